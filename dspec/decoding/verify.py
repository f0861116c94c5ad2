"""How many drafted tokens the target accepts, and which token follows them. Exactness lives here.

A round has S = K-1 drafts. Row i of what the target says (i = 0..S) is about the token after the anchor and the first
i drafts. All rules keep a prefix of the drafts and add one token that is the target's own, the bonus.
"""

import jax
import jax.numpy as jnp

from dspec.decoding import sampling


def match(drafts_BxS: jax.Array, target_BxK: jax.Array) -> jax.Array:
  """Accepts a draft while it equals the token that the target takes itself.

  At temperature 0 `target_BxK` are the target's most probable tokens: greedy verification. Above it they are its
  samples, drawn whatever the drafts are: sample-and-match (arXiv 2602.06036), exact for every drafter, since what is
  put out are the samples alone. The tokens that a round gains are `target[:, :accepted + 1]`: the accepted drafts
  equal them, and the last is the bonus.

  Args:
    drafts_BxS: int32.
    target_BxK: int32, K = S + 1.

  Returns:
    Number of accepted drafts, int32 [B] in 0..S.
  """
  right = drafts_BxS == target_BxK[:, :-1]
  return jnp.cumprod(right, axis=-1).sum(-1).astype(jnp.int32)


def rejection(
    drafts_BxS: jax.Array,
    draft_probs_BxSxV: jax.Array,
    target_probs_BxKxV: jax.Array,
    accept_BxK: jax.Array,
    bonus_BxK: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Accepts a draft x with probability min(1, p(x) / q(x)); the bonus makes up for what is missing.

  The rule of arXiv 2211.17192 and 2302.01318, for drafts that were drawn from q, each slot on its own. Behind the
  accepted ones the bonus is drawn from norm(max(0, p - q)), or from p behind the whole block. Its acceptance rate is
  the largest that any rule can have, sum_v min(p, q); but only for one slot.

  Args:
    drafts_BxS: int32, slot k drawn from `draft_probs[:, k - 1]`.
    draft_probs_BxSxV: q, float32, rows that sum to one.
    target_probs_BxKxV: p, float32, rows that sum to one, after temperature and truncation.
    accept_BxK: float32 in [0, 1), independent of the drafts; the last column is not used.
    bonus_BxK: float32 in [0, 1), independent of all others; that of the bonus token's place is used.

  Returns:
    Number of accepted drafts, int32 [B] in 0..S, and the bonus tokens, int32 [B].
  """
  s = drafts_BxS.shape[1]
  pick = lambda probs: jnp.take_along_axis(probs, drafts_BxS[..., None], -1)[..., 0]
  p, q = pick(target_probs_BxKxV[:, :s]), pick(draft_probs_BxSxV)
  accepted_B = jnp.cumprod(accept_BxK[:, :s] * q < p, axis=-1).sum(-1).astype(jnp.int32)

  rows = jnp.arange(drafts_BxS.shape[0])
  target_BxV = target_probs_BxKxV[rows, accepted_B]
  draft_BxV = draft_probs_BxSxV[rows, jnp.minimum(accepted_B, s - 1)]
  residual = jnp.maximum(target_BxV - draft_BxV, 0.0)
  # Nothing is left where p = q; there a draft is not refused, but for rounding.
  use = ((accepted_B < s) & (residual.sum(-1) > 0))[:, None]
  return accepted_B, sampling.categorical(jnp.where(use, residual, target_BxV), bonus_BxK[rows, accepted_B])
