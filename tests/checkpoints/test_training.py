"""Checkpoints: what goes in comes out, in another process' place, and nothing else is accepted."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.checkpoints import training
from dspec.data import features
from dspec.data import pipeline
from dspec.errors import UserError


@pytest.fixture(scope='module')
def paths(tmp_path_factory):
  rows = [(list(range(10 * i, 10 * i + 9)), [False] * 2 + [True] * 7) for i in range(1, 8)]
  return features.write(tmp_path_factory.mktemp('rows'), None, None, rows, ())


@pytest.fixture
def iterator(paths):
  return lambda: iter(pipeline.batches(paths, seed=0, batch_size=2, length=10, anchors=2))


def make_state(seed):
  a, b, c = jax.random.split(jax.random.key(seed), 3)
  return {
      'step': jnp.array(seed, jnp.int32),
      'params': {
          'kernel': jax.random.normal(a, (3, 4)),
          'half': jax.random.normal(b, (5,)).astype(jnp.bfloat16),
      },
      'opt_state': ({'mu': jax.random.normal(c, (3, 4))}, (), [jnp.array(7)]),
  }


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


def test_round_trip_into_a_fresh_manager(iterator, tmp_path):
  it = iterator()
  for _ in range(5):
    next(it)
  with training.open_manager(tmp_path) as manager:
    training.save(manager, 5, make_state(5), it)
  wanted = [next(it) for _ in range(6)]

  new = iterator()
  with training.open_manager(tmp_path) as manager:
    assert manager.latest_step() == 5
    state = training.restore(manager, make_state(99), new)
  assert_same(state, make_state(5))
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
  for batch in wanted:
    found = next(new)
    assert all(np.array_equal(found[name], batch[name]) for name in batch)


def test_the_newest_two_are_kept_and_the_newest_is_read(iterator, tmp_path, caplog):
  with training.open_manager(tmp_path) as manager:
    for step in (3, 6, 9):
      training.save(manager, step, make_state(step), iterator())
    assert sorted(manager.all_steps()) == [6, 9]
  # What a stop in the middle of a save leaves behind.
  (tmp_path / '12.orbax-checkpoint-tmp').mkdir()
  assert not any('skipped' in message for message in caplog.messages)
  with training.open_manager(tmp_path) as manager:
    assert_same(training.restore(manager, make_state(0), iterator()), make_state(9))
  assert [m for m in caplog.messages if 'skipped' in m] == [
      f'{tmp_path}/12.orbax-checkpoint-tmp: was being saved when its run was ended, and is skipped']
  params = training.restore_params(tmp_path)
  assert_same(params, jax.tree.map(np.asarray, make_state(9)['params']))


def test_the_best_is_kept_beside_the_newest(iterator, tmp_path):
  lengths = {1: 1.5, 2: 2.5, 3: None, 4: 2.5, 5: 2.0, 6: None}
  with training.open_manager(tmp_path, keep=1) as manager:
    for step, length in lengths.items():
      training.save(manager, step, make_state(step), iterator(), length)
    assert sorted(manager.all_steps()) == [4, 6]  # Of equals the later one.
  with training.open_manager(tmp_path, keep=2) as manager:
    assert (training.best_step(manager), manager.latest_step()) == (4, 6)
    training.save(manager, 7, make_state(7), iterator(), 2.25)
    training.save(manager, 8, make_state(8), iterator(), 3.0)
    manager.wait_until_finished()
    assert sorted(manager.all_steps()) == [7, 8] and training.best_step(manager) == 8
    assert_same(training.restore(manager, make_state(0), step=7), make_state(7))
  assert_same(training.restore_params(tmp_path, best=True), jax.tree.map(np.asarray, make_state(8)['params']))


def test_none_is_best_where_none_was_measured(iterator, tmp_path):
  with training.open_manager(tmp_path) as manager:
    training.save(manager, 3, make_state(3), iterator())
  with pytest.raises(UserError, match=f'^{tmp_path}: no checkpoint here was evaluated'):
    training.restore_params(tmp_path, best=True)
  # As an earlier version has written it.
  shutil.rmtree(tmp_path / '3' / 'metrics')
  with training.open_manager(tmp_path, keep=1) as manager:
    assert_same(training.restore(manager, make_state(0), iterator()), make_state(3))
    training.save(manager, 4, make_state(4), iterator(), 1.0)
    training.save(manager, 5, make_state(5), iterator())
    assert sorted(manager.all_steps()) == [4, 5] and training.best_step(manager) == 4


def test_parameters_are_the_running_mean_where_there_is_one(iterator, tmp_path):
  state = {**make_state(3), 'ema': {'kernel': make_state(4)['params']['kernel']}}
  with training.open_manager(tmp_path) as manager:
    training.save(manager, 3, state, iterator())
  params = training.restore_params(tmp_path)
  np.testing.assert_array_equal(params['kernel'], state['ema']['kernel'])
  np.testing.assert_array_equal(params['half'], state['params']['half'])


def test_what_a_stop_has_left_is_removed_by_the_run_that_goes_on(iterator, tmp_path):
  left = tmp_path / '2.orbax-checkpoint-tmp'
  (left / 'state').mkdir(parents=True)
  for step, writes in ((3, False), (6, True)):
    with training.open_manager(tmp_path, writes=writes) as manager:
      training.save(manager, step, make_state(step), iterator())
    assert left.exists() == (not writes)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['3', '6']


def test_other_errors_are_not_explained(tmp_path):
  with training.open_manager(tmp_path) as manager:
    for error in (ValueError('No such layer'), OSError(13, 'Permission denied'), UserError('a full moon')):
      with pytest.raises(type(error)) as caught, training.explained(manager):
        raise error
      assert caught.value is error
    with pytest.raises(UserError, match='no checkpoint was saved yet'), training.explained(manager):
      raise OSError(28, 'No space left on device')


def test_a_checkpoint_that_is_there_is_left_alone(iterator, tmp_path):
  with training.open_manager(tmp_path) as manager:
    training.save(manager, 3, make_state(3), iterator())
    training.save(manager, 3, make_state(4), iterator())
  with training.open_manager(tmp_path) as manager:
    assert_same(training.restore(manager, make_state(0), iterator()), make_state(3))


def with_kernel(state, kernel):
  return {**state, 'params': {**state['params'], 'kernel': kernel}}


@pytest.mark.parametrize('change,names', [
    (lambda state: with_kernel(state, jnp.zeros((3, 5))), ['params/kernel']),
    (lambda state: {**state, 'more': jnp.zeros(2)}, ['more']),
    (lambda state: {k: v for k, v in state.items() if k != 'opt_state'}, ['opt_state/0/mu', 'opt_state/2/0']),
])
def test_another_state(iterator, tmp_path, change, names):
  with training.open_manager(tmp_path) as manager:
    training.save(manager, 3, make_state(3), iterator())
  with training.open_manager(tmp_path) as manager:
    with pytest.raises(UserError) as error:
      training.restore(manager, change(make_state(0)), iterator())
  message = str(error.value)
  assert message.startswith(f'{tmp_path / "3"}: ') and '--workdir' in message
  listed = message.partition('differing arrays: ')[2].partition('. Use')[0]
  assert listed.split(', ') == names  # Those that differ, and no other.


def test_no_checkpoint(tmp_path):
  with pytest.raises(UserError, match='no checkpoint here'):
    training.restore_params(tmp_path)
