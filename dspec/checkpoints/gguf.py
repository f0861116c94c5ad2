"""GGUF files: one file with a target's shape, weights and tokenizer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Parsing and dequantisation are
the `gguf` package's; this module knows the names and layouts of the supported architectures.
"""

import functools
import os
from pathlib import Path
import struct
from typing import Any

from absl import logging
import gguf
from gguf import quants
import numpy as np

from dspec.checkpoints import tensors as tensors_lib
from dspec.checkpoints.fields import Fields
from dspec.data import chat
from dspec.errors import UserError
from dspec.models import target as target_lib

_VERSIONS = (2, 3)
_ROPE_FACTORS = 'rope_freqs.weight'
# Of Gemma 3, whose files do not say them: every sixth layer is global; the scores of the largest model.
_GEMMA3_PATTERN, _GEMMA3_LOCAL_THETA, _GEMMA3_27B_LAYERS = 6, 10_000.0, 62


def load_target(
    path: str | os.PathLike[str], *, dtype: Any = np.float32, place: tensors_lib.Placement | None = None,
    chat_template: str | None = None, thinking: bool = False,
) -> tuple[target_lib.TargetConfig, dict[str, Any], chat.Tokenizer]:
  """Reads a whole target model.

  Args:
    path: a GGUF file.
    dtype: of the matrices; everything else is float32.
    place: what becomes of each array, see `tensors.load`.
    chat_template: Jinja source, instead of the file's.
    thinking: for templates that ask whether the model shall think before it answers.

  Returns:
    The model's shape, its parameters (nested dict, kernels (in, out)), and its tokenizer.

  Raises:
    UserError: if the file is missing, damaged or holds something that is not supported.
  """
  path = Path(path)
  reader, metadata = _open(path)
  architecture = metadata.get('general.architecture', str)
  if architecture not in target_lib.FAMILIES:
    raise UserError(
        f'{path}: architecture {architecture!r} is not supported; supported: {", ".join(target_lib.FAMILIES)}'
    )
  stored = {tensor.name: tensor for tensor in reader.tensors}
  factors = _read(stored[_ROPE_FACTORS]) if _ROPE_FACTORS in stored else np.ones(0)
  config = _config(metadata, architecture, 'output.weight' not in stored, tuple(factors.tolist()))
  tokenizer = _tokenizer(metadata, chat_template, thinking)
  if tokenizer.vocab_size > config.vocab_size:
    raise UserError(
        f'{path}: {tokenizer.vocab_size} tokens but {config.vocab_size} rows of the embedding'
    )
  params = tensors_lib.load(
      str(path), {name: tuple(tensor.shape[::-1].tolist()) for name, tensor in stored.items()},
      lambda name: _read(stored[name]), _rules(config), dtype=dtype, place=place,
      known_spare=lambda name: name == _ROPE_FACTORS,
  )
  return config, params, tokenizer


class _StrictReader(gguf.GGUFReader):
  """Refuses to read past the end; the base class yields short arrays and loops over them."""

  def _get(self, offset: int, dtype: Any, count: int = 1, **kwargs: Any) -> np.ndarray:
    self.data = np.asarray(self.data)  # slicing a memmap takes four times as long
    array = super()._get(offset, dtype, count, **kwargs)
    if len(array) != count:
      raise ValueError('the file ends too early')
    return array


def _open(path: Path) -> tuple[gguf.GGUFReader, Fields]:
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
  return reader, Fields(path, values)


def _read(tensor: gguf.ReaderTensor) -> np.ndarray:
  try:
    return quants.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise NotImplementedError(f'has the unsupported type {tensor.tensor_type.name}') from error


def _tokenizer(metadata: Fields, chat_template: str | None, thinking: bool) -> chat.Tokenizer:
  model = metadata.get('tokenizer.ggml.model', str)
  common = {
      'tokens': metadata.list_of('tokenizer.ggml.tokens', str),
      'token_types': metadata.list_of('tokenizer.ggml.token_type', int),
      'eos_ids': _eos_ids(metadata),
      'bos_id': metadata.get('tokenizer.ggml.bos_token_id', int, None),
      'chat_template': chat_template or metadata.get('tokenizer.chat_template', str, None),
      'thinking': thinking,
      'source': str(metadata.path),
  }
  if model == 'gpt2':
    return chat.byte_level_bpe(
        merges=metadata.list_of('tokenizer.ggml.merges', str),
        pre_tokenizer=metadata.get('tokenizer.ggml.pre', str),
        **common,
    )
  if model == 'llama' and not metadata.get('tokenizer.ggml.add_space_prefix', bool, True):
    return chat.scored_bpe(scores=metadata.list_of('tokenizer.ggml.scores', float), **common)
  raise UserError(
      f'{metadata.path}: tokenizer model {model!r} is not supported; supported: gpt2 (byte-level BPE), and llama '
      'without a space put before the text (as in Gemma)'
  )


def _eos_ids(metadata: Fields) -> tuple[int, ...]:
  """End of sequence, of turn and of message, where the file names them."""
  keys = (f'tokenizer.ggml.{name}_token_id' for name in ('eos', 'eot', 'eom'))
  return tensors_lib.eos_of(*(metadata.get(key, int, None) for key in keys))


def _config(
    metadata: Fields, family: str, tied: bool, rope_divisors: tuple[float, ...]
) -> target_lib.TargetConfig:
  path, of = metadata.path, lambda name: f'{family}.{name}'
  if metadata.get(of('expert_count'), int, 0):
    raise UserError(f'{path}: a mixture of experts ({of("expert_count")}) is not supported')

  width = metadata.positive(of('embedding_length'), int)
  layers = metadata.positive(of('block_count'), int)
  heads = metadata.positive(of('attention.head_count'), int)
  kv_heads = metadata.positive(of('attention.head_count_kv'), int, heads)
  head_dim = metadata.positive(of('attention.key_length'), int, width // heads)
  for key in (of('rope.dimension_count'), of('attention.value_length')):
    if metadata.get(key, int, head_dim) != head_dim:
      raise UserError(
          f'{path}: {key} differs from the size of a head, {head_dim}; that is not supported'
      )
  tensors_lib.check_heads(path, heads, kv_heads, head_dim)
  theta = metadata.positive(of('rope.freq_base'), float, None)
  if theta is None:
    theta = 10_000.0
    logging.warning('%s does not give %s; taking 10000, as llama.cpp does', path, of('rope.freq_base'))
  rope_divisors = _rope_divisors(metadata, family, rope_divisors, head_dim // 2)
  tokens = metadata.get('tokenizer.ggml.tokens', list)
  return target_lib.TargetConfig(
      family=family,
      vocab_size=metadata.positive(of('vocab_size'), int, len(tokens)),
      num_layers=layers,
      width=width,
      mlp_width=metadata.positive(of('feed_forward_length'), int),
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=head_dim,
      rope_theta=theta,
      norm_eps=metadata.positive(of('attention.layer_norm_rms_epsilon'), float),
      max_length=metadata.positive(of('context_length'), int),
      tie_embeddings=tied,
      eos_ids=_eos_ids(metadata),
      rope_divisors=rope_divisors,
      **_attention(metadata, family, layers, width // heads),
  )


def _rope_divisors(metadata, family, factors: tuple[float, ...], half: int) -> tuple[float, ...]:
  """What the frequencies are divided by: the file's own factors (Llama 3.1), or linear scaling."""
  kind = metadata.get(f'{family}.rope.scaling.type', str, 'none')
  old_factor = metadata.get(f'{family}.rope.scale_linear', float, None)
  if kind not in ('none', 'linear') or (factors and kind == 'linear'):
    raise UserError(f'{metadata.path}: rotary scaling ({kind}) is not supported; use a model without it')
  if factors and len(factors) != half:
    raise UserError(f'{metadata.path}: {_ROPE_FACTORS} has {len(factors)} numbers, heads have {half} frequencies')
  if kind == 'linear' or old_factor is not None:
    return (metadata.positive(f'{family}.rope.scaling.factor', float, old_factor or ...),) * half
  return factors


def _attention(metadata, family: str, layers: int, scores_of: int) -> dict[str, Any]:
  """Options of `TargetConfig` for sliding windows and the scale of scores."""
  window = metadata.get(f'{family}.attention.sliding_window', int, 0)
  if family == 'gemma3':
    return {
        'sliding_window': metadata.positive('gemma3.attention.sliding_window', int),
        'local_layers': tuple(i for i in range(layers) if (i + 1) % _GEMMA3_PATTERN),
        'local_rope_theta': metadata.positive('gemma3.rope.freq_base_swa', float, _GEMMA3_LOCAL_THETA),
        'attention_scale': scores_of**-0.5 if layers == _GEMMA3_27B_LAYERS else 0.0,
    }
  if window:
    raise UserError(
        f'{metadata.path}: sliding-window attention ({family}.attention.sliding_window) is not supported')
  return {}


def _rotary_kernel(array_OxI: np.ndarray, *, heads: int) -> np.ndarray:
  """Undoes the row order for interleaved rotary pairs, and transposes.

  Files of the llama architecture keep the pair (j, j + head_dim/2) of each head in the neighbouring
  rows (2j, 2j + 1); the model rotates halves. Other architectures are stored as the model has them.
  """
  out, inside = array_OxI.shape
  pairs = array_OxI.reshape(heads, out // heads // 2, 2, inside)
  return pairs.swapaxes(1, 2).reshape(out, inside).T


_NAMES = {
    ('embed', 'embedding'): 'token_embd.weight',
    ('norm', 'scale'): 'output_norm.weight',
    ('lm_head', 'kernel'): 'output.weight',
}
_LAYER_NAMES = {
    ('attn_norm', 'scale'): 'attn_norm.weight',
    **{('attn', f'{x}_proj', 'kernel'): f'attn_{x}.weight' for x in 'qkv'},
    **{('attn', f'{x}_proj', 'bias'): f'attn_{x}.bias' for x in 'qkv'},
    **{('attn', f'{x}_norm', 'scale'): f'attn_{x}_norm.weight' for x in 'qk'},
    ('attn', 'o_proj', 'kernel'): 'attn_output.weight',
    ('attn_post_norm', 'scale'): 'post_attention_norm.weight',
    ('mlp_norm', 'scale'): 'ffn_norm.weight',
    **{('mlp', f'{x}_proj', 'kernel'): f'ffn_{x}.weight' for x in ('gate', 'up', 'down')},
    ('mlp_post_norm', 'scale'): 'post_ffw_norm.weight',
}


def _rules(config: target_lib.TargetConfig) -> dict[str, tensors_lib.Rule]:
  permuted = {
      ('attn', 'q_proj', 'kernel'): config.num_heads, ('attn', 'k_proj', 'kernel'): config.num_kv_heads,
  } if config.family == 'llama' else {}

  def convert(path):
    return functools.partial(_rotary_kernel, heads=permuted[path]) if path in permuted else None

  layer_names = {path: f'blk.{{}}.{name}' for path, name in _LAYER_NAMES.items()}
  return tensors_lib.rules(config, _NAMES, layer_names, convert)
