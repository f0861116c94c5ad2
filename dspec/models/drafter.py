"""The block-diffusion drafter (DFlash, arXiv 2602.06036): one pass proposes a whole block.

The target's tapped hidden states, fused once, become keys and values of every layer. A block is the anchor (a known
token) followed by masks; its slots see one another and the context strictly below the anchor. Embedding and
output head are the target's own, frozen; this module maps embeddings to final hidden states.

The head costs more than the rest of a small drafter. A draft vocabulary (arXiv 2502.14856) keeps only the rows of
frequent tokens: other tokens are never drafted, so they always come from the target, and what it says is not touched.

Drafters that others have trained (see `dspec.checkpoints.dflash`) may have sliding or causal layers, slots that predict
one token further, and the parts of DFlash 2 (https://inco.ai/blog/dflash2/): convolutions over the slots of a block
around every sublayer, and a selector that lets a slot's token depend on the one before it.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dspec import sharding
from dspec.models import blocks
from dspec.models import masks
from dspec.models import splash
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
  embedding_scale: float = 1.0  # Of the target's embeddings, as the drafter sees them.
  # Only imported drafters have what follows.
  from_anchor: bool = False  # Slot k, from 0, predicts anchor + k + 1, not anchor + k: a block has one slot less.
  layer_windows: tuple[int, ...] = ()  # Of each layer: a slot sees positions nearer than this; 0: all. (): all layers.
  causal_layers: tuple[int, ...] = ()  # Layers whose slots do not see the slots behind them.
  logit_scale: float = 1.0
  logit_softcap: float = 0.0  # 0: none.
  conv_taps: int = 0  # Of DFlash 2's convolutions; 0: none.
  conv_group: int = 0  # Channels that share a tap's dynamic part.
  selector_rank: int = 0  # Of DFlash 2's selector; 0: none.
  selector_candidates: int = 0  # Most probable tokens of a slot that it chooses from.

  @property
  def num_slots(self) -> int:
    """Positions that a block holds, the anchor's among them."""
    return self.block_size - self.from_anchor

  @property
  def is_trainable(self) -> bool:
    """Whether the losses are those of what is decoded: plain logits of independent slots."""
    plain = self.logit_scale == 1 and not self.logit_softcap
    return plain and not self.conv_taps and not self.selector_rank


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
  """A drafter with the widths, heads, rotary base and embeddings of its target."""
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
      embedding_scale=target.embedding_scale,
  )


def block_tokens(anchor_tokens_BxA: jax.Array, config: DrafterConfig) -> jax.Array:
  """`[B, A, num_slots]`: the anchor's token, then masks."""
  masks_shape = (*anchor_tokens_BxA.shape, config.num_slots - 1)
  return jnp.concatenate(
      [anchor_tokens_BxA[..., None], jnp.full(masks_shape, config.mask_token_id, jnp.int32)], axis=-1
  )


def embed(config: DrafterConfig, target_params: Any, tokens: jax.Array) -> jax.Array:
  """What a block's tokens enter as: the target's embeddings, scaled as the drafter wants them, float32 `[..., D]`."""
  return target_lib.embed(target_params, tokens) * config.embedding_scale


def draft_slots(hidden_BxAxKxD: jax.Array, config: DrafterConfig) -> jax.Array:
  """Hidden states of the slots that predict anchor + 1, anchor + 2, ..., `[B, A, K-1, D]`."""
  return hidden_BxAxKxD if config.from_anchor else hidden_BxAxKxD[:, :, 1:]


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
  zeros = lambda *shape: sharding.constrain(jnp.zeros((batch, kv, *shape)), sharding.CACHE)
  return tuple((zeros(d, length), zeros(length, d)) for _ in range(config.num_layers))


def adjust_logits(
    params: Any, config: DrafterConfig, hidden_BxSxD: jax.Array, logits_BxSxV: jax.Array, anchors_B: jax.Array,
    dtype: jnp.dtype,
) -> jax.Array:
  """What slots choose by: the head's logits, scaled, capped, and with a selector's scores.

  Args:
    params: the drafter's.
    config: its shape.
    hidden_BxSxD: see `draft_slots`.
    logits_BxSxV: of the head, float32.
    anchors_B: int32 tokens.
    dtype: of the matrix products.
  """
  if config.logit_scale != 1:
    logits_BxSxV = logits_BxSxV * config.logit_scale
  if config.logit_softcap:
    logits_BxSxV = config.logit_softcap * jnp.tanh(logits_BxSxV / config.logit_softcap)
  if config.selector_rank:
    logits_BxSxV = _select(
        params['selector'], hidden_BxSxD, logits_BxSxV, anchors_B, config.selector_candidates, dtype)
  return logits_BxSxV


def _select(selector, hidden_BxSxD, logits_BxSxV, anchors_B, num_candidates, dtype):
  """Scores of each slot's candidates behind the best token of the slot before; -inf for all other tokens.

  With u the logits, c a slot's candidates (its most probable tokens) and x_0 the anchor (DFlash 2):

      score_k(v) = u_k(v) + sum_r predecessor[x_{k-1}, r] * (projection h_k)_r * successor[v, r]    for v in c_k
      x_k = argmax_v score_k(v)

  Where drafts are drawn, or form a tree, the scores stay those behind the best path.
  """
  unary_BxSxC, candidates_BxSxC = jax.lax.top_k(logits_BxSxV, num_candidates)
  context_BxSxR = blocks.matmul(hidden_BxSxD, selector['projection']['kernel'], dtype)
  row = lambda name, tokens: jnp.asarray(selector[name])[tokens].astype(jnp.float32)

  def choose(before_B, slot):
    unary_BxC, candidates_BxC, context_BxR = slot
    pairs_BxC = jnp.einsum('br,bcr->bc', row('predecessor', before_B) * context_BxR, row('successor', candidates_BxC))
    scores_BxC = unary_BxC + pairs_BxC
    best_Bx1 = jnp.argmax(scores_BxC, axis=-1)[:, None]
    return jnp.take_along_axis(candidates_BxC, best_Bx1, 1)[:, 0], scores_BxC

  slots = jax.tree.map(lambda x: x.swapaxes(0, 1), (unary_BxSxC, candidates_BxSxC, context_BxSxR))
  scores_BxSxC = jax.lax.scan(choose, anchors_B, slots)[1].swapaxes(0, 1)
  b, s, _ = candidates_BxSxC.shape
  rows, columns = jnp.arange(b)[:, None, None], jnp.arange(s)[None, :, None]
  return jnp.full_like(logits_BxSxV, -jnp.inf).at[rows, columns, candidates_BxSxC].set(scores_BxSxC)


class Places(NamedTuple):
  """Where the blocks of a batch stand, int32.

  Attributes:
    anchors_BxA: positions of the anchors, each in its own document.
    seen_BxA: as `anchors_BxA` of `masks.context`: blocks see the context's slots below it.
    starts_BxA: see `masks.context`; None where a row of context is one document.
    starts_BxT: of every slot of the context the first one of its document, or None as before.
  """

  anchors_BxA: jax.Array
  seen_BxA: jax.Array
  starts_BxA: jax.Array | None = None
  starts_BxT: jax.Array | None = None


def block_attention(q, k_own, v_own, context, places, *, window=0, layer_window=0, causal=False):
  """Attention of blocks over [context ; own block], the two parts merged by their common maximum.

  Args:
    q: [B, A, K, H, d].
    k_own: [B, A, K, Hkv, d].
    v_own: [B, A, K, Hkv, d].
    context: (keys [B, Hkv, d, T], values [B, Hkv, T, d]).
    places: `Places`; `anchors_BxA` and `starts_BxT` are not read.
    window: see `masks.context`.
    layer_window: see `masks.nearby` and `masks.own_block`.
    causal: see `masks.own_block`.

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
  seen = masks.context(places.seen_BxA, keys.shape[-1], window, places.starts_BxA)[:, :, None, :]
  if layer_window:
    seen &= masks.nearby(places.seen_BxA, keys.shape[-1], k, layer_window)
  past = jnp.where(seen[:, None, :, None], past, -jnp.inf)
  own = jnp.einsum('bhagkd,baphd->bhagkp', q, k_own, preferred_element_type=jnp.float32)
  if layer_window or causal:
    own = jnp.where(masks.own_block(k, layer_window, causal)[None, None, None, None], own, -jnp.inf)
  # A slot always sees itself, so the maximum is finite even without context.
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


def _in_anchor_groups(attention, q, k_own, v_own, context, places):
  """`block_attention` over groups of anchors, rematerialised, so that memory stays bounded."""
  b, a, k = q.shape[:3]
  pairs = k * context[0].shape[-1]
  size = max(1, _MAX_SCORES // pairs)
  if size >= a:
    return attention(q, k_own, v_own, context, places)
  groups = -(-a // size)
  size = -(-a // groups)  # As even as can be.
  pad = lambda x: jnp.pad(x, ((0, 0), (0, groups * size - a)) + ((0, 0),) * (x.ndim - 2))
  split = lambda x: pad(x).reshape(b, groups, size, *x.shape[2:]).swapaxes(0, 1)
  step = jax.checkpoint(lambda args: attention(*args[:3], context, args[3]))
  places = places._replace(starts_BxT=None)  # Of no anchor.
  out = jax.lax.map(step, jax.tree.map(split, (q, k_own, v_own, places)))
  return out.swapaxes(0, 1).reshape(b, groups * size, k, -1)[:, :a]


class Attention(nn.Module):
  """Queries from the block; the same key and value projections for context and block."""

  config: DrafterConfig
  dtype: jnp.dtype
  window: int  # Of this layer.
  causal: bool
  attention: str

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

  def __call__(self, x_BxAxKxD, context, places):
    c = self.config
    b, a, k, _ = x_BxAxKxD.shape
    x = x_BxAxKxD.reshape(b, a * k, -1)
    positions = places.anchors_BxA[:, :, None] + jnp.arange(k)[None, None, :]
    positions = positions.reshape(b, a * k)
    q = self.q_norm(self.q_proj(x).reshape(b, a * k, c.num_heads, c.head_dim))
    q = blocks.rotary(q, positions, c.rope_theta)
    keys, values = self.keys_values(x, positions)
    split = lambda y: y.reshape(b, a, k, *y.shape[2:])
    options = {'window': c.window, 'layer_window': self.window, 'causal': self.causal}
    arguments = split(q), split(keys), split(values), context
    if self.attention == 'splash' and a > 1:  # A block that has its row to itself leaves nothing to skip.
      arguments = jax.tree.map(lambda x: x.astype(self.dtype), arguments)
      return self.o_proj(splash.block_attention(*arguments, places, **options))
    return self.o_proj(_in_anchor_groups(functools.partial(block_attention, **options), *arguments, places))


class SlotConvolutions(nn.Module):
  """Causal convolutions over the slots of a block, before and after a sublayer (DFlash 2).

  Channel c of group g, with taps o = 0, 1, ... back from slot k, nothing before slot 0, and dynamic parts that are a
  projection of the sublayer's input at slot k:

      y_k[c] = sum_o (base[o, c] + dynamic_k[o, g]) * x_{k-o}[c]
  """

  config: DrafterConfig
  dtype: jnp.dtype

  def setup(self):
    c = self.config
    one = lambda _, shape: jnp.zeros(shape).at[:, 0].set(1.0)  # The slot itself: no convolution.
    self.base = self.param('base', one, (2, c.conv_taps, c.width))
    self.projection = blocks.linear(2 * c.conv_taps * (c.width // c.conv_group), self.dtype, None)

  def before(self, x_BxAxKxD):
    """The sublayer's input, and what `after` wants."""
    c = self.config
    dynamic = self.projection(x_BxAxKxD)
    dynamic = dynamic.reshape(*x_BxAxKxD.shape[:-1], 2, c.conv_taps, c.width // c.conv_group)
    return self._convolve(x_BxAxKxD, self.base[0], dynamic[..., 0, :, :]), dynamic[..., 1, :, :]

  def after(self, x_BxAxKxD, dynamic):
    """The sublayer's output, convolved."""
    return self._convolve(x_BxAxKxD, self.base[1], dynamic)

  def _convolve(self, x, base_OxD, dynamic_BxAxKxOxG):
    k, base_OxD = x.shape[2], base_OxD.astype(jnp.float32)
    out = 0.0
    for tap in range(self.config.conv_taps):
      back = jnp.pad(x, ((0, 0), (0, 0), (tap, 0), (0, 0)))[:, :, :k]
      dynamic = jnp.repeat(dynamic_BxAxKxOxG[..., tap, :], self.config.conv_group, axis=-1)
      out += (base_OxD[tap][None, None, None] + dynamic) * back
    return out


class Layer(nn.Module):
  config: DrafterConfig
  dtype: jnp.dtype
  index: int
  attention: str

  def setup(self):
    c = self.config
    window = c.layer_windows[self.index] if c.layer_windows else 0
    self.attn_norm = blocks.rms_norm(c.norm_eps, None)
    self.attn = Attention(c, self.dtype, window, self.index in c.causal_layers, self.attention)
    self.mlp_norm = blocks.rms_norm(c.norm_eps, None)
    self.mlp = blocks.GatedMLP(c.mlp_width, self.dtype)
    if c.conv_taps:
      self.attn_conv, self.mlp_conv = SlotConvolutions(c, self.dtype), SlotConvolutions(c, self.dtype)

  def __call__(self, x, context, places):
    attn = lambda y: self.attn(y, context, places)
    if not self.config.conv_taps:
      x = x + attn(self.attn_norm(x))
      return x + self.mlp(self.mlp_norm(x))
    h, dynamic = self.attn_conv.before(self.attn_norm(x))
    x = x + self.attn_conv.after(attn(h), dynamic)
    h, dynamic = self.mlp_conv.before(self.mlp_norm(x))
    return x + self.mlp_conv.after(self.mlp(h), dynamic)


class Drafter(nn.Module):
  """Drafts blocks. Training runs many anchors a row, decoding one; both take the same path.

  `feature_scale` [N * D] multiplies the features and is not trained. A DFlash drafter is the same without it: its `fc`
  has taken it in. `draft_ids` [V'] are the ascending token ids of the
  draft vocabulary, if it has one; see `draft_head`. The parameters may also hold a `selector`; see `adjust_logits`.
  With `remat` 'layers' a layer keeps its inputs for the backward pass, which computes the rest once more; with 'none'
  it keeps everything. `attention` is 'xla', for every device, or 'splash', for TPUs, of the training forward; decoding
  takes 'xla'.
  """

  config: DrafterConfig
  dtype: jnp.dtype = jnp.float32
  remat: str = 'none'
  attention: str = 'xla'

  def setup(self):
    c = self.config
    self.feature_scale = self.param('feature_scale', nn.initializers.ones, (len(c.target_layers) * c.width,))
    if c.vocab_size:
      self.param('draft_ids', lambda _: jnp.arange(c.vocab_size, dtype=jnp.int32))
    self.fc = blocks.linear(c.width, self.dtype, None)
    self.hidden_norm = blocks.rms_norm(c.norm_eps, None)
    layer = {'none': Layer, 'layers': nn.remat(Layer)}[self.remat]
    self.layers = [layer(c, self.dtype, i, self.attention) for i in range(c.num_layers)]
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
    """Final hidden states of blocks at their anchors, `[B, A, num_slots, D]` float32; see `draft_slots`."""
    return self._draft(embeddings_BxAxKxD, Places(anchors_BxA, anchors_BxA), cache)

  def _draft(self, x, places, cache):
    for layer, context in zip(self.layers, cache):
      x = layer(x, context, places)
    return self.norm(x)

  def __call__(self, features_BxTxF, embeddings_BxAxKxD, anchors_BxA, starts_BxT=None) -> jax.Array:
    """Training forward: first the context, of whole rows or of the windows alone, then every block.

    Args:
      features_BxTxF: see `write_context`.
      embeddings_BxAxKxD: see `embed`.
      anchors_BxA: int32, slots of the rows.
      starts_BxT: int32, of rows that hold several documents: the first slot of each slot's own. Positions count
        from there, and no block sees what lies below. None: rows are documents.

    Returns as `draft`.
    """
    b, t, width = features_BxTxF.shape
    shape, window = embeddings_BxAxKxD.shape, self.config.window
    starts_BxA, anchors = None, anchors_BxA
    if starts_BxT is not None:
      starts_BxA = jnp.take_along_axis(starts_BxT, anchors_BxA, 1)
      anchors = anchors_BxA - starts_BxA
    if 0 < window * shape[1] < t:
      # Less is projected when each block becomes a row of its own, which holds what its window shows.
      seen = jnp.minimum(anchors, window)
      from_anchor = jnp.arange(window)[None, None, :] - seen[:, :, None]
      slots = jnp.minimum(anchors_BxA[:, :, None] + from_anchor, t - 1)
      features = jax.vmap(lambda row, at: row[at])(features_BxTxF, slots).reshape(-1, window, width)
      positions = (anchors[:, :, None] + from_anchor).reshape(-1, window)
      embeddings = embeddings_BxAxKxD.reshape(-1, 1, *shape[2:])
      places = Places(anchors.reshape(-1, 1), seen.reshape(-1, 1))
    else:
      positions = jnp.tile(jnp.arange(t)[None, :], (b, 1))
      positions = positions if starts_BxT is None else positions - starts_BxT
      features, embeddings = features_BxTxF, embeddings_BxAxKxD
      places = Places(anchors, anchors_BxA, starts_BxA, starts_BxT)
    context = self._context(features, positions)
    cache = tuple((k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)) for k, v in context)
    return self._draft(embeddings, places, cache).reshape(shape)
