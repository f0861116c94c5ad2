"""Accumulated gradients: those of the whole batch, for every objective, in less memory."""

import functools
import itertools

import jax
import numpy as np
import pytest

from dspec import accumulation
from dspec import config as config_lib
from dspec import train
from dspec.data import features
from dspec.data import pipeline
from dspec.losses import Objective, objective
from dspec.models import drafter as drafter_lib

TAPS, K, LENGTH, ANCHORS, PARTS = (0, 1), 4, 24, 3, 4
# (row's length, prompt length), in the order in which the parts take them, so that their slots differ: many, few, none.
SHAPES = ((24, 2), (9, 7), (6, 6), (15, 4), (20, 3), (8, 6), (5, 5), (24, 5))
OBJECTIVES = [
    Objective(gamma, first_error, chain, reduction)
    for (gamma, first_error, chain), reduction in itertools.product(
        ((None, 0.0, 0.0), (3.0, 0.0, 0.0), (3.0, 0.3, 0.0), (3.0, 0.0, 40.0), (3.0, 0.3, 40.0)), ('mean', 'sum'))]


@pytest.fixture(scope='module')
def setting(untrained_target, tmp_path_factory):
  """(models as `train.train_step` takes them, batch with features, target's parameters)."""
  target, target_params = untrained_target(vocab_size=29, head_dim=4, max_length=64)
  rng = np.random.default_rng(0)
  rows = [(rng.integers(3, 29, n).tolist(), [t >= prompt for t in range(n)]) for n, prompt in SHAPES]
  paths = features.write(tmp_path_factory.mktemp('rows'), target, target_params, rows, TAPS)
  batch = next(iter(pipeline.batches(paths, seed=0, batch_size=len(rows), length=LENGTH, anchors=ANCHORS)))
  order = [batch['tokens'][:, :5].tolist().index(tokens[:5]) for tokens, _ in rows]
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.drafter.update(num_layers=1, block_size=K, target_layers=TAPS, mask_token_id=1, vocab_size=0)
  drafter = drafter_lib.Drafter(train.make_drafter_config(config, target.config))
  models = {'optimizer': train.make_optimizer(config), 'target': target, 'drafter': drafter}
  return models, jax.tree.map(lambda x: x[np.array(order)], batch), target_params


def choose(which, scores, valid):
  """One program for all objectives."""
  return jax.lax.switch(which, [functools.partial(objective, spec=spec) for spec in OBJECTIVES], scores, valid)


def test_every_objective_has_the_gradient_of_the_whole_batch(setting):
  models, batch, target_params = setting
  params = train.init_params(models['drafter'], jax.random.key(7))
  score = functools.partial(train.score, drafter=models['drafter'], target_params=target_params, head_chunk=5)

  @jax.jit
  def whole(params, batch, which):
    return jax.value_and_grad(lambda params: choose(which, *score(params, batch)), has_aux=True)(params)

  @jax.jit
  def in_parts(params, batch, which):
    return accumulation.value_and_grad(
        lambda batch: batch, score, functools.partial(choose, which), params, batch, PARTS)

  # What a mean over the parts would be: their rows are every PARTS-th one.
  parts = [jax.tree.map(lambda x: np.concatenate([x[m::PARTS]] * PARTS), batch) for m in range(PARTS)]
  for which, spec in enumerate(OBJECTIVES):
    (value, aux), gradient = whole(params, batch, which)
    (found, found_aux), found_gradient = in_parts(params, batch, which)
    np.testing.assert_allclose(found, value, rtol=1e-5, err_msg=str(spec))
    for name, wanted in vars(aux).items():
      np.testing.assert_allclose(getattr(found_aux, name), wanted, rtol=1e-5, atol=1e-7, err_msg=f'{spec} {name}')
    largest = max(np.abs(x).max() for x in jax.tree.leaves(gradient))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * largest), found_gradient, gradient)
    assert largest > 1e-2
    naive = np.mean([whole(params, part, which)[0][0] for part in parts])
    assert abs(naive - value) > 1e-2 * abs(value), spec  # The batch tells them apart.


def test_a_step_in_parts(setting):
  """Without features on disk, too, it is the step of the whole batch, in less memory: nearly as little as the parts."""
  models, batch, target_params = setting
  batch = {name: np.concatenate([x] * 8) for name, x in batch.items() if name != 'features'}
  state = jax.jit(functools.partial(train.init_state, **models))(jax.random.key(0), batch, target_params, None)
  results, temporaries = [], []
  for parts in (1, 8):
    step = functools.partial(
        train.train_step, **models, spec=Objective(3.0, 0.3, 40.0), head_chunk=100, accumulate=parts)
    compiled = jax.jit(step).lower(state, batch, target_params).compile()
    temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    results.append(compiled(state, batch, target_params))
  (wanted, metrics), (found, found_metrics) = results
  for name in ('loss', 'gradient_norm', 'accepted_length', 'num_slots'):
    np.testing.assert_allclose(found_metrics[name], metrics[name], rtol=1e-5)
  moments = lambda state: state.opt_state[1][0].mu  # Linear in the gradient.
  largest = max(np.abs(x).max() for x in jax.tree.leaves(moments(wanted)))
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * largest), moments(found), moments(wanted))
  # Features, which are kept for the second pass, are those of the whole batch.
  kept = batch['tokens'].size * len(TAPS) * models['target'].config.width * 2
  assert temporaries[1] - kept < (temporaries[0] - kept) / 4
