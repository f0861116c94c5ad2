"""The parts of both models against numpy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.models import blocks


@pytest.mark.parametrize('theta', [100.0, 1e4, 1e6])
def test_rotary_is_a_complex_rotation(theta):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
  positions = rng.integers(0, 500, size=(2, 5))
  got = np.asarray(blocks.rotary(jnp.asarray(x), jnp.asarray(positions), theta))
  for pair in range(4):
    z = x[..., pair] + 1j * x[..., pair + 4]
    z = z * np.exp(1j * positions * theta ** (-pair / 4))[..., None]
    # Angles are products in float32: 500 * 2^-23 radians.
    np.testing.assert_allclose(got[..., pair], z.real, atol=3e-4)
    np.testing.assert_allclose(got[..., pair + 4], z.imag, atol=3e-4)


def test_rotated_products_depend_on_distances_only():
  rng = np.random.default_rng(1)
  q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

  def product(query_position, key_position):
    turn = lambda x, p: blocks.rotary(jnp.asarray(x), jnp.array([[p]]), 100.0)
    return jnp.sum(turn(q, query_position) * turn(k, key_position))

  np.testing.assert_allclose(product(17, 12), product(5, 0), rtol=1e-4)
  assert abs(product(17, 12) - product(12, 17)) > 1e-2


def test_rms_norm():
  rng = np.random.default_rng(2)
  x, scale = rng.normal(size=(3, 4, 6)), rng.normal(size=6)
  got = blocks.rms_norm(0.1, 'norm').apply(
      {'params': {'scale': jnp.asarray(scale, jnp.float32)}}, jnp.asarray(x, jnp.float32))
  want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * scale
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_norm_of_bfloat16_is_computed_in_float32():
  x = jnp.full((1, 3), 300.0, jnp.bfloat16)
  got = blocks.rms_norm(0.0, 'norm').apply({'params': {'scale': jnp.ones(3)}}, x)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, 1.0, rtol=1e-6)


def test_gated_mlp(reference, random_params):
  module = blocks.GatedMLP(7, jnp.float32)
  x = np.random.default_rng(3).normal(size=(2, 3, 5)).astype(np.float32)
  params = random_params(module, 4, x)
  assert jax.tree.map(jnp.shape, params) == {
      'gate_proj': {'kernel': (5, 7)}, 'up_proj': {'kernel': (5, 7)},
      'down_proj': {'kernel': (7, 5)}}
  np.testing.assert_allclose(
      module.apply({'params': params}, x), reference.mlp(x.astype(np.float64), params), atol=1e-5)


def value_and_gradients(dtype, x, kernel):
  """Of a loss whose cotangent is different everywhere."""
  layer = blocks.linear(kernel.shape[1], dtype, 'layer')
  weights = jnp.linspace(-1, 1, x.shape[0] * x.shape[1] * kernel.shape[1])
  weights = weights.reshape(*x.shape[:2], -1)

  def loss(x, kernel):
    y = layer.apply({'params': {'kernel': kernel}}, x)
    return jnp.sum(jnp.sin(y) * weights), y

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, kernel)


@pytest.fixture
def projection():
  rng = np.random.default_rng(5)
  return (jnp.asarray(rng.normal(size=(3, 8, 32)), jnp.float32),
          jnp.asarray(rng.normal(size=(32, 24)) / 6, jnp.float32))


def test_linear_in_float32_against_numpy(projection):
  x, kernel = (np.asarray(a, np.float64) for a in projection)
  weights = np.linspace(-1, 1, 3 * 8 * 24).reshape(3, 8, 24)
  cotangent = np.cos(x @ kernel) * weights
  (_, y), (dx, dkernel) = value_and_gradients(jnp.float32, *projection)
  np.testing.assert_allclose(y, x @ kernel, atol=1e-5)
  np.testing.assert_allclose(dx, cotangent @ kernel.T, atol=1e-5)
  np.testing.assert_allclose(dkernel, np.einsum('bti,bto->io', x, cotangent), atol=1e-5)


def test_linear_in_bfloat16_is_close_to_float32(projection):
  (_, want), wanted = value_and_gradients(jnp.float32, *projection)
  (_, got), gradients = value_and_gradients(jnp.bfloat16, *projection)
  for a, b in zip((got, *gradients), (want, *wanted)):
    assert a.dtype == jnp.float32
    error = np.linalg.norm(a - b) / np.linalg.norm(b)
    assert 1e-5 < error < 8e-3  # bfloat16 keeps 8 bits: 2^-8 is 4e-3


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_one_row_is_a_row_of_many(projection, dtype):
  x, kernel = projection
  apply = jax.jit(lambda x: blocks.linear(24, dtype, 'layer').apply({'params': {'kernel': kernel}}, x))
  one = apply(x[1:2, 3:4])
  assert one.shape == (1, 1, 24) and one.dtype == jnp.float32
  np.testing.assert_allclose(one[0, 0], apply(x)[1, 3], rtol=1e-5, atol=1e-6)


def test_every_product_of_a_bfloat16_step_has_bfloat16_operands(projection):
  step = jax.jit(lambda x, kernel: value_and_gradients(jnp.bfloat16, x, kernel))
  products = [
      line.split(' : ')[-1]
      for line in step.lower(*projection).as_text().splitlines() if 'dot_general' in line]
  assert len(products) == 3  # forward, dx, dkernel
  for types in products:
    assert re.findall(r'x(bf16|f32)>', types) == ['bf16', 'bf16', 'f32'], types


def test_linear_refuses_other_products():
  with pytest.raises(NotImplementedError, match='is needed here'):
    blocks._dot_general(jnp.ones((2, 3)), jnp.ones((3, 2)), (((0,), (1,)), ((), ())), dtype=jnp.float32)


@pytest.mark.parametrize('heads,kv', [(6, 2), (3, 3), (4, 1)])
def test_group_and_ungroup(heads, kv):
  q = np.random.default_rng(6).normal(size=(2, 5, heads, 4)).astype(np.float32)
  grouped = np.asarray(blocks.group_queries(jnp.asarray(q), kv))
  groups = heads // kv
  assert grouped.shape == (2, kv, groups * 5, 4)
  for h in range(heads):  # head h shares key head h // groups, as in the checkpoints
    first = h % groups * 5
    np.testing.assert_array_equal(grouped[:, h // groups, first:first + 5], q[:, :, h])
  back = blocks.ungroup_queries(jnp.asarray(grouped), heads)
  np.testing.assert_array_equal(back, q.reshape(2, 5, heads * 4))
