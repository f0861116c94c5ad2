"""Speculative decoding with a block-diffusion drafter: draft a block, verify it in one target pass, repeat.

A round starts at the anchor, the last known token of a row, at position p. The drafter proposes the tokens of p+1 ..
p+K-1 from the target's features of the positions below p. The target reads anchor and drafts at p .. p+K-1, which
gives its own token for each next position; the longest correct prefix is kept, and the target's token behind it (the
bonus) becomes the next anchor. Rejected positions stay in both caches, in the future of every query, until overwritten.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspec.decoding import autoregressive
from dspec.decoding import sampling
from dspec.decoding import verify
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib


@flax.struct.dataclass
class Trace:
  """What happened in each round of each row (R is the largest possible number of rounds).

  Attributes:
    drafts_BxRxS: int32 drafted tokens of slots 1..S.
    starts_BxR: int32 position of the round's anchor; -1 where the row had no such round.
    accepted_BxR: int32 accepted drafts, before cutting at an EOS or the limit.
    gained_BxR: int32 tokens that the round added to the output: accepted drafts and bonus, after the cut.
  """

  drafts_BxRxS: jax.Array
  starts_BxR: jax.Array
  accepted_BxR: jax.Array
  gained_BxR: jax.Array


def draft_greedy(
    drafter: drafter_lib.Drafter, drafter_params: Any, target_params: Any, anchor_B, positions_B, cache
) -> jax.Array:
  """The drafter's most probable token at every slot, int32 [B, S]."""
  tokens = drafter_lib.block_tokens(anchor_B[:, None], drafter.config)
  hidden = drafter.apply(
      {'params': drafter_params}, target_lib.embed(target_params, tokens), positions_B[:, None], cache,
      method='draft',
  )
  logits = target_lib.logits(target_params, hidden[:, 0, 1:], drafter.dtype)
  return sampling.most_probable(logits)


@functools.partial(jax.jit, static_argnames=('target', 'drafter', 'max_new_tokens'))
def generate(
    target: target_lib.Target,
    target_params: Any,
    drafter: drafter_lib.Drafter,
    drafter_params: Any,
    prompts_BxP: jax.Array,
    lengths_B: jax.Array,
    *,
    max_new_tokens: int,
) -> tuple[autoregressive.Rows, Trace]:
  """Greedy speculative decoding: the same tokens as `autoregressive.generate` at temperature 0.

  Args:
    target: the target.
    target_params: its parameters.
    drafter: the drafter; `drafter.config.block_size` is the decode-time K.
    drafter_params: its parameters.
    prompts_BxP: int32, right-padded.
    lengths_B: int32, at least 1.
    max_new_tokens: length limit of every row, the token of the prefill included.

  Returns:
    The finished rows and the trace of their rounds.
  """
  b, p = prompts_BxP.shape
  k = drafter.config.block_size
  size = p + max_new_tokens
  taps = drafter.config.target_layers
  eos_ids = target.config.eos_ids
  rows = autoregressive.start_rows(
      prompts_BxP, lengths_B, lengths_B + max_new_tokens, jnp.zeros(b, jnp.uint32), size
  )

  def write_context(cache, features, positions):
    return drafter.apply(
        {'params': drafter_params}, features, positions, cache, method='write_context'
    )

  # The last rounds of a row may look past its limit, so the caches are one block longer.
  target_cache = target_lib.init_cache(target.config, b, size + k)
  drafter_cache = drafter_lib.init_cache(drafter.config, b, size + k)
  logits_BxV, target_cache, drafter_cache = autoregressive.prefill(
      target, target_params, target_cache, prompts_BxP, lengths_B, taps, write_context, drafter_cache
  )
  first = sampling.most_probable(logits_BxV)
  rows = autoregressive.append(rows, first, eos_ids)
  rounds = max(max_new_tokens - 1, 1)  # Each gains a token or more, after the prefill's.
  trace = Trace(
      drafts_BxRxS=jnp.zeros((b, rounds, k - 1), jnp.int32),
      starts_BxR=jnp.full((b, rounds), -1, jnp.int32),
      accepted_BxR=jnp.zeros((b, rounds), jnp.int32),
      gained_BxR=jnp.zeros((b, rounds), jnp.int32),
  )

  def round_(state):
    r, rows, target_cache, drafter_cache, trace = state
    live = ~rows.done_B
    start_B = rows.lengths_B - 1
    anchor_B = jnp.take_along_axis(rows.tokens_BxT, start_B[:, None], 1)[:, 0]
    drafts = draft_greedy(drafter, drafter_params, target_params, anchor_B, start_B, drafter_cache)

    block = jnp.concatenate([anchor_B[:, None], drafts], 1)
    positions = start_B[:, None] + jnp.arange(k)[None, :]
    positions = jnp.where(live[:, None], positions, size + k)
    hidden, features, target_cache = target.apply(
        {'params': target_params}, block, positions, target_cache, taps
    )
    best = sampling.most_probable(target_lib.logits(target_params, hidden, target.dtype))
    accepted = verify.match(drafts, best)
    # Features past the accepted prefix are wrong, but lie at or above the next anchor until overwritten.
    drafter_cache = write_context(drafter_cache, features, positions)

    before = rows.lengths_B
    rows = append_prefix(rows, best, accepted + 1, eos_ids)
    keep = lambda old, new: old.at[:, r].set(jnp.where(live.reshape(b, *[1] * (new.ndim - 1)), new, old[:, r]))
    trace = Trace(
        drafts_BxRxS=keep(trace.drafts_BxRxS, drafts),
        starts_BxR=keep(trace.starts_BxR, start_B),
        accepted_BxR=keep(trace.accepted_BxR, accepted),
        gained_BxR=keep(trace.gained_BxR, rows.lengths_B - before),
    )
    return r + 1, rows, target_cache, drafter_cache, trace

  state = (0, rows, target_cache, drafter_cache, trace)
  state = jax.lax.while_loop(lambda state: ~state[1].done_B.all(), round_, state)
  return state[1], state[4]


def append_prefix(
    rows: autoregressive.Rows, tokens_BxK: jax.Array, counts_B: jax.Array, eos_ids: tuple[int, ...]
) -> autoregressive.Rows:
  """Adds the first `counts` tokens to every live row, cut behind the first EOS and at the limit."""
  b, k = tokens_BxK.shape
  eos = autoregressive.is_eos(tokens_BxK, eos_ids)
  eos_before = jnp.cumsum(eos, -1) - eos > 0
  steps = jnp.arange(k)[None, :]
  slots = rows.lengths_B[:, None] + steps
  take = (steps < counts_B[:, None]) & ~eos_before & (slots < rows.limits_B[:, None])
  take &= ~rows.done_B[:, None]
  tokens = rows.tokens_BxT.at[jnp.arange(b)[:, None], jnp.where(take, slots, rows.size)].set(
      tokens_BxK, mode='drop'
  )
  lengths = rows.lengths_B + take.sum(-1, dtype=jnp.int32)
  done = rows.done_B | (take & eos).any(-1) | (lengths >= rows.limits_B)
  return rows.replace(tokens_BxT=tokens, lengths_B=lengths, done_B=done)
