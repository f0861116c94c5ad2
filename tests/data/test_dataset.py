"""From a config to rows on disk: what is in them, what a cache may be used for, what is refused."""

import dataclasses
import fcntl
import itertools
import json
import shutil
import threading
import types

import grain
import jax.numpy as jnp
import numpy as np
import pytest

from dspec import config as config_lib
from dspec.data import dataset
from dspec.data import features
from dspec.data import responses
from dspec.errors import UserError
from dspec.models import target as target_lib

EOS, WIDTH = 2, 16
PROMPTS = ['Why is the sky blue?', 'Name three rivers.', 'Hello there!', 'Write one line of Python.',
           'What is 2 + 2?', 'Tell me a joke.', 'Why  is the sky\nblue?', 'A much too long prompt ' * 9]


@pytest.fixture(scope='module')
def target(untrained_target):
  """A tiny Llama over the real tokenizer's vocabulary."""
  return untrained_target(vocab_size=49152, width=WIDTH, num_heads=2, num_kv_heads=1, head_dim=8, max_length=256,
                          eos_ids=(EOS,))


@pytest.fixture
def scene(target, smollm2, tmp_path):
  """A config on a prompts file, and a call of `prepare` on it."""
  config = config_lib.default('smoke').copy_and_resolve_references()
  path = tmp_path / 'prompts.jsonl'
  path.write_text(''.join(json.dumps({'prompt': prompt}) + '\n' for prompt in PROMPTS))
  config.data.update(
      prompts=str(path), num_prompts=20, held_out=2, max_prompt_tokens=20, max_response_tokens=8,
      generation_batch_size=4)
  config.drafter.target_layers = (0, 1)
  scene = types.SimpleNamespace(
      config=config, prompts=path, cache=tmp_path / 'cache', tokenizer=smollm2[2], model=target[0],
      fingerprint='abc')
  scene.prepare = lambda: dataset.prepare(
      scene.config, scene.cache, scene.model, target[1], scene.tokenizer, scene.fingerprint)
  return scene


@pytest.fixture
def answers(monkeypatch):
  """Answers written down here instead of sampled; a function that gets what follows each prompt."""

  def script(answer):
    calls = []

    def sample(model, params, prompts, seeds, key, **options):
      for i, prompt in enumerate(prompts):
        calls.append(prompt)
        yield i, answer(len(calls) - 1)

    monkeypatch.setattr(responses, 'sample', sample)
    return calls

  return script


@pytest.fixture
def no_work(monkeypatch):
  """A function after which nothing may be sampled or computed."""

  def forbid():
    def sample(model, params, prompts, *args, **options):
      assert not prompts
      return iter(())

    def compute(*args):
      raise AssertionError('features are computed again')

    monkeypatch.setattr(responses, 'sample', sample)
    monkeypatch.setattr(features, 'compute', compute)

  return forbid


def read(data):
  source = grain.sources.ArrayRecordDataSource([str(path) for path in data.paths])
  return [features.decode_record(source[i]) for i in range(len(source))]


def test_rows(scene, target):
  """The whole way with a real sampler: every stored number is made once more from the config."""
  data = scene.prepare()
  records = read(data)
  render = lambda prompt: tuple(scene.tokenizer.render_prompt([{'role': 'user', 'content': prompt}]))
  wanted = {render(prompt) for prompt in PROMPTS[:6]}  # A duplicate and a long one are left out.
  training = [tuple(record['tokens'][~record['supervised']].tolist()) for record in records]
  assert len(data.held_out) == 2 and len(training) == 4
  assert set(training) | set(data.held_out) == wanted
  assert not set(training) & set(data.held_out)

  params = target[1]
  for record in records:
    tokens, n = record['tokens'], int(np.argmax(record['supervised']))
    assert record['supervised'].tolist() == [t >= n for t in range(len(tokens))]
    assert 2 <= len(tokens) - n <= 8
    positions = jnp.arange(len(tokens))[None]
    cache = target_lib.init_cache(scene.model.config, 1, len(tokens))
    tapped = scene.model.apply({'params': params}, jnp.asarray(tokens)[None], positions, cache, (0, 1))[1]
    np.testing.assert_allclose(
        record['features'].astype(np.float32), np.asarray(tapped[0]), rtol=2.0**-8, atol=1e-3)

  lengths = [len(record['tokens']) for record in records]
  answers = [record['tokens'][record['supervised']] for record in records]
  assert data.length % 64 == 0 and max(lengths) <= data.length < max(lengths) + 64
  assert data.stats == {
      'training_prompts': 4,
      'training_tokens': sum(map(len, answers)),
      'row_tokens': sum(lengths),
      'truncated_share': sum(EOS not in answer for answer in answers) / 4,
      'held_out_prompts': 2,
      'too_long_prompts': 1,
      'features': 'cached',
      'responses': 'regenerated',
  }


def test_answers_as_written(scene, no_work):
  """Conversations with their own answers: nothing is generated, and every turn of the assistant is supervised."""
  talk = lambda i: [{'role': role, 'content': f'{role} {i} {turn}'} for turn in range(2) for role in ('user', 'assistant')]
  scene.prompts.write_text(''.join(json.dumps({'messages': talk(i)}) + '\n' for i in range(4)))
  no_work()
  scene.config.data.update(responses='as_written', features='online', max_prompt_tokens=60, max_response_tokens=20)
  data = scene.prepare()
  records, say = read(data), scene.tokenizer.encode
  assert len(records) == data.stats['training_prompts'] == 2 and len(data.held_out) == 2
  found = set()
  for record in records:
    runs = [list(run) for said, run in itertools.groupby(
        range(len(record['tokens'])), lambda t: bool(record['supervised'][t])) if said]
    texts = [scene.tokenizer.decode(record['tokens'][run].tolist(), skip_special=False) for run in runs]
    i = texts[0].split()[1]
    assert texts == [f'assistant {i} 0<|im_end|>', f'assistant {i} 1<|im_end|>']
    found.add(i)
  prompts = {tuple(scene.tokenizer.render_prompt(talk(i)[:1])) for i in range(4) if str(i) not in found}
  assert set(data.held_out) == prompts
  assert data.stats['training_tokens'] == sum(
      len(say(f'assistant {i} {turn}')) + 1 for i in found for turn in range(2))
  assert data.stats['truncated_share'] == 0 and data.stats['responses'] == 'as_written'
  # Cut where rows get too long; and never the data of regenerated answers.
  scene.config.data.update(max_prompt_tokens=20, max_response_tokens=20)
  shorter = scene.prepare()
  assert shorter.stats['truncated_share'] == 1 and {len(r['tokens']) for r in read(shorter)} == {40}
  assert shorter.paths[0].parent.parent != data.paths[0].parent.parent


def test_as_written_needs_answers(scene):
  scene.config.data.responses = 'as_written'
  with pytest.raises(UserError, match='line 1: no conversation'):
    scene.prepare()
  scene.prompts.write_text(json.dumps({'messages': [{'role': 'user', 'content': 'x'}]}) + '\n')
  scene.config.data.held_out = 0
  with pytest.raises(UserError, match='1 conversations 0 are held out, and the others hold no answer'):
    scene.prepare()


def test_online_features_are_not_stored(scene, answers, monkeypatch):
  answers(lambda i: [9, 9, EOS])
  monkeypatch.setattr(features, 'compute', None)
  monkeypatch.setattr(shutil, 'disk_usage', None)
  scene.config.data.features = 'online'
  records = read(scene.prepare())
  assert len(records) == 4 and not any('features' in record for record in records)


def test_rows_of_several_conversations(scene, answers):
  """The same files; which of their records lie in a row is planned."""
  answers(lambda i: [7] * (4 * i + 2))
  alone = scene.prepare()
  lengths = [len(record['tokens']) for record in read(alone)]
  assert alone.packs is None and 'filled_share' not in alone.stats
  scene.config.data.row_tokens = tokens = max(lengths) - 1 + 2 * min(lengths)
  data = scene.prepare()
  assert data.paths == alone.paths and data.length == tokens
  assert sorted(i for pack in data.packs for i in pack) == list(range(len(lengths)))
  assert max(sum(lengths[i] for i in pack) for pack in data.packs) <= tokens and len(data.packs) < len(lengths)
  shared = {'rows': len(data.packs), 'filled_share': sum(lengths) / (len(data.packs) * tokens)}
  assert data.stats == {**alone.stats, **shared}
  # What does not fit is cut, and counts as what is left of it.
  scene.config.data.row_tokens = tokens = max(lengths) - 1
  data = scene.prepare()
  assert data.stats['filled_share'] == (sum(lengths) - 1) / (len(data.packs) * tokens)


def test_truncated_answers_are_counted(scene, answers):
  whole, cut = [7, 7, EOS], [7] * 8
  given = [cut, whole, [EOS], whole]  # The third has no label to learn; it is not cut.
  answers(lambda i: given[i])
  data = scene.prepare()
  assert data.stats['truncated_share'] == 1 / 4
  found = [record['tokens'][record['supervised']].tolist() for record in read(data)]
  assert found == [cut, whole, whole]
  assert data.stats['training_prompts'] == 3
  assert data.stats['training_tokens'] == 14
  counts = np.zeros(scene.model.config.vocab_size)
  counts[[7, EOS]] = 12, 2
  np.testing.assert_array_equal(data.answer_counts, counts)
  assert data.coverage(np.array([3, 7])) == 12 / 14


def assert_same(a, b):
  np.testing.assert_array_equal(a.answer_counts, b.answer_counts)
  without_counts = lambda data: dataclasses.replace(data, answer_counts=())
  assert without_counts(a) == without_counts(b)


# ---- What a cache is used for ----------------------------------------------------------------------


def test_the_second_time_nothing_is_computed(scene, no_work):
  first = scene.prepare()
  times = {path: path.stat().st_mtime_ns for path in first.paths}
  no_work()
  # Where the file lies, and what comes after the data, does not matter.
  moved = scene.prompts.rename(scene.prompts.with_name('moved.jsonl'))
  scene.config.data.prompts = str(moved)
  scene.config.data.generation_batch_size = 3
  scene.config.seed = 5
  scene.config.loss.chain = 1.0
  scene.config.train.steps = 99
  assert_same(scene.prepare(), first)
  assert {path: path.stat().st_mtime_ns for path in first.paths} == times


def change(section, **values):
  return lambda scene: scene.config[section].update(values)


@pytest.mark.parametrize('alter', [
    lambda scene: scene.prompts.write_text(scene.prompts.read_text().replace('rivers', 'lakes')),
    change('data', seed=1),
    change('data', num_prompts=7),
    change('data', held_out=3),
    change('data', max_prompt_tokens=19),
    change('data', max_response_tokens=9),
    change('data', response_temperature=0.8),
    lambda scene: setattr(scene, 'fingerprint', 'abd'),
    lambda scene: setattr(scene, 'model', target_lib.Target(scene.model.config, jnp.bfloat16)),
    lambda scene: setattr(scene, 'tokenizer', Retouched(scene.tokenizer)),
])
def test_other_inputs_other_data(scene, answers, alter):
  calls = answers(lambda i: [9, 9, EOS])
  first = scene.prepare()
  before = len(calls)
  alter(scene)
  second = scene.prepare()
  folder = lambda data: data.paths[0].parents[1]
  assert folder(second) != folder(first)
  assert len(calls) > before
  assert all(path.exists() for path in first.paths)


class Retouched:
  """A tokenizer that would render something else."""

  def __init__(self, tokenizer):
    self._tokenizer = tokenizer

  def __getattr__(self, name):
    return getattr(self._tokenizer, name)

  def fingerprint(self):
    return 'other'


def test_other_taps_other_features_of_the_same_text(scene, answers, no_work):
  calls = answers(lambda i: [9, 9, EOS])
  first = scene.prepare()
  before = len(calls)
  scene.config.drafter.target_layers = (0,)
  second = scene.prepare()
  assert len(calls) == before
  assert second.paths[0].parents[1] == first.paths[0].parents[1]
  assert second.paths[0].parent != first.paths[0].parent
  for a, b in zip(read(first), read(second)):
    assert a['tokens'].tolist() == b['tokens'].tolist()
    np.testing.assert_array_equal(a['features'][:, :WIDTH], b['features'])
  no_work()
  scene.config.drafter.target_layers = (0, 1)
  assert scene.prepare().paths == first.paths


# ---- What is refused -------------------------------------------------------------------------------


def test_mask_token_in_the_data(scene, answers):
  answers(lambda i: [9, 16 if i == 2 else 10, EOS])
  with pytest.raises(UserError, match='--config.drafter.mask_token_id=16: .*occurs in the data'):
    scene.prepare()
  # Another mask can use the same text.
  scene.config.drafter.mask_token_id = 17
  assert len(read(scene.prepare())) == 4


def test_no_prompt_is_left(scene, answers):
  calls = answers(lambda i: [9, 9, EOS])
  scene.config.data.held_out = 6
  with pytest.raises(UserError) as error:
    scene.prepare()
  for word in (str(scene.prompts), '7 prompts', '6 have at most', '6 are held out'):
    assert word in str(error.value)
  assert not calls


def test_no_answer_has_a_label(scene, answers):
  answers(lambda i: [EOS])
  with pytest.raises(UserError, match='no answer has two tokens'):
    scene.prepare()


def test_a_bad_line_is_named_before_any_work(scene, answers):
  calls = answers(lambda i: [9, 9, EOS])
  scene.prompts.write_text(scene.prompts.read_text() + '{"prompt": 3}\n')
  with pytest.raises(UserError, match='line 9'):
    scene.prepare()
  assert not calls


@pytest.fixture
def full_disk(monkeypatch):
  """A function that leaves ten bytes on the disk, until it is called with another number."""

  def set_free(free=10):
    usage = types.SimpleNamespace(total=10**12, used=0, free=free)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)

  return set_free


def test_a_full_disk_is_refused_before_features_are_computed(scene, answers, full_disk, monkeypatch):
  answers(lambda i: [9, 9, EOS])
  full_disk()
  original, calls = features.compute, []
  monkeypatch.setattr(features, 'compute', lambda *args: calls.append(args) or original(*args))
  for _ in range(2):  # Nothing is left behind that would make the second try pass.
    with pytest.raises(UserError, match='--config.data.features=online'):
      scene.prepare()
  assert not calls
  full_disk(10**9)
  assert len(read(scene.prepare())) == 4
  full_disk()
  scene.prepare()  # All is there: no room is needed.


def test_a_full_disk_is_refused_before_answers_are_sampled(scene, answers, full_disk):
  calls = answers(lambda i: [9, 9, EOS])
  full_disk()
  with pytest.raises(UserError, match='GB'):
    scene.prepare()
  assert not calls


def test_a_full_disk_is_refused_after_a_stop_too(scene, answers, full_disk, monkeypatch):
  answers(lambda i: [9, 9, EOS])

  def stop(*args):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(features, 'compute', stop)
    with pytest.raises(KeyboardInterrupt):
      scene.prepare()
  full_disk()
  with pytest.raises(UserError, match='GB'):
    scene.prepare()


# ---- Two runs at once ------------------------------------------------------------------------------


def test_a_second_run_waits_for_the_first(scene, answers, monkeypatch):
  calls = answers(lambda i: [9, 9, EOS])
  first = scene.prepare()
  folder = first.paths[0].parents[1]
  (folder / 'responses.jsonl').unlink()
  calls.clear()

  waiting = threading.Event()
  log = lambda message, *args: waiting.set() if 'waiting' in message else None
  monkeypatch.setattr(dataset.logging, 'info', log)
  found = []
  with (folder / 'lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    thread = threading.Thread(target=lambda: found.append(scene.prepare()))
    thread.start()
    assert waiting.wait(60)
    assert not calls and not found
  thread.join(60)
  assert len(calls) == 4
  assert_same(*found, first)
