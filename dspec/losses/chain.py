"""Expected accepted length, as a loss (arXiv 2606.11552, chain term).

If slot j agrees with the target with probability p_j, slots 1..k are all accepted with probability
rho_k = prod_{j<=k} p_j, and sum_k rho_k tokens are accepted on average.
"""

import flax.struct
import jax
import jax.numpy as jnp

from dspec.errors import UserError
from dspec.losses.scores import SlotScores, mean_of, score_slots, valid_prefix

# Block size of the paper's experiments, at which its alpha_c = 40 is quoted.
PAPER_BLOCK_SIZE = 16


@flax.struct.dataclass
class ChainAux:
  """What the chain term saw.

  Attributes:
    expected_accepted: float32 [], mean over blocks of sum_k rho_k, in draft tokens, 0..K-1; the
      bonus token is not in it.
    num_blocks: int32 [], blocks with a valid slot.
  """

  expected_accepted: jax.Array
  num_blocks: jax.Array


def chain_per_token(chain: float, block_size: int = PAPER_BLOCK_SIZE) -> float:
  """Loss units that alpha_c = `chain` gives one more expected accepted token: chain / (K-1).

  R_chain is a share of K-1, so the same alpha_c pulls less on each token of a larger block. The
  paper's 40 at K=16 is 2.667 a token; that strength is alpha_c = 2.667 * 7 = 18.7 at K=8.

  Raises:
    UserError: if block_size is below 2, which leaves no draft slot.
  """
  if block_size < 2:
    raise UserError(f'block_size is {block_size}: give at least 2, the anchor and one draft slot')
  return chain / (block_size - 1)


def chain_weights(log_probs: jax.Array, valid: jax.Array) -> jax.Array:
  """S_k = (1/(K-1)) * sum_{j>=k} rho_j, detached: how much slot k's log-probability moves R_chain.

  d R / d log p_k = S_k within a block, so chain has the gradient of cross-entropy with the fixed
  weights S_k. D-PACE (arXiv 2605.18810) trains with these weights, made from smoothed s_j in place
  of p_j and without the 1/(K-1); chain is D-PACE at smoothing 0, scaled.

  Args:
    log_probs: float32 [..., S].
    valid: bool [..., S]; what follows a block's first invalid slot does not count.

  Returns:
    float32 [..., S], 0 at slots that do not count.
  """
  rho = _survival(jax.lax.stop_gradient(log_probs), valid_prefix(valid))
  return jax.lax.cumsum(rho, axis=rho.ndim - 1, reverse=True) / rho.shape[-1]


def chain_from_scores(scores: SlotScores, valid: jax.Array) -> tuple[jax.Array, ChainAux]:
  """-R_chain of arXiv 2606.11552: R = mean over blocks of (1/(K-1)) * sum_k rho_k, in [0, 1].

  The paper rewards R (its L holds - alpha_c * R_chain). A loss is to be minimised, so the sign is
  here: L = ... + alpha_c * chain_loss. Neither decayed nor detached. An invalid slot counts as
  p = 1 in the products and is left out of the sum; the divisor stays K-1 = S for short blocks too.

  Args:
    scores: SlotScores [..., S].
    valid: bool [..., S]; what follows a block's first invalid slot does not count. Blocks without a
      valid slot are not in the mean.

  Returns:
    (-R, float32 scalar in [-1, 0], ChainAux). The loss is 0 if no slot is valid.
  """
  valid = valid_prefix(valid)
  num_blocks = jnp.sum(valid[..., 0])
  accepted = mean_of(jnp.sum(_survival(scores.log_probs, valid)), num_blocks)
  return -accepted / valid.shape[-1], ChainAux(accepted, num_blocks)


@jax.jit
def chain_loss(
    logits: jax.Array, labels: jax.Array, valid: jax.Array
) -> tuple[jax.Array, ChainAux]:
  """`chain_from_scores` of logits [..., S, V], labels [..., S], valid [..., S]."""
  return chain_from_scores(score_slots(logits, labels, valid), valid)


def _survival(log_probs, valid):
  """rho_k, float32 [..., S], 0 at invalid slots; `valid` is a prefix."""
  # Not cumprod(p): its gradient divides by p, which may have underflowed to 0.
  log_rho = jnp.cumsum(jnp.where(valid, log_probs, 0.0), axis=-1)
  return jnp.where(valid, jnp.exp(log_rho), 0.0)
