"""Which key a query may see."""

import jax
import jax.numpy as jnp


def causal(
    positions_BxT: jax.Array, num_keys: int, window: int = 0, starts_BxT: jax.Array | None = None
) -> jax.Array:
  """Keys at or before the query's own position, `[B, T, num_keys]` bool.

  With a window, the last `window` of them only, the query's own among them; 0 is no window. Key slot and position are
  the same number, in the cache too. Slots beyond a row's end hold padding or rejected drafts; they lie in the future
  of every query until they are overwritten. Where a row holds several documents, `starts` is the first slot of the
  query's own, below which it sees nothing.

      position   keys 0 1 2 3 4   documents start at 0 and 2
             1        x x . . .                    x x . . .
             2        x x x . .                    . . x . .
             3        x x x x .                    . . x x .
  """
  keys, positions = jnp.arange(num_keys)[None, None, :], positions_BxT[:, :, None]
  seen = keys <= positions
  if window:
    seen &= keys > positions - window
  return seen if starts_BxT is None else seen & (keys >= starts_BxT[:, :, None])


def context(
    anchors_BxA: jax.Array, num_keys: int, window: int = 0, starts_BxA: jax.Array | None = None
) -> jax.Array:
  """Context that a block may see: positions strictly below its anchor, `[B, A, num_keys]` bool.

  With a window, the last `window` of them only; 0 is no window. Where a row holds several documents, `starts` is the
  first slot of the anchor's own, below which its block sees nothing.

  The target's features of the anchor itself are not known when its block is drafted. All slots of a block see
  the same context, the whole of their own block (no mask is needed there), and no other block:

      block of       context 0 1 2 3 4 5   block(2)  block(4)
      anchor 2 slot 0        x x . . . .     x x x     . . .
               slot 1        x x . . . .     x x x     . . .
      anchor 4 slot 0        x x x x . .     . . .     x x x
  """
  keys, anchors = jnp.arange(num_keys)[None, None, :], anchors_BxA[:, :, None]
  seen = keys < anchors
  if window:
    seen &= keys >= anchors - window
  return seen if starts_BxA is None else seen & (keys >= starts_BxA[:, :, None])


def nearby(anchors_BxA: jax.Array, num_keys: int, num_slots: int, window: int) -> jax.Array:
  """Context nearer to a slot than `window` positions, `[B, A, num_slots, num_keys]` bool: a layer's sliding window.

  Unlike the window of `context` it moves with the slot. Window 3:

      block of       context 0 1 2 3
      anchor 4 slot 0        . . x x
               slot 1        . . . x
               slot 2        . . . .
  """
  positions = anchors_BxA[:, :, None] + jnp.arange(num_slots)[None, None, :]
  return jnp.arange(num_keys)[None, None, None, :] > positions[..., None] - window


def own_block(num_slots: int, window: int = 0, causal: bool = False) -> jax.Array:
  """Slots of its own block that a slot may see, `[num_slots, num_slots]` bool: all, but for a window or causality.

      window 2       slot 0 1 2 3   causal         slot 0 1 2 3
             slot 0       x x . .          slot 0       x . . .
             slot 1       x x x .          slot 1       x x . .
             slot 2       . x x x          slot 2       x x x .
  """
  ahead = jnp.arange(num_slots)[None, :] - jnp.arange(num_slots)[:, None]
  seen = jnp.abs(ahead) < (window or num_slots)
  return seen & (ahead <= 0) if causal else seen


def valid_labels(
    anchors_BxA: jax.Array, is_anchor_BxA: jax.Array, supervised_BxT: jax.Array, block_size: int,
    starts_BxT: jax.Array | None = None,
) -> jax.Array:
  """Draft slots whose label counts, `[B, A, block_size - 1]` bool, always a prefix of the block.

  Slot k is valid when the tokens at anchor+1 .. anchor+k are all inside the row, of the anchor's document where
  `starts` has the first slot of each token's, and supervised; nothing after a turn's end counts.
  """
  steps = jnp.arange(1, block_size)
  positions = anchors_BxA[:, :, None] + steps[None, None, :]
  length = supervised_BxT.shape[1]
  inside = positions < length
  rows = jnp.arange(supervised_BxT.shape[0])[:, None, None]
  positions = jnp.minimum(positions, length - 1)
  supervised = supervised_BxT[rows, positions] & inside
  if starts_BxT is not None:
    supervised &= starts_BxT[rows, positions] == jnp.take_along_axis(starts_BxT, anchors_BxA, 1)[:, :, None]
  supervised &= is_anchor_BxA[:, :, None]
  return jnp.cumprod(supervised, axis=-1).astype(bool)
