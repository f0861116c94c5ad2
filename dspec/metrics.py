"""What a training run says of its steps: metrics.jsonl, the same as TensorBoard events, and a trace of a few steps."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import json
import pathlib
import time
from typing import Any

from absl import logging
import jax
from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2
from tensorboardX.proto import summary_pb2

from dspec import json_lines
from dspec import multihost


class Writer:
  """Writes records to `metrics.jsonl` and `tensorboard/` of a folder, in the first process; others only keep them.

  Events are written as they come, not from a thread: a kill loses none, and a full disk is an error of the run.

  Attributes:
    curve: all records so far; on resume, of the first process, those up to the step that it resumes at.
  """

  def __init__(self, folder: pathlib.Path, step: int):
    """Takes up the files of a run that has done `step` steps; what it said of later ones before a kill is removed.

    With the first record a new event file begins, which makes TensorBoard hide later steps of the earlier files.
    """
    self._folder, self._step, self._events = folder, step, None
    self.curve = _read_curve(folder / 'metrics.jsonl', step) if multihost.is_first() else []

  def write(self, record: dict[str, Any]) -> None:
    """Adds a record: its step, numbers by name, and lists of numbers by slot, which TensorBoard shows as NAME/SLOT."""
    self.curve.append(record)
    if not multihost.is_first():
      return
    json_lines.append(self._folder / 'metrics.jsonl', record)
    self._events = self._events or _open_events(self._folder / 'tensorboard', self._step)
    values = []
    for name, value in record.items():
      if isinstance(value, list):
        values += [(f'{name}/{slot}', of_slot) for slot, of_slot in enumerate(value, start=1)]
      elif name != 'step':
        values.append((name, value))
    summary = summary_pb2.Summary(
        value=[summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values])
    self._events.write_event(event_pb2.Event(wall_time=time.time(), step=record['step'], summary=summary))
    self._events.flush()

  def close(self) -> None:
    if self._events is not None:
      self._events.close()


def _open_events(folder: pathlib.Path, step: int) -> event_file_writer.EventsWriter:
  """A new event file of a run that has done `step` steps."""
  folder.mkdir(parents=True, exist_ok=True)
  events = event_file_writer.EventsWriter(str(folder / 'events'), filename_suffix=f'.{step}')
  start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
  events.write_event(event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=start))
  return events


def _read_curve(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
  """The metrics up to a step; later ones, from a run that went on past its checkpoint, are removed."""
  found = json_lines.read_whole(path)
  records = [record for record in found if record['step'] <= step]
  if len(records) < len(found):
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))
  return records


@contextlib.contextmanager
def profile(folder: pathlib.Path, steps: Sequence[int]) -> Iterator[Callable[[int, Any], None]]:
  """Traces some steps of a loop, in the first process, for TensorBoard's or Perfetto's viewer.

  Args:
    folder: where the trace goes.
    steps: () for none, or the first one and the one after the last.

  Yields:
    A function that is called before each step, with its number and the arrays that it waits for, so that a trace holds
    whole steps.
  """
  window = range(*steps) if steps and multihost.is_first() else ()
  tracing = False

  def stop():
    jax.profiler.stop_trace()
    logging.info('trace of steps %d to %d: %s', window[0], window[-1], folder)

  def before(step: int, state: Any) -> None:
    nonlocal tracing
    if (step in window) != tracing:
      jax.block_until_ready(state)
      if tracing:
        stop()
      else:
        jax.profiler.start_trace(folder)
      tracing = not tracing

  try:
    yield before
  finally:
    if tracing:  # The window ends with the run, or the run within the window.
      stop()
