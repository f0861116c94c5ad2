"""Two processes on one machine are one run: the same losses, stopped together, resumed to the bit after any end."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dspec.checkpoints import training

ROOT = pathlib.Path(__file__).parents[1]
STEPS, EVERY = 60, 5
CHANGES = {
    'train.steps': STEPS, 'train.checkpoint_every': EVERY, 'mesh.data': 2, 'mesh.fsdp': 2, 'mesh.tensor': 2,
    'train.accumulate': 2, 'train.ema': 0.9, 'train.evaluate_every': 25, 'evaluate.checkpoint': 'best'}
INTERRUPTED = 130  # What a stopped run exits with.


@pytest.fixture(scope='module')
def scratch(tmp_path_factory):
  """A folder for the data and compiled programs of all runs."""
  return tmp_path_factory.mktemp('multihost')


def environment(scratch, devices):
  return {
      **os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
      'JAX_COMPILATION_CACHE_DIR': str(scratch / 'xla'), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '1'}


def free_address():
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    return f'localhost:{probe.getsockname()[1]}'


class Run:
  """One or two processes of tests/tiny.py."""

  def __init__(self, scratch, workdir, processes, delay=0.0, changes=None):
    path = scratch / f'{workdir.name}.json'
    path.write_text(json.dumps({
        'folder': str(scratch / 'data'), 'workdir': str(workdir), 'kind': 'cached',
        'config': {**CHANGES, **(changes or {})}, 'delay': delay}))
    self.workdir = workdir
    words = [sys.executable, str(ROOT / 'tests' / 'tiny.py'), str(path)]
    address = free_address()
    self.logs = [workdir.parent / f'{workdir.name}-{i}.log' for i in range(processes)]
    self.processes = []
    for i, log in enumerate(self.logs):
      own = [address, str(processes), str(i)] if processes > 1 else []
      # Files, not pipes: a process that waits for its reader would stop the others.
      with log.open('w') as err, log.with_suffix('.out').open('w') as out:
        self.processes.append(subprocess.Popen(
            words + own, stdout=out, stderr=err, env=environment(scratch, 8 // processes)))

  def steps(self):
    """Those that were logged; 0 before the first."""
    path = self.workdir / 'metrics.jsonl'
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])['step'] if lines and lines[-1].endswith('}') else 0

  def wait_for_step(self, step, seconds=600):
    give_up = time.monotonic() + seconds
    while self.steps() < step:
      assert all(process.poll() is None for process in self.processes), self.errors()
      assert time.monotonic() < give_up, self.errors()
      time.sleep(0.02)

  def finish(self, seconds=600):
    """(exit status, result or None) of each process."""
    statuses = [process.wait(timeout=seconds) for process in self.processes]
    outs = [log.with_suffix('.out').read_text().splitlines() for log in self.logs]
    lines = [[line for line in out if line.startswith('{')] for out in outs]
    return [(status, json.loads(found[-1]) if found else None) for status, found in zip(statuses, lines)]

  def kill(self, which):
    """SIGKILL to one, then, as a scheduler would, to the rest."""
    for process in (self.processes[which], *self.processes):
      process.send_signal(signal.SIGKILL)
      process.wait()

  def errors(self):
    return '\n'.join(log.read_text() for log in self.logs)

  def resumed_at(self):
    found = re.findall(r'resuming .* at step (\d+) of', self.logs[0].read_text())
    return int(found[0]) if found else 0


def checkpoints(workdir):
  """Finished ones."""
  folder = workdir / 'checkpoints'
  return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []


@pytest.fixture(scope='module')
def undisturbed(scratch):
  """(result of process 0, workdir) of two processes that nothing happens to."""
  run = Run(scratch, scratch / 'undisturbed', 2)
  (status, result), (other_status, other) = run.finish()
  assert (status, other_status) == (0, 0), run.errors()
  assert other['params'] == result['params'] and other['evaluated_step'] == result['evaluated_step']
  return result, run.workdir


def test_two_processes_train_as_one(scratch, undisturbed):
  found, folder = undisturbed
  [(status, wanted)] = (run := Run(scratch, scratch / 'alone', 1)).finish()
  assert status == 0, run.errors()
  assert found['devices'] == wanted['devices'] == 8
  assert [record['step'] for record in found['curve'] if 'loss' in record] == list(range(1, STEPS + 1))
  for one, other in zip(wanted['curve'], found['curve'], strict=True):
    assert one.keys() == other.keys()
    for name in one:
      assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), (one['step'], name)
  # Written once, by the first.
  lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  assert [line['step'] for line in lines if 'loss' in line] == list(range(1, STEPS + 1))
  lengths = {line['step']: line['validation_accepted_length'] for line in lines if 'loss' not in line}
  assert list(lengths) == [25, 50, STEPS] and len(lines) == STEPS + 3
  assert len(list((folder / 'tensorboard').iterdir())) == 1
  # Both keep the best one, and it is what they end with.
  best = max(lengths, key=lambda step: (lengths[step], step))
  assert found['evaluated_step'] == wanted['evaluated_step'] == best
  assert checkpoints(folder) == sorted({STEPS - EVERY, STEPS, best})
  log = (scratch / 'undisturbed-1.log').read_text()
  assert 'training undisturbed' in (scratch / 'undisturbed-0.log').read_text() and 'training' not in log


def test_parts_of_a_batch_on_a_mesh(scratch, undisturbed):
  """A batch in two parts, each over all devices, gives the steps of the whole one."""
  whole = {'train.accumulate': 1, 'train.evaluate_every': 0, 'evaluate.checkpoint': 'last'}
  [(status, wanted)] = (run := Run(scratch, scratch / 'at_once', 1, changes=whole)).finish()
  assert status == 0, run.errors()
  found = [record for record in undisturbed[0]['curve'] if 'loss' in record]
  for one, other in zip(wanted['curve'][:10], found):
    for name in one:
      assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), (one['step'], name)


def assert_ends_as(result, undisturbed, workdir):
  wanted, folder = undisturbed
  assert result['params'] == wanted['params']  # To the bit.
  left_out = ('seconds', 'slots_per_second')
  read = lambda folder: [
      {k: v for k, v in json.loads(line).items() if k not in left_out}
      for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  assert read(workdir) == read(folder)


def test_stopped_then_killed_it_ends_as_if_undisturbed(scratch, undisturbed):
  """SIGTERM to one process, a resumed run, SIGKILL, a resumed run."""
  seed = random.randrange(10**6)
  print('seed', seed)
  rng, workdir = random.Random(seed), scratch / 'disturbed'
  run = Run(scratch, workdir, 2, delay=0.2)
  run.wait_for_step(3)
  run.processes[1].send_signal(signal.SIGTERM)
  assert [status for status, _ in run.finish()] == [INTERRUPTED] * 2, run.errors()
  saved = re.findall(r'saved step (\d+)', run.errors())
  stopped_at = checkpoints(workdir)[-1]
  assert 3 <= stopped_at < STEPS and stopped_at == run.steps()
  assert saved == [str(stopped_at)] * 2  # Both, and the same.

  run = Run(scratch, workdir, 2, delay=0.05)
  run.wait_for_step(stopped_at + rng.randint(EVERY, 2 * EVERY))
  run.kill(rng.randrange(2))
  assert run.resumed_at() == stopped_at
  kept = checkpoints(workdir)[-1]

  run = Run(scratch, workdir, 2)
  (status, result), (other_status, _) = run.finish()
  assert (status, other_status) == (0, 0), run.errors()
  assert run.resumed_at() >= kept >= stopped_at
  assert_ends_as(result, undisturbed, workdir)


def test_goes_on_in_other_processes_on_another_mesh(scratch, undisturbed):
  """What two processes on a mesh of 2 x 2 x 2 have saved, in one on 4 x 1 x 2, and as numpy arrays on one device."""
  wanted, folder = undisturbed
  workdir = scratch / 'elsewhere'
  shutil.copytree(folder, workdir)
  shutil.rmtree(workdir / 'checkpoints' / str(STEPS))
  run = Run(scratch, workdir, 1, changes={'mesh.data': 4, 'mesh.fsdp': 1, 'mesh.tensor': 2})
  [(status, result)] = run.finish()
  assert status == 0, run.errors()
  assert run.resumed_at() == STEPS - EVERY
  for name, array in wanted['params'].items():
    np.testing.assert_allclose(result['params'][name], array, rtol=1e-3, atol=1e-5, err_msg=name)
  restored = training.restore_params(folder / 'checkpoints', best=True)
  found = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(restored)[0]}
  assert found.keys() == wanted['params'].keys()
  for name, array in wanted['params'].items():
    assert isinstance(found[name], np.ndarray)
    np.testing.assert_array_equal(found[name], np.asarray(array, found[name].dtype))


@pytest.mark.slow
def test_killed_ten_times(scratch, undisturbed):
  seed = random.randrange(10**6)
  print('seed', seed)
  rng, workdir = random.Random(seed), scratch / 'killed'
  kept = 0
  for _ in range(10):
    run = Run(scratch, workdir, 2, delay=0.05)
    run.wait_for_step(kept + 1)
    time.sleep(rng.uniform(0, 0.6))
    run.kill(rng.randrange(2))
    assert run.resumed_at() == kept
    kept = (checkpoints(workdir) or [0])[-1]
  run = Run(scratch, workdir, 2)
  (status, result), (other_status, _) = run.finish()
  assert (status, other_status) == (0, 0), run.errors()
  assert run.resumed_at() == kept
  assert_ends_as(result, undisturbed, workdir)


# ---- What is refused -------------------------------------------------------------------------------


def test_a_folder_that_is_not_shared(scratch, tmp_path):
  """Here it is another one in each process, as a local disk would be."""
  script = '''
import pathlib, sys
from dspec import multihost
from dspec.errors import UserError
multihost._SECONDS_TO_SEE = 1
multihost.initialize(sys.argv[1], 2, int(sys.argv[2]))
multihost.check_shared('--workdir', pathlib.Path(sys.argv[3], 'both'))
try:
  multihost.check_shared('--workdir', pathlib.Path(sys.argv[3], sys.argv[2]))
except UserError as error:
  print(error)
'''
  address = free_address()
  runs = [subprocess.Popen(
      [sys.executable, '-c', script, address, str(i), str(tmp_path)], stdout=subprocess.PIPE, text=True,
      env=environment(scratch, 1)) for i in range(2)]
  for i, run in enumerate(runs):
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    assert f'--workdir={tmp_path / str(i)}: what process 0 writes there is not seen by 1, of 2 processes' in out
  assert list((tmp_path / 'both').iterdir()) == list((tmp_path / '0').iterdir()) == []


@pytest.mark.parametrize('words, message', [
    (['--multihost'], 'neither TPU, Slurm nor GKE tells where'),
    (['--multihost', '--coordinator=localhost:1'], 'give all three'),
    (['--multihost', '--num_processes=2'], 'give all three'),
    (['--multihost', '--coordinator=localhost:1', '--num_processes=2', '--process_id=2'],
     '--process_id=2: must be below --num_processes=2'),
    (['--coordinator=localhost:1'], '--coordinator: add --multihost'),
    (['--multihost', '--mode=generate'], '--mode=generate is for one process'),
])
def test_flags_that_do_not_go_together(scratch, tmp_path, words, message):
  done = subprocess.run(
      [sys.executable, '-m', 'dspec.main', f'--config={ROOT}/experiments/uniform.py', f'--workdir={tmp_path / "work"}',
       f'--config.cache_dir={tmp_path / "cache"}', *words],
      env=environment(scratch, 1), capture_output=True, text=True, timeout=120, check=False)
  assert done.returncode == 2 and done.stderr.startswith('error: ') and 'Traceback' not in done.stderr, done.stderr
  assert message in done.stderr
  assert list(tmp_path.iterdir()) == []
