"""The command line: wrong words end with status 2 and a clear message, and leave nothing behind."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
EXPERIMENT = ROOT / 'experiments' / 'uniform.py'


@pytest.mark.parametrize('words, messages', [
    (['--config=F:smoke', '--config.train.step=3'],
     ['--config.train.step: unknown option; did you mean --config.train.steps?']),
    (['--config=/nowhere/experiment.py'], ['--config=/nowhere/experiment.py: no such file']),
    (['--config=F', '--config.train.steps=abc'], ['--config.train.steps=abc', "'abc'"]),
    (['--config=F', '--config.drafter.block_size=1', '--config.loss.chain=-1'],
     ['--config.drafter.block_size=1: must be at least 2', '--config.loss.chain=-1.0: must be']),
    (['--config=F', '--config.drafter.target_layers=8,1'],
     ['--config.drafter.target_layers=(8, 1): must be layer numbers']),
    (['--config=F', '--wokrdir=x'], ['wokrdir', 'workdir']),
    (['--config=F', 'extra'], ["unexpected 'extra'"]),
    (['--config=F', '--config.cache_dir=s3://bucket/cache', '--workdir=gs://bucket/run', '--config.train.steps=0'],
     ['--workdir=gs://bucket/run: is a URL', '--config.cache_dir=s3://bucket/cache: is a URL', 'mount the bucket',
      '--config.train.steps=0: must be']),
])
def test_wrong_words(tmp_path, words, messages):
  words = [word.replace('F', str(EXPERIMENT)) if word.startswith('--config=') else word
           for word in words]
  workdir, cache = tmp_path / 'work', tmp_path / 'cache'
  done = subprocess.run(
      [sys.executable, '-m', 'dspec.main', f'--workdir={workdir}', *words], cwd=tmp_path,
      env={**os.environ, 'PYTHONPATH': str(ROOT), 'DSPEC_CACHE_DIR': str(cache)},
      capture_output=True, text=True, timeout=120, check=False)
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith('error: ')
  assert 'Traceback' not in done.stderr
  for line in done.stderr.splitlines()[1:]:
    assert line.startswith('       '), done.stderr
  for message in messages:
    assert message in done.stderr
  assert not done.stdout
  assert list(tmp_path.iterdir()) == []
