"""Acceptance against loops, and rejection sampling against the distribution that it must give."""

import jax
from hypothesis import given, settings, strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dspec.decoding import sampling
from dspec.decoding import verify


@settings(max_examples=40, deadline=None)
@given(slots=st.sampled_from([1, 4, 15]), vocab=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_match_by_loops(slots, vocab, seed):
  rng = np.random.default_rng(seed)
  drafts = rng.integers(0, vocab, size=(5, slots))
  target = rng.integers(0, vocab, size=(5, slots + 1))
  got = verify.match(jnp.asarray(drafts), jnp.asarray(target))
  assert got.dtype == jnp.int32 and got.shape == (5,)
  for row in range(5):
    accepted = 0
    while accepted < slots and drafts[row, accepted] == target[row, accepted]:
      accepted += 1
    assert got[row] == accepted


def test_the_bonus_is_not_compared():
  target = jnp.array([[4, 5, 6, 7]] * 4)
  drafts = jnp.array([[4, 5, 6], [4, 5, 9], [9, 5, 6], [5, 6, 7]])
  np.testing.assert_array_equal(verify.match(drafts, target), [3, 2, 0, 0])


# ---- Rejection -------------------------------------------------------------------------------------

FALSE_ALARM = 1e-4  # Of a right rule, with another seed; the seed is fixed.
SLOTS, VOCAB, DRAWS = 2, 4, 60_000


def some_probs(rng, *shape):
  """Distributions over several orders of magnitude, with impossible tokens."""
  probs = rng.random(shape) ** 4
  probs[rng.random(shape) < 0.2] = 0
  probs[..., 0] += 0.05
  return (probs / probs.sum(-1, keepdims=True)).astype(np.float32)


def texts_of_rounds(rule, target, draft, seed):
  """Frequencies [V, V, V] of the first three tokens of many rounds.

  The target is a table: `target[i][drafts so far]` is its distribution after them. Positions that a round leaves
  open are drawn from the target, as later rounds would.
  """
  rng = np.random.default_rng(seed)
  drafts = np.stack([rng.choice(VOCAB, DRAWS, p=draft[s]) for s in range(SLOTS)], 1)
  rows = np.stack(
      [np.tile(target[0], (DRAWS, 1)), target[1][drafts[:, 0]], target[2][drafts[:, 0], drafts[:, 1]]], 1)
  accepted, bonus = jax.jit(rule)(
      jnp.asarray(drafts), jnp.tile(jnp.asarray(draft)[None], (DRAWS, 1, 1)), jnp.asarray(rows),
      jnp.asarray(rng.random((DRAWS, SLOTS + 1), np.float32)),
      jnp.asarray(rng.random((DRAWS, SLOTS + 1), np.float32)))
  accepted, bonus = np.asarray(accepted), np.asarray(bonus)
  assert accepted.min() >= 0 and accepted.max() <= SLOTS
  counts = np.zeros((VOCAB,) * 3)
  for text, n, last in zip(drafts.tolist(), accepted, bonus):
    text = [*text[:n], int(last)]
    while len(text) < 3:
      table = target[len(text)][tuple(text)]
      text.append(int(rng.choice(VOCAB, p=table)))
    counts[tuple(text)] += 1
  return counts


def right_by_chi_square(rule, seed):
  rng = np.random.default_rng(seed)
  target = [some_probs(rng, *(VOCAB,) * (i + 1)).astype(np.float64) for i in range(3)]
  target = [table / table.sum(-1, keepdims=True) for table in target]
  draft = some_probs(rng, SLOTS, VOCAB).astype(np.float64)
  draft /= draft.sum(-1, keepdims=True)
  counts = texts_of_rounds(rule, [t.astype(np.float32) for t in target], draft.astype(np.float32), seed)
  want = DRAWS * target[0][:, None, None] * target[1][:, :, None] * target[2]
  assert not counts[want == 0].any()
  often = want >= 5
  observed = np.append(counts[often], counts[~often].sum())
  expected = np.append(want[often], max(want[~often].sum(), 1e-9))
  statistic = ((observed - expected) ** 2 / expected).sum()
  return scipy.stats.chi2.sf(statistic, often.sum()) > FALSE_ALARM


def test_texts_of_rejection_sampling_have_the_target_distribution():
  assert all(right_by_chi_square(verify.rejection, seed) for seed in range(3))


def bonus_of_wrong_row(drafts, draft_probs, target_probs, accept, bonus):
  accepted, _ = verify.rejection(drafts, draft_probs, target_probs, accept, bonus)
  shifted = jnp.roll(target_probs, -1, axis=1)
  rows = jnp.arange(accepted.shape[0])
  residual = jnp.maximum(shifted[rows, accepted] - draft_probs[rows, jnp.minimum(accepted, SLOTS - 1)], 0)
  residual = jnp.where((accepted < SLOTS)[:, None], residual, target_probs[:, -1])
  return accepted, sampling.categorical(residual, bonus[rows, accepted])


def residual_not_renormalised(drafts, draft_probs, target_probs, accept, bonus):
  accepted, right = verify.rejection(drafts, draft_probs, target_probs, accept, bonus)
  rows = jnp.arange(accepted.shape[0])
  residual = jnp.maximum(target_probs[rows, accepted] - draft_probs[rows, jnp.minimum(accepted, SLOTS - 1)], 0)
  raw = jnp.minimum((jnp.cumsum(residual, -1) <= bonus[rows, accepted][:, None]).sum(-1), VOCAB - 1)
  return accepted, jnp.where(accepted < SLOTS, raw, right)


def bonus_of_target_itself(drafts, draft_probs, target_probs, accept, bonus):
  accepted, _ = verify.rejection(drafts, draft_probs, target_probs, accept, bonus)
  rows = jnp.arange(accepted.shape[0])
  return accepted, sampling.categorical(target_probs[rows, accepted], bonus[rows, accepted])


def one_accepted_too_many(drafts, draft_probs, target_probs, accept, bonus):
  accepted, token = verify.rejection(drafts, draft_probs, target_probs, accept, bonus)
  return jnp.minimum(accepted + 1, SLOTS), token


@pytest.mark.parametrize('bug', [
    bonus_of_wrong_row, residual_not_renormalised, bonus_of_target_itself, one_accepted_too_many])
def test_the_test_sees_a_planted_bug(bug):
  def wrong_or_impossible(seed):
    try:
      return not right_by_chi_square(bug, seed)
    except AssertionError:  # A text that the target never writes.
      return True
  assert all(wrong_or_impossible(seed) for seed in range(3))


def test_rejection_accepts_as_much_as_any_rule_can():
  """The share of accepted first slots is sum_v min(p, q), within five standard deviations."""
  rng = np.random.default_rng(5)
  p, q = some_probs(rng, 3, 6), some_probs(rng, 2, 6)
  drafts = np.stack([rng.choice(6, DRAWS, p=row / row.sum(dtype=np.float64)) for row in q.astype(np.float64)], 1)
  tile = lambda x: jnp.tile(jnp.asarray(x)[None], (DRAWS, 1, 1))
  accepted, _ = jax.jit(verify.rejection)(
      jnp.asarray(drafts), tile(q), tile(p), jnp.asarray(rng.random((DRAWS, 3), np.float32)),
      jnp.asarray(rng.random((DRAWS, 3), np.float32)))
  overlap = np.minimum(p[0], q[0]).sum()
  assert 0.05 < overlap < 0.9
  assert abs((np.asarray(accepted) > 0).mean() - overlap) < 5 * np.sqrt(overlap * (1 - overlap) / DRAWS)


def test_a_drafter_that_is_the_target_is_always_accepted():
  rng = np.random.default_rng(6)
  probs = some_probs(rng, 200, 3, 5)
  drafts = np.array([[rng.choice(5, p=p / p.sum()) for p in row[:2].astype(np.float64)] for row in probs])
  accepted, bonus = jax.jit(verify.rejection)(
      jnp.asarray(drafts), jnp.asarray(probs[:, :2]), jnp.asarray(probs),
      jnp.asarray(rng.random((200, 3), np.float32)), jnp.asarray(rng.random((200, 3), np.float32)))
  np.testing.assert_array_equal(accepted, 2)
  assert (probs[np.arange(200), 2, np.asarray(bonus)] > 0).all()
