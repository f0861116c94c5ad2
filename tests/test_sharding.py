"""Devices: what does not divide is refused, and neither their number nor their mesh changes a run."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import jax
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from dspec import config as config_lib
from dspec import sharding
from dspec.errors import UserError
from dspec.models import target as target_lib

ROOT = pathlib.Path(__file__).parents[1]
MESHES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(sizes) == 8]
DRAFTED, CHUNK, STEPS = 56, 48, 20  # Of tests/tiny.py: tokens that are drafted, slots whose logits are held at once.


def environment(devices):
  """Of a process with so many devices."""
  return {
      **os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
      # Compiles in half the time. How a program is divided among devices does not change.
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}


# ---- What is refused -------------------------------------------------------------------------------


@pytest.fixture
def config():
  return config_lib.default('smoke').copy_and_resolve_references()


@pytest.mark.parametrize('mesh', [(3, 1, 1), (0, 1, 3), (0, 16, 1), (2, 2, 1)])
def test_a_mesh_of_other_devices_than_there_are(monkeypatch, config, mesh):
  monkeypatch.setattr(jax, 'device_count', lambda: 8)
  config.mesh.update(dict(zip(sharding.AXES, mesh)))
  with pytest.raises(UserError) as error:
    sharding.make_mesh(config)
  options = ' '.join(f'--config.mesh.{axis}={size}' for axis, size in zip(sharding.AXES, mesh))
  assert str(error.value).startswith(f'{options}: there are 8 devices')


def test_a_batch_that_the_mesh_does_not_divide():
  mesh = jax.sharding.AbstractMesh((2, 3, 4), sharding.AXES)
  sharding.check_batch(mesh, 12)
  with pytest.raises(UserError, match='train.batch_size=8 is not a multiple of 6, .* mesh.data=2 times mesh.fsdp=3$'):
    sharding.check_batch(mesh, 8)
  sharding.check_batch(mesh, 24, 4)
  with pytest.raises(UserError, match='batch_size=12 is not a multiple of 24, .* mesh.fsdp=3 times train.accumulate=4$'):
    sharding.check_batch(mesh, 12, 4)


def test_a_target_that_the_mesh_does_not_divide(config):
  """All numbers at once."""

  class Tokenizer:
    turn_end_ids, used_ids, user_prefix_ids = [5], set(), staticmethod(lambda: [3, 4])

  shape = dict(
      family='llama', num_layers=30, rope_theta=1e4, norm_eps=1e-5, max_length=2048, tie_embeddings=True, eos_ids=(2,),
      head_dim=64)
  config.mesh.update(fsdp=5, tensor=4)
  target = target_lib.TargetConfig(
      vocab_size=49151, width=576, mlp_width=1538, num_heads=9, num_kv_heads=3, **shape)
  with pytest.raises(UserError) as error:
    config_lib.validate_against_target(config, target, Tokenizer())
  assert str(error.value).splitlines() == [
      '--config.mesh.tensor=4: must divide the 9 heads of the target',
      '--config.mesh.tensor=4: must divide the 3 key heads of the target',
      '--config.mesh.tensor=4: must divide the 1538 columns of the MLP of the target',
      '--config.mesh.tensor=4: must divide the 49151 tokens of the target',
      '--config.mesh.fsdp=5: must divide the 576 channels of the target',
  ]
  config.mesh.update(fsdp=8, tensor=2)
  target = target_lib.TargetConfig(
      vocab_size=49152, width=576, mlp_width=1536, num_heads=8, num_kv_heads=2, **shape)
  config_lib.validate_against_target(config, target, Tokenizer())


def test_one_device_takes_every_default(config):
  mesh = sharding.make_mesh(config)
  assert mesh.axis_names == ('data', 'fsdp', 'tensor')
  assert dict(mesh.shape) == {'data': jax.device_count(), 'fsdp': 1, 'tensor': 1}


# ---- The table -------------------------------------------------------------------------------------


@pytest.mark.parametrize('path, wanted', [
    ('embed/embedding', ('tensor', 'fsdp')),
    ('lm_head/kernel', ('fsdp', 'tensor')),
    ('layers_11/attn/q_proj/kernel', ('fsdp', 'tensor')),
    ('layers_0/attn/k_proj/bias', ('tensor',)),
    ('layers_0/attn/o_proj/kernel', ('tensor', 'fsdp')),
    ('layers_0/mlp/gate_proj/kernel', ('fsdp', 'tensor')),
    ('layers_0/mlp/down_proj/kernel', ('tensor', 'fsdp')),
    ('opt_state/1/0/mu/layers_0/mlp/down_proj/kernel', ('tensor', 'fsdp')),
    ('params/fc/kernel', ('tensor', 'fsdp')),
    ('layers_0/attn/o_proj/bias', ()),
    ('layers_0/attn_norm/scale', ()),
    ('layers_0/attn/not_q_proj/kernel', ()),
    ('feature_scale', ()),
    ('draft_ids', ()),
])
def test_what_the_table_says(path, wanted):
  assert sharding.spec(path.split('/')) == PartitionSpec(*wanted)


def parts(spec, shape, sizes):
  """The shape that one device holds."""
  sizes = dict(zip(sharding.AXES, sizes))
  divisors = [sizes[axis] if axis else 1 for axis in (*spec, *[None] * (len(shape) - len(spec)))]
  return [size // parts if size % parts == 0 else size for size, parts in zip(shape, divisors)]


# ---- Every mesh ------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """{mesh: what tests/meshes.py prints of it}; (1, 1, 1) is one device."""
  folder = tmp_path_factory.mktemp('meshes')

  def start(devices, meshes):
    words = [sys.executable, str(ROOT / 'tests' / 'meshes.py'), str(folder), json.dumps(meshes)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(devices))

  def finish(run, meshes):
    out, err = run.communicate(timeout=600)
    assert run.returncode == 0, err
    return dict(zip(map(tuple, meshes), json.loads(out.splitlines()[-1]), strict=True))

  found = finish(start(1, [(1, 1, 1)]), [(1, 1, 1)])
  for run, meshes in [(start(8, part), part) for part in (MESHES[::2], MESHES[1::2])]:
    found.update(finish(run, meshes))
  assert len(found) == 11
  return found


def test_every_mesh_gives_the_losses_of_one_device(runs):
  """Uniform, and with one term more at a time."""
  wanted = np.array(runs[1, 1, 1]['losses'])
  assert wanted.shape == (4, STEPS) and len(np.unique(wanted)) == 4 * STEPS
  for sizes in MESHES:
    np.testing.assert_allclose(runs[sizes]['losses'], wanted, rtol=1e-5, err_msg=str(sizes))


def assert_lies_as_the_table_says(found, sizes):
  """`found` is what `parts` of tests/tiny.py gives."""
  for path, (whole, part) in found.items():
    assert part == parts(sharding.spec(path.split('/')), whole, sizes), (sizes, path)
  # That the table splits something, too.
  kernels = [shapes for path, shapes in found.items() if path.endswith('kernel')]
  assert kernels and all(np.prod(part) * sizes[1] * sizes[2] == np.prod(whole) for whole, part in kernels)


def assert_moments_lie_as_parameters(found):
  moments = {path for path in found if '/mu/' in path or '/nu/' in path}
  assert len(moments) == 2 * sum(path.startswith('params/') for path in found) - 4  # But for what is not trained.
  for path in moments:
    assert found[path] == found['params/' + path.split('u/', 1)[1]], path


@pytest.mark.parametrize('tree', ['target', 'state'])
def test_every_array_lies_as_the_table_says(runs, tree):
  """The target's, the drafter's, and the optimizer's moments, which lie as their parameters."""
  for sizes in MESHES:
    found = runs[sizes][tree]
    assert_lies_as_the_table_says(found, sizes)
    if tree == 'state':
      assert_moments_lie_as_parameters(found)


def test_logits_are_never_whole(runs):
  """A device holds its rows of a chunk and its part of the vocabulary: nothing gathers the rest."""
  for sizes in MESHES:
    held = {tuple(sorted(shape)) for shape in runs[sizes]['held']}
    rows, tokens = CHUNK // (sizes[0] * sizes[1]), DRAFTED // sizes[2]
    own = tuple(sorted((rows, tokens)))
    assert own in held, sizes
    more = {tuple(sorted(shape)) for shape in ((CHUNK, tokens), (rows, DRAFTED), (CHUNK, DRAFTED))} - {own}
    assert not more & held, sizes


# ---- Whole runs ------------------------------------------------------------------------------------


def train(folder, name, devices, kind, **changes):
  """Starts tests/tiny.py."""
  run = folder / f'{name}.json'
  run.write_text(json.dumps({
      'folder': str(folder / f'data-{name}'), 'workdir': str(folder / name), 'kind': kind, 'config': changes}))
  return subprocess.Popen(
      [sys.executable, str(ROOT / 'tests' / 'tiny.py'), str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      text=True, env=environment(devices))


def test_one_device_and_eight_train_alike(tmp_path):
  """The loop itself, features computed online, and what is logged of each step."""
  changes = {'train.steps': 4}
  mesh = {'mesh.data': 2, 'mesh.fsdp': 2, 'mesh.tensor': 2}
  runs = [train(tmp_path, 'one', 1, 'online', **changes), train(tmp_path, 'eight', 8, 'online', **changes, **mesh)]
  results = []
  for run in runs:
    out, err = run.communicate(timeout=600)
    assert run.returncode == 0, err
    assert 'rematerialization' not in err  # What XLA calls an exchange that it can only do by copying all to all.
    results.append(json.loads(out.splitlines()[-1]))
  one, eight = results
  assert (one['devices'], eight['devices']) == (1, 8)
  assert_lies_as_the_table_says(eight['state'], (2, 2, 2))
  assert_moments_lie_as_parameters(eight['state'])
  assert len(eight['curve']) == 4
  for found, wanted in zip(eight['curve'], one['curve'], strict=True):
    assert found.keys() == wanted.keys()
    for name in found:
      assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-7), name
  assert eight['params'].keys() == one['params'].keys()
  for name in one['params']:
    np.testing.assert_allclose(eight['params'][name], one['params'][name], rtol=1e-3, atol=1e-5, err_msg=name)


# ---- Decoding --------------------------------------------------------------------------------------


def test_decoding_on_a_mesh_says_what_one_device_says():
  """Answers for training, features, plain and speculative decoding, with parameters in parts."""
  start = lambda devices, **mesh: subprocess.Popen(
      [sys.executable, str(ROOT / 'tests' / 'decode.py'), json.dumps({f'mesh.{axis}': n for axis, n in mesh.items()})],
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(devices))
  results = []
  for run in [start(1), start(8, fsdp=2, tensor=2), start(8, tensor=8)]:
    out, err = run.communicate(timeout=600)
    assert run.returncode == 0, err
    results.append(json.loads(out.splitlines()[-1]))
  one, *meshes = results
  assert len(set(map(str, one['answers']['sampled in 3']))) == 11  # Not all alike.
  assert any(max(accepted, default=0) for accepted in one['answers']['accepted in 3'])
  assert [mesh['split'] for mesh in meshes] == [{'kernel': n, 'embedding': n} for n in (1 / 4, 1 / 8)]
  for mesh in meshes:
    assert mesh['answers'] == one['answers']
    np.testing.assert_allclose(mesh['features'], one['features'], rtol=1e-2, atol=1e-2)  # bfloat16.
