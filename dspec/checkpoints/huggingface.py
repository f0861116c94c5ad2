"""Hugging Face folders: config.json, safetensors (in one file or sharded), tokenizer.json, chat template.

Formats: https://huggingface.co/docs/transformers/main_classes/configuration and
https://huggingface.co/docs/safetensors. Weights are mapped into memory and read tensor by tensor.
"""

from collections.abc import Mapping, Sequence
import hashlib
import json
import os
import pathlib
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub_errors
import numpy as np
import safetensors
import tokenizers

from dspec.checkpoints import tensors as tensors_lib
from dspec.checkpoints.fields import Fields
from dspec.data import chat
from dspec.errors import UserError
from dspec.models import blocks
from dspec.models import target as target_lib

HUB = 'hub:'  # Before an id of the Hugging Face Hub.
_ARCHITECTURES = {
    'LlamaForCausalLM': 'llama',
    'Qwen2ForCausalLM': 'qwen2',
    'Qwen3ForCausalLM': 'qwen3',
    'Gemma3ForCausalLM': 'gemma3',
}
INDEX, _WEIGHTS = 'model.safetensors.index.json', 'model.safetensors'
_GEMMA3_PATTERN = 6  # Every sixth layer is global, where the file does not say more.
# All that decides a target, of what a folder may hold.
_PATTERNS = (
    'config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja',
    INDEX, '*.safetensors',
)


def fetch(name: str) -> pathlib.Path:
  """The folder of a model of the hub, fetched at first use into the hub's own cache.

  Args:
    name: `ORGANISATION/MODEL`, and `@REVISION` if it is not the newest one.

  Raises:
    UserError: if there is no such model, it wants a token, or the network does not answer.
  """
  repo, _, revision = name.partition('@')
  try:
    return pathlib.Path(
        huggingface_hub.snapshot_download(repo, revision=revision or None, allow_patterns=list(_PATTERNS)))
  except hub_errors.HFValidationError as error:
    raise UserError(f'{HUB}{name}: write {HUB}ORGANISATION/MODEL, or with a revision {HUB}ORGANISATION/MODEL@REVISION '
                    f'({error})') from error
  except hub_errors.GatedRepoError as error:
    raise UserError(f'{HUB}{name} is gated: accept its terms at https://huggingface.co/{repo}, then give a token by '
                    '`hf auth login` or HF_TOKEN') from error
  except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
    raise UserError(f'{HUB}{name}: the hub has no such model or revision, or it is private and HF_TOKEN is not set '
                    'to a token that may read it') from error
  except (hub_errors.LocalEntryNotFoundError, hub_errors.HfHubHTTPError, OSError) as error:
    raise UserError(f'{HUB}{name} cannot be fetched ({type(error).__name__}: {error}); check the network and the disk, '
                    'or fetch the model elsewhere and give its folder as --config.target.path') from error


def fingerprint(folder: pathlib.Path) -> str:
  """SHA-256 over the files that decide a target."""
  digest = hashlib.sha256()
  for path in sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)}):
    with path.open('rb') as file:
      digest.update(f'{path.name} {hashlib.file_digest(file, "sha256").hexdigest()}\n'.encode())
  return digest.hexdigest()


def load_target(
    folder: str | os.PathLike[str], *, dtype: Any = np.float32, place: tensors_lib.Placement | None = None,
    chat_template: str | None = None, thinking: bool = False,
) -> tuple[target_lib.TargetConfig, dict[str, Any], chat.Tokenizer]:
  """Reads a whole target model.

  Args:
    folder: of config.json, *.safetensors and tokenizer.json, as `transformers` saves them.
    dtype: of the matrices; everything else is float32.
    place: what becomes of each array, see `tensors.load`.
    chat_template: Jinja source, instead of the folder's.
    thinking: for templates that ask whether the model shall think before it answers.

  Returns:
    The model's shape, its parameters (nested dict, kernels (in, out)), and its tokenizer.

  Raises:
    UserError: if something is missing, damaged or not supported.
  """
  folder = pathlib.Path(folder)
  config = read_config(folder)
  tokenizer = read_tokenizer(folder, config.eos_ids, chat_template=chat_template, thinking=thinking)
  if tokenizer.vocab_size > config.vocab_size:
    raise UserError(
        f'{folder / "tokenizer.json"}: {tokenizer.vocab_size} tokens but {config.vocab_size} rows of the embedding')
  return config, load_params(folder, config, dtype=dtype, place=place), tokenizer


# ---- Shape -----------------------------------------------------------------------------------------


def read_config(folder: pathlib.Path) -> target_lib.TargetConfig:
  """The model's shape, from config.json and generation_config.json.

  Raises:
    UserError: if config.json is missing or says something that is not supported.
  """
  fields = Fields(folder / 'config.json', _read_json(folder / 'config.json'))
  architectures = fields.list_of('architectures', str)
  known = [name for name in architectures if name in _ARCHITECTURES]
  if not known:
    raise UserError(f'{fields.path}: architecture {", ".join(architectures)} is not supported; supported: '
                    + ', '.join(_ARCHITECTURES))
  family = _ARCHITECTURES[known[0]]
  for key, what in (
      ('attention_bias', 'bias in attention'), ('mlp_bias', 'bias in the MLP'),
      ('use_sliding_window', 'a sliding window'), ('use_bidirectional_attention', 'bidirectional attention'),
      ('final_logit_softcapping', 'a soft cap of logits'), ('attn_logit_softcapping', 'a soft cap of scores'),
  ):
    fields.refuse(key, what, False)
  activation = fields.get('hidden_activation' if family == 'gemma3' else 'hidden_act', str, None)
  wanted = 'gelu_pytorch_tanh' if family == 'gemma3' else 'silu'
  if activation not in (None, wanted):
    raise UserError(f'{fields.path}: activation {activation} is not supported; for this architecture {wanted} is')
  width, heads = fields.positive('hidden_size', int), fields.positive('num_attention_heads', int)
  kv_heads = fields.positive('num_key_value_heads', int, heads)
  # Qwen 3 and Gemma 3 choose the size of a head freely: theirs must be said.
  head_dim = fields.positive('head_dim', int, ... if family in ('qwen3', 'gemma3') else width // heads)
  tensors_lib.check_heads(fields.path, heads, kv_heads, head_dim)
  layers = fields.positive('num_hidden_layers', int)
  generation = folder / 'generation_config.json'
  ends = [_read_json(generation).get('eos_token_id') if generation.exists() else None, fields.raw('eos_token_id')]
  return target_lib.TargetConfig(
      family=family,
      vocab_size=fields.positive('vocab_size', int),
      num_layers=layers,
      width=width,
      mlp_width=fields.positive('intermediate_size', int),
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=head_dim,
      norm_eps=fields.positive('rms_norm_eps', float),
      max_length=fields.positive('max_position_embeddings', int),
      tie_embeddings=fields.get('tie_word_embeddings', bool, family == 'gemma3'),
      eos_ids=_eos_ids(fields.path, ends),
      **_rotary(fields, family, head_dim // 2),
      **_locality(fields, family, layers, head_dim),
  )


def _eos_ids(path: pathlib.Path, ends: Sequence[Any]) -> tuple[int, ...]:
  try:
    ids = tensors_lib.eos_of(*ends)
    if ids and all(type(i) is int for i in ids):
      return ids
  except TypeError:
    pass
  raise UserError(f'{path}: eos_token_id must be a number or a list of numbers, here or in generation_config.json; '
                  f'it is {ends[1]!r} here and {ends[0]!r} there')


def _rotary(fields: Fields, family: str, half: int) -> dict[str, Any]:
  """Options of `TargetConfig` for rotary positions, spelled in the older way (rope_theta) or the newer (rope_parameters)."""
  parameters = fields.inner('rope_parameters')
  by_layer = 'full_attention' in parameters
  local = parameters.inner('sliding_attention') if by_layer else None
  of_all = parameters.inner('full_attention') if by_layer else parameters
  theta = of_all.positive('rope_theta', float, None) or fields.positive('rope_theta', float)
  scaling = of_all if 'rope_type' in of_all else fields.inner('rope_scaling')
  options = {'rope_theta': theta, 'rope_divisors': _divisors(scaling, half, theta)}
  if family == 'gemma3':
    local_theta = local.positive('rope_theta', float, None) if local else None
    options['local_rope_theta'] = local_theta or fields.positive('rope_local_base_freq', float)
    if local and local.get('rope_type', str, 'default') != 'default':
      raise UserError(f'{fields.path}: rotary scaling of sliding_attention is not supported')
  return options


def _divisors(scaling: Fields, half: int, theta: float) -> tuple[float, ...]:
  kind = scaling.get('rope_type', str, None) or scaling.get('type', str, 'default')
  if scaling.get('partial_rotary_factor', float, 1.0) != 1:
    raise UserError(f'{scaling.path}: partial_rotary_factor is not supported')
  if kind == 'default':
    return ()
  if kind == 'linear':
    return (scaling.positive('factor', float),) * half
  if kind == 'llama3':
    return blocks.llama3_divisors(
        half, theta,
        factor=scaling.positive('factor', float),
        low_frequency_factor=scaling.positive('low_freq_factor', float),
        high_frequency_factor=scaling.positive('high_freq_factor', float),
        original_length=scaling.positive('original_max_position_embeddings', int),
    )
  raise UserError(f'{scaling.path}: rotary scaling {kind!r} is not supported; supported: default, linear, llama3')


def _locality(fields: Fields, family: str, layers: int, head_dim: int) -> dict[str, Any]:
  """Options of `TargetConfig` for layers that see a window, and the scale of scores."""
  if family != 'gemma3':
    kinds = set(fields.list_of('layer_types', str, ()))
    if kinds - {'full_attention'}:
      raise UserError(f'{fields.path}: layer_types {", ".join(sorted(kinds))} are not supported')
    return {}
  if 'layer_types' in fields:
    kinds = fields.list_of('layer_types', str)
    if len(kinds) != layers or set(kinds) - {'full_attention', 'sliding_attention'}:
      raise UserError(f'{fields.path}: layer_types must be full_attention or sliding_attention, one for each layer')
    local = tuple(i for i, kind in enumerate(kinds) if kind == 'sliding_attention')
  else:
    pattern = fields.positive('sliding_window_pattern', int, _GEMMA3_PATTERN)
    local = tuple(i for i in range(layers) if (i + 1) % pattern)
  return {
      'local_layers': local,
      'sliding_window': fields.positive('sliding_window', int),
      'attention_scale': fields.positive('query_pre_attn_scalar', float, float(head_dim)) ** -0.5,
  }


# ---- Weights ---------------------------------------------------------------------------------------

_NAMES = {
    ('embed', 'embedding'): 'model.embed_tokens.weight',
    ('norm', 'scale'): 'model.norm.weight',
    ('lm_head', 'kernel'): 'lm_head.weight',
}
_LAYER_NAMES = {
    ('attn_norm', 'scale'): 'input_layernorm.weight',
    **{('attn', f'{x}_proj', 'kernel'): f'self_attn.{x}_proj.weight' for x in 'qkvo'},
    **{('attn', f'{x}_proj', 'bias'): f'self_attn.{x}_proj.bias' for x in 'qkv'},
    **{('attn', f'{x}_norm', 'scale'): f'self_attn.{x}_norm.weight' for x in 'qk'},
    ('mlp_norm', 'scale'): 'post_attention_layernorm.weight',
    **{('mlp', f'{x}_proj', 'kernel'): f'mlp.{x}_proj.weight' for x in ('gate', 'up', 'down')},
}
_SANDWICH_NAMES = {
    ('attn_post_norm', 'scale'): 'post_attention_layernorm.weight',
    ('mlp_norm', 'scale'): 'pre_feedforward_layernorm.weight',
    ('mlp_post_norm', 'scale'): 'post_feedforward_layernorm.weight',
}


def load_params(
    folder: pathlib.Path, config: target_lib.TargetConfig, *, dtype: Any = np.float32,
    place: tensors_lib.Placement | None = None,
) -> dict[str, Any]:
  """The parameters of a target, see `load_target`."""
  rules = tensor_rules(config)
  files = weight_files(folder)
  shapes = {name: tuple(files[name].get_slice(name).get_shape()) for name in files}
  order = {file: i for i, file in enumerate(dict.fromkeys(files.values()))}
  in_file_order = dict(sorted(rules.items(), key=lambda item: order.get(files.get(item[0]), -1)))
  return tensors_lib.load(
      str(folder), shapes, lambda name: read_tensor(files[name], name), in_file_order, dtype=dtype, place=place,
      # Frequencies are computed; and a tied head may be stored a second time.
      known_spare=lambda name: name.endswith('rotary_emb.inv_freq') or (
          config.tie_embeddings and name == 'lm_head.weight'),
  )


def tensor_rules(config: target_lib.TargetConfig) -> dict[str, tensors_lib.Rule]:
  """A rule for each tensor of a checkpoint, by its name there."""
  names = _LAYER_NAMES
  if target_lib.FAMILIES[config.family].sandwich_norm:
    names = names | _SANDWICH_NAMES
  # Gemma keeps what its norms' scales are above one.
  above_one = lambda path: (lambda x: x.astype(np.float32) + 1) if path[-1] == 'scale' else None
  return tensors_lib.rules(
      config, _NAMES, {path: f'model.layers.{{}}.{name}' for path, name in names.items()},
      above_one if config.family == 'gemma3' else lambda path: None,
  )


def read_tensor(file: Any, name: str) -> np.ndarray:
  """One tensor of an open safetensors file.

  Raises:
    NotImplementedError: for a type that is none of float32, float16 and bfloat16.
  """
  kind = file.get_slice(name).get_dtype()
  if kind not in ('F32', 'F16', 'BF16'):
    raise NotImplementedError(f'has the unsupported type {kind}')
  return file.get_tensor(name)


def weight_files(folder: pathlib.Path) -> dict[str, Any]:
  """The open safetensors file, mapped into memory, of each tensor's name.

  Raises:
    UserError: for missing, unreadable or damaged files, and tensors that are not where the index says.
  """
  if not (folder / INDEX).exists():
    file = _open(folder / _WEIGHTS)
    return {name: file for name in file.keys()}
  index = _read_json(folder / INDEX).get('weight_map')
  if not isinstance(index, Mapping) or not all(isinstance(name, str) for name in index.values()):
    raise UserError(f'{folder / INDEX}: "weight_map" must hold the file of each tensor')
  missing = sorted({name for name in index.values() if not (folder / name).is_file()})
  if missing:
    raise UserError(f'{folder / INDEX} names files that are not there: {", ".join(missing)}; fetch them again')
  files = {name: _open(folder / name) for name in sorted(set(index.values()))}
  held = {name: set(file.keys()) for name, file in files.items()}
  lost = [name for name, file in index.items() if name not in held[file]]
  if lost:
    raise UserError(f'{folder / INDEX}: {index[lost[0]]} lacks {lost[0]}, and {len(lost) - 1} more are not where the '
                    'index says; fetch the model again')
  return {name: file for file in files.values() for name in file.keys()}


def _open(path: pathlib.Path) -> Any:
  if not path.is_file():
    raise UserError(f'{path} is missing: weights must be {_WEIGHTS}, or shards with {INDEX} (older .bin files are '
                    'converted by loading and saving them with transformers)')
  try:
    return safetensors.safe_open(path, framework='numpy')
  except (safetensors.SafetensorError, OSError) as error:
    raise UserError(
        f'{path} is damaged or incomplete ({path.stat().st_size} bytes): {error}; fetch it again') from error


# ---- Tokenizer -------------------------------------------------------------------------------------


def read_tokenizer(
    folder: pathlib.Path, eos_ids: Sequence[int], *, chat_template: str | None = None, thinking: bool = False
) -> chat.Tokenizer:
  """The tokenizer and chat template of a folder.

  Args:
    folder: of tokenizer.json, tokenizer_config.json, and chat_template.jinja or the template in the former.
    eos_ids: ids that end a sequence.
    chat_template: see `load_target`.
    thinking: likewise.

  Raises:
    UserError: if tokenizer.json is missing, damaged or no BPE.
  """
  path = folder / 'tokenizer.json'
  description = _read_json(path)
  kind = (description.get('model') or {}).get('type')
  if kind != 'BPE':
    raise UserError(f'{path}: a tokenizer of type {kind} is not supported; supported: BPE')
  added = description.get('added_tokens') or []
  # The encoder does not know special tokens, so that no text is ever taken for one; nor does it add any.
  description['added_tokens'] = [token for token in added if not token['special']]
  description.update(post_processor=None, truncation=None, padding=None)
  text = json.dumps(description)
  try:
    encoder = tokenizers.Tokenizer.from_str(text)
  except Exception as error:  # pylint: disable=broad-except  It raises no other class of its own.
    raise UserError(f'{path} is damaged or of an unknown kind: {error}') from error
  special = {token['content']: token['id'] for token in added if token['special']}
  ids = [*encoder.get_vocab(with_added_tokens=True).values(), *special.values()]
  settings_path = folder / 'tokenizer_config.json'
  settings = _read_json(settings_path) if settings_path.exists() else {}
  template = chat_template or _template(folder, settings)
  bos = settings.get('bos_token')
  bos = bos.get('content') if isinstance(bos, Mapping) else bos
  parts = [text, special, list(eos_ids), bos, template]
  return chat.Tokenizer(
      encoder,
      special=special,
      vocab_size=max(ids) + 1,
      unused_ids=set(range(max(ids) + 1)) - set(ids),
      eos_ids=eos_ids,
      bos_id=special.get(bos),
      chat_template=template,
      thinking=thinking,
      source=str(folder),
      fingerprint=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
  )


def _template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
  path = folder / 'chat_template.jinja'
  if path.exists():
    return path.read_text('utf-8')
  template = settings.get('chat_template')
  if isinstance(template, list):  # Several, by name.
    template = {entry['name']: entry['template'] for entry in template}.get('default')
  return template


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text('utf-8'))
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error.strerror}; a model folder holds config.json, tokenizer.json and '
                    '*.safetensors') from error
  except ValueError as error:
    raise UserError(f'{path} is damaged ({error}); fetch it again') from error
  if not isinstance(value, dict):
    raise UserError(f'{path} must hold a JSON object')
  return value
