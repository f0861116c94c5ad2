"""GGUF files: one file with a target's shape, weights and tokenizer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Parsing and dequantisation are
the `gguf` package's; this module knows the names and layouts of the supported architectures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import functools
import os
from pathlib import Path
import struct
from typing import Any

from absl import logging
import gguf
from gguf import quants
import numpy as np

from dspec.data import chat
from dspec.errors import UserError
from dspec.models.target import TargetConfig

_VERSIONS = (2, 3)


@dataclass(frozen=True)
class TensorRule:
  """Where one tensor of the file goes.

  Attributes:
    path: its place in the parameters, outer name first.
    shape: its numpy shape in the file: (out, in) for a matrix.
    convert: float32 array as stored -> float32 array as the model wants it.
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]
  convert: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Family:
  """How files of one architecture are read.

  Attributes:
    config: metadata and whether the head is tied to the embedding -> the model's shape.
    tensors: the model's shape -> a rule for each tensor that the file must have.
  """

  config: Callable[['Metadata', bool], TargetConfig]
  tensors: Callable[[TargetConfig], dict[str, TensorRule]]


class Metadata:
  """The key-value part of a file, with typed access. Errors name the file and the key."""

  def __init__(self, path: Path, values: Mapping[str, Any]):
    self.path = path
    self._values = values

  def __contains__(self, key: str) -> bool:
    return key in self._values

  def get(self, key: str, kind: type, default: Any = ...) -> Any:
    """The value of `key`; without a default it must be there.

    Raises:
      UserError: if it is missing or not a `kind`.
    """
    if key not in self._values:
      if default is ...:
        raise UserError(f'{self.path}: the metadata lacks {key}')
      return default
    value = self._values[key]
    if type(value) is not kind:  # bool is an int in Python, but not here
      raise UserError(
          f'{self.path}: metadata {key} must be of type {kind.__name__}, not {type(value).__name__}'
      )
    return value

  def list_of(self, key: str, kind: type) -> list[Any]:
    """As `get`, for a list whose elements are all of type `kind`."""
    values = self.get(key, list)
    if not all(type(value) is kind for value in values):
      raise UserError(f'{self.path}: metadata {key} must hold only {kind.__name__}')
    return values

  def positive(self, key: str, kind: type, default: Any = ...) -> Any:
    """As `get`, for a number above zero."""
    value = self.get(key, kind, default)
    if value is not None and not value > 0:
      raise UserError(f'{self.path}: metadata {key} must be positive, not {value}')
    return value


def load_target(
    path: str | os.PathLike[str],
) -> tuple[TargetConfig, dict[str, Any], chat.Tokenizer]:
  """Reads a whole target model.

  Args:
    path: a GGUF file.

  Returns:
    The model's shape, its parameters (nested dict of float32 numpy arrays, kernels (in, out)), and
    its tokenizer.

  Raises:
    UserError: if the file is missing, damaged or holds something that is not supported.
  """
  path = Path(path)
  reader, metadata = _open(path)
  architecture = metadata.get('general.architecture', str)
  if architecture not in FAMILIES:
    raise UserError(
        f'{path}: architecture {architecture!r} is not supported; supported: {", ".join(FAMILIES)}'
    )
  family = FAMILIES[architecture]
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  if 'rope_freqs.weight' in tensors:
    raise UserError(
        f'{path}: rescaled rotary frequencies (tensor rope_freqs.weight, as in Llama 3.1) are not '
        'supported; use a model without them'
    )
  config = family.config(metadata, 'output.weight' not in tensors)
  tokenizer = _tokenizer(metadata)
  if tokenizer.vocab_size > config.vocab_size:
    raise UserError(
        f'{path}: {tokenizer.vocab_size} tokens but {config.vocab_size} rows of the embedding'
    )
  params = _params(path, tensors, family.tensors(config))
  return config, params, tokenizer


class _StrictReader(gguf.GGUFReader):
  """Refuses to read past the end; the base class yields short arrays and loops over them."""

  def _get(self, offset: int, dtype: Any, count: int = 1, **kwargs: Any) -> np.ndarray:
    self.data = np.asarray(self.data)  # slicing a memmap takes four times as long
    array = super()._get(offset, dtype, count, **kwargs)
    if len(array) != count:
      raise ValueError('the file ends too early')
    return array


def _open(path: Path) -> tuple[gguf.GGUFReader, Metadata]:
  try:
    with open(path, 'rb') as file:
      head = file.read(8)
  except OSError as error:
    raise UserError(f'cannot read {path}: {error.strerror}') from error
  if head[:4] != b'GGUF':
    raise UserError(f'{path} is not a GGUF file (it does not start with GGUF)')
  version = struct.unpack('<I', head[4:])[0] if len(head) == 8 else 0
  if version not in _VERSIONS:
    raise UserError(
        f'{path}: GGUF version {version} is not supported (versions 2 and 3 in little-endian order '
        'are)'
    )
  try:
    reader = _StrictReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
  # What the reader raises on bad bytes: unknown types and codes, text that is not UTF-8 and
  # impossible sizes (ValueError), offsets that overflow, keys twice.
  except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
    raise UserError(
        f'{path} is damaged or incomplete ({os.path.getsize(path)} bytes): {error}; fetch it again'
    ) from error
  return reader, Metadata(path, values)


def _params(
    path: Path, tensors: Mapping[str, gguf.ReaderTensor], rules: Mapping[str, TensorRule]
) -> dict[str, Any]:
  """Dequantises and places every tensor; reports all that does not fit at once."""
  problems = [f'unknown tensor {name}' for name in tensors if name not in rules]
  for name, rule in rules.items():
    if name not in tensors:
      problems.append(f'missing tensor {name}')
      continue
    shape = tuple(tensors[name].shape[::-1].tolist())
    if shape != rule.shape:
      problems.append(f'tensor {name} has shape {shape}, expected {rule.shape}')
  _refuse(path, problems)

  params: dict[str, Any] = {}
  for name, rule in rules.items():
    tensor = tensors[name]
    try:
      array = quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
      problems.append(f'tensor {name} has the unsupported type {tensor.tensor_type.name}')
      continue
    if not np.isfinite(array).all():
      problems.append(f'tensor {name} holds values that are not finite')
    if problems:  # nothing will be returned: only look for further problems
      continue
    node = params
    for part in rule.path[:-1]:
      node = node.setdefault(part, {})
    # A copy of its own: neither a view of the file nor of the untransposed array.
    node[rule.path[-1]] = np.array(rule.convert(array), np.float32, order='C')
  _refuse(path, problems)
  return params


def _refuse(path: Path, problems: list[str], shown: int = 20) -> None:
  if problems:
    listed = '\n  '.join(problems[:shown])
    rest = f'\n  and {len(problems) - shown} more' if len(problems) > shown else ''
    raise UserError(f'{path} does not fit its architecture:\n  {listed}{rest}')


def _tokenizer(metadata: Metadata) -> chat.Tokenizer:
  model = metadata.get('tokenizer.ggml.model', str)
  if model != 'gpt2':
    raise UserError(
        f'{metadata.path}: tokenizer model {model!r} is not supported; supported: gpt2 (byte-level '
        'BPE)'
    )
  return chat.Tokenizer(
      tokens=metadata.list_of('tokenizer.ggml.tokens', str),
      merges=metadata.list_of('tokenizer.ggml.merges', str),
      token_types=metadata.list_of('tokenizer.ggml.token_type', int),
      pre_tokenizer=metadata.get('tokenizer.ggml.pre', str),
      eos_ids=_eos_ids(metadata),
      bos_id=metadata.get('tokenizer.ggml.bos_token_id', int, None),
      chat_template=metadata.get('tokenizer.chat_template', str, None),
      source=str(metadata.path),
  )


def _eos_ids(metadata: Metadata) -> tuple[int, ...]:
  """End of sequence, of turn and of message, where the file names them."""
  keys = (f'tokenizer.ggml.{name}_token_id' for name in ('eos', 'eot', 'eom'))
  ids = (metadata.get(key, int, None) for key in keys)
  return tuple(dict.fromkeys(i for i in ids if i is not None))


def _llama_config(metadata: Metadata, tied: bool) -> TargetConfig:
  path = metadata.path
  scaling = metadata.get('llama.rope.scaling.type', str, 'none')
  if scaling != 'none' or 'llama.rope.scale_linear' in metadata:
    raise UserError(f'{path}: rotary scaling ({scaling}) is not supported; use a model without it')
  for key, what in (
      ('llama.expert_count', 'a mixture of experts'),
      ('llama.attention.sliding_window', 'sliding-window attention'),
  ):
    if metadata.get(key, int, 0):
      raise UserError(f'{path}: {what} ({key}) is not supported')

  width = metadata.positive('llama.embedding_length', int)
  heads = metadata.positive('llama.attention.head_count', int)
  kv_heads = metadata.positive('llama.attention.head_count_kv', int, heads)
  head_dim = metadata.positive('llama.attention.key_length', int, width // heads)
  for key in ('llama.rope.dimension_count', 'llama.attention.value_length'):
    if metadata.get(key, int, head_dim) != head_dim:
      raise UserError(
          f'{path}: {key} differs from the size of a head, {head_dim}; that is not supported'
      )
  if head_dim % 2 or heads % kv_heads:
    raise UserError(
        f'{path}: {heads} heads of size {head_dim} with {kv_heads} key heads cannot work'
    )
  theta = metadata.positive('llama.rope.freq_base', float, None)
  if theta is None:
    theta = 10_000.0
    logging.warning('%s does not give llama.rope.freq_base; taking 10000, as llama.cpp does', path)
  tokens = metadata.get('tokenizer.ggml.tokens', list)
  return TargetConfig(
      family='llama',
      vocab_size=metadata.positive('llama.vocab_size', int, len(tokens)),
      num_layers=metadata.positive('llama.block_count', int),
      width=width,
      mlp_width=metadata.positive('llama.feed_forward_length', int),
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=head_dim,
      rope_theta=theta,
      norm_eps=metadata.positive('llama.attention.layer_norm_rms_epsilon', float),
      max_length=metadata.positive('llama.context_length', int),
      tie_embeddings=tied,
      eos_ids=_eos_ids(metadata),
  )


def _as_stored(array: np.ndarray) -> np.ndarray:
  return array


def _kernel(array_OxI: np.ndarray) -> np.ndarray:
  return array_OxI.T


def _rotary_kernel(array_OxI: np.ndarray, *, heads: int) -> np.ndarray:
  """Undoes the row order for interleaved rotary pairs, and transposes.

  Files of the llama architecture keep the pair (j, j + head_dim/2) of each head in the neighbouring
  rows (2j, 2j + 1); the model rotates halves.
  """
  out, inside = array_OxI.shape
  pairs = array_OxI.reshape(heads, out // heads // 2, 2, inside)
  return pairs.swapaxes(1, 2).reshape(out, inside).T


def _llama_tensors(config: TargetConfig) -> dict[str, TensorRule]:
  width, mlp_width = config.width, config.mlp_width
  query_width = config.num_heads * config.head_dim
  key_width = config.num_kv_heads * config.head_dim
  query = functools.partial(_rotary_kernel, heads=config.num_heads)
  key = functools.partial(_rotary_kernel, heads=config.num_kv_heads)
  embedding_shape = (config.vocab_size, width)
  rules = {
      'token_embd.weight': TensorRule(('embed', 'embedding'), embedding_shape, _as_stored),
      'output_norm.weight': TensorRule(('norm', 'scale'), (width,), _as_stored),
  }
  if not config.tie_embeddings:
    rules['output.weight'] = TensorRule(('lm_head', 'kernel'), embedding_shape, _kernel)
  in_layer = {
      'attn_norm': (('attn_norm', 'scale'), (width,), _as_stored),
      'attn_q': (('attn', 'q_proj', 'kernel'), (query_width, width), query),
      'attn_k': (('attn', 'k_proj', 'kernel'), (key_width, width), key),
      'attn_v': (('attn', 'v_proj', 'kernel'), (key_width, width), _kernel),
      'attn_output': (('attn', 'o_proj', 'kernel'), (width, query_width), _kernel),
      'ffn_norm': (('mlp_norm', 'scale'), (width,), _as_stored),
      'ffn_gate': (('mlp', 'gate_proj', 'kernel'), (mlp_width, width), _kernel),
      'ffn_up': (('mlp', 'up_proj', 'kernel'), (mlp_width, width), _kernel),
      'ffn_down': (('mlp', 'down_proj', 'kernel'), (width, mlp_width), _kernel),
  }
  for i in range(config.num_layers):
    for name, (path, shape, convert) in in_layer.items():
      rules[f'blk.{i}.{name}.weight'] = TensorRule((f'layers_{i}', *path), shape, convert)
  return rules


# By the file's general.architecture.
FAMILIES: dict[str, Family] = {'llama': Family(_llama_config, _llama_tensors)}
