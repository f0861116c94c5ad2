"""The kernel, interpreted, against the attention in plain XLA: values, gradients, empty tiles, and on a mesh."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import masks
from dspec.models import splash

ROOT = pathlib.Path(__file__).parents[2]
NAMES = 'q', 'k_own', 'v_own', 'keys', 'values'
# Interpreted kernels are long programs that run once.
COMPILE_QUICKLY = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


def draw(b=2, t=200, a=12, k=16, h=4, kv=2, d=64, packed=False, seed=0):
  """Arrays and places of rows: an anchor without context, one at the row's end, and slots without an anchor."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  arrays = (
      normal(b, a, k, h, d), normal(b, a, k, kv, d), normal(b, a, k, kv, d), normal(b, kv, d, t), normal(b, kv, t, d))
  anchors = np.zeros((b, a), np.int32)
  for row in anchors:
    row[: a - 3] = [0, *np.sort(rng.choice(np.arange(1, t - 1), a - 5, replace=False)), t - 1]
  starts = np.zeros((b, t), np.int32)
  if packed:
    for row, of_row, borders in zip(starts, anchors, ((40, 171), (1, 2, 150, 190))):
      for border in borders:
        row[border:] = border
      of_row[1] = borders[0]  # The first token of a document.
      of_row[: a - 3].sort()
  seen = jnp.asarray(anchors)
  if not packed:
    return arrays, drafter_lib.Places(seen, seen)
  of_anchors = np.take_along_axis(starts, anchors, 1)
  return arrays, drafter_lib.Places(*map(jnp.asarray, (anchors - of_anchors, anchors, of_anchors, starts)))


def value_and_gradients(attention, arrays, places):
  """What comes out, and the gradients of a sum that gives each output another weight."""
  weights = jnp.asarray(np.random.default_rng(9).normal(size=arrays[0].shape), jnp.float32)

  def loss(arrays):
    out = attention(*arrays[:3], arrays[3:], places)
    return jnp.sum(out * weights.reshape(out.shape)), out

  step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=COMPILE_QUICKLY)
  (_, out), gradients = step(arrays)
  return [out, *gradients]


@pytest.fixture
def small_tiles(monkeypatch):
  monkeypatch.setattr(splash, '_TILE', 128)


@pytest.mark.parametrize('shape, options', [
    ({}, {}),
    ({'packed': True, 'd': 128, 'h': 2}, {'window': 37}),
    ({'packed': True, 'k': 15, 'kv': 1}, {}),
    ({'packed': True, 'd': 6}, {'layer_window': 9, 'causal': True}),
])
def test_against_xla(shape, options, small_tiles):
  arrays, places = draw(**shape)
  wanted = value_and_gradients(functools.partial(drafter_lib.block_attention, **options), arrays, places)
  found = value_and_gradients(
      functools.partial(splash.block_attention, interpret=True, **options), arrays, places)
  for name, got, want in zip(('out', *NAMES), found, wanted):
    assert np.isfinite(got).all() and np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(), err_msg=name)


def test_a_drafter_by_either(monkeypatch, small_tiles, random_params):
  """Of packed rows, with layers computed twice; in bfloat16, too, where scores are as near as roundings are."""
  monkeypatch.setattr(splash, 'block_attention', functools.partial(splash.block_attention, interpret=True))
  config = drafter_lib.DrafterConfig(
      num_layers=1, block_size=4, target_layers=(0,), mask_token_id=3, width=12, mlp_width=14, num_heads=4,
      num_kv_heads=2, head_dim=6, rope_theta=50.0, norm_eps=1e-3)
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  anchors, starts = jnp.array([[0, 3, 9, 17]]), jnp.array([[0] * 9 + [9] * 11])
  inputs = normal(1, 20, 12), normal(1, 4, 4, 12), anchors, starts
  params = random_params(drafter_lib.Drafter(config), 1, *inputs)

  def gradient(attention, dtype=jnp.float32):
    drafter = drafter_lib.Drafter(config, dtype, 'layers', attention)
    loss = lambda params, features: jnp.sum(jnp.sin(drafter.apply({'params': params}, features, *inputs[1:])))
    return jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=COMPILE_QUICKLY)(params, inputs[0])

  wanted, found, rounded = gradient('xla'), gradient('splash'), gradient('splash', jnp.bfloat16)
  norm = lambda tree: np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))
  error = lambda tree: norm(jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), tree, wanted)) / norm(wanted)
  assert error(found) < 1e-5 < error(rounded) < 0.05


# ---- Tiles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('options', [{}, {'window': 37}, {'layer_window': 9}, {'layer_window': 9, 'causal': True}])
def test_mask_and_tiles_against_the_masks(packed, options):
  """Every pair of a query and a key, and which tiles have any."""
  t, a, k, tile = 300, 20, 15, 128
  _, places = draw(b=1, t=t, a=a, k=k, d=6, packed=packed)
  options = {'window': 0, 'layer_window': 0, 'causal': False, **options}
  mask = splash._Mask(k, 384, **options, block_bits=5, slot_bits=4 if any(list(options.values())[1:]) else 0)
  slots, blocks = jnp.tile(jnp.arange(k), a), jnp.repeat(jnp.arange(a), k)
  queries = mask.encode(jnp.repeat(places.seen_BxA[0], k), slots, blocks)
  documents = jnp.repeat(places.starts_BxA[0], k) if packed else None
  found = np.asarray(mask(queries[:, None], jnp.arange(384 + a * k)[None, :]))

  wanted = np.asarray(masks.context(places.seen_BxA, 384, options['window']))[0][:, None]
  if options['layer_window']:
    wanted = wanted & np.asarray(masks.nearby(places.seen_BxA, 384, k, options['layer_window']))[0]
  wanted = np.broadcast_to(wanted, (a, k, 384)).reshape(a * k, 384)
  own = np.kron(np.eye(a, dtype=bool), np.asarray(masks.own_block(k, options['layer_window'], options['causal'])))
  wanted = np.concatenate([wanted, own], 1)
  np.testing.assert_array_equal(found, wanted)

  if packed:  # Which the kernel tells by the segments.
    wanted = wanted & (np.arange(384 + a * k) >= np.asarray(documents)[:, None])
  pad = lambda x, axis: np.concatenate([x, np.repeat(np.take(x, [-1], axis), -x.shape[axis] % tile, axis)], axis)
  wanted = pad(pad(wanted, 0), 1)
  queries, documents = (x if x is None else jnp.asarray(pad(np.asarray(x), 0)) for x in (queries, documents))
  needed = np.asarray(splash._needed(mask, queries, documents, wanted.shape[1], tile))
  tiles = wanted.reshape(wanted.shape[0] // tile, tile, wanted.shape[1] // tile, tile).any((1, 3))
  np.testing.assert_array_equal(needed, tiles)
  assert not needed.all()

  following = np.asarray(splash._next(jnp.asarray(needed))).ravel()
  columns = np.flatnonzero(needed)
  for i, column in enumerate(following[: columns[-1] + 1]):
    assert column == columns[columns >= i][0] % needed.shape[1]


def test_tiles_that_no_block_sees_are_not_computed(small_tiles):
  """A product with NaN would be one; XLA's is."""
  arrays, places = draw(b=1, t=300, a=8, h=2, d=6)
  places = drafter_lib.Places(*[jnp.minimum(places.seen_BxA, 120)] * 2)  # The first of three tiles of context.
  poisoned = (*arrays[:4], arrays[4].at[:, :, 128:].set(jnp.nan))
  wanted = drafter_lib.block_attention(*arrays[:3], arrays[3:], places)
  found = splash.block_attention(*poisoned[:3], poisoned[3:], places, interpret=True)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
  assert np.isnan(drafter_lib.block_attention(*poisoned[:3], poisoned[3:], places)).any()


def test_bounds_that_do_not_fit_a_query():
  shapes = [(1, 2**14, 16, 1, 8)] * 3 + [(1, 1, 8, 2**18), (1, 1, 2**18, 8)]
  arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  places = drafter_lib.Places(*[jax.ShapeDtypeStruct((1, 2**14), jnp.int32)] * 2)
  with pytest.raises(UserError, match='16384 blocks in a row of 262144 tokens are too many; lower --config.train.anch'):
    jax.eval_shape(lambda *args: splash.block_attention(*args[:3], args[3:], places), *arrays)


# ---- Devices, in a process of its own --------------------------------------------------------------

ON_A_MESH = '''
import functools, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from dspec import config as config_lib, sharding
from dspec.models import drafter, splash
from models.test_splash import draw, value_and_gradients
config = config_lib.default().copy_and_resolve_references()
config.mesh.update(data=2, fsdp=2, tensor=2)
mesh = sharding.make_mesh(config)
arrays, places = draw(b=8, t=40, a=6, d=6, k=4)
wanted = value_and_gradients(drafter.block_attention, arrays, places)
with jax.set_mesh(mesh):
  of = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(('data', 'fsdp'), *spec)))
  arrays = [of(x, *([None, None, 'tensor'] if x.ndim == 5 else ['tensor'])) for x in arrays]
  places = jax.tree.map(of, places)
  attention = functools.partial(splash.block_attention, interpret=True)
  found = value_and_gradients(attention, arrays, places)
  for got, want in zip(found, wanted):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
  program = jax.jit(lambda arrays, places: attention(*arrays[:3], arrays[3:], places)).lower(arrays, places).compile()
  text = program.as_text()
  assert not any(word in text for word in ('all-gather', 'all-to-all', 'all-reduce', 'collective-permute')), text
  out = program(arrays, places)
  assert out.addressable_shards[0].data.shape == (2, 6, 4, out.shape[-1] // 2), out.sharding
  # Three heads are not shared by two devices.
  arrays, places = draw(b=8, t=40, a=6, d=6, k=4, h=3, kv=3)
  found = attention(*arrays[:3], arrays[3:], places)
np.testing.assert_allclose(found, drafter.block_attention(*arrays[:3], arrays[3:], places), atol=1e-5)
'''
FOR_A_TPU = '''
import os
os.environ.update(TPU_SKIP_MDS_QUERY='1', ALLOW_MULTIPLE_LIBTPU_LOAD='1')
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from dspec.models import drafter, splash
device = topologies.get_topology_desc(platform='tpu', topology_name='v5e:2x2').devices[0]
for d in (64, 128):
  shapes = (1, 16, 8, 2, d), (1, 16, 8, 1, d), (1, 16, 8, 1, d), (1, 1, d, 256), (1, 1, 256, d)
  shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=SingleDeviceSharding(device))
  arrays = [shape(jnp.bfloat16, *sizes) for sizes in shapes]
  whole = shape(jnp.int32, 1, 16)
  places = drafter.Places(whole, whole, whole, shape(jnp.int32, 1, 256))
  loss = lambda arrays, places: splash.block_attention(*arrays[:3], arrays[3:], places).sum()
  program = jax.jit(jax.grad(loss)).trace(arrays, places).lower(lowering_platforms=('tpu',)).compile()
  assert all(f'splash_mha_{name}' in program.as_text() for name in ('fwd', 'dq', 'dkv'))
'''


def run(script, devices):
  done = subprocess.run(
      [sys.executable, '-c', script], capture_output=True, text=True, timeout=600, check=False, env={
          **os.environ, 'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "tests"}', 'JAX_PLATFORMS': 'cpu',
          'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'})
  assert done.returncode == 0, done.stderr


def test_on_a_mesh():
  """As on one device, and each takes its rows and heads, with no word to the others."""
  run(ON_A_MESH, 8)


def test_compiles_for_a_tpu():
  pytest.importorskip('libtpu', reason="needs pip install '.[tpu]'")
  run(FOR_A_TPU, 1)
