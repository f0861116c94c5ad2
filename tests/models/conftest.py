"""Tiny models with random parameters, and a transformer's arithmetic once more, in numpy."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.models import target as target_lib


@pytest.fixture(scope='session')
def random_params():
  """A function (module, seed, *example arguments of its `init`) -> random float32 parameters.

  Norm scales are random too, so that a forgotten or misplaced one shows.
  """

  def make(module, seed, *args, **kwargs):
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *args, **kwargs))['params']
    rng = np.random.default_rng(seed)
    draw = lambda x: (
        1.5 * rng.normal(size=x.shape) / np.sqrt(x.shape[0]) if len(x.shape) > 1
        else 1 + 0.3 * rng.normal(size=x.shape))
    return jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)

  return make


@pytest.fixture(scope='session')
def tiny_config():
  """A Llama with grouped queries whose heads together are wider than the residual stream."""
  return target_lib.TargetConfig(
      family='llama', vocab_size=13, num_layers=3, width=16, mlp_width=20, num_heads=4,
      num_kv_heads=2, head_dim=6, rope_theta=100.0, norm_eps=1e-3, max_length=64,
      tie_embeddings=False, eos_ids=(2,))


@pytest.fixture(scope='session')
def tiny_target(tiny_config, random_params):
  """(module, parameters with an untied head)."""
  module = target_lib.Target(tiny_config)
  cache = target_lib.init_cache(tiny_config, 1, 4)
  tokens = jnp.zeros((1, 4), jnp.int32)
  params = random_params(module, 1, tokens, tokens, cache)
  head = np.random.default_rng(2).normal(size=(tiny_config.width, tiny_config.vocab_size))
  return module, {**params, 'lm_head': {'kernel': jnp.asarray(head, jnp.float32)}}


@pytest.fixture(scope='session')
def reference():
  """The layers in float64, for one sequence at a time: arrays are [T, ...]."""

  def rms(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * np.asarray(scale, np.float64)

  def dense(x, params):
    return x @ np.asarray(params['kernel'], np.float64)

  def rope(x, positions, theta):
    """[T, H, d]; the halves are real and imaginary part."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.asarray(positions)[:, None] * theta ** (-np.arange(half) / half))[:, None]
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], -1)

  def mlp(x, params):
    gate, up = dense(x, params['gate_proj']), dense(x, params['up_proj'])
    return dense(gate / (1 + np.exp(-gate)) * up, params['down_proj'])

  def attend(query, keys, values):
    """One query [d] of one head over a list of keys and values."""
    scores = np.array([query @ key for key in keys]) / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ np.array(values)

  return types.SimpleNamespace(rms=rms, dense=dense, rope=rope, mlp=mlp, attend=attend)
