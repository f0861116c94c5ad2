"""Cross-entropy at the slot that ends the accepted run (arXiv 2606.11552, first-error focal loss).

"Focal" is only its name: there is no (1-p)^g factor. It is the cross-entropy of each block's first
wrong slot, the "chain breaker". Everything after that slot is thrown away at decoding, so
mending it is what lengthens the accepted run.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from dspec.losses.positional_weighting import slot_weights
from dspec.losses.scores import SlotScores, mean_of, score_slots, valid_prefix


@flax.struct.dataclass
class FirstErrorAux:
  """What the first-error term saw.

  Attributes:
    breaker: bool [..., S], true at the first wrong valid slot of each block that has one.
    num_errors: int32 [], blocks that have one.
  """

  breaker: jax.Array
  num_errors: jax.Array


def first_error_from_scores(
    scores: SlotScores, valid: jax.Array, *, gamma: float | None = None
) -> tuple[jax.Array, FirstErrorAux]:
  """L_fe of arXiv 2606.11552: sum_n(w_k* * -log p_k*) / sum_n(w_k*) over blocks with an error.

  k* is the first valid slot whose most probable token is not the label. The choice of k* is not
  differentiated. A block without an error adds to neither sum. The mean is over blocks whatever the
  reduction of the cross-entropy, as printed in the paper.

  Args:
    scores: SlotScores [..., S].
    valid: bool [..., S]; what follows a block's first invalid slot does not count.
    gamma: decay length of w_k in slots, as in `slot_weights`; None for equal weights.

  Returns:
    (loss in nats, float32 scalar, FirstErrorAux). The loss is 0 if no block has an error.

  Raises:
    UserError: on a gamma not above 0.
  """
  valid = valid_prefix(valid)
  wrong = valid & ~scores.correct
  breaker = wrong & (jnp.cumsum(wrong, axis=-1) == 1)
  weights = jnp.broadcast_to(slot_weights(valid.shape[-1], gamma), valid.shape)
  weights = jnp.where(breaker, weights, 0.0)
  total = jnp.sum(weights * -jnp.where(breaker, scores.log_probs, 0.0))
  return mean_of(total, jnp.sum(weights)), FirstErrorAux(breaker, jnp.sum(breaker))


@functools.partial(jax.jit, static_argnames=('gamma',))
def first_error_focal_loss(
    logits: jax.Array, labels: jax.Array, valid: jax.Array, *, gamma: float | None = None
) -> tuple[jax.Array, FirstErrorAux]:
  """`first_error_from_scores` of logits [..., S, V], labels [..., S], valid [..., S]."""
  return first_error_from_scores(score_slots(logits, labels, valid), valid, gamma=gamma)
