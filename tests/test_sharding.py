"""Devices: a batch that does not divide is refused, and their number does not change a run."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from dspec import sharding
from dspec.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]

# Three steps of a tiny drafter; prints what each step logged, and how its parameters ended.
SCRIPT = '''
import json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from dspec import config as config_lib, train
from dspec.data import dataset, features
from dspec.models import target as target_lib

folder = pathlib.Path(sys.argv[1])
shape = target_lib.TargetConfig(
    family='llama', vocab_size=29, num_layers=3, width=16, mlp_width=24, num_heads=4, num_kv_heads=2,
    head_dim=4, rope_theta=100.0, norm_eps=1e-5, max_length=64, tie_embeddings=True, eos_ids=(2,))
target = target_lib.Target(shape)
tokens = jnp.zeros((1, 2), jnp.int32)
params = target.init(jax.random.key(0), tokens, tokens, target_lib.init_cache(shape, 1, 2))['params']
rng = np.random.default_rng(0)
# Rows of unequal length, some without an anchor: devices hold unequal numbers of slots.
rows = [(rng.integers(3, 29, n).tolist(), [t >= p for t in range(n)]) for n, p in ((24, 5), (6, 6), (9, 7), (24, 2), (5, 5), (12, 3))]
results = {'devices': jax.device_count()}
for kind in ('cached', 'online'):
  (folder / kind).mkdir(parents=True)
  paths = features.write(folder / kind, target if kind == 'cached' else None, params, rows, (0, 1))
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.drafter.update(num_layers=1, block_size=4, target_layers=(0, 1), mask_token_id=1, vocab_size=27)
  config.loss.update(gamma=3.0, first_error=0.3, chain=40.0)
  config.train.update(steps=3, batch_size=8, anchors=3, head_chunk=12, compute_dtype='float32', log_every=1)
  data = dataset.Dataset(tuple(paths), (), 24, np.arange(29), {})
  drafter, summary = train.run(config, folder / f'run-{kind}', data, target, params)
  results[kind] = [{k: v for k, v in r.items() if 'second' not in k} for r in summary['curve']]
  results[kind].append([float(np.linalg.norm(x)) for x in jax.tree.leaves(drafter)])
print(json.dumps(results))
'''


def test_a_batch_that_does_not_divide(monkeypatch):
  monkeypatch.setattr(jax, 'device_count', lambda: 3)
  with pytest.raises(UserError, match='--config.train.batch_size=16 is not a multiple of the 3 devices'):
    sharding.make_mesh(16)


def test_mesh():
  mesh = sharding.make_mesh(4 * jax.device_count())
  assert mesh.axis_names == ('data',) and mesh.size == jax.device_count()


def start(folder, devices):
  return subprocess.Popen(
      [sys.executable, '-c', SCRIPT, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
      env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu',
           'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'})


def test_one_device_and_four_train_alike(tmp_path):
  runs = [start(tmp_path / str(devices), devices) for devices in (1, 4)]
  results = []
  for run in runs:
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    results.append(json.loads(out.splitlines()[-1]))
  one, four = results
  assert (one.pop('devices'), four.pop('devices')) == (1, 4)
  for kind in ('cached', 'online'):
    *steps, norms = four[kind]
    *wanted, wanted_norms = one[kind]
    assert len(steps) == 3
    for found, expected in zip(steps, wanted):
      assert found.keys() == expected.keys()
      for name in found:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (kind, name)
    assert norms == pytest.approx(wanted_norms, rel=1e-4)
