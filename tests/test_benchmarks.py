"""The scripts of experiments/benchmarks that decide something: the search for the smallest slice, and speeds of a device."""

import importlib.util
import pathlib
import re

import jax
import pytest

from dspec import compile as compile_lib
from dspec import sharding

FOLDER = pathlib.Path(__file__).parents[1] / 'experiments' / 'benchmarks'


def load(name):
  spec = importlib.util.spec_from_file_location(name, FOLDER / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


slices, accelerator = load('slices'), load('accelerator')

# ---- The smallest slice ----------------------------------------------------------------------------


def test_slices_ascend_and_their_meshes_divide_the_batch():
  for generation, names in slices.SLICES.items():
    counts = [slices.chips(name) for name in names]
    assert counts == sorted(set(counts)) and counts[0] == 4
    for name, count in zip(names, counts):
      assert name.startswith(f'{generation}:') and slices.memory(name) == compile_lib.HBM[generation] * 2**30
      split = slices.mesh(name)
      assert split['fsdp'] * split['tensor'] == count and 32 % split['fsdp'] == 0
  assert slices.mesh('v5e:8x16') == {'fsdp': 32, 'tensor': 4} and slices.mesh('v5p:2x2x2') == {'fsdp': 8, 'tensor': 1}


def search(needed, total, told=True):
  """A search on all generations where slices of `needed[generation]` chips or more fit: (its records, answers)."""
  records, answers = [], {}
  for generation, names in slices.SLICES.items():
    while name := slices.next_slice(names, records):
      assert name not in [record['slice'] for record in records]
      fits = slices.chips(name) >= needed[generation]
      # What does not shrink with the number of chips makes the prediction wrong, as it is in truth.
      used = int(total / slices.chips(name) + 2**31)
      records.append({'slice': name, 'fits': fits, 'used': used if fits or told else None})
    answers[generation] = slices.answer(names, records)
  return records, answers


@pytest.mark.parametrize('told', [True, False])
@pytest.mark.parametrize('needed', [
    {'v5p': 4, 'v6e': 4, 'v5e': 4}, {'v5p': 4, 'v6e': 8, 'v5e': 16}, {'v5p': 8, 'v6e': 64, 'v5e': 256},
    {'v5p': 1000, 'v6e': 1000, 'v5e': 32}])
def test_the_search_ends_at_the_smallest_and_has_seen_that_the_next_does_not_fit(needed, told):
  records, answers = search(needed, 120 * 2**30, told)
  fits = {record['slice']: record['fits'] for record in records}
  for generation, names in slices.SLICES.items():
    enough = [name for name in names if slices.chips(name) >= needed[generation]]
    if not enough:
      assert answers[generation] is None
      continue
    assert answers[generation]['slice'] == enough[0]
    assert names[0] == enough[0] or fits[names[names.index(enough[0]) - 1]] is False


def test_a_measured_slice_shortens_the_search():
  needed, total = {'v5p': 4, 'v6e': 8, 'v5e': 16}, 150 * 2**30
  records, _ = search(needed, total)
  assert [record['slice'] for record in records] == ['v5p:2x2x1', 'v6e:2x4', 'v6e:2x2', 'v5e:4x4', 'v5e:2x4']
  # The nearest by number of chips tells, whatever its generation.
  known = [{'slice': 'v6e:2x2', 'used': 30 * 2**30}, {'slice': 'v5p:2x4x4', 'used': 2**30}, {'slice': 'v5e:2x4', 'used': None}]
  assert slices.predicted('v5e:2x4', known) == 15 * 2**30
  assert slices.predicted('v5e:8x8', known) == 2**29


def test_table():
  fit = {'target': 'qwen3_8b', 'slice': 'v5p:2x2x1', 'mesh': slices.mesh('v5p:2x2x1'), 'fits': True, 'used': 50 * 2**30}
  big = {'target': 'qwen3_8b', 'slice': 'v5e:8x8', 'mesh': slices.mesh('v5e:8x8'), 'fits': True, 'used': 10 * 2**30}
  below = {'target': 'qwen3_8b', 'slice': 'v5e:4x8', 'fits': False, 'used': None}
  lines = slices.table([fit, big, below]).splitlines()
  cells = next([cell.strip() for cell in line.split('|')] for line in lines if 'Qwen3-8B' in line)
  assert cells[1:5] == [
      'Qwen3-8B', '`v5p-8` (2x2x1; fsdp=4): 50.0 GiB of 95', '...',
      '`v5litepod-64` (8x8; fsdp=32, tensor=2): 10.0 GiB of 16']
  assert len(lines) == 2 + len(slices.TARGETS)


# ---- Speeds ----------------------------------------------------------------------------------------


def test_speeds_of_tiny_sizes():
  """All of it runs; and decoding, in float32, says what plain decoding says."""
  config, shape = accelerator.tiny()
  with jax.set_mesh(sharding.make_mesh(config)):
    trained = accelerator.train_speed(config, shape, steps=2)
    decoded = accelerator.decode_speed(config, shape)
  # Random weights know nothing: the loss starts near that of guessing among all tokens.
  assert float(trained['loss']) == pytest.approx(5.55, abs=1.0)
  assert float(trained['tokens/s']) > 0 and 'softmax' in trained['attention']
  assert decoded['tokens as plain'] == '100.0%'
  assert re.fullmatch(r'\d+\.\d\d ms, \d+\.\d\d plain steps', decoded['round of 4'])


def test_kernels_of_attention_are_named():
  program = 'x = custom-call(y), custom_call_target="__cudnn$fmhaSoftmax"\nz = custom-call(x), custom_call_target="__cublas$gemm"'
  assert accelerator.attention_of(program) == '__cudnn$fmhaSoftmax'
