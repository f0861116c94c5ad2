"""Speculative decoding with a block-diffusion drafter: draft a block, verify it in one target pass, repeat.

A round starts at the anchor, the last known token of a row, at position p. The drafter proposes the tokens of p+1 ..
p+K-1 from the target's features of the positions below p. The target reads anchor and drafts at p .. p+K-1, which
gives its own token for each next position; the longest correct prefix is kept, and the target's token behind it (the
bonus) becomes the next anchor. Rejected positions stay in both caches, in the future of every query, until overwritten.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspec.decoding import autoregressive
from dspec.decoding import sampling
from dspec.decoding import trees
from dspec.decoding import verify
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib


@dataclasses.dataclass(frozen=True)
class Drafting:
  """What the drafter proposes in a round; hashable, a static argument of jit.

  One draft is by default: of the most probable tokens, verified by `verify.match`, or drawn, by `verify.rejection`.
  Of several drawn drafts the one is kept that the target expects to accept most of (self-selection, arXiv 2511.00606);
  a tree holds the most probable prefixes (arXiv 2604.12989). Both are verified by matching.

  Attributes:
    how: how drafts are drawn. Must be above temperature 0 for several drafts, and 0 for a tree.
    num_drafts: M.
    tree_size: drafted nodes of a tree; 0 for none.

  Raises:
    UserError: for values out of range or that do not go together.
  """

  how: sampling.Sampling = sampling.GREEDY
  num_drafts: int = 1
  tree_size: int = 0

  def __post_init__(self):
    if self.num_drafts < 1:
      raise UserError(f'num_drafts is {self.num_drafts}: must be at least 1')
    if self.tree_size < 0:
      raise UserError(f'tree_size is {self.tree_size}: must be at least 1, or 0 for no tree')
    if self.num_drafts > 1 and self.tree_size:
      raise UserError(f'num_drafts is {self.num_drafts} and tree_size {self.tree_size}: choose one of them')
    if self.num_drafts > 1 and self.how.temperature == 0:
      raise UserError(f'num_drafts is {self.num_drafts}: at temperature 0 all drafts would be the same; raise it')
    if self.tree_size and self.how != sampling.GREEDY:
      raise UserError(f'tree_size is {self.tree_size}: a tree is not drawn; leave the drafter at temperature 0')

  @property
  def is_single(self) -> bool:
    return self.num_drafts == 1 and not self.tree_size


@flax.struct.dataclass
class Trace:
  """What happened in each round of each row (R is the largest possible number of rounds).

  Attributes:
    drafts_BxRxS: int32 drafted tokens of slots 1..S; of several drafts the one that was kept, of a tree the path that
      was taken and the anchor behind its end.
    starts_BxR: int32 position of the round's anchor; -1 where the row had no such round.
    accepted_BxR: int32 accepted drafts, before cutting at an EOS or the limit.
    gained_BxR: int32 tokens that the round added to the output: accepted drafts and bonus, after the cut.
  """

  drafts_BxRxS: jax.Array
  starts_BxR: jax.Array
  accepted_BxR: jax.Array
  gained_BxR: jax.Array


def draft_logits(
    drafter: drafter_lib.Drafter, drafter_params: Any, target_params: Any, anchor_B, positions_B, cache
) -> jax.Array:
  """Logits of every draft slot, float32 [B, S, V]."""
  tokens = drafter_lib.block_tokens(anchor_B[:, None], drafter.config)
  hidden = drafter.apply(
      {'params': drafter_params}, target_lib.embed(target_params, tokens), positions_B[:, None], cache,
      method='draft',
  )
  return target_lib.logits(target_params, hidden[:, 0, 1:], drafter.dtype)


@functools.partial(jax.jit, static_argnames=('target', 'drafter', 'max_new_tokens', 'how', 'drafting'))
def generate(
    target: target_lib.Target,
    target_params: Any,
    drafter: drafter_lib.Drafter,
    drafter_params: Any,
    prompts_BxP: jax.Array,
    lengths_B: jax.Array,
    key: jax.Array | None = None,
    *,
    max_new_tokens: int,
    how: sampling.Sampling = sampling.GREEDY,
    drafting: Drafting = Drafting(),
) -> tuple[autoregressive.Rows, Trace]:
  """Speculative decoding: what `autoregressive.generate` with the same key and `how` would say.

  The same tokens, at any temperature, for each position has its own random number, however it is reached. Only where
  single drafts are drawn, and verified by rejection, they are others above temperature 0, of the same distribution.

  Args:
    target: the target.
    target_params: its parameters.
    drafter: the drafter; `drafter.config.block_size` is the decode-time K.
    drafter_params: its parameters.
    prompts_BxP: int32, right-padded.
    lengths_B: int32, at least 1.
    key: source of randomness; needed only above temperature 0.
    max_new_tokens: length limit of every row, the token of the prefill included.
    how: how the target's tokens are drawn.
    drafting: what is drafted.

  Returns:
    The finished rows and the trace of their rounds.
  """
  b, p = prompts_BxP.shape
  k = drafter.config.block_size
  size = p + max_new_tokens
  taps = drafter.config.target_layers
  eos_ids = target.config.eos_ids
  rows = autoregressive.start_rows(
      prompts_BxP, lengths_B, lengths_B + max_new_tokens, jnp.arange(b, dtype=jnp.uint32), size
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
  key = jax.random.key(0) if key is None else key
  # The target draws with `key` itself, as in plain decoding. The others must not repeat its numbers, which are
  # folded in by the rows' seeds; those are never this large.
  draft_key, accept_key, bonus_key = (jax.random.fold_in(key, 2**32 - n) for n in (1, 2, 3))
  first = sampling.next_token(logits_BxV, how, key, rows.seeds_B, rows.lengths_B)
  rows = autoregressive.append(rows, first, eos_ids)
  rounds = max(max_new_tokens - 1, 1)  # Each gains a token or more, after the prefill's.
  trace = Trace(
      drafts_BxRxS=jnp.zeros((b, rounds, k - 1), jnp.int32),
      starts_BxR=jnp.full((b, rounds), -1, jnp.int32),
      accepted_BxR=jnp.zeros((b, rounds), jnp.int32),
      gained_BxR=jnp.zeros((b, rounds), jnp.int32),
  )

  def verify_block(logits_BxSxV, anchor_B, seeds_B, positions, new_BxK, cache):
    """One draft. Returns drafts [B, S], the round's tokens [B, K], accepted [B], features [B, K, F] and the cache."""
    drafts = sampling.next_tokens(logits_BxSxV, drafting.how, draft_key, seeds_B, new_BxK[:, :-1])
    block = jnp.concatenate([anchor_B[:, None], drafts], 1)
    hidden, features, cache = target.apply({'params': target_params}, block, positions, cache, taps)
    logits_BxKxV = target_lib.logits(target_params, hidden, target.dtype)
    if drafting.how.temperature == 0:
      tokens = sampling.next_tokens(logits_BxKxV, how, key, seeds_B, new_BxK)
      return drafts, tokens, verify.match(drafts, tokens), features, cache
    accepted, bonus_B = verify.rejection(
        drafts, sampling.probabilities(logits_BxSxV, drafting.how), sampling.probabilities(logits_BxKxV, how),
        sampling.uniforms(accept_key, seeds_B, new_BxK), sampling.uniforms(bonus_key, seeds_B, new_BxK),
    )
    is_draft = jnp.arange(k)[None, :] < accepted[:, None]
    tokens = jnp.where(is_draft, jnp.pad(drafts, ((0, 0), (0, 1))), bonus_B[:, None])
    return drafts, tokens, accepted, features, cache

  def verify_tree(logits_BxSxV, anchor_B, seeds_B, positions, new_BxK, cache):
    """Many drafts in one pass; the cache gets the nodes of the path that was taken. Returns as `verify_block`."""
    if drafting.tree_size:
      tree = trees.best_first(anchor_B, jax.nn.log_softmax(logits_BxSxV), drafting.tree_size)
    else:
      probs = sampling.probabilities(logits_BxSxV, drafting.how)
      drafts_BxMxS = trees.draw_drafts(probs, draft_key, seeds_B, new_BxK[:, :-1], drafting.num_drafts)
      tree = trees.chains(anchor_B, drafts_BxMxS)
    sees = trees.ancestors(tree, k - 1)
    at_depth = lambda x: jnp.take_along_axis(x, tree.depths_BxN, 1)
    hidden, features, nodes = target.apply(
        {'params': target_params}, tree.tokens_BxN, at_depth(positions), cache, taps, (positions[:, 0], sees)
    )
    logits_BxNxV = target_lib.logits(target_params, hidden, target.dtype)
    tokens_BxN = sampling.next_tokens(logits_BxNxV, how, key, seeds_B, at_depth(new_BxK))
    if drafting.tree_size:
      path_BxK, accepted = trees.walk(tree, tokens_BxN, k - 1)
    else:
      path_BxK = trees.best_chain(drafts_BxMxS, sampling.probabilities(logits_BxNxV, how))
    along = lambda x: jnp.take_along_axis(x, path_BxK.reshape(b, k, *[1] * (x.ndim - 2)), 1)
    drafts, tokens = along(tree.tokens_BxN)[:, 1:], along(tokens_BxN)
    if not drafting.tree_size:
      accepted = verify.match(drafts, tokens)
    cache = tuple(
        target_lib.write_cache(layer, along(keys), along(values), positions)
        for layer, (keys, values) in zip(cache, nodes)
    )
    return drafts, tokens, accepted, along(features), cache

  def round_(state):
    r, rows, target_cache, drafter_cache, trace = state
    live = ~rows.done_B
    start_B = rows.lengths_B - 1
    anchor_B = jnp.take_along_axis(rows.tokens_BxT, start_B[:, None], 1)[:, 0]
    logits_BxSxV = draft_logits(drafter, drafter_params, target_params, anchor_B, start_B, drafter_cache)
    # Where the anchor is and the tokens of this round would go; outside the caches for rows that are done.
    steps_K = jnp.arange(k)
    new_BxK = rows.lengths_B[:, None] + steps_K[None, :]
    positions = jnp.where(live[:, None], start_B[:, None] + steps_K[None, :], size + k)
    verify_ = verify_block if drafting.is_single else verify_tree
    drafts, tokens, accepted, features, target_cache = verify_(
        logits_BxSxV, anchor_B, rows.seeds_B, positions, new_BxK, target_cache
    )
    # Features past the accepted prefix are wrong, but lie at or above the next anchor until overwritten.
    drafter_cache = write_context(drafter_cache, features, positions)

    before = rows.lengths_B
    rows = append_prefix(rows, tokens, accepted + 1, eos_ids)
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
