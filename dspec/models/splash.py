"""Attention of blocks over [context ; own block] on TPUs, by JAX's splash kernels (arXiv 2205.14135, in Pallas).

A row is one call: its queries are the slots of all blocks, its keys those of the context and behind them those of all
blocks. Scores are never in memory, forward or backward, and no tile of them is computed that no block sees.

Anchors are data, so the mask is not known when the kernel is compiled, and as an array it would have 96 MiB a row at
the paper's size (512 blocks of 16 slots, 4096 tokens), to be read by every head. Instead each query carries its own
bounds in one whole number, from which the kernel makes its part of the mask; documents are its segments; and which
tiles are empty is computed from the anchors, outside.
"""

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dspec import sharding
from dspec.errors import UserError

_LANES = 128  # Sizes of tiles are multiples of these.
_TILE = 512  # Queries, and keys, of the largest tile.


@dataclasses.dataclass(frozen=True)
class _Mask:
  """Which keys a query sees: the kernel's `mask_function`, equal and hashable by what is static.

  A query is `(anchor << slot_bits | slot) << block_bits | block`.

  Attributes:
    num_slots: K, of a block.
    first_own: the key of slot 0 of block 0.
    window: see `masks.context`.
    layer_window: see `masks.nearby` and `masks.own_block`.
    causal: see `masks.own_block`.
    block_bits: for the number of the block.
    slot_bits: for the slot; 0 where a block's slots see the same.
  """

  num_slots: int
  first_own: int
  window: int
  layer_window: int
  causal: bool
  block_bits: int
  slot_bits: int

  def encode(self, anchors: jax.Array, slots: jax.Array, blocks: jax.Array) -> jax.Array:
    if self.slot_bits:
      anchors = anchors << self.slot_bits | slots
    return anchors << self.block_bits | blocks

  def bounds(self, queries: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The first key, and that behind the last, in the context and in the own block."""
    anchors = queries >> (self.block_bits + self.slot_bits)
    first_own = self.first_own + (queries & (1 << self.block_bits) - 1) * self.num_slots
    first, end_own = anchors - self.window if self.window else None, first_own + self.num_slots
    if self.slot_bits:
      slots = (queries >> self.block_bits) & (1 << self.slot_bits) - 1
      own = first_own + slots
      if self.causal:
        end_own = own + 1
      if self.layer_window:
        nearby = anchors + slots - (self.layer_window - 1)
        first = nearby if first is None else jnp.maximum(first, nearby)
        first_own = jnp.maximum(first_own, own - (self.layer_window - 1))
        end_own = jnp.minimum(end_own, own + self.layer_window)
    return (first, anchors), (first_own, end_own)

  def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
    (first, end), (first_own, end_own) = self.bounds(queries)
    seen = keys < end
    if first is not None:
      seen &= keys >= first
    return seen | ((keys >= first_own) & (keys < end_own))


def block_attention(
    q: jax.Array, k_own: jax.Array, v_own: jax.Array, context: tuple[jax.Array, jax.Array], places: Any, *,
    window: int = 0, layer_window: int = 0, causal: bool = False, interpret: bool = False,
) -> jax.Array:
  """As `drafter.block_attention`, in the dtype of `q`, `k_own`, `v_own` and `context`, which are all of one.

  On the mesh of `jax.set_mesh` each device takes its rows and its heads, where their numbers divide; the compiler
  cannot split a kernel by itself.

  Args:
    q: see `drafter.block_attention`, as what follows.
    k_own: keys of the blocks.
    v_own: values of the blocks.
    context: keys and values of the context.
    places: `drafter.Places`.
    window: of the context.
    layer_window: of the layer.
    causal: whether slots see only those before them.
    interpret: whether the kernel is interpreted, on any device, to test it.

  Returns:
    [B, A, K, H*d] float32.

  Raises:
    UserError: for rows so long, of so many blocks, that the bounds of a query do not fit a whole number of 32 bits.
  """
  k, h, d = q.shape[2:]
  options = {'window': window, 'layer_window': layer_window, 'causal': causal, 'interpret': interpret}
  # As the kernel wants it: [B, heads, A * K, d].
  heads_first = lambda x: x.transpose(0, 3, 1, 2, 4).reshape(x.shape[0], x.shape[3], -1, x.shape[4])
  keys = context[0].swapaxes(2, 3)
  attend = lambda *args: jax.lax.map(lambda row: _attend(*row, num_slots=k, **options), args)
  arguments = (
      heads_first(q * d**-0.5), keys, context[1], heads_first(k_own), heads_first(v_own), places.seen_BxA,
      places.starts_BxA, places.starts_BxT)
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size > 1:
    rows = sharding.dividing(mesh, sharding.BATCH, q.shape)[0]
    heads = 'tensor' if h % mesh.shape['tensor'] == keys.shape[1] % mesh.shape['tensor'] == 0 else None
    specs = jax.tree.map(lambda x: PartitionSpec(rows, heads if x.ndim == 4 else None), arguments)
    attend = jax.shard_map(
        attend, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(rows, heads), check_vma=False)
  out = attend(*arguments).reshape(q.shape[0], h, -1, k, d)
  return out.transpose(0, 2, 3, 1, 4).reshape(*q.shape[:3], h * d).astype(jnp.float32)


def _attend(
    q_HxQxd, keys_HxTxd, values_HxTxd, k_own_HxQxd, v_own_HxQxd, seen_A, starts_A, starts_T, *, num_slots, window,
    layer_window, causal, interpret
):
  """`[H, Q, d]` of one row, for Q = A * K queries; keys have fewer heads where queries share them."""
  num_queries, length = q_HxQxd.shape[1], keys_HxTxd.shape[1]
  tile = min(_TILE, max(num_queries, length) + -max(num_queries, length) % _LANES)
  to_tiles = lambda x, axis: jnp.pad(x, [(0, -n % tile if i == axis else 0) for i, n in enumerate(x.shape)])
  # What is added goes on as blocks of padding, so that no query is without a key.
  queries = jnp.arange(num_queries + -num_queries % tile, dtype=jnp.int32)
  block, slot = queries // num_slots, queries % num_slots
  of_query = lambda x: to_tiles(jnp.repeat(x, num_slots), 0)
  per_slot = causal or layer_window
  mask = _Mask(
      num_slots, length + -length % tile, window, layer_window, causal,
      block_bits=int(queries.size // num_slots).bit_length(), slot_bits=num_slots.bit_length() if per_slot else 0)
  if length.bit_length() + mask.slot_bits + mask.block_bits > 31:
    raise UserError(
        f'--config.train.attention=splash: {num_queries // num_slots} blocks in a row of {length} tokens are too many; '
        'lower --config.train.anchors or --config.data.row_tokens, or take xla')
  queries = mask.encode(of_query(seen_A), slot, block)
  join = lambda past, own: jnp.concatenate([to_tiles(past, past.ndim - 2), to_tiles(own, own.ndim - 2)], -2)
  segments = None
  if starts_A is not None:
    documents = of_query(starts_A)
    segments = splash_attention_kernel.SegmentIds(documents, jnp.concatenate([to_tiles(starts_T, 0), documents]))
  keys, values = join(keys_HxTxd, k_own_HxQxd), join(values_HxTxd, v_own_HxQxd)
  needed = _needed(mask, queries, None if segments is None else documents, keys.shape[1], tile)
  info = lambda next_tile: splash_attention_mask_info.MaskInfo(
      data_next=next_tile[None], mask_next=None, block_mask=needed.astype(jnp.int32)[None], partial_mask_blocks=None,
      q_sequence=queries)
  by_query, by_key = info(_next(needed)), info(_next(needed.T).T)
  kernel = splash_attention_kernel.SplashAttentionKernel(
      by_query, by_query, by_key, is_mqa=False, save_residuals=False, attn_logits_soft_cap=None,
      residual_checkpoint_name=None, mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE, mask_function=mask,
      block_sizes=splash_attention_kernel.BlockSizes(*[tile] * 8), interpret=interpret)
  return kernel(to_tiles(q_HxQxd, 1), keys, values, segments)[:, :num_queries]


def _needed(mask: _Mask, queries_Q, documents_Q, num_keys: int, tile: int) -> jax.Array:
  """Whether any query of a tile sees any key of a tile, `[Q / tile, num_keys / tile]` bool."""
  edges = jnp.arange(0, num_keys, tile)[None, :]
  (first, end), own = mask.bounds(queries_Q)
  first = jnp.zeros_like(queries_Q) if first is None else first
  first = first if documents_Q is None else jnp.maximum(first, documents_Q)
  needed = False
  for first, end in ((first, end), own):
    first, end = jnp.maximum(edges, first[:, None]), jnp.minimum(edges + tile, end[:, None])
    needed |= first < end
  return needed.reshape(-1, tile, edges.size).any(1)


def _next(needed_IxJ: jax.Array) -> jax.Array:
  """The column of the next tile that is needed, this one or a later one, row by row: what to fetch meanwhile."""
  flat = jnp.where(needed_IxJ.ravel(), jnp.arange(needed_IxJ.size), needed_IxJ.size - 1)
  return (jax.lax.cummin(flat, reverse=True) % needed_IxJ.shape[1]).reshape(needed_IxJ.shape)
