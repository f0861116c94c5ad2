"""Orbax checkpoints of a training run: state and data iterator together, so that a resumed run is the same run."""

import pathlib
from typing import Any

from absl import logging
from etils import epath
import grain
import jax
import numpy as np
import orbax.checkpoint as ocp

from dspec.errors import UserError


def open_manager(folder: pathlib.Path, keep: int = 2) -> ocp.CheckpointManager:
  """The manager of a folder of checkpoints; the newest `keep` stay.

  A checkpoint gets its name when it is whole: what a stop in the middle of a save leaves behind is skipped.
  """
  options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
  # Named handlers, so that a manager that has saved nothing yet can describe what it finds.
  handlers = {'state': ocp.StandardCheckpointHandler(), 'data': ocp.JsonCheckpointHandler()}
  manager = ocp.CheckpointManager(epath.Path(folder.absolute()), options=options, item_handlers=handlers)
  for path in folder.glob('*.orbax-checkpoint-tmp*'):
    logging.warning('%s: was being saved when its run was ended, and is skipped', path)
  return manager


def save(manager: ocp.CheckpointManager, step: int, state: Any, iterator: grain.DatasetIterator) -> None:
  """Copies the state to the host, and writes it while training goes on; a checkpoint of this step stays if there is one.

  Every process writes what its devices hold. The iterator is at the same place in all.
  """
  if step in manager.all_steps():
    return
  position = ocp.args.JsonSave(iterator.get_state())
  manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=position))


def restore(manager: ocp.CheckpointManager, state: Any, iterator: grain.DatasetIterator) -> Any:
  """The newest checkpoint's state, in the shapes and shardings of `state`; the iterator is moved in place.

  Raises:
    UserError: when the checkpoint holds other arrays than `state`.
  """
  step = manager.latest_step()
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
  iterator.set_state(restored['data'])
  return restored['state']


def latest_step(folder: pathlib.Path) -> int | None:
  """Of the newest checkpoint, None if there is none; the folder is not made."""
  if not folder.is_dir():
    return None
  with open_manager(folder) as manager:
    return manager.latest_step()


def restore_params(folder: pathlib.Path) -> Any:
  """The drafter's parameters of the newest checkpoint, as numpy arrays."""
  with open_manager(folder) as manager:
    step = manager.latest_step()
    if step is None:
      raise UserError(f'{folder}: no checkpoint here')
    # As numpy arrays, whatever devices they were saved from.
    wanted = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), manager.item_metadata(step)['state'])
    restored = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))
  return restored['state']['params']


def _name(entry) -> str:
  for field in ('key', 'name', 'idx'):
    if hasattr(entry, field):
      return str(getattr(entry, field))
  return str(entry)
