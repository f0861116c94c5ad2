"""Chain term: loops, simulation-free closed forms, and cross-entropy with detached weights."""

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from dspec.errors import UserError
from dspec.losses import (
    SlotScores, chain_from_scores, chain_loss, chain_per_token, chain_weights, score_slots,
    valid_prefix)


def by_loops(logits, labels, valid):
  """R_chain and the number of blocks, by products of probabilities in float64."""
  slots, vocab = logits.shape[-2:]
  total, blocks = 0.0, 0
  for block, names, flags in zip(
      logits.reshape(-1, slots, vocab).astype(np.float64), labels.reshape(-1, slots),
      valid.reshape(-1, slots)):
    blocks += bool(flags[0])
    rho = 1.0
    for row, name, flag in zip(block, names, flags):
      if not flag:
        break
      rho *= np.exp(row[name]) / np.exp(row).sum()
      total += rho
  return total / (slots * blocks), blocks


def scores_of(probabilities):
  log_probs = jnp.log(jnp.asarray(probabilities, jnp.float32))
  return SlotScores(log_probs, jnp.zeros(log_probs.shape, bool))


def test_matches_plain_loops(blocks):
  logits, labels, valid = blocks(0)
  loss, aux = chain_loss(logits, labels, valid)
  want, num_blocks = by_loops(logits, labels, valid)
  np.testing.assert_allclose(loss, -want, rtol=1e-5)
  np.testing.assert_allclose(aux.expected_accepted, want * 5, rtol=1e-5)
  assert aux.num_blocks == num_blocks == 11


@pytest.mark.parametrize('p', [0.3, 0.9, 1.0])
def test_geometric_series(p):
  slots = 15
  loss, aux = chain_from_scores(scores_of(np.full((2, slots), p)), jnp.ones((2, slots), bool))
  want = slots if p == 1 else p * (1 - p**slots) / (1 - p)
  np.testing.assert_allclose(aux.expected_accepted, want, rtol=1e-5)
  np.testing.assert_allclose(loss, -want / slots, rtol=1e-5)


@settings(max_examples=5, deadline=None)
@given(num_blocks=st.integers(1, 5), slots=st.integers(1, 9), seed=st.integers(0, 99))
def test_gradient_is_that_of_cross_entropy_with_detached_weights(num_blocks, slots, seed):
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(num_blocks, slots, 6)).astype(np.float32)
  labels = rng.integers(0, 6, size=(num_blocks, slots))
  valid = rng.random((num_blocks, slots)) < 0.8
  kept = max(valid[:, 0].sum(), 1)

  def weighted_cross_entropy(logits):
    log_probs = score_slots(logits, labels).log_probs
    weights = chain_weights(log_probs, valid)  # detached inside
    return jnp.sum(weights * -jnp.where(valid_prefix(valid), log_probs, 0)) / kept

  got = jax.jit(jax.grad(lambda x: chain_loss(x, labels, valid)[0]))(logits)
  want = jax.jit(jax.grad(weighted_cross_entropy))(logits)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-7)


def test_chain_weights_by_loops():
  p = np.array([[0.9, 0.5, 0.8, 0.4], [0.7, 0.2, 0.6, 0.9]])
  valid = np.array([[1, 1, 1, 1], [1, 1, 0, 1]], bool)
  want = np.zeros((2, 4))
  for n, length in enumerate((4, 2)):
    for k in range(length):
      want[n, k] = sum(np.prod(p[n, :j + 1]) for j in range(k, length)) / 4
  np.testing.assert_allclose(chain_weights(scores_of(p).log_probs, valid), want, rtol=1e-5)


def test_chain_weights_are_detached():
  p = scores_of([[0.9, 0.5, 0.8]]).log_probs
  grad = jax.grad(lambda x: jnp.sum(chain_weights(x, jnp.ones((1, 3), bool))))(p)
  np.testing.assert_array_equal(grad, np.zeros((1, 3)))


def test_gradient_matches_finite_differences(blocks):
  logits, labels, valid = blocks(1, lead=(2, 2), slots=3, vocab=4)
  f = lambda x: 10 * chain_loss(x, labels, valid)[0]
  check_grads(f, (logits,), order=1, modes=['rev'], atol=1e-2, rtol=1e-2)


def test_products_that_vanish_have_a_finite_gradient():
  logits = np.zeros((1, 15, 2), np.float32)
  logits[..., 1] = 200.0  # p(label 0) = e^-200, below the smallest float32
  labels, valid = np.zeros((1, 15), int), np.ones((1, 15), bool)
  value, grad = jax.value_and_grad(lambda x: chain_loss(x, labels, valid)[0])(logits)
  assert value == 0
  np.testing.assert_array_equal(grad, np.zeros_like(logits))


def test_short_blocks_keep_the_divisor():
  p = np.full((1, 4), 0.5)
  loss, _ = chain_from_scores(scores_of(p), jnp.array([[True, True, False, True]]))
  np.testing.assert_allclose(loss, -(0.5 + 0.25) / 4, rtol=1e-6)


def test_strength_per_expected_accepted_token():
  np.testing.assert_allclose(chain_per_token(40, 16), 2.6667, rtol=1e-4)
  np.testing.assert_allclose(chain_per_token(18.6667, 8), chain_per_token(40, 16), rtol=1e-4)
  with pytest.raises(UserError, match='block_size'):
    chain_per_token(40, 1)
