"""Speculative decoding says what the target alone says, however good or bad its drafts are."""

import collections
import dataclasses
import functools
import json
import pathlib

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dspec.decoding import autoregressive
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.decoding import verify
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / 'golden' / 'smollm2_greedy.json'
WIDTH, LENGTHS, LIMIT, K = 7, (7, 3, 1, 5), 14, 4  # the batch that most tests decode, compiled once
# Examples are drawn from a fixed seed: a near tie of two logits may break either way in float32, so
# fresh ones would fail once in many thousand runs.
few = settings(max_examples=10, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def draw_prompts(seed, width=WIDTH, lengths=LENGTHS, vocab=40):
  rng = np.random.default_rng(seed)
  prompts = rng.integers(min(6, vocab - 2), vocab, size=(len(lengths), width))
  return jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32)


def oracle(module, params, prompts, lengths, limit=LIMIT):
  return autoregressive.generate(
      module, params, prompts, lengths, jax.random.key(0), max_new_tokens=limit)


def texts(rows):
  """The known tokens of each row."""
  return [np.asarray(rows.tokens_BxT[i, :n]) for i, n in enumerate(rows.lengths_B)]


def assert_same(got, want):
  np.testing.assert_array_equal(got.lengths_B, want.lengths_B)
  np.testing.assert_array_equal(got.tokens_BxT, want.tokens_BxT)
  assert got.done_B.all()


def check_trace(trace, rows, prompt_lengths, block_size):
  """Recomputes the rounds from drafts and final text alone; returns how many each row had."""
  drafts, starts, accepted, gained = (
      np.asarray(x) for x in (
          trace.drafts_BxRxS, trace.starts_BxR, trace.accepted_BxR, trace.gained_BxR))
  assert drafts.shape == (*starts.shape, block_size - 1)
  counts = []
  for row, text in enumerate(texts(rows)):
    known, r = int(prompt_lengths[row]) + 1, 0  # the token of the prefill
    while known < len(text):
      assert starts[row, r] == known - 1
      rest = text[known:]
      right = 0
      while right < min(block_size - 1, len(rest)) and drafts[row, r, right] == rest[right]:
        right += 1
      if right < len(rest):
        assert accepted[row, r] == right
      else:  # cut by the end of the row: what the target would have said next is not in its text
        assert right <= accepted[row, r] <= block_size - 1
      assert gained[row, r] == min(right + 1, len(rest))
      known, r = known + gained[row, r], r + 1
    assert known == len(text)
    np.testing.assert_array_equal(starts[row, r:], -1)
    np.testing.assert_array_equal(gained[row, r:], 0)
    np.testing.assert_array_equal(accepted[row, r:], 0)
    assert 1 + gained[row].sum() == len(text) - prompt_lengths[row]
    counts.append(r)
  return counts


def script(rng, want, share, block_size=K, vocab=40):
  """Drafts [B, L] of which a `share` is the target's own; random ones behind the end of a row."""
  b, size = want.tokens_BxT.shape
  tokens = rng.integers(0, vocab, size=(b, size + 2 * block_size))
  for row, text in enumerate(texts(want)):
    right = rng.random(len(text)) < share
    tokens[row, :len(text)] = np.where(right, text, tokens[row, :len(text)])
  return tokens


@pytest.fixture(scope='session')
def speculate(make_target, make_drafter, scripted):
  """A function (params, prompts, lengths, tokens, ...) that decodes with written-down drafts."""
  module, _ = make_target(40, 0)

  def run(
      params, prompts, lengths, tokens, block_size=K, limit=LIMIT, generate=speculative.generate):
    drafter, drafter_params = make_drafter(module.config, block_size, 0)
    drafter, drafter_params = scripted(
        drafter, drafter_params, params, tokens, np.ones(tokens.shape, bool))
    return generate(
        module, params, drafter, drafter_params, prompts, lengths, max_new_tokens=limit)

  return run


@few
@given(seed=seeds, share=st.sampled_from([0.0, 0.5, 0.8, 1.0]))
def test_equal_for_any_share_of_right_drafts(make_target, speculate, seed, share):
  module, params = make_target(40, seed)
  prompts, lengths = draw_prompts(seed)
  want = oracle(module, params, prompts, lengths)
  got, trace = speculate(params, prompts, lengths, script(np.random.default_rng(seed), want, share))
  assert_same(got, want)
  rounds = check_trace(trace, got, LENGTHS, K)
  if share == 1:
    new = np.asarray(want.lengths_B) - LENGTHS
    np.testing.assert_array_equal(rounds, -(-(new - 1) // K))


@few
@given(seed=seeds)
def test_equal_with_a_real_drafter(make_target, make_drafter, seed):
  """Five tokens, so that random drafts are often right."""
  module, params = make_target(5, seed)
  drafter, drafter_params = make_drafter(module.config, K, seed + 1)
  prompts, lengths = draw_prompts(seed, vocab=5)
  got, trace = speculative.generate(
      module, params, drafter, drafter_params, prompts, lengths, max_new_tokens=LIMIT)
  assert_same(got, oracle(module, params, prompts, lengths))
  check_trace(trace, got, LENGTHS, K)


def test_some_drafts_of_a_real_drafter_are_accepted(make_target, make_drafter):
  """So the test above is not one of empty prefixes."""
  lengths_seen = set()
  for seed in range(6):
    module, params = make_target(5, seed)
    drafter, drafter_params = make_drafter(module.config, K, seed + 1)
    prompts, lengths = draw_prompts(seed, vocab=5)
    _, trace = speculative.generate(
        module, params, drafter, drafter_params, prompts, lengths, max_new_tokens=LIMIT)
    lengths_seen |= set(np.asarray(trace.accepted_BxR)[np.asarray(trace.starts_BxR) >= 0].tolist())
  assert lengths_seen >= {0, 1, 2}


@few
@given(seed=seeds, drafting=st.sampled_from([
    speculative.Drafting(), speculative.Drafting(tree_size=4),
    speculative.Drafting(sampling.Sampling(1.0), num_drafts=3)]))
def test_a_draft_vocabulary_changes_drafts_alone(make_target, make_drafter, seed, drafting):
  module, params = make_target(5, seed)
  prompts, lengths = draw_prompts(seed, vocab=5)
  want = oracle(module, params, prompts, lengths)
  traces = []
  for ids in ((), (0, 1, 2, 3, 4), (1, 3, 4)):
    drafter, drafter_params = make_drafter(module.config, K, seed + 1, ids)
    got, trace = speculative.generate(
        module, params, drafter, drafter_params, prompts, lengths, max_new_tokens=LIMIT, drafting=drafting)
    assert_same(got, want)
    traces.append(trace)
  none, whole, some = traces
  jax.tree.map(np.testing.assert_array_equal, none, whole)
  ran = np.asarray(some.starts_BxR) >= 0
  taken = np.asarray(some.drafts_BxRxS)[ran]
  if drafting.tree_size:  # Behind the end of its path there is the anchor.
    taken = taken[np.arange(K - 1)[None] < np.asarray(some.accepted_BxR)[ran][:, None]]
  assert set(taken.ravel().tolist()) <= {1, 3, 4}


def test_drafts_are_the_most_probable_of_the_draft_vocabulary(make_target, make_drafter, uncached):
  module, params = make_target(40, 2, mute=True)
  ids = (3, 7, 8, 20, 33, 39)
  drafter, drafter_params = make_drafter(module.config, K, 2, ids)
  prompts, lengths = draw_prompts(2)
  rows, trace = speculative.generate(
      module, params, drafter, drafter_params, prompts, lengths, max_new_tokens=LIMIT)
  _, features = uncached(module, params, rows.tokens_BxT, drafter.config.target_layers)
  logits = np.asarray(training_drafts(
      drafter, drafter_params, params, module, rows.tokens_BxT, features, jnp.maximum(trace.starts_BxR, 0)))
  ran = np.asarray(trace.starts_BxR) >= 0
  wanted = np.array(ids)[logits[..., list(ids)].argmax(-1)]
  np.testing.assert_array_equal(np.asarray(trace.drafts_BxRxS)[ran], wanted[ran])
  assert len(set(wanted[ran].ravel().tolist())) > 3


# Two chunks and two views, with rows whose anchors and ends lie on both sides of position 64.
LONG = (70, (1, 70, 60), 9, 3)


# One token; a prompt of one chunk, and a block longer than the limit.
@pytest.mark.parametrize('width,lengths,limit,block_size', [
    (4, (1, 4), 1, 8), (64, (64, 59), 3, 5), LONG])
def test_shapes_and_limits(make_target, speculate, width, lengths, limit, block_size):
  for seed in range(2):
    module, params = make_target(40, seed)
    prompts, lengths = draw_prompts(seed, width, lengths)
    want = oracle(module, params, prompts, lengths, limit)
    for share in (0.0, 0.7, 1.0):
      tokens = script(np.random.default_rng(seed), want, share, block_size)
      got, trace = speculate(params, prompts, lengths, tokens, block_size, limit)
      assert_same(got, want)
      check_trace(trace, got, np.asarray(lengths), block_size)


def rename(params, a, b):
  """The same target with two token ids exchanged."""
  order = np.arange(40)
  order[[a, b]] = b, a
  return {
      **params, 'embed': {'embedding': params['embed']['embedding'][order]},
      'lm_head': {'kernel': params['lm_head']['kernel'][:, order]}}


@pytest.mark.parametrize('share', [0.0, 0.75, 1.0])
def test_eos_at_every_position(make_target, speculate, share):
  """A target that never ends is renamed so that its j-th token is an EOS: in any slot."""
  module, params = make_target(40, 0, mute=True)
  eos_ids = module.config.eos_ids
  assert len(eos_ids) == 2
  prompts, lengths = draw_prompts(3)
  endless = oracle(module, params, prompts, lengths)
  np.testing.assert_array_equal(endless.lengths_B - lengths, LIMIT)
  outputs = [text[n:].tolist() for text, n in zip(texts(endless), LENGTHS)]
  for j in range(LIMIT):
    token = next(out[j] for out in outputs if out[j] not in out[:j])
    eos = eos_ids[j % 2]
    swap = lambda x: np.where(np.asarray(x) == token, eos, np.where(np.asarray(x) == eos, token, x))
    tokens = script(np.random.default_rng(j), endless, share)
    # Drafts go on being right behind the EOS.
    got, trace = speculate(
        rename(params, token, eos), jnp.asarray(swap(prompts)), lengths, swap(tokens))
    assert got.done_B.all()
    for text, out, length in zip(texts(got), outputs, LENGTHS):
      new = out.index(token) + 1 if token in out else LIMIT
      np.testing.assert_array_equal(text[length:], swap(out[:new]))
    check_trace(trace, got, LENGTHS, K)


def test_a_row_does_not_depend_on_its_neighbours(make_target, speculate):
  module, params = make_target(40, 7)
  prompts, lengths = draw_prompts(7)
  want = oracle(module, params, prompts, lengths)
  tokens = script(np.random.default_rng(7), want, 0.7)
  got, trace = speculate(params, prompts, lengths, tokens)
  order = np.array([2, 0, 3, 1])
  other, other_trace = speculate(params, prompts[order], lengths[order], tokens[order])
  unseeded = lambda rows: rows.replace(seeds_B=jnp.zeros(4))  # A row's seed is its number.
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a)[order], b),
               (unseeded(got), trace), (unseeded(other), other_trace))


def test_accepting_one_token_too_many_is_caught(make_target, speculate, monkeypatch):
  """The equality above has teeth: with a planted bias it fails."""
  module, params = make_target(40, 1)
  prompts, lengths = draw_prompts(1)
  want = oracle(module, params, prompts, lengths)
  tokens = script(np.random.default_rng(1), want, 0.6)
  honest = verify.match
  monkeypatch.setattr(
      verify, 'match', lambda drafts, best: jnp.minimum(honest(drafts, best) + 1, drafts.shape[1]))

  def generate(*args, max_new_tokens):  # another function, so that nothing compiled before is used
    return speculative.generate.__wrapped__(*args, max_new_tokens=max_new_tokens)

  biased = jax.jit(generate, static_argnums=(0, 2), static_argnames='max_new_tokens')
  got, _ = speculate(params, prompts, lengths, tokens, generate=biased)
  with pytest.raises(AssertionError):
    assert_same(got, want)


@pytest.mark.parametrize('changes, width, limit, drafting, text', [
    ({'width': 12}, 7, 14, {}, 'width: the drafter wants 12, the target has 16'),
    ({'target_layers': (0, 2)}, 7, 14, {}, 'layers to read: the drafter wants 3, the target has 2'),
    ({'vocab_size': 41}, 7, 14, {}, 'tokens to draft: the drafter wants 41, the target has 40'),
    ({'mask_token_id': 40}, 7, 14, {}, 'a mask token: the drafter wants 41, the target has 40'),
    ({}, 0, 14, {}, 'at least 1 token'),
    ({}, 100, 25, {}, 'up to 100 tokens, 25 new ones and a block of 4 take 129 positions; the context of the target has 128'),
    ({}, 7, 14, {'tree_size': 128}, 'tree_size is 128: larger than the context of the target, 128 positions'),
    ({'vocab_size': 2}, 7, 14, {'tree_size': 15}, '3 slots of 2 tokens make only 14 different drafts'),
])
def test_what_cannot_be_decoded_is_refused(make_target, make_drafter, changes, width, limit, drafting, text):
  module, params = make_target(40, 0)
  drafter, drafter_params = make_drafter(module.config, K, 0)
  drafter = drafter_lib.Drafter(dataclasses.replace(drafter.config, **changes))
  if drafter.config.vocab_size:
    drafter_params = {**drafter_params, 'draft_ids': jnp.arange(drafter.config.vocab_size)}
  prompts = jnp.ones((2, width), jnp.int32)
  with pytest.raises(UserError) as error:
    speculative.generate(
        module, params, drafter, drafter_params, prompts, jnp.full(2, width), max_new_tokens=limit,
        drafting=speculative.Drafting(**drafting))
  assert text in str(error.value)


# ---- What only imported drafters have ---------------------------------------------------------------


DFLASH2 = {'conv_taps': 2, 'conv_group': 4, 'selector_rank': 3, 'selector_candidates': 3}


@pytest.fixture(scope='session')
def make_imported():
  """A function (target config, seed, changes of the config) -> (module, params) of a random drafter."""

  def make(target_config, seed, changes):
    config = drafter_lib.from_target(
        target_config, num_layers=2, block_size=K, target_layers=(0,), mask_token_id=1)
    config = dataclasses.replace(config, **changes)
    module = drafter_lib.Drafter(config)
    zeros = jnp.zeros((1, 2, config.width)), jnp.zeros((1, 1, K, config.width)), jnp.zeros((1, 1), jnp.int32)
    shapes = dict(jax.eval_shape(module.init, jax.random.key(0), *zeros)['params'])
    if config.selector_rank:
      shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
      rows = shape(target_config.vocab_size, config.selector_rank)
      shapes['selector'] = {
          'predecessor': rows, 'successor': rows, 'projection': {'kernel': shape(config.width, config.selector_rank)}}
    rng = np.random.default_rng(seed)
    draw = lambda x: 1.5 * rng.normal(size=x.shape) / np.sqrt(x.shape[0]) if len(x.shape) > 1 else np.ones(x.shape)
    return module, jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)

  return make


@pytest.mark.parametrize('changes, drafting', [
    (DFLASH2, speculative.Drafting()),
    (DFLASH2, speculative.Drafting(sampling.Sampling(1.0))),
    (DFLASH2, speculative.Drafting(sampling.Sampling(1.0), num_drafts=2)),
    ({'layer_windows': (3, 0), 'causal_layers': (0,), 'embedding_scale': 2.0, 'logit_scale': 0.5, 'logit_softcap': 2.0},
     speculative.Drafting())])
def test_imported_drafters_change_drafts_alone(make_target, make_imported, changes, drafting):
  module, params = make_target(9, 3)
  prompts, lengths = draw_prompts(3, vocab=9)
  drafter, drafter_params = make_imported(module.config, 4, changes)
  got, trace = speculative.generate(
      module, params, drafter, drafter_params, prompts, lengths, jax.random.key(1), max_new_tokens=LIMIT,
      drafting=drafting)
  assert_same(got, oracle(module, params, prompts, lengths))
  if drafting.is_single:
    check_trace(trace, got, LENGTHS, K)


def test_a_tree_holds_no_more_than_the_selector_lets_through(make_target, make_imported):
  module, params = make_target(9, 3)
  drafter, drafter_params = make_imported(module.config, 4, DFLASH2)
  prompts, lengths = draw_prompts(3, vocab=9)
  decode = lambda size: speculative.generate(
      module, params, drafter, drafter_params, prompts, lengths, max_new_tokens=LIMIT,
      drafting=speculative.Drafting(tree_size=size))
  assert_same(decode(3 + 9 + 27)[0], oracle(module, params, prompts, lengths))
  with pytest.raises(UserError, match='make only 39 different drafts'):
    decode(40)


def test_the_anchors_slot_predicts_the_first_token(make_target, make_imported, uncached):
  """Three slots, three drafts: those of all slots of the training forward, the anchor's among them."""
  module, params = make_target(9, 5)
  drafter, drafter_params = make_imported(module.config, 6, {'from_anchor': True})
  prompts, lengths = draw_prompts(5, vocab=9)
  rows, trace = speculative.generate(
      module, params, drafter, drafter_params, prompts, lengths, max_new_tokens=LIMIT)
  assert_same(rows, oracle(module, params, prompts, lengths))
  assert trace.drafts_BxRxS.shape[-1] == drafter.config.num_slots == K - 1
  _, features = uncached(module, params, rows.tokens_BxT, (0,))
  for row, start in enumerate(np.asarray(trace.starts_BxR[:, 1])):
    if start < 0:
      continue
    anchors = jnp.array([[start]])
    tokens = drafter_lib.block_tokens(rows.tokens_BxT[row][anchors], drafter.config)
    hidden = drafter.apply({'params': drafter_params}, features[row][None], target_lib.embed(params, tokens), anchors)
    logits = target_lib.logits(params, hidden[0, 0], jnp.float32)
    assert logits.shape == (K - 1, 9)
    np.testing.assert_array_equal(trace.drafts_BxRxS[row, 1], logits.argmax(-1))


# ---- Above temperature 0 ---------------------------------------------------------------------------


@few
@given(seed=seeds, how=st.sampled_from([
    sampling.Sampling(1.0), sampling.Sampling(0.6, top_k=3), sampling.Sampling(1.5, top_p=0.7)]))
def test_matching_says_what_plain_sampling_says(make_target, make_drafter, seed, how):
  """Token for token, for each position has its own random number."""
  module, params = make_target(5, seed)
  drafter, drafter_params = make_drafter(module.config, K, seed + 1)
  prompts, lengths = draw_prompts(seed, vocab=5)
  key = jax.random.key(seed)
  want = autoregressive.generate(module, params, prompts, lengths, key, max_new_tokens=LIMIT, how=how)
  got, trace = speculative.generate(
      module, params, drafter, drafter_params, prompts, lengths, key, max_new_tokens=LIMIT, how=how)
  assert_same(got, want)
  check_trace(trace, got, LENGTHS, K)


DRAFTINGS = [
    speculative.Drafting(), speculative.Drafting(sampling.Sampling(1.0), num_drafts=2),
    speculative.Drafting(sampling.Sampling(0.7), num_drafts=5), speculative.Drafting(tree_size=1),
    speculative.Drafting(tree_size=4)]


# Every example is compiled anew.
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=seeds, lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), block_size=st.integers(2, 5),
    limit=st.sampled_from([0, 1, 2, 9]), drafting=st.sampled_from(DRAFTINGS), temperature=st.sampled_from([0.0, 1.0]))
def test_every_mechanism_in_every_shape(
    make_target, make_drafter, seed, lengths, block_size, limit, drafting, temperature):
  """A target of seven tokens, two of which end a row, so that rows end early and drafts are often right."""
  module, params = make_target(7, seed)
  drafter, drafter_params = make_drafter(module.config, block_size, seed + 1)
  prompts, lengths = draw_prompts(seed, max(lengths), lengths, vocab=7)
  options = {'max_new_tokens': limit, 'how': sampling.Sampling(temperature)}
  key = jax.random.key(seed)
  want = autoregressive.generate(module, params, prompts, lengths, key, **options)
  got, trace = speculative.generate(
      module, params, drafter, drafter_params, prompts, lengths, key, drafting=drafting, **options)
  assert_same(got, want)
  gained = np.asarray(trace.gained_BxR).sum(-1)
  np.testing.assert_array_equal(gained, np.maximum(np.asarray(want.lengths_B - lengths) - 1, 0))


SAMPLES, NEW, FALSE_ALARM = 20_000, 3, 1e-4


def exact_texts(logits_of, prompt, how, eos_ids):
  """{text: probability} of every continuation of at most NEW tokens, by enumeration, float64."""
  texts = {(): 1.0}
  for _ in range(NEW):
    grown = {}
    for text, probability in texts.items():
      if text and text[-1] in eos_ids:
        grown[text] = probability
        continue
      row = np.asarray(sampling.probabilities(logits_of([*prompt, *text])[None], how), np.float64)[0]
      for token in np.flatnonzero(row):
        grown[(*text, int(token))] = probability * row[token] / row.sum()
    texts = grown
  return texts


def chi_square(found, exact):
  """p-value of the counts `found`, or 0 for a text that is impossible."""
  if any(text not in exact for text in found):
    return 0.0
  total = sum(found.values())
  often = [text for text in exact if total * exact[text] >= 5]
  observed = [found.get(text, 0) for text in often]
  expected = [total * exact[text] for text in often]
  observed.append(total - sum(observed))
  expected.append(max(total - sum(expected), 1e-9))
  statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected))
  return scipy.stats.chi2.sf(statistic, len(often))


def sampled_texts(generate, target, drafter, prompt, how, draft):
  module, params = target
  prompts = jnp.tile(jnp.asarray(prompt, jnp.int32)[None], (SAMPLES, 1))
  rows, trace = generate(
      module, params, *drafter, prompts, jnp.full(SAMPLES, len(prompt)), jax.random.key(3), max_new_tokens=NEW,
      how=how, drafting=speculative.Drafting(draft))
  tokens, lengths = np.asarray(rows.tokens_BxT), np.asarray(rows.lengths_B)
  accepted = np.asarray(trace.accepted_BxR)[:, 0].mean()
  return collections.Counter(
      tuple(row[len(prompt):n].tolist()) for row, n in zip(tokens, lengths)), accepted


@pytest.fixture(scope='module')
def distribution(make_target, make_drafter, uncached):
  """A function (generate, how, draft, seed) -> p-value of whole texts, through all of the decoder."""

  def p_value(generate, how, draft, seed=2, draft_ids=()):
    module, params = target = make_target(5, seed)
    drafter = make_drafter(module.config, 3, seed + 1, draft_ids)
    prompt = [3, 1, 4]
    logits_of = lambda text: uncached(module, params, np.array([text + [0] * (6 - len(text))]))[0][0, len(text) - 1]
    exact = exact_texts(logits_of, prompt, how, module.config.eos_ids)
    assert len(exact) > 10 and abs(sum(exact.values()) - 1) < 1e-9
    found, accepted = sampled_texts(generate, target, drafter, prompt, how, draft)
    assert 0.05 < accepted < 1.95  # Some drafts are accepted, some are not.
    return chi_square(found, exact)

  return p_value


@pytest.mark.parametrize('how,draft,draft_ids', [
    (sampling.Sampling(3.0), sampling.GREEDY, ()),
    (sampling.Sampling(3.0), sampling.Sampling(3.0), ()),
    (sampling.Sampling(3.0), sampling.Sampling(3.0), (0, 1, 4)),
    (sampling.Sampling(4.0, top_k=3), sampling.Sampling(2.0), ()),
    (sampling.Sampling(3.0, top_p=0.8), sampling.Sampling(4.0, top_k=2), ()),
])
def test_texts_have_the_distribution_of_the_target(distribution, how, draft, draft_ids):
  assert distribution(speculative.generate, how, draft, draft_ids=draft_ids) > FALSE_ALARM


def test_a_wrong_rule_shows_in_the_texts(distribution, monkeypatch):
  """The whole chain, not the rule alone: the bonus is drawn from the target instead of what is left of it."""
  honest = verify.rejection

  def biased(drafts, q, p, accept, bonus):
    accepted, _ = honest(drafts, q, p, accept, bonus)
    rows = jnp.arange(accepted.shape[0])
    return accepted, sampling.categorical(p[rows, accepted], bonus[rows, accepted])

  monkeypatch.setattr(verify, 'rejection', biased)

  def generate(*args, **options):  # Another function, so that nothing compiled before is used.
    return speculative.generate.__wrapped__(*args, **options)

  generate = jax.jit(generate, static_argnums=(0, 2), static_argnames=('max_new_tokens', 'how', 'drafting'))
  assert distribution(generate, sampling.Sampling(3.0), sampling.Sampling(3.0)) < FALSE_ALARM


# ---- Against training and the real model -----------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 3))
def training_drafts(drafter, drafter_params, target_params, target, text, features, anchors):
  blocks = drafter_lib.block_tokens(
      jnp.take_along_axis(text, anchors, 1), drafter.config)
  hidden = drafter.apply(
      {'params': drafter_params}, features, target_lib.embed(target_params, blocks), anchors)
  return target_lib.logits(target_params, hidden[:, :, 1:], target.dtype)


@pytest.mark.parametrize('width,lengths,limit,block_size', [(WIDTH, LENGTHS, LIMIT, K), LONG])
def test_drafts_are_those_of_the_training_forward(
    make_target, make_drafter, scripted, uncached, width, lengths, limit, block_size):
  """At every round, from features of the final text: nothing stale or shifted in its cache.

  Part of the positions is drafted from the script, so that accepted prefixes of all lengths occur.
  """
  compared, accepted = 0, set()
  for seed in range(6):
    module, params = make_target(40, seed, mute=True)
    inner, inner_params = make_drafter(module.config, block_size, seed)
    prompts, lengths = draw_prompts(seed, width, lengths)
    want = oracle(module, params, prompts, lengths, limit)
    rng = np.random.default_rng(seed)
    tokens = script(rng, want, 0.9, block_size)
    use = rng.random(tokens.shape) < 0.75
    drafter, drafter_params = scripted(inner, inner_params, params, tokens, use)
    got, trace = speculative.generate(
        module, params, drafter, drafter_params, prompts, lengths, max_new_tokens=limit)
    assert_same(got, want)
    check_trace(trace, got, np.asarray(lengths), block_size)

    _, features = uncached(module, params, got.tokens_BxT, inner.config.target_layers)
    starts = np.asarray(trace.starts_BxR)
    logits = np.asarray(training_drafts(
        inner, inner_params, params, module, got.tokens_BxT, features,
        jnp.maximum(trace.starts_BxR, 0)))
    accepted |= set(np.asarray(trace.accepted_BxR)[starts >= 0].tolist())
    for row, r in np.argwhere(starts >= 0):
      for k in range(1, block_size):
        if not use[row, starts[row, r] + k]:
          assert trace.drafts_BxRxS[row, r, k - 1] == logits[row, r, k - 1].argmax()
          compared += 1
  assert compared > 30
  assert accepted == set(range(block_size))


def test_append_prefix():
  rows = autoregressive.Rows(
      tokens_BxT=jnp.full((5, 6), 9), lengths_B=jnp.array([1, 2, 4, 3, 2]),
      limits_B=jnp.array([6, 6, 6, 6, 6]), done_B=jnp.array([False, False, False, True, False]),
      seeds_B=jnp.zeros(5, jnp.uint32))
  block = jnp.array([[1, 3, 2], [1, 2, 2], [1, 3, 4], [1, 1, 1], [7, 1, 1]])
  got = speculative.append_prefix(rows, block, jnp.array([2, 3, 3, 3, 1]), (2, 7))
  np.testing.assert_array_equal(got.tokens_BxT, [
      [9, 1, 3, 9, 9, 9],  # two counted; the EOS is behind them
      [9, 9, 1, 2, 9, 9],  # cut behind the first EOS
      [9, 9, 9, 9, 1, 3],  # cut at the limit
      [9, 9, 9, 9, 9, 9],  # done before
      [9, 9, 7, 9, 9, 9]])
  np.testing.assert_array_equal(got.lengths_B, [3, 4, 6, 3, 3])
  np.testing.assert_array_equal(got.done_B, [False, True, True, True, True])


def test_on_a_real_target(smollm2, make_drafter, scripted):
  """SmolLM2 in float32; the drafts are a random drafter's, and right ones in between."""
  config, params, _ = smollm2
  module = target_lib.Target(config)
  golden = json.loads(GOLDEN.read_text())['prompts']
  width = max(len(p['prompt_ids']) for p in golden)
  prompts = jnp.asarray([p['prompt_ids'] + [0] * (width - len(p['prompt_ids'])) for p in golden])
  lengths = jnp.asarray([len(p['prompt_ids']) for p in golden])
  # What `autoregressive.generate` said; tests/models/test_target.py holds it to that.
  limit = 16
  want = [p['prompt_ids'] + p['greedy_ids'][:limit] for p in golden]
  rng = np.random.default_rng(0)
  tokens = np.zeros((2, width + limit + 16), int)
  for row, text in enumerate(want):
    tokens[row, :len(text)] = text
  inner, inner_params = make_drafter(config, 8, 0)
  drafter, drafter_params = scripted(
      inner, inner_params, params, tokens, rng.random(tokens.shape) < 0.7)
  got, trace = speculative.generate(
      module, params, drafter, drafter_params, prompts, lengths, max_new_tokens=limit)
  for text, wanted in zip(texts(got), want):
    np.testing.assert_array_equal(text, wanted)
  rounds = check_trace(trace, got, np.asarray(lengths), 8)
  assert max(rounds) < 15 and min(rounds) > 2
