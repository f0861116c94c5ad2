"""Sampling against exact cumulative distributions, and its frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dspec.decoding import sampling

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
        jnp.tile(jnp.asarray(logits)[None], (draws // 4, 1)), temperature, jax.random.key(7),
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
  whole = next_token(logits, 1.0, key, seeds, positions)
  order = jnp.array([5, 0, 3])
  part = next_token(logits[order], 1.0, key, seeds[order], positions[order])
  np.testing.assert_array_equal(part, whole[order])


def test_randomness_differs_by_key_seed_and_position():
  logits = jnp.zeros((400, 1000))
  draw = lambda key, seed, position: np.asarray(next_token(
      logits, 1.0, jax.random.key(key), jnp.arange(400, dtype=jnp.uint32) + seed,
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
    got = next_token(jnp.asarray(logits), temperature, *args)
    np.testing.assert_array_equal(got, logits.argmax(-1))
    assert got.dtype == jnp.int32
