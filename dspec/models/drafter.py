"""The block-diffusion drafter (DFlash, arXiv 2602.06036): one pass proposes a whole block.

The target's tapped hidden states, fused once, become keys and values of every layer. A block is the anchor (a known
token) followed by masks; its slots see one another and the context strictly below the anchor. Embedding and
output head are the target's own, frozen; this module maps embeddings to final hidden states.

The head costs more than the rest of a small drafter. A draft vocabulary (arXiv 2502.14856) keeps only the rows of
frequent tokens: other tokens are never drafted, so they always come from the target, and what it says is not touched.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dspec.models import blocks
from dspec.models import masks
from dspec.models import target as target_lib

# Scores of at most this many (slot, context) pairs a head are held at once, per row of the batch.
_MAX_SCORES = 1 << 21
# Parameters that are measured on the data and not trained.
MEASURED = ('feature_scale', 'draft_ids')


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
  """Shape and meaning of a drafter; hashable, a static argument of jit."""

  num_layers: int
  block_size: int
  target_layers: tuple[int, ...]
  mask_token_id: int
  width: int
  mlp_width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float
  norm_eps: float
  window: int = 0  # Positions of the context that a block sees, the last ones; 0: all.
  vocab_size: int = 0  # Of the draft vocabulary; 0: that of the target.


def from_target(
    target: target_lib.TargetConfig,
    *,
    num_layers: int,
    block_size: int,
    target_layers: tuple[int, ...],
    mask_token_id: int,
    window: int = 0,
    vocab_size: int = 0,
) -> DrafterConfig:
  """A drafter with the widths, heads and rotary base of its target."""
  return DrafterConfig(
      num_layers=num_layers,
      block_size=block_size,
      target_layers=tuple(target_layers),
      mask_token_id=mask_token_id,
      window=window,
      vocab_size=vocab_size,
      width=target.width,
      mlp_width=target.mlp_width,
      num_heads=target.num_heads,
      num_kv_heads=target.num_kv_heads,
      head_dim=target.head_dim,
      rope_theta=target.rope_theta,
      norm_eps=target.norm_eps,
  )


def block_tokens(anchor_tokens_BxA: jax.Array, config: DrafterConfig) -> jax.Array:
  """`[B, A, K]`: the anchor's token, then masks."""
  masks_shape = (*anchor_tokens_BxA.shape, config.block_size - 1)
  return jnp.concatenate(
      [anchor_tokens_BxA[..., None], jnp.full(masks_shape, config.mask_token_id, jnp.int32)], axis=-1
  )


def draft_vocabulary(counts_V: np.ndarray, size: int) -> np.ndarray:
  """Ids of the most frequent tokens, ascending, int32 `[size]`; of equally frequent ones the lowest ids.

  Tokenizers by byte pairs learn frequent pairs first, so that low ids are a fair guess where nothing was counted.
  """
  order = np.argsort(-counts_V, kind='stable')
  return np.sort(order[:size]).astype(np.int32)


def draft_head(params: Any, head_VxD: jax.Array) -> jax.Array:
  """The rows of the target's head that the drafter chooses from, `[V', D]`. Row i stands for `token_ids(params, i)`."""
  return head_VxD[params['draft_ids']] if 'draft_ids' in params else head_VxD


def token_ids(params: Any, rows: jax.Array) -> jax.Array:
  """Target token ids of rows of `draft_head`."""
  return params['draft_ids'][rows] if 'draft_ids' in params else rows


def draft_rows(params: Any, tokens: jax.Array, vocab_size: int) -> jax.Array:
  """Inverse of `token_ids`; -1 for tokens that are not in the draft vocabulary.

  Args:
    params: the drafter's.
    tokens: int32 target token ids, any shape.
    vocab_size: V, the target's.
  """
  if 'draft_ids' not in params:
    return tokens
  ids = params['draft_ids']
  return jnp.full(vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))[tokens]


def init_cache(config: DrafterConfig, batch: int, length: int) -> target_lib.Cache:
  """An empty context cache, laid out like the target's."""
  kv, d = config.num_kv_heads, config.head_dim
  return tuple(
      (jnp.zeros((batch, kv, d, length)), jnp.zeros((batch, kv, length, d)))
      for _ in range(config.num_layers)
  )


def _block_attention(q, k_own, v_own, context, seen_BxA, window):
  """Attention of blocks over [context ; own block], the two parts merged by their common maximum.

  Args:
    q: [B, A, K, H, d].
    k_own: [B, A, K, Hkv, d].
    v_own: [B, A, K, Hkv, d].
    context: (keys [B, Hkv, d, T], values [B, Hkv, T, d]).
    seen_BxA: int32, as `anchors_BxA` of `masks.context`: blocks see the context's slots below it.
    window: see `masks.context`.

  Returns:
    [B, A, K, H*d] float32.
  """
  keys, values = context
  b, a, k, h, d = q.shape
  kv = k_own.shape[3]
  groups = h // kv
  q = (q * d**-0.5).reshape(b, a, k, kv, groups, d).transpose(0, 3, 1, 4, 2, 5)  # B Hkv A G K d
  rows = q.reshape(b, kv, a * groups * k, d)
  past = jnp.einsum('bhqd,bhdt->bhqt', rows, keys, preferred_element_type=jnp.float32)
  past = past.reshape(b, kv, a, groups, k, -1)
  seen = masks.context(seen_BxA, keys.shape[-1], window)[:, None, :, None, None, :]
  past = jnp.where(seen, past, -jnp.inf)
  own = jnp.einsum('bhagkd,baphd->bhagkp', q, k_own, preferred_element_type=jnp.float32)
  # A block always sees itself, so the maximum is finite even without context.
  peak = jnp.maximum(past.max(-1, keepdims=True), own.max(-1, keepdims=True))
  peak = jax.lax.stop_gradient(peak)
  past, own = jnp.exp(past - peak), jnp.exp(own - peak)
  total = past.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)
  from_past = jnp.einsum(
      'bhqt,bhtd->bhqd', past.reshape(b, kv, a * groups * k, -1), values,
      preferred_element_type=jnp.float32,
  ).reshape(b, kv, a, groups, k, d)
  from_own = jnp.einsum('bhagkp,baphd->bhagkd', own, v_own, preferred_element_type=jnp.float32)
  out = (from_past + from_own) / total
  return out.transpose(0, 2, 4, 1, 3, 5).reshape(b, a, k, h * d)


def _in_anchor_groups(attention, q, k_own, v_own, context, seen_BxA):
  """`_block_attention` over groups of anchors, rematerialised, so that memory stays bounded."""
  b, a, k = q.shape[:3]
  pairs = k * context[0].shape[-1]
  size = max(1, _MAX_SCORES // pairs)
  if size >= a:
    return attention(q, k_own, v_own, context, seen_BxA)
  groups = -(-a // size)
  size = -(-a // groups)  # As even as can be.
  pad = lambda x: jnp.pad(x, ((0, 0), (0, groups * size - a)) + ((0, 0),) * (x.ndim - 2))
  split = lambda x: pad(x).reshape(b, groups, size, *x.shape[2:]).swapaxes(0, 1)
  step = jax.checkpoint(lambda args: attention(*args[:3], context, args[3]))
  out = jax.lax.map(step, (split(q), split(k_own), split(v_own), split(seen_BxA)))
  return out.swapaxes(0, 1).reshape(b, groups * size, k, -1)[:, :a]


class Attention(nn.Module):
  """Queries from the block; the same key and value projections for context and block."""

  config: DrafterConfig
  dtype: jnp.dtype

  def setup(self):
    c = self.config
    self.q_proj = blocks.linear(c.num_heads * c.head_dim, self.dtype, None)
    self.k_proj = blocks.linear(c.num_kv_heads * c.head_dim, self.dtype, None)
    self.v_proj = blocks.linear(c.num_kv_heads * c.head_dim, self.dtype, None)
    self.o_proj = blocks.linear(c.width, self.dtype, None)
    self.q_norm = blocks.rms_norm(c.norm_eps, None)
    self.k_norm = blocks.rms_norm(c.norm_eps, None)

  def keys_values(self, x_BxTxD, positions_BxT):
    c = self.config
    shape = (*x_BxTxD.shape[:-1], c.num_kv_heads, c.head_dim)
    keys = self.k_norm(self.k_proj(x_BxTxD).reshape(shape))
    values = self.v_proj(x_BxTxD).reshape(shape)
    return blocks.rotary(keys, positions_BxT, c.rope_theta), values

  def __call__(self, x_BxAxKxD, context, anchors_BxA, seen_BxA):
    c = self.config
    b, a, k, _ = x_BxAxKxD.shape
    x = x_BxAxKxD.reshape(b, a * k, -1)
    positions = anchors_BxA[:, :, None] + jnp.arange(k)[None, None, :]
    positions = positions.reshape(b, a * k)
    q = self.q_norm(self.q_proj(x).reshape(b, a * k, c.num_heads, c.head_dim))
    q = blocks.rotary(q, positions, c.rope_theta)
    keys, values = self.keys_values(x, positions)
    split = lambda y: y.reshape(b, a, k, *y.shape[2:])
    out = _in_anchor_groups(
        functools.partial(_block_attention, window=c.window), split(q), split(keys), split(values), context, seen_BxA
    )
    return self.o_proj(out)


class Layer(nn.Module):
  config: DrafterConfig
  dtype: jnp.dtype

  def setup(self):
    c = self.config
    self.attn_norm = blocks.rms_norm(c.norm_eps, None)
    self.attn = Attention(c, self.dtype)
    self.mlp_norm = blocks.rms_norm(c.norm_eps, None)
    self.mlp = blocks.GatedMLP(c.mlp_width, self.dtype)

  def __call__(self, x, context, anchors_BxA, seen_BxA):
    x = x + self.attn(self.attn_norm(x), context, anchors_BxA, seen_BxA)
    return x + self.mlp(self.mlp_norm(x))


class Drafter(nn.Module):
  """Drafts blocks. Training runs many anchors a row, decoding one; both take the same path.

  `feature_scale` [N * D] multiplies the features and is not trained. A DFlash drafter is the same without it: its `fc`
  has taken it in. `draft_ids` [V'] are the ascending token ids of the
  draft vocabulary, if it has one; see `draft_head`.
  """

  config: DrafterConfig
  dtype: jnp.dtype = jnp.float32

  def setup(self):
    c = self.config
    self.feature_scale = self.param('feature_scale', nn.initializers.ones, (len(c.target_layers) * c.width,))
    if c.vocab_size:
      self.param('draft_ids', lambda _: jnp.arange(c.vocab_size, dtype=jnp.int32))
    self.fc = blocks.linear(c.width, self.dtype, None)
    self.hidden_norm = blocks.rms_norm(c.norm_eps, None)
    self.layers = [Layer(c, self.dtype) for _ in range(c.num_layers)]
    self.norm = blocks.rms_norm(c.norm_eps, None)

  def _context(self, features_BxTxF, positions_BxT):
    context = self.hidden_norm(self.fc(features_BxTxF * self.feature_scale[None, None, :]))
    return [layer.attn.keys_values(context, positions_BxT) for layer in self.layers]

  def write_context(self, features_BxTxF, positions_BxT, cache: target_lib.Cache) -> target_lib.Cache:
    """Adds the features of verified positions to the context cache.

    Args:
      features_BxTxF: tapped target outputs side by side, `F = N * D`.
      positions_BxT: int32; positions outside the cache are dropped.
      cache: see `init_cache`.
    """
    context = self._context(features_BxTxF, positions_BxT)
    return tuple(
        target_lib.write_cache(layer, k, v, positions_BxT) for layer, (k, v) in zip(cache, context)
    )

  def draft(self, embeddings_BxAxKxD, anchors_BxA, cache: target_lib.Cache) -> jax.Array:
    """Final hidden states of blocks at their anchors, `[B, A, K, D]` float32. Slot k predicts anchor + k."""
    return self._draft(embeddings_BxAxKxD, anchors_BxA, anchors_BxA, cache)

  def _draft(self, x, anchors_BxA, seen_BxA, cache):
    for layer, context in zip(self.layers, cache):
      x = layer(x, context, anchors_BxA, seen_BxA)
    return self.norm(x)

  def __call__(self, features_BxTxF, embeddings_BxAxKxD, anchors_BxA) -> jax.Array:
    """Training forward: first the context, of whole rows or of the windows alone, then every block.

    Returns as `draft`.
    """
    b, t, width = features_BxTxF.shape
    shape, window = embeddings_BxAxKxD.shape, self.config.window
    if 0 < window * shape[1] < t:
      # Less is projected when each block becomes a row of its own, which holds what its window shows.
      starts = jnp.maximum(anchors_BxA - window, 0)
      positions = starts[:, :, None] + jnp.arange(window)[None, None, :]
      features = features_BxTxF[jnp.arange(b)[:, None, None], positions].reshape(-1, window, width)
      positions, anchors = positions.reshape(-1, window), anchors_BxA.reshape(-1, 1)
      embeddings, seen = embeddings_BxAxKxD.reshape(-1, 1, *shape[2:]), jnp.minimum(anchors, window)
    else:
      positions = jnp.tile(jnp.arange(t)[None, :], (b, 1))
      features, embeddings, anchors, seen = features_BxTxF, embeddings_BxAxKxD, anchors_BxA, anchors_BxA
    context = self._context(features, positions)
    cache = tuple((k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)) for k, v in context)
    return self._draft(embeddings, anchors, seen, cache).reshape(shape)
