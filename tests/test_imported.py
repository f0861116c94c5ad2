"""Drafters that others have trained, as arms of an experiment: checked, started from, and taken as they are."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec import config as config_lib
from dspec import imported
from dspec import train
from dspec.checkpoints import dflash
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib

TOKENIZER = types.SimpleNamespace(used_ids=frozenset(range(20)), token=str)


@pytest.fixture(scope='module')
def target(untrained_target):
  return untrained_target()


@pytest.fixture(scope='module')
def drafter(target):
  """(shape, parameters) of a drafter that is wider inside than what `from_target` makes."""
  config = drafter_lib.from_target(
      target[0].config, num_layers=1, block_size=4, target_layers=(0, 1), mask_token_id=22)
  config = dataclasses.replace(config, mlp_width=40, rope_theta=77.0)
  return config, train.init_params(drafter_lib.Drafter(config), jax.random.key(1))


@pytest.fixture(scope='module')
def folder(target, drafter, tmp_path_factory):
  path = tmp_path_factory.mktemp('drafter')
  dflash.save_dflash(path, *drafter, target[0].config)
  return path


@pytest.fixture
def config(folder):
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.drafter.update(init=str(folder), num_layers=1, block_size=4, target_layers=(0, 1), mask_token_id=22, window=0,
                        vocab_size=0)
  return config


def test_a_config_that_says_the_same(config, target, drafter):
  config_lib.validate(config)
  imported.check(config, target[0].config, target[1], TOKENIZER)
  assert train.make_drafter_config(config, target[0].config) == drafter[0]
  config.drafter.init = ''
  imported.check(config, target[0].config, target[1], TOKENIZER)
  assert train.make_drafter_config(config, target[0].config).mlp_width == target[0].config.mlp_width


def test_a_config_that_says_something_else(config, target):
  config.drafter.update(target_layers=(0,), window=16, mask_token_id=5)
  with pytest.raises(UserError) as error:
    imported.check(config, target[0].config, target[1], TOKENIZER)
  assert str(error.value) == (
      f'--config.drafter.init={config.drafter.init}: the config describes another drafter; add '
      '--config.drafter.mask_token_id=22 --config.drafter.target_layers=0,1 --config.drafter.window=0')


def test_another_target(config, target):
  tokenizer = types.SimpleNamespace(used_ids=frozenset(range(23)), token=str)
  with pytest.raises(UserError, match="mask token, 22, is '22', which text can make"):
    imported.check(config, target[0].config, target[1], tokenizer)


def test_the_copy_of_another_targets_embedding(config, target, drafter, tmp_path):
  dflash.save_speculators(tmp_path, *drafter, *(target[0].config, target[1]), 'some/target')
  config.drafter.init = str(tmp_path)
  imported.check(config, target[0].config, target[1], TOKENIZER)
  other = {**target[1], 'embed': {'embedding': target[1]['embed']['embedding'][::-1]}}
  with pytest.raises(UserError, match='made for some/target'):
    imported.check(config, target[0].config, other, TOKENIZER)


def test_what_cannot_be_trained(config, target, drafter, tmp_path):
  dflash.save_dflash(tmp_path, dataclasses.replace(drafter[0], logit_softcap=30.0), drafter[1], target[0].config)
  config.drafter.init = str(tmp_path)
  with pytest.raises(UserError, match='cannot be trained; --config.train.steps=0'):
    imported.check(config, target[0].config, target[1], TOKENIZER)
  config.train.steps = 0
  imported.check(config, target[0].config, target[1], TOKENIZER)


def test_nothing_is_trained_in_no_steps(config, target, folder, tmp_path):
  """The drafter as it is, and a summary that the report can show."""
  config.train.steps = 0
  config_lib.validate(config)
  params, summary = train.run(config, tmp_path / 'arm', None, *target)
  want = dflash.load_drafter(folder)[1]
  for got in (params, train.trained_params(config, tmp_path / 'arm')):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(want)))
  assert not (tmp_path / 'arm').exists()
  assert (summary['steps'], summary['steps_this_run'], summary['curve']) == (0, 0, [])
  scale = len(want['feature_scale'])
  assert summary['drafter_parameters'] == sum(x.size for x in jax.tree.leaves(want)) - scale


def test_training_starts_from_it(config, target, folder):
  """And from nothing that is measured: its `fc` was trained on features as they are."""
  given = dflash.load_drafter(folder)[1]
  drafter = drafter_lib.Drafter(train.make_drafter_config(config, target[0].config))
  state = train.init_state(
      jax.random.key(0), {}, target[1], None, given, optimizer=train.make_optimizer(config), target=target[0],
      drafter=drafter)
  assert int(state.step) == 0
  assert all(map(np.array_equal, jax.tree.leaves(state.params), jax.tree.leaves(given)))
  moments = [x for x in jax.tree.leaves(state.opt_state) if jnp.ndim(x)]
  assert moments and all(not np.any(x) for x in moments)
