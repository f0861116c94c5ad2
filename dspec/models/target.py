"""The frozen target: a decoder-only language model that also hands out chosen layers' outputs.

Keys are cached as `[B, Hkv, d, T]` and values as `[B, Hkv, T, d]`, one pair a layer: with the time axis last,
one-token attention over the cache is a plain matrix product on every backend.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspec.models import blocks
from dspec.models import masks

Params = Any
Cache = tuple[tuple[jax.Array, jax.Array], ...]

FAMILIES = ('llama',)

_SMALLEST_VIEW = 256  # See `_views`.


@dataclasses.dataclass(frozen=True)
class TargetConfig:
  """Shape of a target; hashable, a static argument of jit."""

  family: str
  vocab_size: int
  num_layers: int
  width: int
  mlp_width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float
  norm_eps: float
  max_length: int
  tie_embeddings: bool
  eos_ids: tuple[int, ...]


def init_cache(config: TargetConfig, batch: int, length: int) -> Cache:
  """An empty cache for `length` positions, float32 (a bfloat16 cache is slower on CPUs)."""
  kv, d = config.num_kv_heads, config.head_dim
  return tuple(
      (jnp.zeros((batch, kv, d, length)), jnp.zeros((batch, kv, length, d)))
      for _ in range(config.num_layers)
  )


def write_cache(layer, k_BxTxHxd: jax.Array, v_BxTxHxd: jax.Array, positions_BxT: jax.Array):
  """Stores keys and values at their positions; positions outside the cache are dropped."""
  keys, values = layer
  rows = jnp.arange(k_BxTxHxd.shape[0])[:, None]
  keys = keys.at[rows, :, :, positions_BxT].set(k_BxTxHxd, mode='drop')
  values = values.at[rows, :, positions_BxT].set(v_BxTxHxd, mode='drop')
  return keys, values


def _attend(q, keys, values, positions_BxT, view):
  """Softmax attention of grouped queries over the first `view` cache slots."""
  keys, values = keys[..., :view], values[:, :, :view]
  scale = q.shape[-1] ** -0.5
  scores = jnp.einsum('bhqd,bhdt->bhqt', q * scale, keys, preferred_element_type=jnp.float32)
  groups = q.shape[2] // positions_BxT.shape[1]
  mask = jnp.tile(masks.causal(positions_BxT, view), (1, groups, 1))[:, None]
  weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
  return jnp.einsum('bhqt,bhtd->bhqd', weights, values, preferred_element_type=jnp.float32)


def _views(size: int) -> list[int]:
  """Lengths of the cache that attention may be cut to: 256, 1024, ... and all of it.

  A cut copies what it keeps, so that finer steps cost more than they save.
  """
  views = []
  view = _SMALLEST_VIEW
  while view < size:
    views.append(view)
    view *= 4
  return [*views, size]


def cached_attention(q_BxTxHxd, layer, positions_BxT) -> jax.Array:
  """Causal attention over a cache, `[B, T, H*d]`; the work follows the longest row, not the cache.

  Positions outside the cache mark rows that have finished; what comes back for them has no meaning.
  """
  keys, values = layer
  size = keys.shape[-1]
  q = blocks.group_queries(q_BxTxHxd, keys.shape[1])
  views = _views(size)
  longest = jnp.max(jnp.where(positions_BxT < size, positions_BxT, 0)) + 1
  branch = (longest > jnp.array(views)).sum()
  out = jax.lax.switch(
      branch,
      [lambda *args, view=view: _attend(*args, view) for view in views],
      q, keys, values, positions_BxT,
  )
  return blocks.ungroup_queries(out, q_BxTxHxd.shape[2])


def tree_attention(q_BxNxHxd, k_BxNxHkvxd, v_BxNxHkvxd, layer, starts_B, sees_BxNxN) -> jax.Array:
  """Attention of a tree's nodes over [cache below the tree ; the nodes that each may see], `[B, N, H*d]`."""
  keys, values = layer
  b, n, h, d = q_BxNxHxd.shape
  q = blocks.group_queries(q_BxNxHxd, keys.shape[1]) * d**-0.5
  groups = q.shape[2] // n
  own = jnp.einsum('bhqd,bnhd->bhqn', q, k_BxNxHkvxd, preferred_element_type=jnp.float32)
  own = jnp.where(jnp.tile(sees_BxNxN, (1, groups, 1))[:, None], own, -jnp.inf)

  def attend(view):
    past = jnp.einsum('bhqd,bhdt->bhqt', q, keys[..., :view], preferred_element_type=jnp.float32)
    below = jnp.arange(view)[None, :] < starts_B[:, None]
    scores = jnp.concatenate([jnp.where(below[:, None, None, :], past, -jnp.inf), own], -1)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum(
        'bhqt,bhtd->bhqd', weights[..., :view], values[:, :, :view], preferred_element_type=jnp.float32
    )
    return out + jnp.einsum(
        'bhqn,bnhd->bhqd', weights[..., view:], v_BxNxHkvxd, preferred_element_type=jnp.float32
    )

  views = _views(keys.shape[-1])
  longest = jnp.max(jnp.where(starts_B < views[-1], starts_B, 0))  # Of the rows that have not finished.
  branch = (longest > jnp.array(views)).sum()
  out = jax.lax.switch(branch, [functools.partial(attend, view) for view in views])
  return blocks.ungroup_queries(out, h)


class Attention(nn.Module):
  config: TargetConfig
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, positions_BxT, layer, tree=None):
    c = self.config
    b, t, _ = x.shape
    q = blocks.linear(c.num_heads * c.head_dim, self.dtype, 'q_proj')(x)
    k = blocks.linear(c.num_kv_heads * c.head_dim, self.dtype, 'k_proj')(x)
    v = blocks.linear(c.num_kv_heads * c.head_dim, self.dtype, 'v_proj')(x)
    q = blocks.rotary(q.reshape(b, t, c.num_heads, c.head_dim), positions_BxT, c.rope_theta)
    k = blocks.rotary(k.reshape(b, t, c.num_kv_heads, c.head_dim), positions_BxT, c.rope_theta)
    v = v.reshape(b, t, c.num_kv_heads, c.head_dim)
    if tree is None:
      layer = write_cache(layer, k, v, positions_BxT)
      out = cached_attention(q, layer, positions_BxT)
    else:
      out, layer = tree_attention(q, k, v, layer, *tree), (k, v)
    return blocks.linear(c.width, self.dtype, 'o_proj')(out), layer


class Layer(nn.Module):
  config: TargetConfig
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x, positions_BxT, layer, tree=None):
    c = self.config
    h = blocks.rms_norm(c.norm_eps, 'attn_norm')(x)
    h, layer = Attention(c, self.dtype, name='attn')(h, positions_BxT, layer, tree)
    x = x + h
    h = blocks.rms_norm(c.norm_eps, 'mlp_norm')(x)
    return x + blocks.GatedMLP(c.mlp_width, self.dtype, name='mlp')(h), layer


class Target(nn.Module):
  """A decoder-only transformer. `apply` takes the parameter tree that `dspec.checkpoints` loads."""

  config: TargetConfig
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, tokens_BxT, positions_BxT, cache: Cache, taps: tuple[int, ...] = (), tree=None):
    """Runs tokens at their positions on top of the cache, or a tree of tokens beside it.

    Args:
      tokens_BxT: int32 token ids.
      positions_BxT: int32 absolute positions; equal to the cache slots that are written.
      cache: one (keys, values) pair a layer, see `init_cache`.
      taps: ascending 0-based layers whose outputs (the residual stream after the layer) are wanted.
      tree: None, or (starts_B, sees_BxTxT): the tokens are nodes of a tree that grows from position `starts`. A node
        sees the cache below that, and the nodes that `sees` names, itself among them. Nodes may share positions, so
        nothing is written to the cache.

    Returns:
      hidden_BxTxD after the final norm (float32), features_BxTx(N*D) of the tapped layers side by side
      (float32; width 0 without taps), and the new cache; of a tree, the nodes' own (keys, values) of each layer,
      `[B, T, Hkv, d]`, for `write_cache`.
    """
    c = self.config
    x = nn.Embed(c.vocab_size, c.width, name='embed')(tokens_BxT).astype(jnp.float32)
    features, new_cache = [], []
    for i in range(c.num_layers):
      x, layer = Layer(c, self.dtype, name=f'layers_{i}')(x, positions_BxT, cache[i], tree)
      new_cache.append(layer)
      if i in taps:
        features.append(x)
    hidden = blocks.rms_norm(c.norm_eps, 'norm')(x)
    features = jnp.concatenate(features, -1) if taps else jnp.zeros((*tokens_BxT.shape, 0))
    return hidden, features, tuple(new_cache)


def head_VxD(params: Params) -> jax.Array:
  """The output head with one row a token; the embedding itself where the two are tied."""
  if 'lm_head' in params:
    return params['lm_head']['kernel'].T
  return params['embed']['embedding']


def logits(params: Params, hidden_xD: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Float32 logits `[..., V]` of hidden states after the final norm, operands in `dtype`."""
  return project(head_VxD(params), hidden_xD, dtype)


def project(head_VxD: jax.Array, hidden_xD: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """`logits` for some rows of the head."""
  # As rows of a rank of 3: XLA's CPU backend converts all of a transposed bfloat16 matrix to float32 for a rank of 2.
  rows = hidden_xD.reshape(1, -1, hidden_xD.shape[-1])
  return blocks.matmul(rows, head_VxD.T, dtype).reshape(*hidden_xD.shape[:-1], -1)


def embed(params: Params, tokens: jax.Array) -> jax.Array:
  """The target's own token embeddings, float32 `[..., D]`."""
  return params['embed']['embedding'][tokens].astype(jnp.float32)


def cast(params: Params, dtype: jnp.dtype) -> Params:
  """Matrices in `dtype` (once, so that no step repeats the cast); norm scales, and whole numbers, stay as they are."""
  return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, params)
