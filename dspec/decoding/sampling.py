"""Choosing a token from logits."""

import dataclasses

import jax
import jax.numpy as jnp

from dspec.errors import UserError

_SEGMENT = 256


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn; hashable, a static argument of jit.

  Attributes:
    temperature: divides the logits; 0 takes the most probable token, whatever the others say.
    top_k: only the k most probable tokens may be drawn, with all that tie with the last of them; 0 for all.
    top_p: of these, only the most probable ones that together have at least this probability (arXiv 1904.09751).

  Raises:
    UserError: for values out of range.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    if not 0 <= self.temperature < float('inf'):
      raise UserError(f'temperature is {self.temperature}: must be at least 0 and finite')
    if self.top_k < 0:
      raise UserError(f'top_k is {self.top_k}: must be at least 1, or 0 for all tokens')
    if not 0 < self.top_p <= 1:
      raise UserError(f'top_p is {self.top_p}: must be above 0 and at most 1')


GREEDY = Sampling()


def probabilities(logits_xV: jax.Array, how: Sampling) -> jax.Array:
  """The distribution that tokens are drawn from, float32 `[..., V]`: temperature, then top-k, then top-p, then softmax.

  At temperature 0 all of it is on the most probable token.
  """
  if how.temperature == 0:
    return jax.nn.one_hot(most_probable(logits_xV), logits_xV.shape[-1], dtype=jnp.float32)
  weights = _weights(logits_xV, how)
  return weights / weights.sum(-1, keepdims=True)


def _weights(logits_xV: jax.Array, how: Sampling) -> jax.Array:
  """`probabilities` above temperature 0, but for a factor that each row has to itself."""
  logits = logits_xV.astype(jnp.float32) / how.temperature
  if 0 < how.top_k < logits.shape[-1]:
    weakest = jax.lax.top_k(logits, how.top_k)[0][..., -1:]
    logits = jnp.where(logits >= weakest, logits, -jnp.inf)
  weights = jnp.exp(logits - logits.max(-1, keepdims=True))
  if how.top_p < 1:
    falling = -jnp.sort(-weights, axis=-1)
    # A token stays while those above it have less than top_p: the first one always does.
    stays = jnp.cumsum(falling, axis=-1) - falling < how.top_p * falling.sum(-1, keepdims=True)
    weakest = jnp.min(jnp.where(stays, falling, jnp.inf), axis=-1, keepdims=True)
    weights = jnp.where(weights >= weakest, weights, 0.0)
  return weights


def most_probable(logits_xV: jax.Array) -> jax.Array:
  """`argmax` over the last axis, int32; the lowest id wins a tie. Ten times faster than XLA's on CPUs."""
  v = logits_xV.shape[-1]
  ids = jax.lax.broadcasted_iota(jnp.int32, logits_xV.shape, logits_xV.ndim - 1)
  top = logits_xV.max(-1, keepdims=True)
  return jnp.where(logits_xV == top, ids, v).min(-1)


def categorical(probs_BxV: jax.Array, uniform_B: jax.Array) -> jax.Array:
  """Inverse-transform sampling with one uniform number a row, in two levels.

  Args:
    probs_BxV: float32, non-negative; rows need not sum to one.
    uniform_B: float32 in [0, 1).

  Returns:
    int32 [B]; token v with probability `probs[v] / sum(probs)`. Far cheaper than one Gumbel number a token:
    only segment sums and one segment are accumulated.
  """
  b, v = probs_BxV.shape
  probs = jnp.pad(probs_BxV, ((0, 0), (0, -v % _SEGMENT))).reshape(b, -1, _SEGMENT)
  segments = jnp.cumsum(probs.sum(-1), -1)
  wanted = uniform_B * segments[:, -1]
  segment = jnp.minimum((segments <= wanted[:, None]).sum(-1), segments.shape[1] - 1)
  rows = jnp.arange(b)
  before = jnp.where(segment > 0, segments[rows, jnp.maximum(segment - 1, 0)], 0.0)
  inside = jnp.cumsum(probs[rows, segment], -1)
  within = (inside + before[:, None] <= wanted[:, None]).sum(-1)
  # Rounding may run past the last token that has any probability: step back onto it.
  last = _SEGMENT - 1 - jnp.argmax(probs[rows, segment, ::-1] > 0, -1)
  token = segment * _SEGMENT + jnp.minimum(within, last)
  return jnp.minimum(token, v - 1).astype(jnp.int32)


def uniforms(key: jax.Array, seeds_B: jax.Array, positions_BxN: jax.Array) -> jax.Array:
  """One float32 in [0, 1) for each position of each row, `[B, N]`; it depends on nothing but key, seed and position."""
  fold = lambda seed, position: jax.random.fold_in(jax.random.fold_in(key, seed), position)
  draw = lambda seed, position: jax.random.uniform(fold(seed, position))
  return jax.vmap(jax.vmap(draw, (None, 0)))(seeds_B, positions_BxN)


def draw(weights_BxNxV: jax.Array, uniform_BxN: jax.Array) -> jax.Array:
  """`categorical` for every position, int32 [B, N]."""
  v = weights_BxNxV.shape[-1]
  return categorical(weights_BxNxV.reshape(-1, v), uniform_BxN.reshape(-1)).reshape(uniform_BxN.shape)


def next_tokens(
    logits_BxNxV: jax.Array, how: Sampling, key: jax.Array, seeds_B: jax.Array, positions_BxN: jax.Array
) -> jax.Array:
  """The token that comes at each position, int32 [B, N].

  At temperature 0 the most probable token. Above it a sample whose randomness depends only on
  (key, the row's seed, the position), so that batching does not change what a row says, and neither does it matter
  whether a position is reached one token at a time or by verifying drafts.
  """
  if how.temperature == 0:
    return most_probable(logits_BxNxV)
  return draw(_weights(logits_BxNxV, how), uniforms(key, seeds_B, positions_BxN))


def next_token(
    logits_BxV: jax.Array, how: Sampling, key: jax.Array, seeds_B: jax.Array, positions_B: jax.Array
) -> jax.Array:
  """`next_tokens` of one position a row, int32 [B]."""
  return next_tokens(logits_BxV[:, None], how, key, seeds_B, positions_B[:, None])[:, 0]
