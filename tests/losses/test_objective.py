"""The weighted sum of the terms, what it reports, and what may not change it."""

import dataclasses
import math

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.errors import UserError
from dspec.losses import (
    Objective, SlotScores, chain_loss, first_error_focal_loss, objective, objective_from_logits,
    positional_weighted_cross_entropy, score_slots_chunked, valid_prefix)

PAPER = Objective(gamma=10.0, first_error=0.3, chain=40.0)


def value_and_grad(logits, labels, valid, spec):
  (loss, aux), grad = jax.value_and_grad(
      lambda x: objective_from_logits(x, labels, valid, spec), has_aux=True)(logits)
  return loss, aux, np.asarray(grad)


@pytest.mark.parametrize('slots, chain', [(15, 40.0), (7, 18.6667), (3, 8.0)])
def test_is_the_weighted_sum_with_chain_rescaled_to_the_block_size(blocks, slots, chain):
  batch = blocks(0, slots=slots)
  loss, aux = objective_from_logits(*batch, PAPER)
  terms = (
      positional_weighted_cross_entropy(*batch, gamma=10.0)[0],
      first_error_focal_loss(*batch, gamma=10.0)[0],
      chain_loss(*batch)[0],
  )
  np.testing.assert_allclose(
      loss, terms[0] + 0.3 * terms[1] + chain * terms[2], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose((aux.cross_entropy, aux.first_error, aux.chain), terms, rtol=1e-5)


def test_one_more_expected_token_is_worth_the_same_at_every_block_size():
  spec = Objective(chain=40.0)

  def chain_part(slots, sure):
    """The chain's part of L for a block whose first `sure` slots are certain, the rest hopeless."""
    log_probs = jnp.where(jnp.arange(slots)[None] < sure, 0.0, -100.0)
    scores = SlotScores(log_probs, jnp.zeros((1, slots), bool))
    loss, aux = objective(scores, jnp.ones((1, slots), bool), spec)
    return loss - aux.cross_entropy

  for slots in (4, 7, 15):
    np.testing.assert_allclose(chain_part(slots, 3) - chain_part(slots, 2), -40 / 15, rtol=1e-4)


def test_gradient_is_the_weighted_sum_of_gradients(blocks):
  logits, labels, valid = blocks(1, slots=15)
  grad_of = lambda f, **options: jax.grad(lambda x: f(x, labels, valid, **options)[0])(logits)
  want = (
      grad_of(positional_weighted_cross_entropy, gamma=10.0)
      + 0.3 * grad_of(first_error_focal_loss, gamma=10.0) + 40 * grad_of(chain_loss))
  np.testing.assert_allclose(
      value_and_grad(logits, labels, valid, PAPER)[2], want, rtol=1e-4, atol=1e-6)


def test_reduction_sum_is_per_block(blocks):
  batch = blocks(2)
  loss, _ = objective_from_logits(*batch, Objective(gamma=4.0, reduction='sum'))
  want, _ = positional_weighted_cross_entropy(*batch, gamma=4.0, reduction='sum')
  mean, _ = positional_weighted_cross_entropy(*batch, gamma=4.0)
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  assert loss > 1.5 * mean


def test_a_weight_of_zero_leaves_the_term_out_but_reports_it(blocks):
  logits, labels, valid = blocks(3)
  loss, aux, grad = value_and_grad(logits, labels, valid, Objective(gamma=10.0))
  want, want_grad = jax.value_and_grad(
      lambda x: positional_weighted_cross_entropy(x, labels, valid, gamma=10.0)[0])(logits)
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  np.testing.assert_allclose(grad, want_grad, rtol=1e-5, atol=1e-7)
  assert aux.first_error > 0 and aux.chain < 0


def test_reports_by_loops(blocks):
  logits, labels, valid = blocks(4, lead=(4, 5))
  _, aux = objective_from_logits(logits, labels, valid, PAPER)
  lengths, right, seen = [], [0] * 5, [0] * 5
  for block, names, flags in zip(
      logits.reshape(-1, 5, 7), labels.reshape(-1, 5), valid.reshape(-1, 5)):
    run, unbroken = 0, True
    for k in range(5):
      if not flags[k]:
        break
      seen[k] += 1
      hit = block[k].argmax() == names[k]
      right[k] += hit
      unbroken = unbroken and hit
      run += unbroken
    if flags[0]:
      lengths.append(1 + run)
  np.testing.assert_allclose(aux.accepted_length, np.mean(lengths), rtol=1e-6)
  np.testing.assert_array_equal(aux.slot_count, seen)
  np.testing.assert_allclose(aux.slot_accuracy, np.array(right) / seen, rtol=1e-6)
  assert aux.num_blocks == len(lengths) and aux.num_slots == sum(seen)


def test_accepted_length_runs_from_one_to_the_block_size():
  valid = jnp.ones((2, 15), bool)
  for right, want in ((True, 16), (False, 1)):
    scores = SlotScores(jnp.full((2, 15), -1.0), jnp.full((2, 15), right))
    assert objective(scores, valid, PAPER)[1].accepted_length == want


def test_a_batch_without_a_valid_slot_is_zero_with_a_zero_gradient(blocks):
  logits, labels, valid = blocks(5)
  for spec in (PAPER, dataclasses.replace(PAPER, reduction='sum')):
    loss, aux, grad = value_and_grad(logits, labels, np.zeros_like(valid), spec)
    assert loss == 0
    np.testing.assert_array_equal(grad, np.zeros_like(logits))
    for leaf in jax.tree.leaves(aux):
      np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))


@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 3e38])
def test_garbage_in_invalid_slots_does_not_leak(blocks, garbage):
  logits, labels, valid = blocks(6)
  kept = np.asarray(valid_prefix(jnp.asarray(valid)))
  loss, aux, grad = value_and_grad(logits, labels, valid, PAPER)
  logits = np.where(kept[..., None], logits, garbage).astype(np.float32)
  labels = np.where(kept, labels, -100)
  loss_2, aux_2, grad_2 = value_and_grad(logits, labels, valid, PAPER)
  assert loss == loss_2
  jax.tree.map(np.testing.assert_array_equal, aux, aux_2)
  np.testing.assert_array_equal(grad, grad_2)
  np.testing.assert_array_equal(grad_2[~kept], 0)


@settings(max_examples=4, deadline=None)
@given(extra=st.integers(1, 4), seed=st.integers(0, 99), reduction=st.sampled_from(['mean', 'sum']))
def test_invalid_blocks_change_nothing(extra, seed, reduction):
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(3 + extra, 4, 6)).astype(np.float32)
  labels = rng.integers(0, 6, size=(3 + extra, 4))
  valid = rng.random((3 + extra, 4)) < 0.8
  valid[3:, 0] = False
  spec = dataclasses.replace(PAPER, reduction=reduction)
  loss, aux, grad = value_and_grad(logits[:3], labels[:3], valid[:3], spec)
  padded_loss, padded_aux, padded_grad = value_and_grad(logits, labels, valid, spec)
  np.testing.assert_allclose(padded_loss, loss, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(padded_grad[:3], grad, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(padded_grad[3:], 0)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), padded_aux, aux)


def test_chunked_scores_give_the_same_objective_and_gradient():
  rng = np.random.default_rng(7)
  hidden = rng.normal(size=(3, 2, 5, 8)).astype(np.float32)
  head = rng.normal(size=(11, 8)).astype(np.float32)
  labels = rng.integers(0, 11, size=(3, 2, 5))
  labels = np.where(rng.random(labels.shape) < 0.6, (hidden @ head.T).argmax(-1), labels)
  valid = rng.random(labels.shape) < 0.9

  def chunked(hidden):
    return objective(score_slots_chunked(hidden, head, labels, chunk_size=7), valid, PAPER)

  def plain(hidden):
    return objective_from_logits(hidden @ head.T, labels, valid, PAPER)

  (loss, aux), grad = jax.jit(jax.value_and_grad(chunked, has_aux=True))(hidden)
  (want, want_aux), want_grad = jax.jit(jax.value_and_grad(plain, has_aux=True))(hidden)
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  np.testing.assert_allclose(grad, want_grad, rtol=1e-4, atol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), aux, want_aux)


def test_leading_axes_are_only_a_shape(blocks):
  logits, labels, valid = blocks(8, lead=(2, 6))
  loss, _ = objective_from_logits(logits, labels, valid, PAPER)
  flat, _ = objective_from_logits(
      logits.reshape(12, 5, 7), labels.reshape(12, 5), valid.reshape(12, 5), PAPER)
  np.testing.assert_allclose(loss, flat, rtol=1e-6)


@pytest.mark.parametrize('options, name', [
    ({'gamma': 0.0}, 'gamma'),
    ({'gamma': -2.0}, 'gamma'),
    ({'first_error': -0.1}, 'first_error'),
    ({'chain': -1.0}, 'chain'),
    ({'chain': math.nan}, 'chain'),
    ({'chain': math.inf}, 'chain'),
    ({'reduction': 'total'}, 'reduction'),
])
def test_bad_settings_are_refused_by_name(options, name):
  with pytest.raises(UserError, match=name):
    Objective(**options)
