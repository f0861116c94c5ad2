"""The frozen target: a decoder-only language model that also hands out chosen layers' outputs.

One decoder serves every family; `FAMILIES` has what sets a family's layers apart from Llama's.

Keys are cached as `[B, Hkv, d, T]` and values as `[B, Hkv, T, d]`, one pair a layer: with the time axis last,
one-token attention over the cache is a plain matrix product on every backend.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspec import sharding
from dspec.models import blocks
from dspec.models import masks

Params = Any
Cache = tuple[tuple[jax.Array, jax.Array], ...]

_SMALLEST_VIEW = 256  # See `_views`.


@dataclasses.dataclass(frozen=True)
class Family:
  """What the layers of a family have that Llama's (arXiv 2302.13971) do not.

  Attributes:
    qkv_bias: biases on the query, key and value projections.
    qk_norm: RMS norms of each head's queries and keys, before their rotation.
    sandwich_norm: RMS norms of what attention and MLP add, too.
    activation: of the MLP's gate.
    scaled_embedding: embeddings are multiplied by sqrt(width). The head is not.
  """

  qkv_bias: bool = False
  qk_norm: bool = False
  sandwich_norm: bool = False
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  scaled_embedding: bool = False


FAMILIES: dict[str, Family] = {
    'llama': Family(),
    'qwen2': Family(qkv_bias=True),  # arXiv 2407.10671
    'qwen3': Family(qk_norm=True),  # arXiv 2505.09388
    'gemma3': Family(  # arXiv 2503.19786
        qk_norm=True, sandwich_norm=True, activation=functools.partial(nn.gelu, approximate=True), scaled_embedding=True
    ),
}


@dataclasses.dataclass(frozen=True)
class TargetConfig:
  """Shape of a target; hashable, a static argument of jit.

  Attributes:
    family: a key of `FAMILIES`.
    rope_divisors: what the rotary frequencies are divided by, head_dim / 2 numbers; (): nothing. See
      `blocks.llama3_divisors`.
    local_layers: layers whose attention sees the last `sliding_window` positions only, the query's own among them.
    local_rope_theta: of those layers, whose frequencies are not divided.
    attention_scale: scores are multiplied by it; 0 stands for head_dim ** -0.5.
  """

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
  rope_divisors: tuple[float, ...] = ()
  local_layers: tuple[int, ...] = ()
  sliding_window: int = 0
  local_rope_theta: float = 0.0
  attention_scale: float = 0.0

  @property
  def embedding_scale(self) -> float:
    return self.width**0.5 if FAMILIES[self.family].scaled_embedding else 1.0


def init_cache(config: TargetConfig, batch: int, length: int) -> Cache:
  """An empty cache for `length` positions, float32 (a bfloat16 cache is slower on CPUs)."""
  kv, d = config.num_kv_heads, config.head_dim
  zeros = lambda *shape: sharding.constrain(jnp.zeros((batch, kv, *shape)), sharding.CACHE)
  return tuple((zeros(d, length), zeros(length, d)) for _ in range(config.num_layers))


def write_cache(layer, k_BxTxHxd: jax.Array, v_BxTxHxd: jax.Array, positions_BxT: jax.Array):
  """Stores keys and values at their positions; positions outside the cache are dropped."""

  @jax.vmap  # Row by row: with the rows among the indices, devices would exchange what each writes to its own rows.
  def write(keys, values, k_TxHxd, v_TxHxd, positions_T):
    keys = keys.at[:, :, positions_T].set(k_TxHxd.transpose(1, 2, 0), mode='drop')
    return keys, values.at[:, positions_T].set(v_TxHxd.transpose(1, 0, 2), mode='drop')

  return write(*layer, k_BxTxHxd, v_BxTxHxd, positions_BxT)


def _attend(q, keys, values, positions_BxT, starts_BxT, view, window):
  """Softmax attention of grouped, scaled queries over the first `view` cache slots."""
  keys, values = keys[..., :view], values[:, :, :view]
  scores = jnp.einsum('bhqd,bhdt->bhqt', q, keys, preferred_element_type=jnp.float32)
  groups = q.shape[2] // positions_BxT.shape[1]
  mask = jnp.tile(masks.causal(positions_BxT, view, window, starts_BxT), (1, groups, 1))[:, None]
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


def cached_attention(q_BxTxHxd, layer, positions_BxT, window: int = 0, starts_BxT=None) -> jax.Array:
  """Causal attention over a cache, `[B, T, H*d]`; the work follows the longest row, not the cache.

  Args:
    q_BxTxHxd: queries, scaled.
    layer: (keys, values) of the cache.
    positions_BxT: int32. Those outside the cache mark rows that have finished; what comes back for them has no meaning.
    window: see `masks.causal`.
    starts_BxT: see `masks.causal`.
  """
  keys, values = layer
  size = keys.shape[-1]
  q = blocks.group_queries(q_BxTxHxd, keys.shape[1])
  views = _views(size)
  longest = jnp.max(jnp.where(positions_BxT < size, positions_BxT, 0)) + 1
  branch = (longest > jnp.array(views)).sum()
  out = jax.lax.switch(
      branch,
      [lambda *args, view=view: _attend(*args, view, window) for view in views],
      q, keys, values, positions_BxT, starts_BxT,
  )
  return blocks.ungroup_queries(out, q_BxTxHxd.shape[2])


def tree_attention(
    q_BxNxHxd, k_BxNxHkvxd, v_BxNxHkvxd, layer, positions_BxN, starts_B, sees_BxNxN, window: int = 0
) -> jax.Array:
  """Attention of a tree's nodes over [cache below the tree ; the nodes that each may see], `[B, N, H*d]`.

  Queries are scaled; with a window, see `masks.causal`, a node sees only what is near its own position.
  """
  keys, values = layer
  n, h = q_BxNxHxd.shape[1:3]
  q = blocks.group_queries(q_BxNxHxd, keys.shape[1])
  groups = q.shape[2] // n
  rows = lambda mask: jnp.tile(mask, (1, groups, 1))[:, None]
  if window:
    sees_BxNxN = sees_BxNxN & (positions_BxN[:, None, :] > positions_BxN[:, :, None] - window)
  own = jnp.einsum('bhqd,bnhd->bhqn', q, k_BxNxHkvxd, preferred_element_type=jnp.float32)
  own = jnp.where(rows(sees_BxNxN), own, -jnp.inf)

  def attend(view):
    past = jnp.einsum('bhqd,bhdt->bhqt', q, keys[..., :view], preferred_element_type=jnp.float32)
    below = masks.context(starts_B[:, None], view)
    if window:
      below = below & masks.causal(positions_BxN, view, window)
    below = rows(jnp.broadcast_to(below, (below.shape[0], n, view)))
    scores = jnp.concatenate([jnp.where(below, past, -jnp.inf), own], -1)
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
  is_local: bool

  @nn.compact
  def __call__(self, x, positions_BxT, layer, tree=None, starts_BxT=None):
    c, family = self.config, FAMILIES[self.config.family]
    project = lambda heads, name: blocks.linear(heads * c.head_dim, self.dtype, name, bias=family.qkv_bias)(x).reshape(
        *x.shape[:2], heads, c.head_dim
    )
    q, k, v = project(c.num_heads, 'q_proj'), project(c.num_kv_heads, 'k_proj'), project(c.num_kv_heads, 'v_proj')
    if family.qk_norm:
      q, k = blocks.rms_norm(c.norm_eps, 'q_norm')(q), blocks.rms_norm(c.norm_eps, 'k_norm')(k)
    theta, divisors = (c.local_rope_theta, ()) if self.is_local else (c.rope_theta, c.rope_divisors)
    turns_BxT = positions_BxT if starts_BxT is None else positions_BxT - starts_BxT
    q, k = (blocks.rotary(x, turns_BxT, theta, divisors) for x in (q, k))
    q *= c.attention_scale or c.head_dim**-0.5
    window = c.sliding_window if self.is_local else 0
    if tree is None:
      layer = write_cache(layer, k, v, positions_BxT)
      out = cached_attention(q, layer, positions_BxT, window, starts_BxT)
    else:
      out, layer = tree_attention(q, k, v, layer, positions_BxT, *tree, window), (k, v)
    return blocks.linear(c.width, self.dtype, 'o_proj')(out), layer


class Layer(nn.Module):
  config: TargetConfig
  dtype: jnp.dtype
  is_local: bool

  @nn.compact
  def __call__(self, x, positions_BxT, layer, tree=None, starts_BxT=None):
    c, family = self.config, FAMILIES[self.config.family]
    norm = lambda name: blocks.rms_norm(c.norm_eps, name)
    attn = Attention(c, self.dtype, self.is_local, name='attn')
    h, layer = attn(norm('attn_norm')(x), positions_BxT, layer, tree, starts_BxT)
    x += norm('attn_post_norm')(h) if family.sandwich_norm else h
    h = blocks.GatedMLP(c.mlp_width, self.dtype, family.activation, name='mlp')(norm('mlp_norm')(x))
    return x + (norm('mlp_post_norm')(h) if family.sandwich_norm else h), layer


class Target(nn.Module):
  """A decoder-only transformer. `apply` takes the parameter tree that `dspec.checkpoints` loads."""

  config: TargetConfig
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(
      self, tokens_BxT, positions_BxT, cache: Cache, taps: tuple[int, ...] = (), tree=None, starts_BxT=None
  ):
    """Runs tokens at their positions on top of the cache, or a tree of tokens beside it.

    Args:
      tokens_BxT: int32 token ids.
      positions_BxT: int32 absolute positions; equal to the cache slots that are written.
      cache: one (keys, values) pair a layer, see `init_cache`.
      taps: ascending 0-based layers whose outputs (the residual stream after the layer) are wanted.
      tree: None, or (starts_B, sees_BxTxT): the tokens are nodes of a tree that grows from position `starts`. A node
        sees the cache below that, and the nodes that `sees` names, itself among them. Nodes may share positions, so
        nothing is written to the cache.
      starts_BxT: None, or the first slot of the document that each token belongs to, of several in a row: it sees
        nothing below, and is at position 0 there.

    Returns:
      hidden_BxTxD after the final norm (float32), features_BxTx(N*D) of the tapped layers side by side
      (float32; width 0 without taps), and the new cache; of a tree, the nodes' own (keys, values) of each layer,
      `[B, T, Hkv, d]`, for `write_cache`.
    """
    c = self.config
    x = sharding.constrain_embedded(nn.Embed(c.vocab_size, c.width, name='embed')(tokens_BxT))
    x = x.astype(jnp.float32) * c.embedding_scale
    features, new_cache = [], []
    for i in range(c.num_layers):
      layer = Layer(c, self.dtype, i in c.local_layers, name=f'layers_{i}')
      x, layer = layer(x, positions_BxT, cache[i], tree, starts_BxT)
      new_cache.append(layer)
      if i in taps:
        features.append(x)
    hidden = blocks.rms_norm(c.norm_eps, 'norm')(x)
    if self.is_initializing() and not c.tie_embeddings:
      blocks.linear(c.vocab_size, self.dtype, 'lm_head')(hidden)  # For `logits`, which needs it alone.
    features = jnp.concatenate(features, -1) if taps else jnp.zeros((*tokens_BxT.shape, 0))
    # The drafter's fc, split over its rows, would have them put side by side in parts, which XLA gets wrong.
    features = sharding.constrain(features, sharding.BATCH)
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
  """Rows of the target's embedding, not scaled, float32 `[..., D]`."""
  return sharding.constrain_embedded(params['embed']['embedding'][tokens]).astype(jnp.float32)


def cast(params: Params, dtype: jnp.dtype) -> Params:
  """Matrices in `dtype`, once, so that no step repeats the cast; norm scales, and whole numbers, stay as they are.

  Nothing is widened: that would take memory and change no result.
  """
  size = jnp.dtype(dtype).itemsize
  return jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 and x.dtype.itemsize > size else x, params)
