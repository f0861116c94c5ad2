"""The training objective: L = L_CE + alpha_f * L_fe - alpha_c * R_chain (arXiv 2606.11552)."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from dspec.errors import UserError
from dspec.losses.chain import chain_from_scores, chain_per_token
from dspec.losses.first_error import first_error_from_scores
from dspec.losses.positional_weighting import (
    check_gamma, check_reduction, cross_entropy_from_scores)
from dspec.losses.scores import SlotScores, mean_of, score_slots, valid_prefix


@dataclasses.dataclass(frozen=True)
class Objective:
  """Which terms, how strong. Hashable: a static argument of jit. The paper's best is (10, .3, 40).

  Attributes:
    gamma: decay length in slots of the weights of cross-entropy and first-error; None for equal
      weights.
    first_error: alpha_f, the weight of the first-error term. 0 leaves it out.
    chain: alpha_c as quoted at K=16, whatever K is in use; 0 leaves the term out. R_chain is
      divided by K-1, so `objective` multiplies this by (K-1)/15: the strength per expected accepted
      token is chain/15 at every K, e.g. 40 acts as 40 at K=16 and as 18.7 at K=8.
    reduction: of the cross-entropy, 'mean' over weighted slots or 'sum' over slots and mean over
      blocks; see `cross_entropy_from_scores`. The paper's weights are meant for 'mean'.

  Raises:
    UserError: on gamma not above 0, a weight that is negative or not finite, or an unknown
      reduction.
  """

  gamma: float | None = None
  first_error: float = 0.0
  chain: float = 0.0
  reduction: str = 'mean'

  def __post_init__(self):
    check_gamma(self.gamma)
    check_reduction(self.reduction)
    for name in ('first_error', 'chain'):
      weight = getattr(self, name)
      if not 0 <= weight < float('inf'):
        raise UserError(f'{name} is {weight}: give a number of at least 0; 0 leaves the term out')


@flax.struct.dataclass
class ObjectiveAux:
  """What to log. Scalars but for the two slot curves; every mean is 0 if it is over nothing.

  Terms are reported before their weights, and also where the weight is 0.

  Attributes:
    cross_entropy: L_CE, nats.
    first_error: L_fe, nats.
    chain: -R_chain, in [-1, 0].
    expected_accepted: mean over blocks of sum_k rho_k, draft tokens, without the bonus token.
    accepted_length: mean over blocks of 1 + the number of leading valid slots whose most probable
      token is the label: tokens of one greedy round with the bonus token, on given text.
    slot_accuracy: float32 [S], share of the blocks whose slot k is valid in which it is correct,
      whatever the slots before it.
    slot_count: int32 [S], those blocks.
    num_blocks: int32, blocks with at least one valid slot; the blocks of every mean over blocks.
    num_slots: int32, valid slots.
  """

  cross_entropy: jax.Array
  first_error: jax.Array
  chain: jax.Array
  expected_accepted: jax.Array
  accepted_length: jax.Array
  slot_accuracy: jax.Array
  slot_count: jax.Array
  num_blocks: jax.Array
  num_slots: jax.Array


def objective(
    scores: SlotScores, valid: jax.Array, spec: Objective
) -> tuple[jax.Array, ObjectiveAux]:
  """L = L_CE + alpha_f * L_fe - alpha_c * (K-1)/15 * R_chain over all blocks given.

  Args:
    scores: SlotScores [..., S], S = K-1.
    valid: bool [..., S]; what follows a block's first invalid slot does not count.
    spec: the weights; static under jit.

  Returns:
    (L, float32 scalar, ObjectiveAux).
  """
  valid = valid_prefix(valid)
  num_slots = valid.shape[-1]
  cross_entropy, slots = cross_entropy_from_scores(
      scores, valid, gamma=spec.gamma, reduction=spec.reduction)
  first_error, _ = first_error_from_scores(scores, valid, gamma=spec.gamma)
  chain, blocks = chain_from_scores(scores, valid)

  loss = cross_entropy
  # A Python branch: a term that is left out cannot even pass on a NaN.
  if spec.first_error:
    loss = loss + spec.first_error * first_error
  if spec.chain:
    loss = loss + chain_per_token(spec.chain) * num_slots * chain

  correct = valid & scores.correct
  run = jnp.cumprod(correct.astype(jnp.int32), axis=-1)
  over_blocks = tuple(range(valid.ndim - 1))
  slot_count = jnp.sum(valid, axis=over_blocks)
  return loss, ObjectiveAux(
      cross_entropy=cross_entropy,
      first_error=first_error,
      chain=chain,
      expected_accepted=blocks.expected_accepted,
      accepted_length=mean_of(jnp.sum(run) + blocks.num_blocks, blocks.num_blocks),
      slot_accuracy=mean_of(jnp.sum(correct, axis=over_blocks), slot_count),
      slot_count=slot_count,
      num_blocks=blocks.num_blocks,
      num_slots=slots.num_slots,
  )


@functools.partial(jax.jit, static_argnames=('spec',))
def objective_from_logits(
    logits: jax.Array, labels: jax.Array, valid: jax.Array, spec: Objective
) -> tuple[jax.Array, ObjectiveAux]:
  """`objective` of logits [..., S, V], labels [..., S], valid [..., S]."""
  return objective(score_slots(logits, labels, valid), valid, spec)
