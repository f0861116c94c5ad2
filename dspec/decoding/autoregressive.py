"""One token at a time: the baseline of every speed, and the oracle of every exactness test."""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspec.decoding import sampling
from dspec.errors import UserError
from dspec.models import target as target_lib

PREFILL_CHUNK = 32


@flax.struct.dataclass
class Rows:
  """A batch of rows being decoded.

  Attributes:
    tokens_BxT: int32; prompt, then what was generated.
    lengths_B: int32; known tokens of each row.
    limits_B: int32; a row ends when it has this many tokens.
    done_B: bool; rows that met an EOS or their limit.
    seeds_B: uint32; what a row's randomness is derived from.
  """

  tokens_BxT: jax.Array
  lengths_B: jax.Array
  limits_B: jax.Array
  done_B: jax.Array
  seeds_B: jax.Array

  @property
  def size(self) -> int:
    return self.tokens_BxT.shape[1]


def is_eos(tokens: jax.Array, eos_ids: tuple[int, ...]) -> jax.Array:
  """Whether each token ends a turn."""
  return functools.reduce(jnp.logical_or, [tokens == e for e in eos_ids], jnp.zeros(tokens.shape, bool))


def prefill(
    model: target_lib.Target,
    params: Any,
    cache: target_lib.Cache,
    prompts_BxP: jax.Array,
    lengths_B: jax.Array,
    taps: tuple[int, ...] = (),
    consume: Callable[..., Any] = lambda carry, features, positions: carry,
    carry: Any = None,
    starts_BxP: jax.Array | None = None,
):
  """Runs right-padded prompts through the target in chunks, so that long ones fit.

  Args:
    model: the target.
    params: its parameters.
    cache: an empty cache.
    prompts_BxP: int32.
    lengths_B: int32, at least 1.
    taps: layers whose outputs `consume` wants.
    consume: `(carry, features [B, C, N*D], positions [B, C]) -> carry`, called for each chunk.
    carry: its first state.
    starts_BxP: int32; where a row holds several documents, see `target.Target`.

  Returns:
    logits_BxV after each row's last prompt token, the filled cache, and the last carry. Padding is
    written too; those slots are overwritten before any query may see them.
  """
  b, p = prompts_BxP.shape
  pad = lambda x: jnp.pad(x, ((0, 0), (0, -p % PREFILL_CHUNK)))
  prompts, starts = pad(prompts_BxP), starts_BxP if starts_BxP is None else pad(starts_BxP)

  def chunk(i, state):
    cache, hidden_BxD, carry = state
    start = i * PREFILL_CHUNK
    cut = lambda x: x if x is None else jax.lax.dynamic_slice(x, (0, start), (b, PREFILL_CHUNK))
    positions = jnp.tile(start + jnp.arange(PREFILL_CHUNK)[None, :], (b, 1))
    h, features, cache = model.apply(
        {'params': params}, cut(prompts), positions, cache, taps, starts_BxT=cut(starts))
    carry = consume(carry, features, positions)
    offset = lengths_B - 1 - start
    last = jnp.take_along_axis(h, jnp.clip(offset, 0, PREFILL_CHUNK - 1)[:, None, None], 1)[:, 0]
    here = (offset >= 0) & (offset < PREFILL_CHUNK)
    return cache, jnp.where(here[:, None], last, hidden_BxD), carry

  chunks = (lengths_B.max() + PREFILL_CHUNK - 1) // PREFILL_CHUNK
  state = (cache, jnp.zeros((b, model.config.width)), carry)
  cache, hidden_BxD, carry = jax.lax.fori_loop(0, chunks, chunk, state)
  return target_lib.logits(params, hidden_BxD, model.dtype), cache, carry


def append(rows: Rows, token_B: jax.Array, eos_ids: tuple[int, ...]) -> Rows:
  """Adds one token to every row that is not done."""
  live = ~rows.done_B
  slot = jnp.where(live, rows.lengths_B, rows.size)
  tokens = rows.tokens_BxT.at[jnp.arange(slot.shape[0]), slot].set(token_B, mode='drop')
  lengths = rows.lengths_B + live
  done = rows.done_B | (live & (is_eos(token_B, eos_ids) | (lengths >= rows.limits_B)))
  return rows.replace(tokens_BxT=tokens, lengths_B=lengths, done_B=done)


def step(model, params, rows: Rows, cache, how: sampling.Sampling, key: jax.Array):
  """One decoding step of every live row."""
  last = rows.lengths_B - 1
  token_B = jnp.take_along_axis(rows.tokens_BxT, last[:, None], 1)
  positions = jnp.where(rows.done_B, rows.size, last)[:, None]
  hidden, _, cache = model.apply({'params': params}, token_B, positions, cache)
  logits_BxV = target_lib.logits(params, hidden[:, 0], model.dtype)
  token_B = sampling.next_token(logits_BxV, how, key, rows.seeds_B, rows.lengths_B)
  return append(rows, token_B, model.config.eos_ids), cache


def start_rows(prompts_BxP, lengths_B, limits_B, seeds_B, size: int) -> Rows:
  """Rows that hold their prompts only; a row of limit `lengths` (no new token) is done at once.

  Without seeds, a row's is its number.
  """
  if seeds_B is None:
    seeds_B = jnp.arange(prompts_BxP.shape[0], dtype=jnp.uint32)
  tokens = jnp.pad(prompts_BxP, ((0, 0), (0, size - prompts_BxP.shape[1])))
  return Rows(tokens, lengths_B, limits_B, lengths_B >= limits_B, seeds_B)


def check_length(config: target_lib.TargetConfig, width: int, max_new_tokens: int, block_size: int = 0) -> None:
  """Refuses what does not fit the context.

  Raises:
    UserError: for no prompt token, or more positions than the target was made for.
  """
  if width < 1:
    raise UserError('empty prompts: each must have at least 1 token')
  length = width + max_new_tokens + block_size
  if length > config.max_length:
    block = f' and a block of {block_size}' if block_size else ''
    raise UserError(
        f'prompts of up to {width} tokens, {max_new_tokens} new ones{block} take {length} positions; the context of '
        f'the target has {config.max_length}'
    )


@functools.partial(jax.jit, static_argnames=('model', 'max_new_tokens', 'how'))
def generate(
    model: target_lib.Target,
    params: Any,
    prompts_BxP: jax.Array,
    lengths_B: jax.Array,
    key: jax.Array,
    seeds_B: jax.Array | None = None,
    *,
    max_new_tokens: int,
    how: sampling.Sampling = sampling.GREEDY,
) -> Rows:
  """Decodes every row to its EOS or for `max_new_tokens` tokens, one token a step.

  Args:
    model: the target.
    params: its parameters.
    prompts_BxP: int32, right-padded.
    lengths_B: int32, at least 1.
    key: source of randomness.
    seeds_B: uint32, what sets the randomness of a row apart from others; None for its number.
    max_new_tokens: length limit of every row, the token of the prefill included.
    how: how tokens are drawn.

  Raises:
    UserError: see `check_length`.
  """
  b, p = prompts_BxP.shape
  check_length(model.config, p, max_new_tokens)
  size = p + max_new_tokens
  rows = start_rows(prompts_BxP, lengths_B, lengths_B + max_new_tokens, seeds_B, size)
  cache = target_lib.init_cache(model.config, b, size)
  logits_BxV, cache, _ = prefill(model, params, cache, prompts_BxP, lengths_B)
  first = sampling.next_token(logits_BxV, how, key, rows.seeds_B, rows.lengths_B)
  rows = append(rows, first, model.config.eos_ids)
  rows, _ = jax.lax.while_loop(
      lambda state: ~state[0].done_B.all(),
      lambda state: step(model, params, *state, how, key),
      (rows, cache),
  )
  return rows
