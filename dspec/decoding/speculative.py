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
  def by_rejection(self) -> bool:
    return self.is_single and self.how.temperature > 0

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


@flax.struct.dataclass
class State:
  """Of a batch between two rounds.

  Attributes:
    round: int32 scalar; rounds so far.
    rows: tokens so far.
    target_cache: of the positions below each row's last token.
    drafter_cache: likewise.
    trace: of the rounds so far.
    draft_head: rows of the target's head that are drafted from, [V', D]; None for all.
    key: source of randomness.
  """

  round: jax.Array
  rows: autoregressive.Rows
  target_cache: target_lib.Cache
  drafter_cache: target_lib.Cache
  trace: Trace
  draft_head: jax.Array | None
  key: jax.Array


@functools.partial(jax.jit, static_argnames=('target', 'drafter', 'max_new_tokens', 'how', 'drafting'))
def generate(
    target: target_lib.Target,
    target_params: Any,
    drafter: drafter_lib.Drafter,
    drafter_params: Any,
    prompts_BxP: jax.Array,
    lengths_B: jax.Array,
    key: jax.Array | None = None,
    seeds_B: jax.Array | None = None,
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
    seeds_B: uint32, what sets the randomness of a row apart from others; None for its number.
    max_new_tokens: length limit of every row, the token of the prefill included.
    how: how the target's tokens are drawn.
    drafting: what is drafted.

  Returns:
    The finished rows and the trace of their rounds.

  Raises:
    UserError: for a drafter that was made for another target, prompts that do not fit the context, or a tree that is
      larger than the context or than the number of possible drafts.
  """
  models = target, target_params, drafter, drafter_params
  key = jax.random.key(0) if key is None else key
  state = start(*models, prompts_BxP, lengths_B, key, seeds_B, max_new_tokens=max_new_tokens, how=how)
  state = jax.lax.while_loop(
      lambda state: ~state.rows.done_B.all(),
      lambda state: advance(*models, state, how=how, drafting=drafting),
      state,
  )
  return state.rows, state.trace


def start(
    target, target_params, drafter, drafter_params, prompts_BxP, lengths_B, key, seeds_B=None, *,
    max_new_tokens: int, how: sampling.Sampling,
) -> State:
  """Prefill, and the first token of every row. Arguments as of `generate`."""
  b, p = prompts_BxP.shape
  k = drafter.config.block_size
  check_pair(target.config, drafter.config)
  autoregressive.check_length(target.config, p, max_new_tokens, k)
  size = p + max_new_tokens
  rows = autoregressive.start_rows(prompts_BxP, lengths_B, lengths_B + max_new_tokens, seeds_B, size)
  write = functools.partial(write_context, drafter, drafter_params)
  # The last rounds of a row may look past its limit, so the caches are one block longer.
  target_cache = target_lib.init_cache(target.config, b, size + k)
  drafter_cache = drafter_lib.init_cache(drafter.config, b, size + k)
  logits_BxV, target_cache, drafter_cache = autoregressive.prefill(
      target, target_params, target_cache, prompts_BxP, lengths_B, drafter.config.target_layers, write, drafter_cache
  )
  first = sampling.next_token(logits_BxV, how, key, rows.seeds_B, rows.lengths_B)
  rows = autoregressive.append(rows, first, target.config.eos_ids)
  return State(
      jnp.zeros((), jnp.int32), rows, target_cache, drafter_cache, empty_trace(b, max_new_tokens, k),
      draft_head(target_params, drafter, drafter_params), key)


def empty_trace(batch: int, max_new_tokens: int, block_size: int) -> Trace:
  """Of no round yet; each will gain a token or more, after the prefill's."""
  rounds = max(max_new_tokens - 1, 1)
  return Trace(
      drafts_BxRxS=jnp.zeros((batch, rounds, block_size - 1), jnp.int32),
      starts_BxR=jnp.full((batch, rounds), -1, jnp.int32),
      accepted_BxR=jnp.zeros((batch, rounds), jnp.int32),
      gained_BxR=jnp.zeros((batch, rounds), jnp.int32),
  )


def draft_head(target_params: Any, drafter: drafter_lib.Drafter, drafter_params: Any) -> jax.Array | None:
  """`State.draft_head`: gathered once, not in every round."""
  if not drafter.config.vocab_size:
    return None
  return drafter_lib.draft_head(drafter_params, target_lib.head_VxD(target_params))


def advance(
    target, target_params, drafter, drafter_params, state: State, *, how: sampling.Sampling, drafting: Drafting
) -> State:
  """One round of every row that is not done. Arguments as of `generate`."""
  rows, k = state.rows, drafter.config.block_size
  _check_tree(drafting.tree_size, drafter.config, target.config)
  live = ~rows.done_B
  start_B = rows.lengths_B - 1
  anchor_B = jnp.take_along_axis(rows.tokens_BxT, start_B[:, None], 1)[:, 0]
  logits_BxSxV = propose(target_params, drafter, drafter_params, state)

  # Where the anchor and the drafts are, outside the caches for rows that are done; and where their successors would go.
  steps_K = jnp.arange(k)
  positions_BxK = jnp.where(live[:, None], start_B[:, None] + steps_K[None, :], rows.size + k)
  new_BxK = rows.lengths_B[:, None] + steps_K[None, :]
  verify_drafts = _verify_one if drafting.is_single else _verify_many
  drafts, tokens, accepted, features, target_cache = verify_drafts(
      target, target_params, drafter.config.target_layers, drafter_params, state, anchor_B, logits_BxSxV,
      positions_BxK, new_BxK, how, drafting,
  )
  # Features past the accepted prefix are wrong, but lie at or above the next anchor until overwritten.
  drafter_cache = write_context(drafter, drafter_params, state.drafter_cache, features, positions_BxK)
  state = state.replace(target_cache=target_cache, drafter_cache=drafter_cache)
  return end_round(state, drafts, tokens, accepted, target.config.eos_ids)


def end_round(
    state: State, drafts_BxS: jax.Array, tokens_BxK: jax.Array, accepted_B: jax.Array, eos_ids: tuple[int, ...]
) -> State:
  """The state with what a round has found, in the rows that were not done.

  Args:
    state: of before the round.
    drafts_BxS: what was drafted.
    tokens_BxK: what the target says in place of each draft, and behind them; wrong behind the first wrong draft.
    accepted_B: drafts that are accepted.
    eos_ids: tokens that end a row.
  """
  live, r = ~state.rows.done_B, state.round
  rows = append_prefix(state.rows, tokens_BxK, accepted_B + 1, eos_ids)
  new = Trace(drafts_BxS, state.rows.lengths_B - 1, accepted_B, rows.lengths_B - state.rows.lengths_B)
  keep = lambda old, new: old.at[:, r].set(jnp.where(live.reshape(-1, *[1] * (new.ndim - 1)), new, old[:, r]))
  return state.replace(round=r + 1, rows=rows, trace=jax.tree.map(keep, state.trace, new))


def check_pair(target: target_lib.TargetConfig, drafter: drafter_lib.DrafterConfig) -> None:
  """Refuses, with a UserError, a drafter that was made for another target."""
  for what, of_drafter, of_target in (
      ('width', drafter.width, target.width),
      ('layers to read', drafter.target_layers[-1] + 1, target.num_layers),
      ('tokens to draft', drafter.vocab_size, target.vocab_size),
      ('a mask token', drafter.mask_token_id + 1, target.vocab_size),
  ):
    if of_drafter > of_target or (what == 'width' and of_drafter != of_target):
      raise UserError(
          f'{what}: the drafter wants {of_drafter}, the target has {of_target}; it was made for another target'
      )


def _check_tree(tree_size: int, drafter: drafter_lib.DrafterConfig, target: target_lib.TargetConfig) -> None:
  if tree_size >= target.max_length:
    raise UserError(f'tree_size is {tree_size}: larger than the context of the target, {target.max_length} positions')
  vocab_size = drafter.selector_candidates or drafter.vocab_size or target.vocab_size
  slots = drafter.block_size - 1
  drafts = sum(vocab_size ** (slot + 1) for slot in range(slots))
  if tree_size > drafts:
    raise UserError(
        f'tree_size is {tree_size}: {slots} slots of {vocab_size} tokens make only {drafts} different drafts')


def propose(target_params: Any, drafter: drafter_lib.Drafter, drafter_params: Any, state: State) -> jax.Array:
  """Logits of every draft slot over the draft vocabulary, float32 [B, S, V']; -inf for what it cannot draft."""
  positions_Bx1 = state.rows.lengths_B[:, None] - 1
  anchors_Bx1 = jnp.take_along_axis(state.rows.tokens_BxT, positions_Bx1, 1)
  block = drafter_lib.block_tokens(anchors_Bx1, drafter.config)
  embeddings = drafter_lib.embed(drafter.config, target_params, block)
  hidden = drafter.apply(
      {'params': drafter_params}, embeddings, positions_Bx1, state.drafter_cache, method='draft'
  )
  hidden_BxSxD = drafter_lib.draft_slots(hidden, drafter.config)[:, 0]
  head_VxD = target_lib.head_VxD(target_params) if state.draft_head is None else state.draft_head
  logits_BxSxV = target_lib.project(head_VxD, hidden_BxSxD, drafter.dtype)
  return drafter_lib.adjust_logits(
      drafter_params, drafter.config, hidden_BxSxD, logits_BxSxV, anchors_Bx1[:, 0], drafter.dtype
  )


def write_context(
    drafter: drafter_lib.Drafter, drafter_params: Any, cache: target_lib.Cache, features_BxTxF, positions_BxT
) -> target_lib.Cache:
  """See `Drafter.write_context`."""
  return drafter.apply({'params': drafter_params}, features_BxTxF, positions_BxT, cache, method='write_context')


def _keys(key: jax.Array) -> list[jax.Array]:
  """Of drafting, accepting and the bonus. The target draws with `key` itself, as in plain decoding.

  Rows fold their seeds into these, and seeds are never as large as what is folded in here: no number comes twice.
  """
  return [jax.random.fold_in(key, 2**32 - n) for n in (1, 2, 3)]


def _verify_one(
    target, target_params, taps, drafter_params, state, anchor_B, logits_BxSxV, positions_BxK, new_BxK, how, drafting
):
  """One draft a row: drafts [B, S], the round's tokens [B, K], accepted [B], features [B, K, F], the target's cache."""
  seeds_B = state.rows.seeds_B
  draft_key, accept_key, bonus_key = _keys(state.key)
  drafts = sampling.next_tokens(logits_BxSxV, drafting.how, draft_key, seeds_B, new_BxK[:, :-1])
  drafts = drafter_lib.token_ids(drafter_params, drafts)
  block = jnp.concatenate([anchor_B[:, None], drafts], 1)
  hidden, features, cache = target.apply({'params': target_params}, block, positions_BxK, state.target_cache, taps)
  logits_BxKxV = target_lib.logits(target_params, hidden, target.dtype)
  if not drafting.by_rejection:
    tokens = sampling.next_tokens(logits_BxKxV, how, state.key, seeds_B, new_BxK)
    return drafts, tokens, verify.match(drafts, tokens), features, cache
  draft_probs = sampling.probabilities(logits_BxSxV, drafting.how)
  if 'draft_ids' in drafter_params:  # Nothing else is ever drafted.
    of_all = jnp.zeros((*drafts.shape, logits_BxKxV.shape[-1]))
    draft_probs = of_all.at[..., drafter_params['draft_ids']].set(draft_probs)
  accepted, bonus_B = verify.rejection(
      drafts, draft_probs, sampling.probabilities(logits_BxKxV, how),
      sampling.uniforms(accept_key, seeds_B, new_BxK), sampling.uniforms(bonus_key, seeds_B, new_BxK),
  )
  is_draft = jnp.arange(block.shape[1])[None, :] < accepted[:, None]
  tokens = jnp.where(is_draft, jnp.pad(drafts, ((0, 0), (0, 1))), bonus_B[:, None])
  return drafts, tokens, accepted, features, cache


def _verify_many(
    target, target_params, taps, drafter_params, state, anchor_B, logits_BxSxV, positions_BxK, new_BxK, how, drafting
):
  """Many drafts a row in one pass. Returns as `_verify_one`; the cache gets the nodes of the path that was taken."""
  seeds_B, (b, k) = state.rows.seeds_B, new_BxK.shape
  if drafting.tree_size:
    tree = trees.best_first(anchor_B, jax.nn.log_softmax(logits_BxSxV), drafting.tree_size)
    nodes = drafter_lib.token_ids(drafter_params, tree.tokens_BxN[:, 1:])
    tree = tree.replace(tokens_BxN=tree.tokens_BxN.at[:, 1:].set(nodes))
  else:
    probs = sampling.probabilities(logits_BxSxV, drafting.how)
    drafts_BxMxS = trees.draw_drafts(probs, _keys(state.key)[0], seeds_B, new_BxK[:, :-1], drafting.num_drafts)
    drafts_BxMxS = drafter_lib.token_ids(drafter_params, drafts_BxMxS)
    tree = trees.chains(anchor_B, drafts_BxMxS)
  at_depth = lambda x: jnp.take_along_axis(x, tree.depths_BxN, 1)
  hidden, features, nodes = target.apply(
      {'params': target_params}, tree.tokens_BxN, at_depth(positions_BxK), state.target_cache, taps,
      (positions_BxK[:, 0], trees.ancestors(tree, k - 1)),
  )
  logits_BxNxV = target_lib.logits(target_params, hidden, target.dtype)
  tokens_BxN = sampling.next_tokens(logits_BxNxV, how, state.key, seeds_B, at_depth(new_BxK))
  if drafting.tree_size:
    path_BxK, accepted = trees.walk(tree, tokens_BxN, k - 1)
  else:
    path_BxK = trees.best_chain(drafts_BxMxS, sampling.probabilities(logits_BxNxV, how))
  along = lambda x: jnp.take_along_axis(x, path_BxK.reshape(b, k, *[1] * (x.ndim - 2)), 1)
  drafts, tokens = along(tree.tokens_BxN)[:, 1:], along(tokens_BxN)
  if not drafting.tree_size:
    accepted = verify.match(drafts, tokens)
  cache = tuple(
      target_lib.write_cache(layer, along(keys), along(values), positions_BxK)
      for layer, (keys, values) in zip(state.target_cache, nodes)
  )
  return drafts, tokens, accepted, along(features), cache


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
