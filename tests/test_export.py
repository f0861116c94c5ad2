"""The export of a run: what it writes, and what it refuses before it writes anything."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from dspec import config as config_lib
from dspec import export
from dspec import train
from dspec.checkpoints import dflash
from dspec.checkpoints import training as checkpoints
from dspec.data import features
from dspec.data import pipeline
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 6
IDS = (1, 4, 5, 17)
ARMS = (('first', {'loss.gamma': 3.0}), ('second', {}))


@pytest.fixture(scope='module')
def target(untrained_target):
  return untrained_target()


@pytest.fixture
def config():
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.arms = ARMS
  config.drafter.update(num_layers=1, block_size=4, target_layers=(0, 1), mask_token_id=22, window=0, vocab_size=4)
  config.train.steps = STEPS
  return config


@pytest.fixture
def loads(monkeypatch, target):
  """The run's target is the tiny one; a list of how often it was loaded."""
  calls = []
  tokenizer = types.SimpleNamespace(used_ids=frozenset(range(20)), token=str)

  def load(config, path):
    calls.append(path)
    return target[0].config, target[1], tokenizer

  monkeypatch.setattr(export.targets, 'locate', lambda config, cache_dir: pathlib.Path('model.gguf'))
  monkeypatch.setattr(export.targets, 'load', load)
  return calls


@pytest.fixture(scope='module')
def params(target):
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.drafter.update(num_layers=1, block_size=4, target_layers=(0, 1), mask_token_id=22, window=0, vocab_size=4)
  found = train.init_params(drafter_lib.Drafter(train.make_drafter_config(config, target[0].config)), jax.random.key(3))
  scale = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2, found['feature_scale'].shape), jnp.float32)
  return {**found, 'feature_scale': scale, 'draft_ids': jnp.array(IDS, jnp.int32)}


def finish(config, workdir, params, tmp_path, step=STEPS):
  """A workdir as a run leaves it, with the checkpoint of its last arm."""
  workdir.mkdir()
  (workdir / 'config.json').write_text(config_lib.to_json(config))
  (tmp_path / 'rows').mkdir()
  rows = features.write(tmp_path / 'rows', None, None, [(list(range(9)), [False] * 2 + [True] * 7)] * 4, ())
  iterator = iter(pipeline.batches(rows, seed=0, batch_size=2, length=10, anchors=2))
  with checkpoints.open_manager(workdir / 'second' / 'checkpoints') as manager:
    checkpoints.save(manager, step, train.TrainState(jnp.array(step), params, ()), iterator)
  length = {'micro': 1.618, 'micro_interval': [1.5, 1.75], 'macro': 1.7, 'macro_interval': [1.6, 1.8]}
  measured = {
      'accepted_length': length, 'gain': None, 'waste': 0.25, 'identical_prompts': 24, 'num_prompts': 24,
      'speculative_tokens_per_second': 2.0, 'autoregressive_tokens_per_second': 1.0}
  loss = {'gamma': None, 'first_error': 0.0, 'chain': 0.0}
  arms = [{'name': name, 'loss': loss, 'sets': {name: measured}} for name, _ in ARMS]
  (workdir / 'report.json').write_text(json.dumps({'arms': arms, 'config': {'evaluate': {}}}))
  return workdir


@pytest.mark.parametrize('format', dflash.FORMATS)
def test_the_last_arm_of_a_run(config, loads, params, target, tmp_path, format):
  workdir = finish(config, tmp_path / 'work', params, tmp_path)
  out = tmp_path / 'deep' / 'out'
  export.run(config, str(workdir), format, str(out))
  assert sorted(path.name for path in out.iterdir()) == ['README.md', 'config.json', 'model.safetensors']
  assert list(out.parent.iterdir()) == [out]
  assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # Who may read one may read all.
  shape, got, info = dflash.load_drafter(out)
  assert info.format == format
  assert shape.vocab_size == (4 if format == 'speculators' else 0)
  dflash.check_target(shape, info, target[0].config)
  dflash.check_copies(got, info, target[1])
  half = lambda x: np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))
  np.testing.assert_array_equal(
      got['fc']['kernel'], half(params['fc']['kernel'] * params['feature_scale'][:, None]))
  np.testing.assert_array_equal(
      got['layers_0']['mlp']['up_proj']['kernel'], half(params['layers_0']['mlp']['up_proj']['kernel']))
  tensors = safetensors_numpy.load_file(out / 'model.safetensors')
  assert ('d2t' in tensors) == ('lm_head.weight' in tensors) == (format == 'speculators')
  if format == 'speculators':
    np.testing.assert_array_equal(np.arange(4) + tensors['d2t'], IDS)
    np.testing.assert_array_equal(got['draft_ids'], IDS)

  card = (out / 'README.md').read_text()
  assert 'license: apache-2.0' in card and '"num_speculative_tokens": 3' in card
  assert 'second' in card and '1.618 [1.500, 1.750]' in card and 'first |' not in card
  assert ('--speculative-algorithm DFLASH' in card) == (format == 'dflash')
  assert ('draft vocabulary of 4 of the 23 tokens' in card) == (format == 'dflash')
  assert '"learning_rate"' in card


def test_without_a_report(config, loads, params, tmp_path):
  workdir = finish(config, tmp_path / 'work', params, tmp_path)
  (workdir / 'report.json').unlink()
  (tmp_path / 'out').mkdir()  # An empty folder will do.
  export.run(config, str(workdir), 'dflash', str(tmp_path / 'out'))
  assert 'It was not measured.' in (tmp_path / 'out' / 'README.md').read_text()


def test_a_report_of_another_checkpoint(config, loads, params, target, tmp_path):
  """The best one is written, and the card does not give it the accepted length of the last one."""
  workdir = finish(config, tmp_path / 'work', params, tmp_path)
  config.train.update(evaluate_every=3, evaluate_prompts=2)
  config.evaluate.checkpoint = 'best'
  (workdir / 'config.json').write_text(config_lib.to_json(config))
  with checkpoints.open_manager(workdir / 'second' / 'checkpoints') as manager:
    better = {**params, 'fc': {'kernel': 2 * params['fc']['kernel']}}
    state = train.TrainState(jnp.array(1), better, ())
    step = config.train.steps + 1
    rows = features.write(tmp_path / 'rows', None, None, [(list(range(9)), [False] * 2 + [True] * 7)] * 4, ())
    iterator = iter(pipeline.batches(rows, seed=0, batch_size=2, length=10, anchors=2))
    checkpoints.save(manager, step, state, iterator, 1.5)
    checkpoints.save(manager, step + 1, train.TrainState(jnp.array(2), params, ()), iterator)
  export.run(config, str(workdir), 'dflash', str(tmp_path / 'out'))
  _, got, _ = dflash.load_drafter(tmp_path / 'out')
  half = lambda x: np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))
  np.testing.assert_array_equal(
      got['fc']['kernel'], half(better['fc']['kernel'] * params['feature_scale'][:, None]))
  assert 'It was not measured.' in (tmp_path / 'out' / 'README.md').read_text()


def test_an_imported_drafter_into_the_other_format(config, loads, params, target, tmp_path):
  """No run is needed where nothing is trained."""
  workdir = finish(config, tmp_path / 'work', params, tmp_path)
  export.run(config, str(workdir), 'speculators', str(tmp_path / 'a'))
  config.arms = ()
  config.train.steps, config.drafter.init = 0, str(tmp_path / 'a')
  export.run(config, str(tmp_path / 'none'), 'dflash', str(tmp_path / 'b'))
  assert not (tmp_path / 'none').exists()
  a, b = (safetensors_numpy.load_file(tmp_path / name / 'model.safetensors') for name in 'ab')
  assert a.keys() - b.keys() == {'embed_tokens.weight', 'lm_head.weight', 'd2t', 't2d'}
  assert all(a[name].tobytes() == b[name].tobytes() for name in b)


@pytest.mark.parametrize('case, text', [
    ('no out', '--out is missing'),
    ('full out', 'exists and is not an empty folder'),
    ('file out', 'exists and is not an empty folder'),
    ('window', '--config.drafter.window=16: the formats cannot say'),
    ('no run', 'no run here; train first'),
    ('other run', 'differs in seed: 0 there, 7 here'),
    ('unfinished', 'second was trained for 3 of 6 steps'),
    ('no checkpoint', 'second was trained for 0 of 6 steps'),
])
def test_refused_before_anything_is_loaded_or_written(config, loads, params, tmp_path, case, text):
  workdir, out = tmp_path / 'work', tmp_path / 'out'
  if case == 'window':
    config.drafter.window = 16
  if case != 'no run':
    finish(config, workdir, params, tmp_path, step=3 if case == 'unfinished' else STEPS)
  if case == 'no checkpoint':
    (workdir / 'second').rename(workdir / 'third')
  if case == 'other run':
    config.seed = 7
  if case == 'full out':
    out.mkdir()
    (out / 'mine').touch()
  if case == 'file out':
    out.touch()
  before = sorted(tmp_path.rglob('*'))
  with pytest.raises(UserError) as error:
    export.run(config, str(workdir), 'dflash', '' if case == 'no out' else str(out))
  assert text in str(error.value)
  assert not loads
  assert sorted(tmp_path.rglob('*')) == before


def test_the_command_line(tmp_path):
  done = subprocess.run(
      [sys.executable, '-m', 'dspec.main', f'--config={ROOT}/experiments/uniform.py:smoke', '--mode=export',
       f'--out={tmp_path / "out"}', f'--workdir={tmp_path / "none"}', '--config.drafter.window=0'],
      cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(ROOT), 'DSPEC_CACHE_DIR': str(tmp_path / 'cache')},
      capture_output=True, text=True, timeout=120, check=False)
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith('error: --workdir=') and 'without --mode=export' in done.stderr
  assert list(tmp_path.iterdir()) == []
