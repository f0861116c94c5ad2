"""On a GPU: decoding stays exact in float32, and a train step is that of the CPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec import compile as compile_lib
from dspec import config as config_lib
from dspec import sharding
from dspec import train
from dspec.decoding import autoregressive
from dspec.decoding import speculative
from dspec.models import drafter as drafter_lib

pytestmark = pytest.mark.gpu


@pytest.fixture(scope='module')
def gpu():
  try:
    return jax.devices('gpu')[0]
  except RuntimeError:
    pytest.skip('there is no GPU')


@pytest.fixture(scope='module')
def model(untrained_target):
  """(module, float32 parameters) of a target that ends no text."""
  return untrained_target(vocab_size=88, width=32, mlp_width=40, num_heads=4, head_dim=8, eos_ids=())


def make_config(**data):
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.data.update(max_prompt_tokens=16, max_response_tokens=16, **data)
  config.drafter.update(num_layers=1, block_size=4, target_layers=(0, 1), mask_token_id=1, vocab_size=56, window=5)
  config.loss.update(gamma=3.0, first_error=0.3, chain=40.0)
  config.train.update(batch_size=4, anchors=3, head_chunk=16, compute_dtype='float32')
  return config


def test_speculative_decoding_says_what_plain_decoding_says(gpu, model):
  """Rows of several lengths, two block sizes; the drafts are those of an untrained drafter, some of them right by chance."""
  target, params = model
  config = train.make_drafter_config(make_config(), target.config)
  drafter_params = train.init_params(drafter_lib.Drafter(config), jax.random.key(2))
  drafter_params['draft_ids'] = np.arange(config.vocab_size, dtype=np.int32)
  rng = np.random.default_rng(0)
  prompts, lengths = rng.integers(3, target.config.vocab_size, (16, 20)), rng.integers(1, 21, 16)
  params, drafter_params, prompts, lengths = jax.device_put((params, drafter_params, prompts, lengths), gpu)
  with jax.default_matmul_precision('highest'):
    plain = autoregressive.generate(target, params, prompts, lengths, jax.random.key(0), max_new_tokens=48)
    for block_size in (4, 16):
      drafter = drafter_lib.Drafter(dataclasses.replace(config, block_size=block_size))
      rows, trace = speculative.generate(
          target, params, drafter, drafter_params, prompts, lengths, max_new_tokens=48)
      np.testing.assert_array_equal(rows.tokens_BxT, plain.tokens_BxT)
      assert np.asarray(trace.accepted_BxR).sum() > 0
  assert rows.tokens_BxT.devices() == {gpu}


@pytest.mark.parametrize('features', ['cached', 'online'])
def test_a_train_step_is_that_of_the_cpu(gpu, model, features):
  config, shape = make_config(features=features), model[0].config

  def step_on(device):
    mesh = sharding.make_mesh(config, [device])
    with jax.set_mesh(mesh), jax.default_matmul_precision('highest'):
      step, shapes, _ = compile_lib.train_step(config, mesh, shape)
      rng, k, length = np.random.default_rng(0), config.drafter.block_size, shapes[1]['tokens'].shape[1]

      def fill(path, x):
        name = jax.tree_util.keystr(path)
        if 'opt_state' in name or 'step' in name:
          return np.zeros(x.shape, x.dtype)
        if 'draft_ids' in name:
          return np.arange(x.shape[0], dtype=x.dtype)
        if x.dtype == bool:
          return np.ones(x.shape, bool)
        if jnp.issubdtype(x.dtype, jnp.integer):
          return rng.integers(1, length - k if 'anchors' in name else 56, x.shape).astype(x.dtype)
        return (rng.normal(size=x.shape) / np.sqrt(x.shape[0]) if x.ndim > 1 else np.ones(x.shape)).astype(x.dtype)

      arguments = jax.tree_util.tree_map_with_path(fill, shapes)
      arguments = jax.tree.map(lambda value, x: jax.device_put(value, x.sharding), arguments, shapes)
      return jax.device_get(step(*arguments))

  (state, metrics), (wanted_state, wanted) = step_on(gpu), step_on(jax.devices('cpu')[0])
  assert metrics['num_slots'] == wanted['num_slots'] > 0 and wanted['gradient_norm'] > 0
  for name in ('loss', 'gradient_norm'):
    np.testing.assert_allclose(metrics[name], wanted[name], rtol=1e-4)
  # Adam's first step is as long as the learning rate whatever the gradient: parameters differ by rounding of its sign.
  for got, expected in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(wanted_state.opt_state)):
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-6)
