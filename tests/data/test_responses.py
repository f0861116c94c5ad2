"""Sampling from the target: whatever shares the batch, each prompt gets its own continuation, once."""

import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.data import responses
from dspec.decoding import autoregressive
from dspec.decoding import sampling
from dspec.errors import UserError

EOS_IDS = (2, 5)
LIMIT = 20


@pytest.fixture(scope='module')
def target(untrained_target):
  """(module, params) whose tokens are irregular and often an EOS."""
  module, params = untrained_target(3, num_layers=2, eos_ids=EOS_IDS)
  return module, jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params)


@pytest.fixture(scope='module')
def prompts():
  """Of 1 to 40 tokens: less than a prefill chunk, and more than one."""
  rng = np.random.default_rng(0)
  lengths = [3, 1, 40, 12, 7, 32, 2, 33, 5, 9, 1]
  return [rng.integers(6, 23, n).tolist() for n in lengths]


def collect(target, prompts, **options):
  options = {'seeds': range(len(prompts)), 'key': jax.random.key(1), 'max_new_tokens': LIMIT,
             'how': sampling.GREEDY, 'batch_size': 4, **options}
  seeds, key = options.pop('seeds'), options.pop('key')
  found = list(responses.sample(*target, prompts, seeds, key, **options))
  assert sorted(i for i, _ in found) == list(range(len(prompts)))  # Each once.
  return [tokens for _, tokens in sorted(found)]


def test_greedy_equals_plain_decoding(target, prompts):
  found = collect(target, prompts)

  padded = np.zeros((len(prompts), 40), np.int32)
  for r, prompt in enumerate(prompts):
    padded[r, : len(prompt)] = prompt
  lengths = np.array([len(prompt) for prompt in prompts])
  rows = autoregressive.generate(
      *target, jnp.asarray(padded), jnp.asarray(lengths), jax.random.key(0), max_new_tokens=LIMIT)
  tokens, ends = np.asarray(rows.tokens_BxT), np.asarray(rows.lengths_B)
  wanted = [tokens[r, n : ends[r]].tolist() for r, n in enumerate(lengths)]
  assert found == wanted

  # The case has what it should: ends of both kinds, at several lengths.
  ended = [answer for answer in found if answer[-1] in EOS_IDS]
  assert 2 <= len(ended) < len(found)
  assert len({len(answer) for answer in ended}) > 1
  assert all(len(answer) == LIMIT for answer in found if answer[-1] not in EOS_IDS)
  assert not any(token in EOS_IDS for answer in found for token in answer[:-1])


def test_a_sample_does_not_depend_on_its_batch(target, prompts):
  seeds = [100 + i for i in range(len(prompts))]
  found = collect(target, prompts, seeds=seeds, how=sampling.Sampling(1.0))
  for batch_size, order in ((1, range(len(prompts))), (4, reversed(range(len(prompts))))):
    order = list(order)
    again = collect(
        target, [prompts[i] for i in order], seeds=[seeds[i] for i in order], how=sampling.Sampling(1.0),
        batch_size=batch_size)
    assert again == [found[i] for i in order]


def test_samples_differ_by_seed_and_key(target):
  same = [[7, 8, 9] * 12] * 8
  found = collect(target, same, how=sampling.Sampling(1.0))
  assert len(set(map(tuple, found))) >= 6
  assert collect(target, same, seeds=[5] * 8, how=sampling.Sampling(1.0)) == [found[5]] * 8
  other = collect(target, same, key=jax.random.key(2), how=sampling.Sampling(1.0))
  assert all(a != b for a, b in zip(found, other))


def test_an_error_in_one_stream_ends_all(target, prompts, monkeypatch):
  before = set(threading.enumerate())
  original = responses._admit

  def admit(model, params, rows, cache, new, *args):
    if (np.asarray(new.lengths_B) == 33).any():  # One prompt's length.
      raise ValueError('broken')
    return original(model, params, rows, cache, new, *args)

  monkeypatch.setattr(responses, '_admit', admit)
  with pytest.raises(ValueError, match='broken'):
    collect(target, prompts)
  assert set(threading.enumerate()) <= before


def test_one_token_and_no_prompt(target, prompts):
  """A row that is done as soon as it is admitted, and nothing to do at all."""
  full = collect(target, prompts)
  assert collect(target, prompts, max_new_tokens=1) == [answer[:1] for answer in full]
  assert collect(target, []) == []


# ---- Resuming --------------------------------------------------------------------------------------


@pytest.fixture
def resumable(target, prompts, tmp_path, monkeypatch):
  """A call of `sample_resumably` on one file, and the prompts that each call has sampled."""
  sampled = []
  original = responses.sample

  def sample(module, params, prompts, *args, **options):
    sampled.append(list(prompts))
    return original(module, params, prompts, *args, **options)

  monkeypatch.setattr(responses, 'sample', sample)
  path = tmp_path / 'rows.jsonl'
  call = lambda: responses.sample_resumably(
      path, *target, prompts, list(range(len(prompts))), jax.random.key(1), name='test',
      max_new_tokens=LIMIT, how=sampling.Sampling(1.0), batch_size=4)
  return path, call, sampled


@pytest.mark.parametrize('cut', [1, 20, -1])
def test_resumes_a_cut_file(resumable, prompts, cut):
  """One character of a line is left, some of them, all but its newline."""
  path, call, sampled = resumable
  whole = call()
  lines = path.read_text().splitlines(keepends=True)
  assert len(lines) == len(prompts)
  part = lines[4][:cut]
  assert part and not part.endswith('\n')
  path.write_text(''.join(lines[:4]) + part)
  kept = {json.loads(line)['index'] for line in lines[:4]}

  assert call() == whole
  assert sampled[1] == [prompts[i] for i in range(len(prompts)) if i not in kept]
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert sorted(record['index'] for record in records) == list(range(len(prompts)))
  assert path.read_text().startswith(''.join(lines[:4]))

  assert call() == whole
  assert not any(sampled[2:])


def test_what_is_done_is_in_the_closed_file_before_the_rest(resumable, prompts, monkeypatch):
  """As a mounted bucket has it for whoever resumes after a kill: what was written when the file was last closed."""
  path, call, _ = resumable
  original, seen = responses.sample, []

  def watched(*args, **options):
    for found in original(*args, **options):
      seen.append(len(path.read_text().splitlines()) if path.exists() else 0)
      yield found

  monkeypatch.setattr(responses, 'sample', watched)
  monkeypatch.setattr(responses, '_SECONDS_UNWRITTEN', 0.0)
  call()
  assert seen == list(range(len(prompts)))


def test_keeps_what_was_done_when_stopped(resumable, target, prompts, monkeypatch):
  path, call, sampled = resumable
  stopped_after = 3
  original = responses.sample

  def stopping(*args, **options):
    for n, found in enumerate(original(*args, **options)):
      if n == stopped_after:
        raise KeyboardInterrupt
      yield found

  with monkeypatch.context() as patch:
    patch.setattr(responses, 'sample', stopping)
    with pytest.raises(KeyboardInterrupt):
      call()
  assert len(path.read_text().splitlines()) == stopped_after
  found = call()
  assert len(sampled[-1]) == len(prompts) - stopped_after
  assert found == collect(target, prompts, how=sampling.Sampling(1.0))


# ---- Prompts written by the target -----------------------------------------------------------------


class Characters:
  """A tokenizer: ids are code points."""

  def user_prefix_ids(self):
    return [1]

  def decode(self, ids):
    return ''.join(map(chr, ids))


@pytest.fixture
def scripted(tmp_path, monkeypatch):
  """Self-synthesis of turns written down here, by seed; `|` stands for the end of a turn."""

  def synthesise(turns, count):
    model = types.SimpleNamespace(config=types.SimpleNamespace(eos_ids=(3, ord('|'))))
    asked = []

    def sample(model, params, prompts, seeds, key, **options):
      assert all(prompt == [1] for prompt in prompts)
      assert options == {'max_new_tokens': 9, 'how': sampling.Sampling(0.8), 'batch_size': 2}
      asked.append(list(seeds))
      for i in reversed(range(len(seeds))):  # They finish in any order.
        yield i, [ord(c) for c in turns(seeds[i])]

    monkeypatch.setattr(responses, 'sample', sample)
    prompts = responses.synthesise_prompts(
        tmp_path, model, None, Characters(), count=count, max_tokens=9, temperature=0.8,
        batch_size=2, seed=0)
    return prompts, asked

  return synthesise


def test_drops_prompts_of_no_use(scripted):
  turns = ['one|', '  |', 'cut off', '|', 'two|', ' one  |', 'unended', 'two |', 'three|', 'four|']
  prompts, asked = scripted(lambda seed: turns[seed] if seed < 10 else f'late {seed}|', 5)
  assert prompts[:4] == ['one', 'two', 'three', 'four']
  assert len(prompts) == 5 and prompts[4].startswith('late')
  # More are sampled until there are enough, and none twice.
  assert len(asked) > 1
  flat = sum(asked, [])
  assert sorted(flat) == list(range(len(flat)))


def test_enough_at_once(scripted):
  prompts, asked = scripted(lambda seed: f'p{seed}|', 4)
  assert prompts == ['p0', 'p1', 'p2', 'p3']
  assert len(asked) == 1 and len(asked[0]) < 10


def test_too_few_distinct_prompts(scripted):
  with pytest.raises(UserError, match='only 2 are distinct') as error:
    scripted(lambda seed: ('same|', 'other|', 'unended')[seed % 3], 4)
  message = str(error.value)
  for word in ('4 are wanted', 'max_prompt_tokens=9', 'prompt_temperature', 'num_prompts'):
    assert word in message
