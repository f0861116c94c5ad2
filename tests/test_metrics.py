"""Metrics: TensorBoard's files, read by hand, say what metrics.jsonl says; a trace holds the steps it was asked for."""

import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from dspec import metrics

RECORDS = [
    {'step': step, 'loss': 3.0 / step, 'num_slots': 12, 'slot_accuracy': [0.5, 1 / 3], 'seconds': 0.1 * step}
    for step in (2, 4, 6)]


def crc32c(data):
  """Castagnoli's, a bit at a time, masked as in TFRecord files."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(folder):
  """All events of a folder, files in the order of their names, which is the order that TensorBoard reads them in."""
  events = []
  for path in sorted(folder.iterdir()):
    assert path.name.startswith('events.out.tfevents.')
    data = path.read_bytes()
    while data:
      length, of_length = struct.unpack('<QI', data[:12])
      content, (of_content,) = data[12 : 12 + length], struct.unpack('<I', data[12 + length : 16 + length])
      assert (of_length, of_content) == (crc32c(data[:8]), crc32c(content))
      events.append(event_pb2.Event.FromString(content))
      data = data[16 + length :]
  return events


def shown(folder):
  """{step: {tag: value}} as TensorBoard shows it: a start hides what came before it from its step on."""
  found = {}
  for event in read_events(folder):
    if event.HasField('session_log'):
      assert event.session_log.status == event_pb2.SessionLog.START
      found = {step: values for step, values in found.items() if step < event.step}
    if event.HasField('summary'):
      assert event.wall_time > 0
      found.setdefault(event.step, {}).update({value.tag: value.simple_value for value in event.summary.value})
  return found


def in_lines(folder):
  """The same of metrics.jsonl, in float32."""
  found = {}
  for line in (folder / 'metrics.jsonl').read_text().splitlines():
    record = json.loads(line)
    values = found.setdefault(record.pop('step'), {})
    for name, value in record.items():
      tags = {f'{name}/{k + 1}': x for k, x in enumerate(value)} if isinstance(value, list) else {name: value}
      values.update({tag: float(np.float32(x)) for tag, x in tags.items()})
  return found


def test_events_are_the_lines(tmp_path):
  writer = metrics.Writer(tmp_path, 0)
  for record in RECORDS:
    writer.write(record)
  # While it is open, too: nothing waits in memory for a kill to lose.
  assert shown(tmp_path / 'tensorboard') == in_lines(tmp_path) != {}
  assert shown(tmp_path / 'tensorboard')[4] == {
      'loss': 0.75, 'num_slots': 12.0, 'slot_accuracy/1': 0.5, 'slot_accuracy/2': float(np.float32(1 / 3)),
      'seconds': float(np.float32(0.4))}
  assert writer.curve == RECORDS
  writer.close()
  assert read_events(tmp_path / 'tensorboard')[0].file_version == 'brain.Event:2'


@pytest.mark.parametrize('step', [0, 3, 4, 9])
def test_a_resumed_run_supersedes_what_came_after_its_checkpoint(tmp_path, step):
  first = metrics.Writer(tmp_path, 0)
  for record in RECORDS:
    first.write(record)
  first.close()
  second = metrics.Writer(tmp_path, step)
  kept = [record for record in RECORDS if record['step'] <= step]
  assert second.curve == kept
  second.write({'step': 10, 'validation_accepted_length': 1.5})
  second.close()
  found = shown(tmp_path / 'tensorboard')
  assert list(found) == [record['step'] for record in kept] + [10]
  assert found == in_lines(tmp_path)
  assert found[10] == {'validation_accepted_length': 1.5}


def test_other_processes_write_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  writer = metrics.Writer(tmp_path, 3)
  writer.write(RECORDS[0])
  writer.close()
  assert writer.curve == RECORDS[:1]
  with metrics.profile(tmp_path / 'profile', (1, 3)) as before_step:
    for step in range(1, 4):
      before_step(step, jnp.zeros(2))
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('steps, traced', [((), []), ((2, 4), [2, 3]), ((5, 9), [5, 6]), ((7, 9), [])])
def test_steps_of_a_trace(tmp_path, monkeypatch, steps, traced):
  """Of steps 1 to 6; a window that the run does not reach the end of ends with it."""
  log = []
  monkeypatch.setattr(jax.profiler, 'start_trace', lambda folder: log.append('start'))
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: log.append('stop'))
  with metrics.profile(tmp_path, steps) as before_step:
    for step in range(1, 7):
      before_step(step, ())
      log.append(step)
  inside = log[log.index('start') + 1 : log.index('stop')] if traced else []
  assert inside == traced and log.count('start') == log.count('stop') == bool(traced)
  assert [entry for entry in log if isinstance(entry, int)] == [1, 2, 3, 4, 5, 6]


def test_a_trace_is_written_though_the_run_ends_within_it(tmp_path):
  with pytest.raises(KeyboardInterrupt):
    with metrics.profile(tmp_path, (2, 5)) as before_step:
      for step in range(1, 4):
        before_step(step, jnp.zeros(2))
        if step == 3:
          raise KeyboardInterrupt
  [trace] = tmp_path.rglob('*.xplane.pb')
  assert trace.stat().st_size > 0
