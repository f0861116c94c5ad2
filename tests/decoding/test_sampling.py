"""Sampling against exact cumulative distributions, and its frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dspec.decoding import sampling
from dspec.errors import UserError

next_token = jax.jit(sampling.next_token, static_argnums=1)
LAST_BELOW_ONE = np.float32(1 - 2**-24)


def draw_probs(rng, vocab, zeros):
  """Unnormalised, over several orders of magnitude; some tokens, or whole stretches, impossible."""
  probs = rng.random(vocab).astype(np.float32) ** 4
  if zeros == 'scattered':
    probs[rng.random(vocab) < 0.6] = 0
  if zeros == 'tail':
    probs[vocab // 3:] = 0
  if zeros == 'head':
    probs[:2 * vocab // 3] = 0
  if zeros == 'all but one':
    probs[np.arange(vocab) != vocab // 2] = 0
  probs[vocab // 2] = 0.3 if zeros in ('scattered', 'all but one') else probs[vocab // 2]
  return probs


@pytest.mark.parametrize('vocab', [1, 7, 256, 300, 1000])
def test_categorical_against_exact_cumulative_sums(vocab):
  rng = np.random.default_rng(vocab)
  categorical = jax.jit(sampling.categorical)
  for zeros in ('none', 'scattered', 'tail', 'head', 'all but one'):
    probs = draw_probs(rng, vocab, zeros)
    if not probs.sum():
      continue
    exact = np.cumsum(probs.astype(np.float64))
    # At random, at both ends, and right at the steps, where rounding could go wrong.
    steps = (exact / exact[-1]).astype(np.float32)[rng.integers(0, vocab, size=300)]
    uniform = np.concatenate([
        [0, LAST_BELOW_ONE, np.nextafter(LAST_BELOW_ONE, np.float32(0))], steps,
        np.nextafter(steps, np.float32(0)), np.nextafter(steps, np.float32(2)), rng.random(97)])
    uniform = np.clip(uniform, 0, LAST_BELOW_ONE).astype(np.float32)
    got = np.asarray(categorical(jnp.tile(probs[None], (len(uniform), 1)), jnp.asarray(uniform)))
    assert got.dtype == np.int32
    assert got.min() >= 0 and got.max() < vocab
    assert (probs[got] > 0).all(), zeros
    wanted = uniform.astype(np.float64) * exact[-1]
    rounding = 2e-6 * exact[-1]
    before = np.where(got > 0, exact[np.maximum(got - 1, 0)], 0)
    assert (wanted >= before - rounding).all() and (wanted <= exact[got] + rounding).all()
    want = np.searchsorted(exact, wanted, side='right')
    clear = np.abs(exact[None, :] - wanted[:, None]).min(1) > rounding
    np.testing.assert_array_equal(got[clear], want[clear])


def test_frequencies():
  """Chi-square at a false-alarm rate of 1e-4 (for another key; this one is fixed)."""
  rng = np.random.default_rng(0)
  vocab, draws, temperature = 300, 40_000, 0.7
  logits = rng.normal(size=vocab).astype(np.float32) * 2
  logits[rng.random(vocab) < 0.3] = -np.inf
  want = np.exp(logits.astype(np.float64) / temperature)
  want *= draws / want.sum()
  got = np.zeros(vocab)
  for i in range(4):
    tokens = next_token(
        jnp.tile(jnp.asarray(logits)[None], (draws // 4, 1)), sampling.Sampling(temperature), jax.random.key(7),
        jnp.arange(draws // 4, dtype=jnp.uint32), jnp.full(draws // 4, 3 + i))
    got += np.bincount(tokens, minlength=vocab)
  assert got[np.isneginf(logits)].sum() == 0
  rare = want < 5
  observed = np.append(got[~rare], got[rare].sum())
  expected = np.append(want[~rare], want[rare].sum())
  statistic = ((observed - expected) ** 2 / expected).sum()
  assert scipy.stats.chi2.sf(statistic, len(observed) - 1) > 1e-4


def test_batching_does_not_change_a_row():
  rng = np.random.default_rng(1)
  logits = jnp.asarray(rng.normal(size=(6, 50)), jnp.float32)
  seeds, positions = jnp.arange(6, dtype=jnp.uint32), jnp.array([4, 4, 9, 1, 0, 30])
  key = jax.random.key(3)
  whole = next_token(logits, sampling.Sampling(1.0), key, seeds, positions)
  order = jnp.array([5, 0, 3])
  part = next_token(logits[order], sampling.Sampling(1.0), key, seeds[order], positions[order])
  np.testing.assert_array_equal(part, whole[order])


def test_randomness_differs_by_key_seed_and_position():
  logits = jnp.zeros((400, 1000))
  draw = lambda key, seed, position: np.asarray(next_token(
      logits, sampling.Sampling(1.0), jax.random.key(key), jnp.arange(400, dtype=jnp.uint32) + seed,
      jnp.full(400, position)))
  base = draw(0, 0, 5)
  assert len(set(base.tolist())) > 250
  for other in (draw(1, 0, 5), draw(0, 400, 5), draw(0, 0, 6)):
    assert (base == other).mean() < 0.02
  np.testing.assert_array_equal(base, draw(0, 0, 5))


def test_temperature_zero_is_argmax_and_low_temperatures_approach_it():
  rng = np.random.default_rng(2)
  logits = rng.normal(size=(8, 70)).astype(np.float32) * 30
  seeds = jnp.arange(8, dtype=jnp.uint32)
  args = (jax.random.key(0), seeds, jnp.zeros(8, jnp.int32))
  for temperature in (0.0, 1e-3):
    got = next_token(jnp.asarray(logits), sampling.Sampling(temperature), *args)
    np.testing.assert_array_equal(got, logits.argmax(-1))
    assert got.dtype == jnp.int32


# ---- What is drawn from ----------------------------------------------------------------------------


def probabilities_by_loops(logits, how):
  """float64 [V], token by token from the most probable on."""
  order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
  weights = {i: np.exp((np.float64(logits[i]) - np.float64(logits[order[0]])) / how.temperature) for i in order}
  kept = order
  if how.top_k:
    weakest = logits[order[min(how.top_k, len(order)) - 1]]
    kept = [i for i in order if logits[i] >= weakest]
  total, sofar, nucleus = sum(weights[i] for i in kept), 0.0, []
  for i in kept:
    if how.top_p < 1 and sofar >= how.top_p * total and logits[i] < logits[nucleus[-1]]:
      break
    nucleus.append(i)
    sofar += weights[i]
  probs = np.zeros(len(logits))
  for i in nucleus:
    probs[i] = weights[i] / sofar
  return probs


@pytest.mark.parametrize('how', [
    sampling.Sampling(1.0), sampling.Sampling(0.3), sampling.Sampling(2.0, top_k=1), sampling.Sampling(1.0, top_k=5),
    sampling.Sampling(0.7, top_k=500), sampling.Sampling(1.0, top_p=0.6), sampling.Sampling(1.5, top_p=1e-6),
    sampling.Sampling(1.0, top_k=7, top_p=0.8)])
def test_probabilities_by_loops(how):
  rng = np.random.default_rng(4)
  logits = (2 * rng.normal(size=(3, 5, 40))).astype(np.float32)
  logits[0, 0, :20] = logits[0, 0, 20:]  # Every token ties with another one.
  logits[1, 1, ::3] = -np.inf
  got = jax.jit(sampling.probabilities, static_argnums=1)(jnp.asarray(logits), how)
  assert got.dtype == jnp.float32
  for index in np.ndindex(3, 5):
    want = probabilities_by_loops(logits[index].tolist(), how)
    np.testing.assert_allclose(got[index], want, atol=1e-6)
    np.testing.assert_array_equal(got[index] > 0, want > 0)
  np.testing.assert_allclose(got.sum(-1), 1, atol=1e-6)


def test_probabilities_at_temperature_zero():
  logits = jnp.array([[1.0, 3.0, 3.0, -jnp.inf]])
  np.testing.assert_array_equal(sampling.probabilities(logits, sampling.GREEDY), [[0, 1, 0, 0]])


def test_tokens_are_drawn_from_the_probabilities():
  rng = np.random.default_rng(8)
  logits = jnp.tile(jnp.asarray(2 * rng.normal(size=30), jnp.float32)[None], (20_000, 1))
  how = sampling.Sampling(0.9, top_k=12, top_p=0.9)
  seeds = jnp.arange(20_000, dtype=jnp.uint32)
  tokens = next_token(logits, how, jax.random.key(1), seeds, jnp.zeros(20_000, jnp.int32))
  want = np.asarray(sampling.probabilities(logits[:1], how))[0].astype(np.float64)
  observed, possible = np.bincount(tokens, minlength=30), want > 0
  assert not observed[~possible].any() and 3 < possible.sum() < 12
  expected = 20_000 * want[possible] / want[possible].sum()
  assert scipy.stats.chisquare(observed[possible], expected).pvalue > 1e-4


@pytest.mark.parametrize('options,word', [
    ({'temperature': -0.1}, 'temperature'), ({'temperature': float('inf')}, 'temperature'),
    ({'top_k': -1}, 'top_k'), ({'top_p': 0.0}, 'top_p'), ({'top_p': 1.1}, 'top_p')])
def test_values_out_of_range(options, word):
  with pytest.raises(UserError, match=word):
    sampling.Sampling(**options)
