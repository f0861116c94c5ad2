"""Tiny random models for decoding, and a drafter whose proposals a test writes down."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

EOS_IDS = (2, 5)


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
  """A drafter that proposes `params['tokens'][row, position]` where `params['use']` is set there.

  Elsewhere, and for the context, it is the drafter it wraps: drafts can be wrong and right at will
  while everything around them still runs.
  """

  inner: drafter_lib.Drafter

  @property
  def config(self) -> drafter_lib.DrafterConfig:
    return self.inner.config

  @property
  def dtype(self) -> Any:
    return self.inner.dtype

  def apply(self, variables, *args, method):
    params = variables['params']
    out = self.inner.apply({'params': params['inner']}, *args, method=method)
    if method != 'draft':
      return out
    positions = args[1][:, :, None] + jnp.arange(self.config.block_size)[None, None, :]
    rows = jnp.arange(positions.shape[0])[:, None, None]
    # Where the head's rows are equally long, each is the hidden state that favours its own token.
    wanted = params['head'][params['tokens'][rows, positions]]
    return jnp.where(params['use'][rows, positions][..., None], wanted, out)


@functools.lru_cache
def shapes_of(module, *args):
  """Parameter shapes; arguments of `init` as (shape, dtype), `None` for the target's cache."""
  zeros = [target_lib.init_cache(module.config, 1, 2) if a is None else jnp.zeros(*a) for a in args]
  return jax.eval_shape(module.init, jax.random.key(0), *zeros)['params']


def random_tree(shapes, seed, scale):
  rng = np.random.default_rng(seed)
  draw = lambda x: (
      scale * rng.normal(size=x.shape) / np.sqrt(x.shape[0]) if len(x.shape) > 1
      else 1 + 0.3 * rng.normal(size=x.shape))
  return jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)


@pytest.fixture(scope='session')
def make_target():
  """A function (vocab, seed, mute, changes of the shape) -> (module, params); strong weights make its tokens irregular.

  Muted EOS tokens have logit 0, which is never the largest, so that every row runs to its limit.
  """

  def make(vocab, seed, mute=False, **changes):
    config = target_lib.TargetConfig(**{
        'family': 'llama', 'vocab_size': vocab, 'num_layers': 2, 'width': 16, 'mlp_width': 24, 'num_heads': 4,
        'num_kv_heads': 2, 'head_dim': 6, 'rope_theta': 100.0, 'norm_eps': 1e-5, 'max_length': 128,
        'tie_embeddings': False, 'eos_ids': tuple(e for e in EOS_IDS if e < vocab - 1), **changes})
    module = target_lib.Target(config)
    shapes = shapes_of(module, ((1, 2), jnp.int32), ((1, 2), jnp.int32), None)
    head = np.random.default_rng(seed + 1000).normal(size=(vocab, 16))
    head /= np.linalg.norm(head, axis=1, keepdims=True)
    if mute:
      head[list(EOS_IDS)] = 0
    params = random_tree(shapes, seed, 3.0)
    return module, {**params, 'lm_head': {'kernel': jnp.asarray(head.T, jnp.float32)}}

  return make


@pytest.fixture(scope='session')
def make_drafter():
  """A function (target config, K, seed, draft vocabulary) -> (module, params) of a random drafter."""

  def make(target_config, block_size, seed, draft_ids=()):
    config = drafter_lib.from_target(
        target_config, num_layers=2, block_size=block_size,
        target_layers=tuple(sorted({0, target_config.num_layers - 2})), mask_token_id=1, vocab_size=len(draft_ids))
    module = drafter_lib.Drafter(config)
    shapes = shapes_of(
        module, ((1, 2, len(config.target_layers) * config.width), jnp.float32),
        ((1, 1, block_size, config.width), jnp.float32), ((1, 1), jnp.int32))
    drawn = random_tree({name: shape for name, shape in shapes.items() if name != 'draft_ids'}, seed, 1.5)
    return module, {**drawn, 'draft_ids': jnp.asarray(draft_ids, jnp.int32)} if draft_ids else drawn

  return make


@pytest.fixture(scope='session')
def scripted():
  """A function (drafter, its params, target params, tokens, use [B, L]) -> (drafter, params)."""

  def make(drafter, params, target_params, tokens, use):
    return ScriptedDrafter(drafter), {
        'inner': params, 'head': target_lib.head_VxD(target_params), 'tokens': jnp.asarray(tokens),
        'use': jnp.asarray(use)}

  return make


@pytest.fixture(scope='session')
def uncached():
  """A function (module, params, tokens [B, T]) -> (logits [B, T, V], features of taps)."""

  def forward(module, params, tokens, taps):
    b, t = tokens.shape
    positions = jnp.tile(jnp.arange(t)[None, :], (b, 1))
    hidden, features, _ = module.apply(
        {'params': params}, tokens, positions, target_lib.init_cache(module.config, b, t), taps)
    return target_lib.logits(params, hidden, jnp.float32), features

  jitted = jax.jit(forward, static_argnums=(0, 3))
  return lambda module, params, tokens, taps=(): jitted(module, params, jnp.asarray(tokens), taps)
