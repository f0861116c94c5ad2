"""Cross-entropy in which early slots weigh more (arXiv 2606.11552, token positional weighting).

A block is accepted up to its first wrong token, so a slot matters less the later it stands:
slot k weighs w_k = exp(-(k-1)/gamma).
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from dspec.errors import UserError
from dspec.losses.scores import SlotScores, mean_of, score_slots, valid_prefix

REDUCTIONS = ('mean', 'sum')


@flax.struct.dataclass
class CrossEntropyAux:
  """What the cross-entropy is over.

  Attributes:
    weight_sum: float32 [], sum of w_k over valid slots.
    num_slots: int32 [], valid slots.
  """

  weight_sum: jax.Array
  num_slots: jax.Array


def slot_weights(num_slots: int, gamma: float | None) -> jax.Array:
  """w_k = exp(-(k-1)/gamma) for k = 1..num_slots, float32 [num_slots]; ones if gamma is None.

  Raises:
    UserError: if gamma is not above 0.
  """
  check_gamma(gamma)
  if gamma is None:
    return jnp.ones(num_slots, jnp.float32)
  return jnp.exp(-jnp.arange(num_slots, dtype=jnp.float32) / gamma)


def check_gamma(gamma: float | None) -> None:
  """Raises UserError unless gamma is None or above 0."""
  if gamma is not None and not gamma > 0:
    raise UserError(f'gamma is {gamma}: give a number above 0, or None for equal weights')


def check_reduction(reduction: str) -> None:
  """Raises UserError unless reduction is one of REDUCTIONS."""
  if reduction not in REDUCTIONS:
    raise UserError(f'reduction is {reduction!r}: give one of {", ".join(map(repr, REDUCTIONS))}')


def cross_entropy_from_scores(
    scores: SlotScores, valid: jax.Array, *, gamma: float | None = None, reduction: str = 'mean'
) -> tuple[jax.Array, CrossEntropyAux]:
  """L_CE of arXiv 2606.11552 over all valid slots of all blocks given.

  Args:
    scores: SlotScores [..., S].
    valid: bool [..., S]; what follows a block's first invalid slot does not count.
    gamma: decay length in slots, or None for equal weights.
    reduction: 'mean' is sum(w_k * -log p_k) / sum(w_k). 'sum' sums over the slots of a block and
      takes the mean over blocks that have a valid slot (the paper prints a sum over slots). 'sum'
      is larger by the mean block's sum of w_k, so a weight on another term is tied to the choice.

  Returns:
    (loss in nats, float32 scalar, CrossEntropyAux). The loss is 0 if no slot is valid.

  Raises:
    UserError: on a gamma not above 0 or an unknown reduction.
  """
  check_reduction(reduction)
  valid = valid_prefix(valid)
  weights = jnp.broadcast_to(slot_weights(valid.shape[-1], gamma), valid.shape)
  weights = jnp.where(valid, weights, 0.0)
  total = jnp.sum(weights * -jnp.where(valid, scores.log_probs, 0.0))
  weight_sum = jnp.sum(weights)
  # With a valid prefix, a block has a valid slot exactly if its first slot is valid.
  kept = weight_sum if reduction == 'mean' else jnp.sum(valid[..., 0])
  return mean_of(total, kept), CrossEntropyAux(weight_sum, jnp.sum(valid))


@functools.partial(jax.jit, static_argnames=('gamma', 'reduction'))
def positional_weighted_cross_entropy(
    logits: jax.Array, labels: jax.Array, valid: jax.Array, *, gamma: float | None = None,
    reduction: str = 'mean',
) -> tuple[jax.Array, CrossEntropyAux]:
  """`cross_entropy_from_scores` of logits [..., S, V], labels [..., S], valid [..., S]."""
  return cross_entropy_from_scores(
      score_slots(logits, labels, valid), valid, gamma=gamma, reduction=reduction)
