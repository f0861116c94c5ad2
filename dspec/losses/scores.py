"""What a loss needs of the drafter's logits: the label's log-probability, and whether it wins.

Every loss of this package sees the logits only through `SlotScores`, so the vocabulary axis is
gone before any loss begins. `score_slots` reads plain logits; `score_slots_chunked` reads hidden
states and the output head, and never holds more than one chunk of logits.
"""

import math

import flax.struct
import jax
import jax.numpy as jnp

# Floor of every denominator. Far below the smallest weight in use, so it only acts on empty sums.
EPS = 1e-12


@flax.struct.dataclass
class SlotScores:
  """The drafter's marks at each draft slot. Slot k of a block is at index k-1 of the last axis.

  Attributes:
    log_probs: float32 [..., S], natural log of the probability given to the label.
    correct: bool [..., S], whether the most probable token is the label (the lower id wins a tie).
  """

  log_probs: jax.Array
  correct: jax.Array


def valid_prefix(valid: jax.Array) -> jax.Array:
  """Cumulative AND over the last axis: nothing after the first invalid slot of a block counts.

  Args:
    valid: bool [..., S].

  Returns:
    bool [..., S].
  """
  return jnp.cumsum(~valid, axis=-1) == 0


def mean_of(total: jax.Array, weight: jax.Array) -> jax.Array:
  """`total / weight`, and 0 where nothing was kept (total and weight both 0). float32."""
  return total / jnp.maximum(weight.astype(jnp.float32), EPS)


def score_slots(logits: jax.Array, labels: jax.Array, valid: jax.Array | None = None) -> SlotScores:
  """Scores plain logits.

  Args:
    logits: float [..., S, V], of any float dtype; the softmax is taken in float32.
    labels: int [..., S]. Ids outside 0..V-1 are clipped; they only make sense at invalid slots.
    valid: bool [..., S] or None. Where given, the logits of slots that do not count are replaced by
      zeros, so that an infinity or NaN there reaches neither value nor gradient.

  Returns:
    SlotScores of shape [..., S].

  Raises:
    ValueError: if the shapes do not agree.
  """
  _check_shapes(logits, labels, valid)
  if valid is not None:
    logits = jnp.where(valid_prefix(valid)[..., None], logits, jnp.zeros((), logits.dtype))
  return _scores_and_probs(logits, labels)[0]


def score_slots_chunked(
    hidden: jax.Array,
    head_VxD: jax.Array,
    labels: jax.Array,
    valid: jax.Array | None = None,
    *,
    chunk_size: int,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> SlotScores:
  """Scores hidden states through the head, `chunk_size` slots at a time.

  The same as `score_slots(hidden @ head.T, labels, valid)`, but at most [chunk_size, V] logits live
  at once, forward or backward. The losses need one gradient, d log_prob / d hidden, and
  it is known in the forward pass: (onehot(label) - softmax) @ head. So a differentiated call makes
  this second product while the chunk's logits are there and keeps only its [rows, D] result; the
  backward pass multiplies it by the cotangent. Two head products a step, where rematerialising the
  logits takes three. A call that is not differentiated makes one.

  The head is frozen: it is not differentiated, and its gradient is zero.

  Args:
    hidden: float [..., S, D], the input of the head.
    head_VxD: float [V, D], one row a token (a tied embedding as it is).
    labels: int [..., S], as in `score_slots`.
    valid: bool [..., S] or None, as in `score_slots`, acting on the hidden states.
    chunk_size: slots a chunk, over all devices. A chunk takes strided rows, so that a batch axis
      sharded over n devices stays sharded within each chunk if n divides chunk_size. The rows are
      padded to whole chunks; a divisor of the number of slots spares that.
    compute_dtype: dtype of the operands of both products; they accumulate in float32.

  Returns:
    SlotScores of shape [..., S].

  Raises:
    ValueError: if the shapes do not agree or chunk_size is below 1.
  """
  _check_shapes(hidden, labels, valid)
  if chunk_size < 1:
    raise ValueError(f'chunk_size must be at least 1, got {chunk_size}')
  if valid is not None:
    hidden = jnp.where(valid_prefix(valid)[..., None], hidden, jnp.zeros((), hidden.dtype))
  rows, width = math.prod(labels.shape), hidden.shape[-1]
  chunks = -(-rows // chunk_size)
  padding = chunks * chunk_size - rows

  def split(x: jax.Array) -> jax.Array:  # [rows, ...] -> [chunks, chunk_size, ...]
    x = jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))
    # The major axis of the rows is the sharded one; it must be the chunk, not the loop.
    return jnp.swapaxes(x.reshape(chunk_size, chunks, *x.shape[1:]), 0, 1)

  def join(x: jax.Array) -> jax.Array:  # [chunks, chunk_size] -> [..., S]
    return jnp.swapaxes(x, 0, 1).reshape(-1)[:rows].reshape(labels.shape)

  # Cast here, outside the loop; only the head's rounded values exist from now on.
  head_VxD = jax.lax.stop_gradient(head_VxD).astype(compute_dtype)
  scores = _score_chunks(
      split(hidden.reshape(rows, width)), head_VxD, split(labels.reshape(rows)))
  return jax.tree.map(join, scores)


@jax.custom_vjp
def _score_chunks(hidden_CxRxD, head_VxD, labels_CxR):
  """SlotScores [C, R] of C chunks of R rows; head_VxD is in the compute dtype."""

  def score(chunk):
    hidden_RxD, labels_R = chunk
    return _scores_and_probs(_head(hidden_RxD, head_VxD), labels_R)[0]

  return jax.lax.map(score, (hidden_CxRxD, labels_CxR))


def _score_chunks_fwd(hidden_CxRxD, head_VxD, labels_CxR):

  def score(chunk):
    hidden_RxD, labels_R = chunk
    scores, probs_RxV = _scores_and_probs(_head(hidden_RxD, head_VxD), labels_R)
    # Subtract before rounding: near p = 1 a bfloat16 softmax has lost 1 - p, which is all there is.
    is_label_RxV = _token_ids(probs_RxV) == labels_R[:, None]
    error_RxV = (is_label_RxV - probs_RxV).astype(head_VxD.dtype)
    slope_RxD = jnp.matmul(error_RxV, head_VxD, preferred_element_type=jnp.float32)
    return scores, slope_RxD.astype(hidden_RxD.dtype)

  return jax.lax.map(score, (hidden_CxRxD, labels_CxR))


def _score_chunks_bwd(slope_CxRxD, cotangent):
  hidden_ct = cotangent.log_probs[..., None] * slope_CxRxD.astype(jnp.float32)
  return hidden_ct.astype(slope_CxRxD.dtype), None, None  # None: zero, never made into an array


_score_chunks.defvjp(_score_chunks_fwd, _score_chunks_bwd)


def _head(hidden_RxD, head_VxD):
  """float32 logits [R, V]."""
  return jax.lax.dot_general(
      hidden_RxD.astype(head_VxD.dtype), head_VxD, (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32)


def _scores_and_probs(logits, labels):
  """SlotScores [...] and float32 softmax [..., V] of logits [..., V]."""
  logits = logits.astype(jnp.float32)
  labels = jnp.clip(labels, 0, logits.shape[-1] - 1)
  # log-softmax written out, so that the vocabulary is exponentiated once for all that follows.
  top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  exps = jnp.exp(logits - top)
  total = jnp.sum(exps, axis=-1, keepdims=True)
  label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)
  log_probs = (label_logits - top - jnp.log(total))[..., 0]
  # The lowest id that reaches the maximum: argmax, but several times faster than XLA's on CPUs.
  winners = jnp.where(logits == top, _token_ids(logits), logits.shape[-1])
  correct = jnp.min(winners, axis=-1) == labels
  return SlotScores(log_probs, correct), exps / total


def _token_ids(like):
  return jax.lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1)


def _check_shapes(scored, labels, valid):
  if scored.shape[:-1] != labels.shape or (valid is not None and valid.shape != labels.shape):
    valid_shape = None if valid is None else valid.shape
    raise ValueError(
        f'labels {labels.shape} and valid {valid_shape} must have the shape of the logits or '
        f'hidden states {scored.shape} without its last axis')
