"""First-error loss: the breaker by brute force, the value by loops."""

import math

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from dspec.losses import SlotScores, first_error_focal_loss, first_error_from_scores


def find_breaker(block, names, flags):
  """Index of the first wrong slot of the valid run, or None."""
  for k, (row, name, flag) in enumerate(zip(block, names, flags)):
    if not flag:
      return None
    if max(range(len(row)), key=lambda v: row[v]) != name:
      return k
  return None


def by_loops(logits, labels, valid, gamma):
  slots, vocab = logits.shape[-2:]
  total = weight_sum = 0.0
  breakers = []
  for block, names, flags in zip(
      logits.reshape(-1, slots, vocab), labels.reshape(-1, slots), valid.reshape(-1, slots)):
    k = find_breaker(block, names, flags)
    breakers.append(k)
    if k is not None:
      row = [float(x) for x in block[k]]
      weight = 1.0 if gamma is None else math.exp(-k / gamma)
      total += weight * (math.log(sum(math.exp(x) for x in row)) - row[names[k]])
      weight_sum += weight
  return total / weight_sum, breakers


@pytest.mark.parametrize('gamma', [None, 2.0])
def test_value_and_breakers_match_brute_force(blocks, gamma):
  logits, labels, valid = blocks(0, lead=(5, 4))
  loss, aux = first_error_focal_loss(logits, labels, valid, gamma=gamma)
  want, breakers = by_loops(logits, labels, valid, gamma)
  assert None in breakers and len(set(breakers)) > 3  # the draw shows several cases
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  for k, row in zip(breakers, np.asarray(aux.breaker).reshape(-1, 5)):
    np.testing.assert_array_equal(np.flatnonzero(row), [] if k is None else [k])
  assert aux.num_errors == sum(k is not None for k in breakers)


def test_every_pattern_of_right_and_wrong():
  patterns = np.array([[bits >> k & 1 for k in range(4)] for bits in range(16)], bool)
  scores = SlotScores(jnp.full((16, 4), -1.0), jnp.asarray(patterns))
  _, aux = first_error_from_scores(scores, jnp.ones((16, 4), bool))
  for pattern, breaker in zip(patterns.tolist(), np.asarray(aux.breaker).tolist()):
    want = [False] * 4
    if False in pattern:
      want[pattern.index(False)] = True
    assert breaker == want


def test_only_the_breaker_has_a_gradient(blocks):
  logits, labels, valid = blocks(1, lead=(4, 4))
  (_, aux), grad = jax.value_and_grad(
      lambda x: first_error_focal_loss(x, labels, valid, gamma=4.0), has_aux=True)(logits)
  moved = np.abs(grad).max(-1) > 0
  np.testing.assert_array_equal(moved, aux.breaker)


def test_blocks_without_an_error_add_nothing(blocks):
  logits, labels, valid = blocks(2)
  right = np.broadcast_to(logits.argmax(-1)[:1], (1,) + labels.shape[1:])
  more = [np.concatenate([x, y]) for x, y in
          ((logits, logits[:1]), (labels, right), (valid, np.ones_like(valid[:1])))]
  loss, aux = first_error_focal_loss(logits, labels, valid, gamma=2.0)
  loss_more, aux_more = first_error_focal_loss(*more, gamma=2.0)
  np.testing.assert_allclose(loss, loss_more, rtol=1e-6)
  assert aux.num_errors == aux_more.num_errors


def test_no_error_at_all_is_zero_with_a_zero_gradient(blocks):
  logits, _, valid = blocks(3)
  value, grad = jax.value_and_grad(
      lambda x: first_error_focal_loss(x, logits.argmax(-1), valid)[0])(logits)
  assert value == 0
  np.testing.assert_array_equal(grad, np.zeros_like(logits))


def test_gradient_matches_finite_differences():
  # Wide margins, so that a finite step does not move the argmax.
  logits = 3 * np.eye(4, dtype=np.float32)[[[0, 1, 2], [3, 1, 0]]] + 0.1
  labels = np.array([[0, 2, 1], [3, 1, 0]])
  f = lambda x: first_error_focal_loss(x, labels, np.ones((2, 3), bool), gamma=2.0)[0]
  check_grads(f, (logits,), order=1, modes=['rev'], atol=1e-2, rtol=1e-2)
