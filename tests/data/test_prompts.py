"""Prompt sources: real files, a real TFDS data set of three rows."""

import json
import subprocess
import sys

import pytest

from dspec.data import prompts
from dspec.errors import UserError


def _write(tmp_path, content):
  path = tmp_path / 'prompts.jsonl'
  path.write_bytes(content)
  return path


# ---- JSON lines ----------------------------------------------------------------------------------


def test_jsonl(tmp_path):
  texts = ['one', '  two\nlines ', 'line\u2028separator, \u00e9, \U0001f600', '"quoted"']
  lines = [json.dumps({'prompt': text, 'id': i}, ensure_ascii=i % 2 == 0)
           for i, text in enumerate(texts)]
  content = '\ufeff' + '\r\n'.join(lines[:2]) + '\n\n' + '\n'.join(lines[2:])
  path = _write(tmp_path, content.encode('utf-8'))
  assert prompts.read_jsonl(path) == texts
  assert prompts.read(str(path)) == texts


@pytest.mark.parametrize('line, message', [
    (b'{"prompt": "open', r'line 3: not JSON \(Unterminated string.*column 12\)'),
    (b'just text', 'line 3: not JSON'),
    (b'{"prompt": "\xff"}', r'line 3: not UTF-8 \(byte 13\)'),
    (b'{"text": "no prompt"}', 'line 3: no "prompt"'),
    (b'["prompt"]', 'line 3: no "prompt"'),
    (b'"prompt"', 'line 3: no "prompt"'),
    (b'{"prompt": ""}', 'line 3: "prompt" is empty'),
    (b'{"prompt": " \\n\\t"}', 'line 3: "prompt" is empty'),
    (b'{"prompt": ["a"]}', r"line 3: \"prompt\" must be a text, not \['a'\]"),
    (b'{"prompt": null}', 'line 3: "prompt" must be a text, not None'),
    (b'{"prompt": "ab\\ud800"}', r'"prompt" holds half of a surrogate pair \(character 3\)'),
])
def test_bad_line(tmp_path, line, message):
  path = _write(tmp_path, b'{"prompt": "good"}\n\n' + line + b'\n{"prompt": "good"}\n')
  with pytest.raises(UserError, match=message) as info:
    prompts.read_jsonl(path)
  assert str(path) in str(info.value)


TALK = [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'u'}, {'role': 'assistant', 'content': 'a'}]


@pytest.mark.parametrize('record, messages', [
    ({'messages': TALK, 'id': 3}, TALK),
    ({'conversations': [{'from': 'system', 'value': 's'}, {'from': 'human', 'value': 'u'}, {'from': 'gpt', 'value': 'a'}]},
     TALK),
    ({'prompt': 'u', 'response': 'a'}, TALK[1:]),
])
def test_conversations(tmp_path, record, messages):
  path = tmp_path / 'talk.jsonl'
  path.write_text(json.dumps(record) + '\n\n' + json.dumps(record))
  assert prompts.read_conversations(path) == [messages] * 2
  assert prompts.read(str(path)) == ['u'] * 2  # To be answered anew.


@pytest.mark.parametrize('record, message', [
    ({'prompt': 'u'}, 'line 1: no conversation'),
    ({'messages': 'u'}, 'line 1: no conversation'),
    ({'messages': ['u']}, 'line 1: no conversation'),
    ({'messages': []}, 'line 1: the conversation must begin with a prompt'),
    ({'messages': TALK[2:]}, 'line 1: the conversation must begin with a prompt'),
    ({'messages': [*TALK, {'role': 'tool', 'content': 'x'}]}, "line 1, message 4: role 'tool'; there are system, user"),
    ({'messages': [*TALK, {'role': 'user'}]}, 'line 1, message 4 must be a text, not None'),
    ({'conversations': [{'from': 'human', 'value': ''}]}, 'line 1, message 1 is empty'),
])
def test_bad_conversation(tmp_path, record, message):
  path = tmp_path / 'talk.jsonl'
  path.write_text(json.dumps(record))
  with pytest.raises(UserError, match=message):
    prompts.read_conversations(path)


@pytest.mark.parametrize('content', [b'', b'\n  \n'])
def test_file_without_prompts(tmp_path, content):
  with pytest.raises(UserError, match='holds no prompt'):
    prompts.read_jsonl(_write(tmp_path, content))


def test_unreadable_file(tmp_path):
  with pytest.raises(UserError, match='absent.jsonl: cannot be read: No such file'):
    prompts.read_jsonl(tmp_path / 'absent.jsonl')
  with pytest.raises(UserError, match='cannot be read'):
    prompts.read_jsonl(tmp_path)


# ---- TFDS ----------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def questions():
  """Defines, and so registers, a data set `dspec_test_questions`."""
  import numpy as np
  import tensorflow_datasets as tfds

  class DspecTestQuestions(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name='plain'), tfds.core.BuilderConfig(name='loud')]

    def _info(self):
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
          'question': tfds.features.Text(), 'number': tfds.features.Scalar(np.int32)}))

    def _split_generators(self, dl_manager):
      return {'train': self._generate_examples(['a', 'b \u00e9', 'c']),
              'holey': self._generate_examples(['a', ' '])}

    def _generate_examples(self, texts):
      for i, text in enumerate(texts):
        yield i, {'question': text.upper() if self.builder_config.name == 'loud' else text,
                  'number': i}

  return 'tfds:dspec_test_questions'


def test_tfds(tmp_path, questions):
  read = lambda rest: prompts.read(f'{questions}{rest}', data_dir=tmp_path)
  assert sorted(read(':train:question')) == ['a', 'b \u00e9', 'c']
  assert sorted(read('/loud:train:question')) == ['A', 'B \u00c9', 'C']
  assert read(':train[:2]:question') == read(':train:question')[:2]


@pytest.mark.parametrize('rest, message', [
    (':nowhere:question', "Unknown split 'nowhere'"),
    (':train[:question', "Error parsing split 'train"),
    (':train:answer', "no field 'answer'; its fields are question, number"),
    (':train:number', 'row 0: the field must be a text'),
    (':holey:question', r'row \d: the field is empty'),
    ('/quiet:train:question', 'quiet not found'),
    (':train[:0]:question', 'the split is empty'),
    (':train', 'must read tfds:NAME:split:field'),
    ('::question', 'must read tfds:NAME:split:field'),
])
def test_bad_tfds_source(tmp_path, questions, rest, message):
  with pytest.raises(UserError, match=message) as info:
    prompts.read_tfds(f'{questions}{rest}', data_dir=tmp_path)
  assert questions in str(info.value) and '\n' not in str(info.value)


@pytest.mark.parametrize('name', ['no_such_data_set', 'wrong name', '../escape'])
def test_unknown_tfds_name(tmp_path, name):
  with pytest.raises(UserError, match='jsonl'):
    prompts.read_tfds(f'tfds:{name}:train:text', data_dir=tmp_path)


def test_tfds_prepared_elsewhere(tmp_path, questions):
  prompts.read_tfds(f'{questions}:train:question', data_dir=tmp_path)
  # Another process, where no builder of that name is defined.
  code = ('import sys; from dspec.data import prompts; '
          'print(ascii(sorted(prompts.read(sys.argv[1], data_dir=sys.argv[2]))))')
  done = subprocess.run(
      [sys.executable, '-c', code, f'{questions}/plain:train:question', str(tmp_path)],
      capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-1] == r"['a', 'b \xe9', 'c']"


def test_gsm8k_without_network(tmp_path, monkeypatch):
  import tensorflow_datasets as tfds

  found = []

  def refuse(builder):
    found.append(type(builder).__name__)
    raise ConnectionError('no route to host')

  monkeypatch.setattr(tfds.core.DatasetBuilder, 'download_and_prepare', refuse)
  with pytest.raises(UserError, match='gsm8k:train:question: cannot be prepared in .*: no route'):
    prompts.read_tfds('tfds:gsm8k:train:question', data_dir=tmp_path)
  assert found == ['Gsm8k'] and 'tensorflow' not in sys.modules


# ---- Duplicates ----------------------------------------------------------------------------------


def test_drop_duplicates():
  given = ['b  c', 'a', ' b c\n', 'B c', 'a ', 'bc', 'a']
  assert prompts.drop_duplicates(given) == ['b  c', 'a', 'B c', 'bc']
  assert prompts.drop_duplicates([]) == []


def test_import_is_light():
  code = 'import sys, dspec.data.prompts; print("tensorflow_datasets" in sys.modules)'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == 'False'
