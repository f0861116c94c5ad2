"""Measures by hand on small traces, intervals against scipy, and a tiny model decoded for real."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dspec import evaluate
from dspec.decoding import autoregressive
from dspec.decoding import speculative
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

EOS = 9


# ---- Made-up traces ------------------------------------------------------------------------------


def _traced(prompt, answer, rounds, num_rounds=8, size=24):
  """One row as a decoder leaves it. `rounds`: (drafts, accepted before the cut, gained)."""
  num_slots = len(rounds[0][0]) if rounds else 3
  tokens = np.zeros((1, size), np.int32)
  tokens[0, : len(prompt) + len(answer)] = [*prompt, *answer]
  length = np.array([len(prompt) + len(answer)], np.int32)
  rows = autoregressive.Rows(tokens, length, length, np.array([True]), np.zeros(1, np.uint32))
  # Rounds that did not run hold drafts all the same.
  drafts = np.full((1, num_rounds, num_slots), answer[-1], np.int32)
  starts = np.full((1, num_rounds), -1, np.int32)
  accepted, gained = np.full((2, 1, num_rounds), 7, np.int32)
  anchor = len(prompt)
  for r, (draft, kept, got) in enumerate(rounds):
    drafts[0, r], starts[0, r], accepted[0, r], gained[0, r] = draft, anchor, kept, got
    anchor += got
  return rows, speculative.Trace(drafts, starts, accepted, gained)


def _stack(items):
  return jax.tree.map(lambda *leaves: np.concatenate(leaves), *items)


def _measure(prompt, answer, rounds, reference=None, question=0):
  reference = np.array(answer if reference is None else reference, np.int32)
  return evaluate.measure(*_traced(prompt, answer, rounds), 0, prompt, question, reference, (EOS,))


# The prefill gives 1. Round 1: slot 2 of 3 wrong, slot 3 right but lost. Round 2: all right.
# Round 3 accepts 3, but the EOS at its slot 2 ends the answer.
ENDED = ([5, 5], [1, 2, 3, 4, 6, 7, 8, 3, EOS], [
    ([2, 8, 4], 1, 2), ([4, 6, 7], 3, 4), ([3, EOS, 5], 3, 2)])
# Round 1: slot 3 right but lost. Round 2: no slot right. The limit of 7 cuts the last round to one
# token; its slots 2 and 3 lie outside.
LIMITED = ([6], [2, 3, 4, 3, 5, 1, 8], [
    ([8, 8, 3], 0, 1), ([8, 8, 8], 0, 1), ([3, 5, 8], 2, 3), ([8, 8, 8], 1, 1)])
# The prefill's token is the EOS.
SILENT = ([7, 8, 5], [EOS], [])


def test_record_of_a_row_cut_at_its_eos():
  record = _measure(*ENDED)
  assert record.prompt == (5, 5) and record.tokens.tolist() == ENDED[1]
  assert record.gained_R.tolist() == [2, 4, 2]
  assert record.accepted_R.tolist() == [1, 3, 2]
  assert record.inside_S.tolist() == [3, 3, 2]
  assert record.correct_S.tolist() == [3, 2, 2]
  assert record.wasted == 1
  assert (record.rounds, record.gained) == (3, 8)
  assert record.identical and record.ended


def test_record_of_a_row_cut_at_its_limit():
  record = _measure(*LIMITED)
  assert record.gained_R.tolist() == [1, 1, 3, 1]
  assert record.accepted_R.tolist() == [0, 0, 2, 1]
  assert record.inside_S.tolist() == [4, 3, 3]
  assert record.correct_S.tolist() == [2, 1, 1]
  assert record.wasted == 1
  assert record.identical and not record.ended


def test_record_without_rounds():
  record = _measure(*SILENT)
  assert (record.rounds, record.gained, record.wasted) == (0, 0, 0)
  assert record.correct_S.tolist() == record.inside_S.tolist() == [0, 0, 0]
  assert record.ended and record.tokens.tolist() == [EOS]


@pytest.mark.parametrize('reference', [
    [1, 2, 3, 4, 6, 7, 8, 4, EOS], [1, 2, 3, 4, 6, 7, 8, 3], [1, 2, 3, 4, 6, 7, 8, 3, EOS, 0]])
def test_not_identical(reference):
  assert not _measure(*ENDED, reference).identical


def test_record_of_one_row_of_several():
  rows, trace = _stack([_traced(*LIMITED), _traced(*ENDED), _traced(*LIMITED)])
  record = evaluate.measure(rows, trace, 1, ENDED[0], 4, np.array(ENDED[1]), (EOS,))
  assert (record.prompt, record.question, record.identical) == ((5, 5), 4, True)
  assert record.gained_R.tolist() == [2, 4, 2]


def test_record_as_json():
  for case in (ENDED, LIMITED, SILENT):
    record = _measure(*case, question=3)
    again = evaluate.Record.from_json(record.prompt, 3, json.loads(json.dumps(record.to_json())))
    for field in dataclasses.fields(record):
      np.testing.assert_array_equal(getattr(again, field.name), getattr(record, field.name))


def test_summary_by_hand():
  records = [_measure(*case, question=i) for i, case in enumerate((ENDED, LIMITED, SILENT))]
  summary = evaluate.summarise(records, samples=50, seed=0)
  length = summary.pop('accepted_length')
  assert length['micro'] == pytest.approx((8 + 6) / (3 + 4))
  assert length['macro'] == pytest.approx((8 / 3 + 6 / 4) / 2)
  for name in ('micro', 'macro'):
    low, high = length[f'{name}_interval']
    assert 6 / 4 <= low <= length[name] <= high <= 8 / 3
  assert summary.pop('acceptance_by_slot') == pytest.approx([5 / 7, 3 / 7, 1 / 7])
  # Accepted: 1, 3, 2 (cut) and 0, 0, 2, 1 (cut).
  assert summary.pop('accepted_distribution') == pytest.approx([2 / 7, 2 / 7, 2 / 7, 1 / 7])
  # A wrong draft ended the rounds that accepted 1, 0, 0 and 2; the second one was all right.
  assert summary.pop('chain_breaker') == pytest.approx((2 + 1 + 1 + 3) / 4)
  assert summary.pop('slot_accuracy') == pytest.approx([5 / 7, 3 / 6, 3 / 5])
  assert summary.pop('waste') == pytest.approx(2 / (14 + 2))
  assert summary.pop('ended_share') == pytest.approx(2 / 3)
  assert summary == {
      'num_prompts': 3, 'new_tokens': 14, 'rounds': 7, 'identical_prompts': 3, 'block_size': 4}


def test_no_round_at_all():
  records = [_measure(*SILENT)]
  summary = evaluate.summarise(records, samples=10, seed=0)
  assert summary['accepted_length'] == {
      'micro': 0, 'micro_interval': [0, 0], 'macro': 0, 'macro_interval': [0, 0]}
  assert summary['waste'] == summary['rounds'] == 0
  assert summary['slot_accuracy'] == summary['acceptance_by_slot'] == [0, 0, 0]
  assert summary['chain_breaker'] is None and summary['accepted_distribution'] == [0, 0, 0, 0]
  assert evaluate.gain(records, records, samples=10, seed=0) == {'micro': 0, 'interval': [0, 0]}


def test_identical_prompts_are_counted():
  records = [_measure(*ENDED), _measure(*LIMITED, [1], question=1)]
  assert evaluate.summarise(records, samples=10, seed=0)['identical_prompts'] == 1


# ---- Bootstrap -----------------------------------------------------------------------------------


def _random_records(count, mean, seed):
  """Records of the same prompts whatever the seed; every fifth without rounds."""
  rng = np.random.default_rng(seed)
  records = []
  for i in range(count):
    gained = 1 + rng.poisson(mean * (1 + i % 4) / 4, 0 if i % 5 == 2 else 3 + i % 7)
    zeros = np.zeros(15, np.int64)
    records.append(evaluate.Record(
        (i,), i, np.array([1]), gained, gained - 1, zeros, zeros, 0, True, False))
  return records


def _scipy_interval(statistic, columns, seed):
  return stats.bootstrap(
      columns, statistic, paired=True, vectorized=True, n_resamples=4000, batch=500,
      confidence_level=0.95, method='percentile', rng=np.random.default_rng(seed)
  ).confidence_interval


def test_intervals_against_scipy():
  records = _random_records(40, 2.0, seed=1)
  length = evaluate.summarise(records, samples=4000, seed=2)['accepted_length']
  sums = [np.array(column, float) for column in zip(*(
      (r.gained_R.sum(), len(r.gained_R)) for r in records if len(r.gained_R)))]
  micro = lambda gained, rounds, axis: gained.sum(axis) / rounds.sum(axis)
  macro = lambda gained, rounds, axis: (gained / rounds).mean(axis)
  for name, statistic in (('micro', micro), ('macro', macro)):
    assert length[name] == pytest.approx(statistic(*sums, axis=0))
    width = np.ptp(length[f'{name}_interval'])
    assert 0.1 < width < 2
    # Other resamples: equal up to their noise.
    expected = _scipy_interval(statistic, sums, seed=3)
    np.testing.assert_allclose(length[f'{name}_interval'], expected, atol=0.06 * width)


def test_gain_against_scipy():
  better, worse = _random_records(40, 2.6, seed=4), _random_records(40, 1.7, seed=5)
  got = evaluate.gain(better, worse, samples=4000, seed=6)
  sums = [np.array(column, float) for column in zip(*(
      (a.gained_R.sum(), len(a.gained_R), b.gained_R.sum(), len(b.gained_R))
      for a, b in zip(better, worse) if len(a.gained_R)))]
  ratio = lambda a, m, b, n, axis: (a.sum(axis) / m.sum(axis)) / (b.sum(axis) / n.sum(axis)) - 1
  assert got['micro'] == pytest.approx(ratio(*sums, axis=0))
  micro = [evaluate.summarise(records, samples=1, seed=0)['accepted_length']['micro']
           for records in (better, worse)]
  assert got['micro'] == pytest.approx(micro[0] / micro[1] - 1)
  np.testing.assert_allclose(
      got['interval'], _scipy_interval(ratio, sums, seed=7), atol=0.06 * np.ptp(got['interval']))


def test_gain_is_paired():
  # Each prompt's rounds are twice as good: the gain is sure, however different the prompts.
  worse = _random_records(30, 3.0, seed=8)
  better = [dataclasses.replace(r, gained_R=2 * r.gained_R) for r in worse]
  got = evaluate.gain(better, worse, samples=100, seed=0)
  assert got['micro'] == pytest.approx(1) and got['interval'] == pytest.approx([1, 1])


def test_gain_needs_the_same_prompts():
  records = _random_records(6, 2.0, seed=9)
  swapped = [dataclasses.replace(r, prompt=other.prompt) for r, other in zip(records, records[::-1])]
  for other in (records[:5], swapped):
    with pytest.raises(UserError, match='same prompts in the same order'):
      evaluate.gain(records, other, samples=10, seed=0)


def test_turns_and_samples_of_a_question_are_one_unit():
  rng = np.random.default_rng(11)
  gained, rounds = rng.integers(20, 60, (12, 3)), rng.integers(10, 20, (12, 3))
  zeros = np.zeros(15, np.int64)
  records = []
  for turn in range(3):  # As they are decoded: all first turns, then all second ones.
    for question in range(12):
      gained_R = np.full(rounds[question, turn], 1)
      gained_R[0] += gained[question, turn] - gained_R.sum()
      records.append(evaluate.Record(
          (question, turn), question, np.array([1]), gained_R, gained_R - 1, zeros, zeros, 0, True, False))
  assert evaluate.sums(records).tolist() == [gained.sum(1).tolist(), rounds.sum(1).tolist()]
  length = evaluate.summarise(records, samples=4000, seed=2)['accepted_length']
  sums = gained.sum(1).astype(float), rounds.sum(1).astype(float)
  micro = lambda gained, rounds, axis: gained.sum(axis) / rounds.sum(axis)
  assert length['micro'] == pytest.approx(micro(*sums, axis=0))
  assert length['macro'] == pytest.approx(np.mean(sums[0] / sums[1]))
  np.testing.assert_allclose(
      length['micro_interval'], _scipy_interval(micro, sums, seed=3), atol=0.06 * np.ptp(length['micro_interval']))


def test_mean_of_sets_against_scipy():
  ours = {name: evaluate.sums(_random_records(n, 2.5, seed=n)) for name, n in (('a', 30), ('b', 45))}
  base = {name: evaluate.sums(_random_records(n, 1.5, seed=n + 1)) for name, n in (('a', 30), ('b', 45))}
  got = evaluate.mean_of_sets(ours, base, samples=4000, seed=1)
  micro = lambda sums: sums[0].sum() / sums[1].sum()
  mean = lambda of: (micro(of['a']) + micro(of['b'])) / 2
  assert got['mean'] == pytest.approx(mean(ours))
  assert got['gain']['micro'] == pytest.approx(mean(ours) / mean(base) - 1)
  # Two samples, resampled independently, are what scipy calls unpaired.
  kept = {name: np.flatnonzero(sums[1]) for name, sums in ours.items()}

  def statistic(a, b, axis, of):
    at = lambda name, indices: [of[name][row][kept[name][indices.astype(int)]].sum(axis) for row in (0, 1)]
    (ga, ra), (gb, rb) = at('a', a), at('b', b)
    return (ga / ra + gb / rb) / 2

  interval = stats.bootstrap(
      [np.arange(len(kept['a'])), np.arange(len(kept['b']))], functools.partial(statistic, of=ours), vectorized=True,
      n_resamples=4000, confidence_level=0.95, method='percentile', rng=np.random.default_rng(5)).confidence_interval
  np.testing.assert_allclose(got['interval'], interval, atol=0.06 * np.ptp(got['interval']))
  gain = lambda a, b, axis: statistic(a, b, axis, ours) / statistic(a, b, axis, base) - 1
  interval = stats.bootstrap(
      [np.arange(len(kept['a'])), np.arange(len(kept['b']))], gain, vectorized=True,
      n_resamples=4000, confidence_level=0.95, method='percentile', rng=np.random.default_rng(6)).confidence_interval
  np.testing.assert_allclose(got['gain']['interval'], interval, atol=0.06 * np.ptp(got['gain']['interval']))
  assert evaluate.mean_of_sets(ours, None, samples=10, seed=0)['gain'] is None


def test_pooled_drafters():
  a, b = ([_measure(*case, question=i) for i, case in enumerate(cases)] for cases in ((ENDED, LIMITED), (ENDED, SILENT)))
  pooled = evaluate.pool([evaluate.Evaluation(tuple(records), 2.0, 8, 'float32') for records in (a, b)])
  assert pooled.seconds == 4 and len(pooled.records) == 4
  assert evaluate.sums(pooled.records).tolist() == [[16, 6], [6, 4]]


def test_seed_decides_the_interval():
  records = _random_records(20, 2.0, seed=10)
  interval = lambda seed: evaluate.summarise(records, samples=99, seed=seed)['accepted_length']
  assert interval(1) == interval(1) != interval(2)


# ---- Batches -------------------------------------------------------------------------------------


def _echo(calls, width):
  """A decoder's program that answers with the prompt's length, as often as its first token says, and the EOS."""

  def run(prompts_BxP, lengths_B, seeds_B):
    assert prompts_BxP.shape[1] == width
    calls.append((prompts_BxP.copy(), lengths_B.copy(), seeds_B.copy()))
    b = len(lengths_B)
    tokens = np.pad(prompts_BxP, ((0, 0), (0, 8)))
    ends = lengths_B + prompts_BxP[:, 0] + 1
    for row in range(b):
      tokens[row, lengths_B[row] : ends[row]] = lengths_B[row]
      tokens[row, ends[row] - 1] = EOS
    return autoregressive.Rows(tokens, ends, lengths_B + 8, np.ones(b, bool), np.zeros(b, np.uint32))

  return run


def _decoder(calls, batch_size=3, limit=1000):
  return evaluate.Decoder(lambda width: _echo(calls, width), batch_size, limit, (EOS,), 'float32')


def test_batches():
  calls = []
  prompts = [[1] * n for n in (2, 7, 4, 1, 300, 3, 6)]
  reference = evaluate.decode_reference(_decoder(calls), prompts, 'made up')
  # Longest first; the last batch is filled with its own row; answers come back in the given order. All answers are of
  # one length, so nothing is decoded again.
  assert [lengths.tolist() for _, lengths, _ in calls] == [[300, 7, 6], [4, 3, 2], [1, 1, 1]]
  assert [seeds.tolist() for *_, seeds in calls] == [[4, 1, 6], [2, 5, 0], [3, 3, 3]]
  for (batch, lengths, _), width in zip(calls, (512, 128, 128)):
    assert batch.shape == (3, width) and batch.dtype == lengths.dtype == np.int32
    np.testing.assert_array_equal(batch, np.arange(width) < lengths[:, None])
  assert [tokens.tolist() for tokens in reference.tokens] == [[len(p), EOS] for p in prompts]
  assert reference.prompts == tuple(map(tuple, prompts)) and reference.questions == tuple(range(7))
  assert reference.batches == ((4, 1, 6), (2, 5, 0), (3,))
  # Padding rows do not count.
  assert reference.tokens_per_second == pytest.approx(14 / reference.seconds)


def test_times_are_of_batches_of_like_answers():
  calls = []
  prompts = [[answer] * n for answer, n in ((1, 9), (5, 8), (2, 7), (4, 3), (6, 2), (3, 1))]
  reference = evaluate.decode_reference(_decoder(calls), prompts, 'made up')
  assert [lengths.tolist() for _, lengths, _ in calls] == [[9, 8, 7], [3, 2, 1], [2, 8, 3], [1, 7, 9]]
  assert reference.batches == ((4, 1, 3), (5, 2, 0))
  assert [len(tokens) for tokens in reference.tokens] == [2, 6, 3, 5, 7, 4]


def test_conversations():
  calls = []

  def follow_up(question, answers):
    assert [len(answer) for answer in answers] == [2] * len(answers)
    return [1] * (10 * question + len(answers)) if len(answers) <= question else None

  reference = evaluate.decode_reference(_decoder(calls), [[1] * 9, [1] * 5, [1] * 7], 'made up', follow_up=follow_up)
  # Question 0 has one turn, 1 has two, 2 has three.
  assert reference.questions == (0, 1, 2, 1, 2, 2)
  assert [len(prompt) for prompt in reference.prompts] == [9, 5, 7, 11, 21, 22]
  assert [tokens[0] for tokens in reference.tokens] == [9, 5, 7, 11, 21, 22]
  assert reference.batches == ((5, 4, 3), (0, 2, 1))


def test_a_stopped_evaluation_goes_on(tmp_path):
  calls, path = [], tmp_path / 'kept' / 'plain.jsonl'
  prompts = [[answer] * n for answer, n in ((1, 9), (5, 8), (2, 7), (4, 3), (6, 2), (3, 1))]
  whole = evaluate.decode_reference(_decoder(calls), prompts, 'made up', path=path)
  files = sorted(path.parent.iterdir())
  assert len(files) == 2 and len(calls) == 4
  # A kill: the second batch of answers has two of its three lines, the last one cut.
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(''.join(lines[:4]) + lines[4][:9])
  files[1].unlink()
  calls.clear()
  again = evaluate.decode_reference(_decoder(calls), prompts, 'made up', path=path)
  assert [lengths.tolist() for _, lengths, _ in calls] == [[3, 2, 1], [2, 8, 3], [1, 7, 9]]
  assert [tokens.tolist() for tokens in again.tokens] == [tokens.tolist() for tokens in whole.tokens]
  calls.clear()
  last = evaluate.decode_reference(_decoder(calls), prompts, 'made up', path=path)
  assert not calls and last.seconds == again.seconds and last.batches == again.batches


@pytest.mark.parametrize('prompts, message', [
    ([], 'no prompts'), ([[1], []], '1 to 8 tokens, these have 0 to 1'),
    ([[1], [1] * 9], 'these have 1 to 9')])
def test_prompts_that_cannot_be_decoded(prompts, message):
  with pytest.raises(UserError, match=message):
    evaluate.decode_reference(_decoder([], limit=8), prompts, 'made up')


def test_prompt_width():
  assert [evaluate.prompt_width(n, 4000) for n in (1, 128, 129, 512, 513, 2049, 4000)] == [
      128, 128, 512, 512, 2048, 4000, 4000]
  assert evaluate.prompt_width(70, 100) == 100


# ---- A tiny model --------------------------------------------------------------------------------

VOCAB, LIMIT, BLOCK = 11, 20, 4


@pytest.fixture(scope='module')
def tiny():
  """(target, params, drafter, two drafters' params), random."""
  config = target_lib.TargetConfig(
      family='llama', vocab_size=VOCAB, num_layers=2, width=16, mlp_width=24, num_heads=4,
      num_kv_heads=2, head_dim=4, rope_theta=1e4, norm_eps=1e-5, max_length=256,
      tie_embeddings=False, eos_ids=(EOS,))
  target = target_lib.Target(config)
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = jax.jit(target.init)(
      jax.random.key(7), tokens, tokens, target_lib.init_cache(config, 1, 4))['params']
  # Greedy answers of a tied random model repeat one token.
  params['lm_head'] = {'kernel': jax.random.normal(jax.random.key(8), (16, VOCAB))}
  drafter_config = drafter_lib.from_target(
      config, num_layers=1, block_size=BLOCK, target_layers=(0,), mask_token_id=10)
  drafter = drafter_lib.Drafter(drafter_config)
  features, blocks = jnp.zeros((1, 4, 16)), jnp.zeros((1, 1, BLOCK, 16))
  drafters = [
      jax.jit(drafter.init)(
          jax.random.key(seed), features, blocks, jnp.zeros((1, 1), jnp.int32))['params']
      for seed in (1, 2)]
  return target, params, drafter, drafters


@pytest.fixture(scope='module')
def decoded(tiny):
  """(reference, one evaluation a drafter) of 21 prompts in batches of 8."""
  target, params, drafter, drafters = tiny
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 9, rng.integers(1, 12)).tolist() for _ in range(21)]
  shape = {'batch_size': 8, 'max_new_tokens': LIMIT}
  plain = evaluate.compile_autoregressive(target, params, **shape)
  shapes = jax.eval_shape(lambda: drafters[0])
  fast = evaluate.compile_speculative(target, params, drafter, shapes, **shape)
  reference = evaluate.decode_reference(plain, prompts, 'tiny')
  evaluations = [
      evaluate.decode_speculatively(fast, drafter_params, reference, 'tiny')
      for drafter_params in drafters]
  return reference, evaluations


def test_reference_is_greedy(tiny, decoded):
  target, params, _, _ = tiny
  reference, _ = decoded

  @jax.jit
  def best(tokens_1xT):
    """The target's own next token at every position of a whole text, without batch or loop."""
    positions = jnp.arange(tokens_1xT.shape[1])[None]
    cache = target_lib.init_cache(target.config, 1, tokens_1xT.shape[1])
    hidden, _, _ = target.apply({'params': params}, tokens_1xT, positions, cache)
    return jnp.argmax(target_lib.logits(params, hidden[0], jnp.float32), -1)

  for prompt, answer in zip(reference.prompts, reference.tokens):
    text = [*prompt, *answer.tolist()]
    next_tokens = best(jnp.array([text + [0] * (32 - len(text))], jnp.int32))
    assert next_tokens[len(prompt) - 1 : len(text) - 1].tolist() == answer.tolist()
    assert EOS not in answer[:-1]
    assert answer[-1] == EOS or len(answer) == LIMIT


def test_measures_by_brute_force(tiny, decoded):
  target, params, drafter, drafters = tiny
  reference, evaluations = decoded
  lengths = {len(tokens) for tokens in reference.tokens}
  assert LIMIT in lengths and len(lengths) > 2  # Some end at the limit, some at their EOS.
  ended = [tokens[-1] == EOS for tokens in reference.tokens]

  @jax.jit
  def draft(drafter_params, tokens_1xT, anchor):
    """Drafts by the training forward, with the features of the whole answer."""
    positions = jnp.arange(tokens_1xT.shape[1])[None]
    cache = target_lib.init_cache(target.config, 1, tokens_1xT.shape[1])
    _, features, _ = target.apply({'params': params}, tokens_1xT, positions, cache, (0,))
    block = drafter_lib.block_tokens(tokens_1xT[:, anchor][:, None], drafter.config)
    hidden = drafter.apply(
        {'params': drafter_params}, features, target_lib.embed(params, block), anchor[None, None])
    return jnp.argmax(target_lib.logits(params, hidden[0, 0, 1:], jnp.float32), -1)

  for drafter_params, evaluation in zip(drafters, evaluations):
    gains, reached, right, inside, wasted = [], [0] * 3, [0] * 3, [0] * 3, 0
    for prompt, answer in zip(reference.prompts, reference.tokens):
      text = [*prompt, *answer.tolist()]
      padded = jnp.array([text + [0] * (32 - len(text))], jnp.int32)
      anchor, gains_here = len(prompt), []
      while anchor < len(text) - 1:
        drafts = draft(drafter_params, padded, jnp.array(anchor)).tolist()
        matches = [a == b for a, b in zip(drafts, text[anchor + 1 :])]
        accepted = (matches + [False]).index(False)
        for k, match in enumerate(matches):
          inside[k] += 1
          right[k] += match
          reached[k] += k < accepted
          wasted += match and k > accepted
        gains_here.append(min(accepted + 1, len(text) - 1 - anchor))
        anchor += gains_here[-1]
      gains.append(gains_here)
    assert [record.gained_R.tolist() for record in evaluation.records] == gains

    got = evaluate.result(evaluation, reference.tokens_per_second, samples=20, seed=0)
    rounds, total = sum(map(len, gains)), sum(map(sum, gains))
    assert 1.05 < total / rounds  # Some drafts are accepted, or little is tested.
    assert got['accepted_length']['micro'] == pytest.approx(total / rounds)
    assert got['accepted_length']['macro'] == pytest.approx(
        np.mean([sum(g) / len(g) for g in gains if g]))
    assert got['acceptance_by_slot'] == pytest.approx([n / rounds for n in reached])
    assert got['slot_accuracy'] == pytest.approx([a / b for a, b in zip(right, inside)])
    assert wasted > 0 and got['waste'] == pytest.approx(wasted / (total + wasted))
    assert got['ended_share'] == pytest.approx(np.mean(ended))
    assert got['identical_prompts'] == got['num_prompts'] == 21
    assert (got['rounds'], got['new_tokens']) == (rounds, total)
    assert (got['block_size'], got['batch_size'], got['dtype']) == (4, 8, 'float32')
    new = sum(map(len, reference.tokens))
    assert got['speculative_tokens_per_second'] == pytest.approx(new / evaluation.seconds)
    assert got['autoregressive_tokens_per_second'] == pytest.approx(new / reference.seconds)
    assert got['sums'] == [[sum(g) for g in gains], [len(g) for g in gains]]
    assert got['gain'] is None and json.loads(json.dumps(got)) == got


def test_a_replay_measures_what_decoding_does(tiny, decoded):
  target, params, drafter, drafters = tiny
  reference, evaluations = decoded
  shapes = jax.eval_shape(lambda: drafters[0])
  decoder = evaluate.compile_replay(target, params, drafter, shapes, batch_size=8, max_new_tokens=LIMIT)
  for drafter_params, evaluation in zip(drafters, evaluations):
    replayed = evaluate.decode_speculatively(decoder, drafter_params, reference, 'tiny')
    assert [r.to_json() for r in replayed.records] == [r.to_json() for r in evaluation.records]
    got, want = (evaluate.result(e, reference.tokens_per_second, samples=20, seed=0) for e in (replayed, evaluation))
    unknown = dict.fromkeys(('identical_prompts', 'speculative_tokens_per_second'))
    assert got == {**want, **unknown}


def test_drafters_share_a_reference(decoded):
  _, (first, second) = decoded
  assert [r.prompt for r in first.records] == [r.prompt for r in second.records]
  assert not all(
      np.array_equal(a.gained_R, b.gained_R) for a, b in zip(first.records, second.records))
  got = evaluate.gain(first.records, second.records, samples=50, seed=0)
  micro = [sum(r.gained for r in e.records) / sum(r.rounds for r in e.records)
           for e in (first, second)]
  assert got['micro'] == pytest.approx(micro[0] / micro[1] - 1)


def test_validation_is_the_accepted_length_of_an_evaluation(tiny, decoded, monkeypatch):
  """Of each drafter, over all rounds; and no drafter compiles it again."""
  target, params, drafter, drafters = tiny
  reference, evaluations = decoded
  compiled, compile_ = [], evaluate.compile_speculative
  monkeypatch.setattr(
      evaluate, 'compile_speculative', lambda *args, **options: compiled.append(options) or compile_(*args, **options))
  chosen = range(3, 11)
  validate = evaluate.validator(target, params, drafter, [reference.prompts[i] for i in chosen], max_new_tokens=LIMIT)
  for drafter_params, evaluation in zip(drafters, evaluations):
    sums = evaluate.sums([evaluation.records[i] for i in chosen])
    assert validate(drafter_params) == pytest.approx(sums[0].sum() / sums[1].sum(), rel=1e-12)
  assert compiled == [{'batch_size': 8, 'max_new_tokens': LIMIT}]
