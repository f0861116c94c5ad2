"""Several processes that are one run: how they find one another, and what they must agree on.

All run the same program on one mesh, in step: whatever one computes, all compute. Files are written by the first alone,
on storage that all see. With one process nothing here does anything.
"""

from collections.abc import Callable, Iterator
import contextlib
import itertools
import json
import os
import pathlib
import secrets
import signal
import time
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np

from dspec.errors import UserError

_SECONDS_TO_SEE = 10  # How late a shared file system may show a new file elsewhere.
# Of `reached_stop`, in all training loops of this process: what the processes agree on is the number of a call.
_calls = itertools.count(1)


def initialize(coordinator: str, num_processes: int | None, process_id: int | None) -> None:
  """Joins the processes of this run; before anything else that touches a device.

  Args:
    coordinator: HOST:PORT of process 0; '' where TPU, Slurm or GKE tell.
    num_processes: of the run; with `coordinator` only.
    process_id: from 0; with `coordinator` only.

  Raises:
    UserError: if something is missing, or the processes do not meet.
  """
  numbers = num_processes, process_id
  if coordinator and None in numbers or not coordinator and numbers != (None, None):
    raise UserError(
        '--coordinator, --num_processes and --process_id: give all three, or none where the cluster tells them')
  if coordinator and process_id >= num_processes:
    raise UserError(f'--process_id={process_id}: must be below --num_processes={num_processes}')
  try:
    jax.distributed.initialize(coordinator or None, num_processes, process_id)
  except (ValueError, RuntimeError) as error:
    raise UserError(
        'the processes of --multihost do not meet'
        + (f' at --coordinator={coordinator}' if coordinator else '; neither TPU, Slurm nor GKE tells where')
        + f' ({error}). Start one on every machine with --coordinator=HOST:PORT of process 0, --num_processes and '
        '--process_id, which counts from 0') from error
  if not coordinator and jax.process_count() == 1:
    raise UserError('--multihost: the cluster tells of this process only; leave it out, or give --coordinator')
  logging.info('process %d of %d, %d of %d devices', jax.process_index(), jax.process_count(),
               jax.local_device_count(), jax.device_count())


def is_first() -> bool:
  """Whether this process writes, prints and shows bars."""
  return jax.process_index() == 0


def wait_for_all(where: str) -> None:
  """Returns when all processes have come here; `where` names the place in errors."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(where)


def from_first(make: Callable[[], Any]) -> Any:
  """What `make` returns in the first process, in all: a small value that JSON can hold."""
  if jax.process_count() == 1:
    return make()
  data = np.frombuffer(json.dumps(make()).encode(), np.uint8) if is_first() else np.zeros(0, np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
  data = data if is_first() else np.zeros(size, np.uint8)
  return json.loads(bytes(multihost_utils.broadcast_one_to_all(data)))


@contextlib.contextmanager
def first_goes_first(where: str) -> Iterator[None]:
  """A block that the first process leaves before the others enter it: they find what it has fetched."""
  if not is_first():
    wait_for_all(where)
  yield
  if is_first():
    wait_for_all(where)


def check_shared(option: str, folder: pathlib.Path) -> None:
  """Refuses a folder that is another one on other machines.

  Raises:
    UserError: in all processes, with those that do not see the first one's file.
  """
  if jax.process_count() == 1:
    return
  name = from_first(lambda: f'.seen-by-all-{secrets.token_hex(8)}')
  if is_first():
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
  wait_for_all(f'a file in {option}')
  deadline = time.monotonic() + _SECONDS_TO_SEE
  while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
    time.sleep(0.2)
  seen_by = multihost_utils.process_allgather(np.array(seen))
  if is_first():
    (folder / name).unlink()
  if not seen_by.all():
    blind = ', '.join(map(str, np.flatnonzero(~seen_by)))
    raise UserError(
        f'{option}={folder}: what process 0 writes there is not seen by {blind}, of {jax.process_count()} processes; '
        'give a folder on storage that all of them share')


def reached_stop(requested: bool) -> bool:
  """Whether to save and stop after this step: the same answer in all processes, which call this once a step.

  A SIGTERM to any process stops all, a few steps later. Nothing waits for a device.

  Args:
    requested: whether this process has had a signal of its own.
  """
  if jax.process_count() == 1:
    return requested
  if requested:
    os.kill(os.getpid(), signal.SIGTERM)  # Which the service behind the next line listens to, in its own handler.
  return multihost_utils.reached_preemption_sync_point(next(_calls))
