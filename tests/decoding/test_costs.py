"""The block size that costs and acceptance make fastest, and costs of a real pair of models."""

import dataclasses
import json
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.decoding import costs
from dspec.models import drafter as drafter_lib

# A machine that verifies for free, and one that pays for every token as for a step of its own.
FREE = costs.Costs(1.0, {2: 0.1, 4: 0.1, 8: 0.1}, {2: 1.0, 4: 1.0, 8: 1.0})
DEAR = costs.Costs(1.0, {2: 0.1, 4: 0.1, 8: 0.1}, {2: 2.0, 4: 4.0, 8: 8.0})


def test_speed_up_is_tokens_over_time():
  acceptance = [0.8, 0.5, 0.25, 0.1, 0.0, 0.0, 0.0]
  for k in (2, 4, 8):
    gained = 1 + np.sum(acceptance[: k - 1])
    assert FREE.speed_up(acceptance, k) == pytest.approx(gained / 1.1)
    assert DEAR.speed_up(acceptance, k) == pytest.approx(gained / (k + 0.1))


@pytest.mark.parametrize('machine, acceptance, best', [
    (FREE, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], 8),
    (DEAR, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], 2),
    (FREE, [0.9, 0.8, 0.7], 4),  # What was not drafted in training is no candidate.
])
def test_best_block_size(machine, acceptance, best):
  assert machine.best_block_size(acceptance) == best


@pytest.mark.parametrize('trained, sizes', [(2, [2]), (3, [2, 3]), (4, [2, 4]), (10, [2, 4, 8, 10]), (16, [2, 4, 8, 16])])
def test_block_sizes(trained, sizes):
  assert costs.block_sizes(trained) == sizes


@pytest.fixture
def models(untrained_target):
  target, params = untrained_target(max_length=256)
  config = drafter_lib.from_target(
      target.config, num_layers=1, block_size=4, target_layers=(0, 1), mask_token_id=1, vocab_size=7)
  drafter = drafter_lib.Drafter(config)
  inputs = jnp.zeros((1, 1, 32)), jnp.zeros((1, 1, 4, 16)), jnp.zeros((1, 1), jnp.int32)
  return target, params, drafter, drafter.init(jax.random.key(0), *inputs)['params'], (target, params)


def test_measured_once_for_what_costs_depend_on(models, tmp_path, monkeypatch):
  target, params, drafter, drafter_params, rival = models
  first = costs.measured(tmp_path, 'abc', *models)
  assert first.step > 0 and first.draft.keys() == first.verify.keys() == {2, 4}
  assert min(*first.draft.values(), *first.verify.values()) > 0
  [path] = tmp_path.iterdir()
  assert json.loads(path.read_text())['step'] == first.step

  def refuse(*args):
    raise LookupError

  monkeypatch.setattr(costs, 'measure', refuse)
  assert costs.measured(tmp_path, 'abc', *models) == first
  other = drafter_lib.Drafter(dataclasses.replace(drafter.config, vocab_size=5))
  for changed in (('abd', *models), ('abc', target, params, other, drafter_params, rival)):
    with pytest.raises(LookupError):
      costs.measured(tmp_path, *changed)
  # A host of the same name, as containers have it, with another CPU.
  monkeypatch.setattr(costs, 'processor', lambda: 'another')
  with pytest.raises(LookupError):
    costs.measured(tmp_path, 'abc', *models)


def test_processor(tmp_path):
  info = tmp_path / 'cpuinfo'
  core = 'processor\t: {}\nmodel name\t: {}\nflags\t\t: fpu avx2 amx_bf16 amx_tile\n'
  info.write_text(core.format(0, 'A CPU: fast') + '\n' + core.format(1, 'B'))
  assert costs.processor(info) == 'A CPU: fast, amx_bf16, avx2'
  info.write_text('Features : fp asimd\n')  # Of ARM, where Linux tells no name.
  assert costs.processor(info) == platform.machine()
  assert costs.processor(tmp_path / 'none')
