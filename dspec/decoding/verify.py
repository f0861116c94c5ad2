"""How many drafted tokens the target accepts. Exactness lives here."""

import jax
import jax.numpy as jnp


def greedy(drafts_BxS: jax.Array, target_BxK: jax.Array) -> jax.Array:
  """Number of accepted drafts of each row, int32 [B] in 0..S.

  `target_BxK[:, i]` is the target's most probable token after the anchor and the first i drafts, so draft slot k
  (1-based) is right when it equals `target[:, k - 1]`; acceptance stops at the first wrong one. The tokens
  gained by a round are `target[:, :accepted + 1]`: accepted drafts equal them, and the last is the bonus.
  """
  right = drafts_BxS == target_BxK[:, :-1]
  return jnp.cumprod(right, axis=-1).sum(-1).astype(jnp.int32)
