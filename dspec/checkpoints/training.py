"""Orbax checkpoints of a training run: state and data iterator together, so that a resumed run is the same run."""

from collections.abc import Iterator, Mapping
import contextlib
import errno
import math
import os
import pathlib
from typing import Any

from absl import logging
from etils import epath
import grain
import jax
import numpy as np
import orbax.checkpoint as ocp

from dspec.errors import UserError


def open_manager(folder: pathlib.Path, keep: int = 2, writes: bool = False) -> ocp.CheckpointManager:
  """The manager of a folder of checkpoints; the newest `keep` stay, and the one of the best accepted length.

  A checkpoint gets its name when it is whole: what a stop in the middle of a save leaves behind is skipped, and removed
  by the next run that `writes` here.
  """
  policies = ocp.checkpoint_managers
  kept = policies.AnyPreservationPolicy([
      policies.LatestN(keep),
      policies.BestN(n=1, get_metric_fn=_accepted_length, keep_checkpoints_without_metrics=False)])
  options = ocp.CheckpointManagerOptions(
      preservation_policy=kept, best_fn=_accepted_length, create=True, cleanup_tmp_directories=writes)
  for path in folder.glob('*.orbax-checkpoint-tmp*'):
    logging.warning('%s: was being saved when its run was ended, and is skipped', path)
  # Named handlers, so that a manager that has saved nothing yet can describe what it finds.
  handlers = {'state': ocp.StandardCheckpointHandler(), 'data': ocp.JsonCheckpointHandler()}
  return ocp.CheckpointManager(epath.Path(folder.absolute()), options=options, item_handlers=handlers)


def _accepted_length(metrics: Mapping[str, float]) -> float:
  """What makes a checkpoint the best one; of equal ones Orbax takes the later. Those that nobody measured come last."""
  return metrics.get('accepted_length', -math.inf)


def best_step(manager: ocp.CheckpointManager) -> int:
  """Of the checkpoint with the best accepted length, the later one of equals.

  Raises:
    UserError: if none was measured.
  """
  step = manager.best_step()
  if step is None or not manager.metrics(step):
    raise UserError(
        f'{manager.directory}: no checkpoint here was evaluated, so that none is the best one; --config.evaluate.'
        'checkpoint=last takes the last one')
  return step


def save(
    manager: ocp.CheckpointManager, step: int, state: Any, iterator: grain.DatasetIterator,
    accepted_length: float | None = None
) -> None:
  """Copies the state to the host, and writes it while training goes on; nothing, where this step has a checkpoint.

  Every process writes what its devices hold. The iterator is at the same place in all.

  Args:
    manager: from `open_manager`.
    step: its number.
    state: a tree of arrays.
    iterator: of the batches.
    accepted_length: on held-out prompts, the same in all processes; None if nobody measured it.
  """
  if step in manager.all_steps():
    return
  args = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(iterator.get_state()))
  manager.save(step, args=args, metrics={} if accepted_length is None else {'accepted_length': accepted_length})


def check(manager: ocp.CheckpointManager) -> None:
  """Raises what a save in the background has met, now and not at the next one; waits for none that goes on."""
  if not manager.is_saving_in_progress():
    manager.wait_until_finished()


@contextlib.contextmanager
def explained(manager: ocp.CheckpointManager) -> Iterator[None]:
  """A block that saves.

  Raises:
    UserError: for a full disk, with what is whole and what to do.
  """
  try:
    yield
  except (OSError, ValueError) as error:  # Of files; of TensorStore, which has no type of its own.
    if not any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
      raise
    folder = pathlib.Path(manager.directory)
    whole = max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=None)
    kept = 'no checkpoint was saved yet' if whole is None else f'the checkpoint of step {whole} is whole'
    raise UserError(
        f'{folder}: the disk is full; {kept}. Make room there and give the same command again, which goes on from '
        'it; lower --config.train.keep to need less, or take a --workdir elsewhere.') from error


def restore(
    manager: ocp.CheckpointManager, state: Any, iterator: grain.DatasetIterator | None = None, step: int | None = None
) -> Any:
  """A checkpoint's state, in the shapes and shardings of `state`.

  Args:
    manager: from `open_manager`.
    state: a tree of arrays, or of their shapes.
    iterator: is moved, in place, to where it was; None leaves that out.
    step: None for the newest one.

  Raises:
    UserError: when the checkpoint holds other arrays than `state`.
  """
  step = manager.latest_step() if step is None else step
  folder = manager.directory / str(step)
  metadata = manager.item_metadata(step)['state']
  shapes = lambda tree: {
      '/'.join(map(_name, path)): tuple(leaf.shape)
      for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }
  saved, wanted = shapes(metadata), shapes(state)
  if saved != wanted:
    differing = [k for k in saved.keys() | wanted.keys() if saved.get(k) != wanted.get(k)]
    differing.sort(key=lambda name: (not name.startswith('params/'), name))
    raise UserError(
        f'{folder}: the checkpoint does not match the config; differing arrays: {", ".join(differing[:5])}'
        f'{" ..." if len(differing) > 5 else ""}. Use another --workdir.'
    )
  restored = manager.restore(
      step, args=ocp.args.Composite(state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore()))
  if iterator is not None:
    iterator.set_state(restored['data'])
  return restored['state']


def latest_step(folder: pathlib.Path) -> int | None:
  """Of the newest checkpoint, None if there is none; the folder is not made."""
  if not folder.is_dir():
    return None
  with open_manager(folder) as manager:
    return manager.latest_step()


def restore_params(folder: pathlib.Path, best: bool = False) -> Any:
  """The drafter's parameters of the newest checkpoint, or the best one, as numpy arrays; their mean if it has one."""
  with open_manager(folder) as manager:
    if manager.latest_step() is None:
      raise UserError(f'{folder}: no checkpoint here')
    step = best_step(manager) if best else manager.latest_step()
    # As numpy arrays, whatever devices they were saved from.
    wanted = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), manager.item_metadata(step)['state'])
    restored = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))
  state = restored['state']
  return {**state['params'], **state.get('ema', {})}


def _name(entry) -> str:
  for field in ('key', 'name', 'idx'):
    if hasattr(entry, field):
      return str(getattr(entry, field))
  return str(entry)
