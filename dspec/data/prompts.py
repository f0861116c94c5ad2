"""Where prompts come from: a file of JSON lines, or a TFDS data set."""

from collections.abc import Iterator, Sequence
import importlib
import json
import pathlib
from typing import Any

from dspec.data import chat
from dspec.errors import UserError

_HELP = 'or give a .jsonl file with one {"prompt": ...} a line'


def read(source: str, *, data_dir: str | pathlib.Path | None = None) -> list[str]:
  """Prompts of a `.jsonl` file, or of `tfds:NAME[/config]:split:field`.

  Args:
    source: see `read_jsonl` and `read_tfds`.
    data_dir: where TFDS keeps its data sets.

  Raises:
    UserError: naming the source and what is wrong with it.
  """
  if source.startswith('tfds:'):
    return read_tfds(source, data_dir=data_dir)
  return read_jsonl(source)


def read_jsonl(path: str | pathlib.Path) -> list[str]:
  """Prompts of a file with one `{"prompt": "..."}` a line; other keys and blank lines are skipped.

  A line may also be a conversation, see `read_conversations`: its first user's turn is the prompt.

  Raises:
    UserError: for a file that cannot be read or holds no prompt, and for the first bad line, with
      its number: not UTF-8, not JSON, no prompt, or an empty one.
  """
  prompts = []
  for record, where in records(read_bytes(path), path):
    if 'messages' in record or 'conversations' in record:
      messages = _conversation(record, where)
      prompts.append(next((m['content'] for m in messages if m['role'] == 'user'), ''))
      checked(prompts[-1], f"{where}: the first user's turn")
    elif 'prompt' in record:
      prompts.append(checked(record['prompt'], f'{where}: "prompt"'))
    else:
      raise UserError(f'{where}: no "prompt"; each line must be an object {{"prompt": ...}}')
  return prompts


def read_conversations(path: str | pathlib.Path) -> list[list[chat.Message]]:
  """Conversations of a file: messages with a role (system, user, assistant) and a content.

  A line is `{"messages": [{"role": ..., "content": ...}, ...]}`, or as in ShareGPT
  `{"conversations": [{"from": "human", "value": ...}, ...]}`, or `{"prompt": ..., "response": ...}`.

  Raises:
    UserError: as `read_jsonl`; a conversation must begin with a prompt.
  """
  return [_conversation(record, where) for record, where in records(read_bytes(path), path)]


_SHAREGPT_ROLES = {'human': 'user', 'user': 'user', 'gpt': 'assistant', 'assistant': 'assistant', 'system': 'system'}


def _conversation(record: dict[str, Any], where: str) -> list[chat.Message]:
  if 'prompt' in record and 'response' in record:
    turns = [('user', record['prompt']), ('assistant', record['response'])]
  else:
    sharegpt = 'messages' not in record and 'conversations' in record
    key, role, content = ('conversations', 'from', 'value') if sharegpt else ('messages', 'role', 'content')
    entries = record.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
      raise UserError(f'{where}: no conversation; each line must be an object {{"messages": [...]}} or '
                      '{"prompt": ..., "response": ...}')
    turns = [(entry.get(role), entry.get(content)) for entry in entries]
    if sharegpt:
      turns = [(_SHAREGPT_ROLES.get(name, name), text) for name, text in turns]
  for i, (role, text) in enumerate(turns, 1):
    if role not in chat.ROLES:
      raise UserError(f'{where}, message {i}: role {role!r}; there are {", ".join(chat.ROLES)}')
    checked(text, f'{where}, message {i}')
  if not turns or turns[0][0] == 'assistant':
    raise UserError(f'{where}: the conversation must begin with a prompt')
  return [{'role': role, 'content': text} for role, text in turns]


def read_bytes(path: str | pathlib.Path) -> bytes:
  """The content of a file.

  Raises:
    UserError: if it cannot be read.
  """
  try:
    return pathlib.Path(path).expanduser().read_bytes()
  except OSError as error:
    raise UserError(f'{path}: cannot be read: {error.strerror}') from error


def records(content: bytes, name: str | pathlib.Path) -> Iterator[tuple[dict[str, Any], str]]:
  """The objects of JSON lines, each with where it stands; blank lines are skipped.

  Args:
    content: of a file.
    name: of that file, for the messages.

  Raises:
    UserError: if there is none, and for the first line that is not UTF-8, not JSON, or no object.
  """
  # Split at newlines only: JSON texts may hold other line separators.
  lines = content.removeprefix(b'\xef\xbb\xbf').split(b'\n')
  if not any(line.strip() for line in lines):
    raise UserError(f'{name}: holds no prompt; write one {{"prompt": ...}} a line')
  for i, line in enumerate(lines, 1):
    if not line.strip():
      continue
    where = f'{name}, line {i}'
    try:
      record = json.loads(line.decode('utf-8'))
    except UnicodeDecodeError as error:
      raise UserError(f'{where}: not UTF-8 (byte {error.start + 1}); save it as UTF-8') from error
    except json.JSONDecodeError as error:
      raise UserError(f'{where}: not JSON ({error.msg}, column {error.colno})') from error
    if not isinstance(record, dict):
      raise UserError(f'{where}: no "prompt"; each line must be an object {{"prompt": ...}}')
    yield record, where


def checked(prompt: Any, where: str) -> str:
  """The prompt, if it is a text that can be tokenized.

  Raises:
    UserError: beginning with `where`, if it is no text, an empty one, or not to be encoded.
  """
  if not isinstance(prompt, str):
    raise UserError(f'{where} must be a text, not {prompt!r:.40}')
  if not prompt.strip():
    raise UserError(f'{where} is empty')
  try:
    prompt.encode('utf-8')
  except UnicodeEncodeError as error:
    raise UserError(
        f'{where} holds half of a surrogate pair (character {error.start + 1})'
    ) from error
  return prompt


def read_tfds(source: str, *, data_dir: str | pathlib.Path | None = None) -> list[str]:
  """Prompts of a TFDS data set, read without TensorFlow; downloaded and prepared at its first use.

  Args:
    source: `tfds:NAME[/config]:split:field`, such as `tfds:gsm8k:train:question`; the split may be
      a slice, such as `train[:1000]`. Data sets of one's own are found once they are prepared in
      `data_dir`, or once the module that defines the builder is imported.
    data_dir: where TFDS keeps its data sets; by default $TFDS_DATA_DIR or ~/tensorflow_datasets.

  Raises:
    UserError: for an unknown name, config, split or field, a field that holds no text, or a failed
      download.
  """
  name, split, field = _parse(source)
  # Late: only those who use TFDS pay for its import.
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core.download import download_manager
  from tensorflow_datasets.core.download import util

  try:
    builder = _builder(tfds, name, data_dir)
  except tfds.core.registered.DatasetNotFoundError as error:
    raise UserError(
        f'{source}: TFDS knows no data set {name!r}; names are at '
        f'https://www.tensorflow.org/datasets/catalog; {_HELP}'
    ) from error
  except (ImportError, OSError, ValueError, AssertionError) as error:
    raise UserError(f'{source}: {_first_line(error)}; {_HELP}') from error
  try:
    builder.download_and_prepare()
  except (
      ImportError, OSError, ValueError, AssertionError, util.DownloadError,
      download_manager.NonMatchingChecksumError,
  ) as error:
    raise UserError(
        f'{source}: cannot be prepared in {builder.data_dir}: {_first_line(error)}; check the '
        f'network and the disk, copy that folder from a machine that has it, {_HELP}'
    ) from error
  features = builder.info.features
  if field not in features:
    raise UserError(f'{source}: no field {field!r}; its fields are {", ".join(features)}')
  try:
    size = builder.info.splits[split].num_examples
  except (KeyError, ValueError) as error:
    raise UserError(f'{source}: {_first_line(error)}') from error
  if not size:
    raise UserError(f'{source}: the split is empty')
  rows = builder.as_data_source(split)
  return [_tfds_prompt(row[field], f'{source}, row {i}') for i, row in enumerate(rows)]


def _parse(source: str) -> tuple[str, str, str]:
  name, _, rest = source.removeprefix('tfds:').partition(':')
  split, _, field = rest.rpartition(':')
  if not (name and split and field):
    raise UserError(
        f'{source!r} must read tfds:NAME:split:field, such as tfds:gsm8k:train:question'
    )
  return name, split, field


def _builder(tfds: Any, name: str, data_dir: str | pathlib.Path | None) -> Any:
  # Of the file formats, only array_record can be read without TensorFlow.
  options = {'data_dir': data_dir, 'file_format': 'array_record'}
  try:
    return tfds.builder(name, **options)
  except tfds.core.registered.DatasetNotFoundError:
    # Some builders, GSM8K's among them, are registered only once their module is imported.
    root, module = pathlib.Path(tfds.__file__).parent, name.partition('/')[0]
    for file in (*root.glob(f'*/{module}/{module}.py'), *root.glob(f'*/{module}.py')):
      parts = file.relative_to(root).with_suffix('').parts
      importlib.import_module('.'.join((root.name, *parts)))
    return tfds.builder(name, **options)


def _tfds_prompt(value: Any, where: str) -> str:
  if isinstance(value, bytes):
    try:
      value = value.decode('utf-8')
    except UnicodeDecodeError as error:
      raise UserError(f'{where}: the field is not UTF-8') from error
  return checked(value, f'{where}: the field')


def _first_line(error: BaseException) -> str:
  return (str(error) or type(error).__name__).strip().splitlines()[0].rstrip('.')


def drop_duplicates(prompts: Sequence[str]) -> list[str]:
  """The first of each group of prompts that differ in white space only, in the given order."""
  first: dict[str, str] = {}
  for prompt in prompts:
    first.setdefault(' '.join(prompt.split()), prompt)
  return list(first.values())
