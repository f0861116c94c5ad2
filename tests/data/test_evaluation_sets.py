"""Evaluation sets: the real tokenizer renders every turn, prompts that do not fit are left out, missing sets are named."""

import json
import types

import numpy as np
import pytest

from dspec import config as config_lib
from dspec.data import benchmarks
from dspec.data import evaluation_sets
from dspec.errors import UserError

QUESTIONS = {
    'gsm8k_test': [{'id': f'g{i}', 'prompt': f'How many are {i} and {i * i}?'} for i in range(9)],
    'mt_bench': [
        {'id': f'm{i}', 'prompt': f'Name {i} rivers.', 'turns': [f'Name {i} rivers.', 'Which is the longest?']}
        for i in range(3)],
}


@pytest.fixture
def folder(tmp_path):
  for name, lines in QUESTIONS.items():
    (tmp_path / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return tmp_path


@pytest.fixture
def make(folder, smollm2, tmp_path):
  target_config, _, tokenizer = smollm2

  def make(held_out=((1, 2), (3,)), max_length=None, **options):
    config = config_lib.default('smoke').copy_and_resolve_references()
    config.data.prompts_dir = str(folder)
    config.evaluate.update(sets=('held_out', 'gsm8k', 'mt_bench'), num_prompts=4)
    config.evaluate.update(options)
    config_lib.validate(config)
    found = evaluation_sets.load_benchmarks(config, tmp_path / 'tfds')
    shape = types.SimpleNamespace(max_length=max_length or target_config.max_length)
    data = types.SimpleNamespace(held_out=held_out, trained_on=((4, 5, 6), (7,)))
    return evaluation_sets.make(config, data, found, tokenizer, shape)

  return make


def chat(tokenizer, *turns):
  """ChatML as SmolLM2 writes it: a user's turns, each but the last answered."""
  parts = ['<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n']
  for i, turn in enumerate(turns):
    parts.append(f'<|im_start|>{("user", "assistant")[i % 2]}\n{turn}<|im_end|>\n')
  return ''.join(parts) + '<|im_start|>assistant\n'


def test_names_are_those_of_the_config():
  assert evaluation_sets.NAMES == config_lib.EVALUATION_SETS


def test_prompts(make, smollm2):
  tokenizer = smollm2[2]
  sets = make()
  assert list(sets) == ['held_out', 'gsm8k', 'mt_bench']
  assert sets['held_out'].ids == ((1, 2), (3,)) and sets['held_out'].follow_up is None
  step_by_step = '\nPlease reason step by step, and put your final answer within \\boxed{}.'
  texts = [tokenizer.decode(ids, skip_special=False) for ids in sets['gsm8k'].ids]
  assert texts == [chat(tokenizer, QUESTIONS['gsm8k_test'][i]['prompt'] + step_by_step) for i in range(4)]
  assert sets['gsm8k'].source['source'] == 'prompts_dir' and sets['gsm8k'].source['num_problems'] == 9
  assert make(sets=('trained_on',), num_prompts=1)['trained_on'].ids == ((4, 5, 6),)
  assert len(sets['mt_bench'].ids) == 3 and len(sets['mt_bench'].first(2).ids) == 2


@pytest.mark.parametrize('sets, held_out, wanted', [
    (('held_out',), ['a', 'b', 'c', 'd', 'e', 'f'], ['e', 'f']),
    (('held_out',), ['a', 'b', 'c', 'd'], ['c', 'd']),
    # What is there twice is one prompt, and one that is reported is none to choose by.
    (('held_out',), ['a', 'b', 'c', 'd', 'b', 'd'], ['c', 'd']),
    (('trained_on',), ['a', 'b'], ['a', 'b']),
    (('held_out',), ['a', 'b', 'c'], '3 held-out prompts 2 are reported, and 1 others are left'),
    (('held_out',), ['a', 'b', 'c', 'too long', 'd', 'too long'], ['c', 'd']),
    (('held_out',), ['a', 'b', 'c', 'too long'], '3 held-out prompts 2 are reported, and 1 others are left'),
])
def test_prompts_to_choose_by_are_none_that_are_reported(sets, held_out, wanted):
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.evaluate.update(sets=sets, num_prompts=2, max_new_tokens=6)
  config.drafter.block_size = 4
  ids = {name: tuple(map(ord, name)) for name in held_out}
  data = types.SimpleNamespace(held_out=[ids[name] for name in held_out], trained_on=[(1,)])
  target_config = types.SimpleNamespace(max_length=12)  # Two are left for a prompt.
  if isinstance(wanted, str):
    with pytest.raises(UserError, match=f'--config.train.evaluate_prompts=2: of {wanted}'):
      evaluation_sets.validation(config, data, target_config, 2)
    return
  found = evaluation_sets.validation(config, data, target_config, 2)
  assert found == tuple(ids[name] for name in wanted)
  reported = evaluation_sets.make(config, data, {}, None, target_config)
  assert len(reported[sets[0]].ids) == min(2, len(getattr(data, sets[0])))
  assert not set(found) & set(reported[sets[0]].ids)


def test_drawn_prompts(make):
  everything = make(num_prompts=9)['gsm8k'].ids
  for seed in (0, 5):
    order = np.random.default_rng(seed).permutation(9)
    assert make(prompt_seed=seed)['gsm8k'].ids == tuple(everything[i] for i in order[:4])
  assert make(num_prompts=100)['gsm8k'].ids == everything


def test_second_turns_follow_the_answer(make, smollm2):
  tokenizer = smollm2[2]
  mt_bench = make()['mt_bench']
  answer = tokenizer.encode('The Nile and the Rhine.') + [2]  # With its EOS.
  ids = mt_bench.follow_up(2, [answer])
  assert tokenizer.decode(ids, skip_special=False) == chat(
      tokenizer, 'Name 2 rivers.', 'The Nile and the Rhine.', 'Which is the longest?')
  assert mt_bench.follow_up(2, [answer, answer]) is None


def test_prompts_that_do_not_fit(make, smollm2, caplog):
  # 16 new tokens and a block of 16 beside the prompt.
  lengths = {name: [len(ids) for ids in found.ids] for name, found in make(num_prompts=9).items()}
  room = max(lengths['gsm8k']) - 1
  assert room >= max(lengths['mt_bench'])
  sets = make(num_prompts=9, max_length=room + 32)
  assert [len(ids) for ids in sets['gsm8k'].ids] == [n for n in lengths['gsm8k'] if n <= room]
  assert 'gsm8k' in caplog.text and 'do not fit the context' in caplog.text
  token = smollm2[2].encode(' river')[0]
  assert make()['mt_bench'].follow_up(0, [[token] * room]) is not None
  assert sets['mt_bench'].follow_up(0, [[token] * room]) is None
  with pytest.raises(UserError, match='held_out: none of 2 prompts has at most 1 tokens'):
    make(held_out=[(1, 2), (1, 2, 3)], max_length=33)


def test_a_missing_benchmark_is_named_and_the_others_go_on(make, folder, monkeypatch, caplog):
  (folder / 'gsm8k_test.jsonl').unlink()

  def no_network(spec):
    raise UserError('no network here')

  monkeypatch.setattr(benchmarks, '_network_source', no_network)
  with pytest.raises(UserError, match='no network here'):
    benchmarks.load('gsm8k', prompts_dir=folder, data_dir=folder / 'tfds')
  assert list(make()) == ['held_out', 'mt_bench']
  assert 'no network here' in caplog.text and 'goes on without it' in caplog.text
  with pytest.raises(UserError, match='nothing is left of --config.evaluate.sets'):
    make(sets=('gsm8k',))
