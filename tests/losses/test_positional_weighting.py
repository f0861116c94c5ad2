"""Weighted cross-entropy against plain loops in float64."""

import math

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from dspec.errors import UserError
from dspec.losses import positional_weighted_cross_entropy, slot_weights


def by_loops(logits, labels, valid, gamma, reduction):
  """Also the summed weights and the slot count."""
  slots, vocab = logits.shape[-2:]
  total = weight_sum = 0.0
  blocks = count = 0
  for block, names, flags in zip(
      logits.reshape(-1, slots, vocab), labels.reshape(-1, slots), valid.reshape(-1, slots)):
    blocks += bool(flags[0])
    for k in range(1, slots + 1):
      if not flags[k - 1]:
        break
      row = [float(x) for x in block[k - 1]]
      nats = math.log(sum(math.exp(x) for x in row)) - row[names[k - 1]]
      weight = 1.0 if gamma is None else math.exp(-(k - 1) / gamma)
      total, weight_sum, count = total + weight * nats, weight_sum + weight, count + 1
  return total / (weight_sum if reduction == 'mean' else blocks), weight_sum, count


def test_slot_weights():
  np.testing.assert_allclose(
      slot_weights(4, 10.0), [1.0, 0.904837, 0.818731, 0.740818], rtol=1e-5)
  np.testing.assert_array_equal(slot_weights(3, None), np.ones(3))


@pytest.mark.parametrize('gamma', [None, 2.0])
@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_matches_plain_loops(blocks, gamma, reduction):
  logits, labels, valid = blocks(0)
  loss, aux = positional_weighted_cross_entropy(
      logits, labels, valid, gamma=gamma, reduction=reduction)
  want, weight_sum, count = by_loops(logits, labels, valid, gamma, reduction)
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  np.testing.assert_allclose(aux.weight_sum, weight_sum, rtol=1e-5)
  assert aux.num_slots == count


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_gradient_matches_finite_differences(blocks, reduction):
  logits, labels, valid = blocks(1, lead=(2, 2), slots=3, vocab=4)
  f = lambda x: positional_weighted_cross_entropy(
      x, labels, valid, gamma=3.0, reduction=reduction)[0]
  check_grads(f, (logits,), order=1, modes=['rev'], atol=1e-2, rtol=1e-2)


def test_gradient_is_weight_times_softmax_minus_onehot():
  logits = jnp.zeros((1, 2, 4))
  labels, valid = jnp.array([[0, 3]]), jnp.ones((1, 2), bool)
  grad = jax.grad(lambda x: positional_weighted_cross_entropy(x, labels, valid, gamma=1.0)[0])
  weights = np.array([1, math.exp(-1)]) / (1 + math.exp(-1))
  want = np.array([[-0.75, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, -0.75]]) * weights[:, None]
  np.testing.assert_allclose(grad(logits)[0], want, rtol=1e-5)


@pytest.mark.parametrize('gamma', [0.0, -1.0, float('nan')])
def test_gamma_must_be_above_zero(blocks, gamma):
  with pytest.raises(UserError, match='gamma'):
    slot_weights(4, gamma)
  with pytest.raises(UserError, match='gamma'):
    positional_weighted_cross_entropy(*blocks(2), gamma=gamma)


def test_unknown_reduction_is_refused(blocks):
  with pytest.raises(UserError, match="'max'.*'mean', 'sum'"):
    positional_weighted_cross_entropy(*blocks(2), reduction='max')
