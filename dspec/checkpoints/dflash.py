"""Drafters in and out, in the two formats that engines serve.

- `dflash`: as z-lab publishes them (https://github.com/z-lab/dflash); vLLM and SGLang read it. The body of a Qwen3 with
  `fc` and `hidden_norm` for the target's features; embedding and head are the target's own. DFlash 2 has the same
  layout, with convolutions and a selector.
- `speculators` (https://github.com/vllm-project/speculators): the same tensors, the target's embedding and head beside
  them, and a draft vocabulary if there is one. vLLM reads it.

Both are a folder of config.json and safetensors, matrices (out, in). A wrong mask token, tapped layer or rotary base
makes a drafter that runs and is never accepted: nothing of that is guessed here, and what cannot be run is refused by
name.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from dspec.checkpoints import tensors as tensors_lib
from dspec.checkpoints.fields import Fields
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

FORMATS = ('dflash', 'speculators')
# Models by their class names in public code; the second one holds the parts of DFlash 2.
_DFLASH, _DFLASH2 = 'DFlashDraftModel', 'DFlash2DraftModel'
_ARCHITECTURES = (_DFLASH, 'Qwen3DFlashDraftModel', _DFLASH2)
# Of the target, by its family; a speculators checkpoint names it.
_TARGET_ARCHITECTURES = {
    'llama': 'LlamaForCausalLM', 'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM',
    'gemma3': 'Gemma3ForCausalLM',
}
# Made from the target when a checkpoint is loaded, or from the config; nothing is read from them.
_DERIVED = ('rotary_emb.inv_freq', 'verifier_norm.weight', 'verifier_lm_head.weight')
_OWN_ROWS = 0.1  # Relative distance from which a matrix is not the target's; bfloat16 and 4 bits stay below.


@dataclasses.dataclass(frozen=True)
class Info:
  """What a checkpoint says beside the drafter's shape and parameters.

  Attributes:
    path: the folder.
    format: one of `FORMATS`.
    vocab_size: V, the target's.
    num_target_layers: the target's; None where the format does not say.
    target: the target's name, '' where the format does not say.
    embedding_VxD: the checkpoint's own copy of the target's embedding, or None.
    head_VxD: likewise of the head; of the draft vocabulary's rows where there is one.
  """

  path: Path
  format: str
  vocab_size: int
  num_target_layers: int | None
  target: str
  embedding_VxD: np.ndarray | None = None
  head_VxD: np.ndarray | None = None


# ---- Reading ------------------------------------------------------------------------------------


def load_config(path: str | os.PathLike[str]) -> tuple[drafter_lib.DrafterConfig, Info]:
  """The shape of a drafter, from config.json alone; see `load_drafter`."""
  folder = Path(path).expanduser()
  file = folder / 'config.json'
  try:
    values = json.loads(file.read_text('utf-8'))
  except OSError as error:
    raise UserError(f'cannot read {file}: {error.strerror}; give the folder of a DFlash drafter') from error
  except ValueError as error:
    raise UserError(f'{file} is damaged: {error}') from error
  if not isinstance(values, dict):
    raise UserError(f'{file} is damaged: not a JSON object')
  if 'speculators_model_type' in values:
    return _speculators_config(file, values)
  return _dflash_config(file, values)


def load_drafter(path: str | os.PathLike[str]) -> tuple[drafter_lib.DrafterConfig, dict[str, Any], Info]:
  """Reads a drafter of either format; which one it is, its config says.

  Args:
    path: a folder with config.json and safetensors.

  Returns:
    The drafter's shape, its parameters (nested dict of numpy arrays, float32 but for the ids of a draft vocabulary,
    kernels (in, out), `feature_scale` 1), and what else the checkpoint says.

  Raises:
    UserError: if it is missing, damaged, incomplete, or holds something that is not supported.
  """
  config, info = load_config(path)
  tensors = _tensors(info.path)
  info = dataclasses.replace(
      info, embedding_VxD=tensors.pop('embed_tokens.weight', None), head_VxD=tensors.pop('lm_head.weight', None))
  config, draft_ids = _draft_ids(config, info, tensors.pop('d2t', None), tensors.pop('t2d', None))
  params = _params(config, info, tensors)
  if draft_ids is not None:
    params['draft_ids'] = draft_ids
  return config, params, info


def _dflash_config(file: Path, values: dict[str, Any]) -> tuple[drafter_lib.DrafterConfig, Info]:
  inner = values.get('dflash_config') or {}
  architectures = values.get('architectures') or []
  if not isinstance(inner, dict) or not (inner or set(architectures) & set(_ARCHITECTURES)):
    raise UserError(f'{file} does not describe a DFlash drafter: architectures are {architectures}')
  unknown = set(architectures) - set(_ARCHITECTURES)
  if unknown:
    raise UserError(f'{file}: architecture {", ".join(sorted(unknown))} is not supported; '
                    f'supported: {", ".join(_ARCHITECTURES)}')
  fields, both = Fields(file, values), Fields(file, inner, values)
  both.refuse('projector_type', 'a correction head', 'dflash')
  both.refuse('shift_label', 'labels that are shifted', False)
  both.refuse('causal', 'causality that this format does not name is_causal', False)
  num_layers = fields.positive('num_hidden_layers', int)
  num_target_layers = both.positive('num_target_layers', int, None)
  taps = both.list_of('target_layer_ids', int, None)
  if taps is None:
    if num_target_layers is None:
      raise UserError(f'{file}: target_layer_ids is missing')
    taps = default_target_layers(num_target_layers, num_layers)
  windows, causal = _sliding(fields, num_layers)
  extra = {
      'embedding_scale': both.positive('input_embedding_scale', float, 1.0),
      'logit_scale': both.positive('output_multiplier', float, 1.0),
      'logit_softcap': both.get('final_logit_softcapping', float, 0.0),
      'layer_windows': windows, 'causal_layers': causal,
  }
  if _DFLASH2 in architectures:
    extra |= {
        'conv_taps': both.positive('conv_kernel_size', int), 'conv_group': both.positive('conv_group_size', int),
        'selector_rank': both.positive('selector_rank', int),
        'selector_candidates': both.positive('selector_top_k', int),
    }
  config, vocab_size = _body(fields, both, taps, extra)
  return config, Info(file.parent, 'dflash', vocab_size, num_target_layers, '')


def _speculators_config(file: Path, values: dict[str, Any]) -> tuple[drafter_lib.DrafterConfig, Info]:
  if values['speculators_model_type'] != 'dflash':
    raise UserError(f'{file}: a speculator of type {values["speculators_model_type"]!r} is not supported; '
                    'supported: dflash')
  inner = values.get('transformer_layer_config')
  if not isinstance(inner, dict):
    raise UserError(f'{file}: transformer_layer_config is missing')
  fields, body = Fields(file, values), Fields(file, inner)
  fields.refuse('projector_type', 'a correction head', 'dflash')
  fields.refuse('shift_label', 'labels that are shifted', False)
  if 'sliding_attention' in (inner.get('layer_types') or []):
    raise UserError(f'{file}: sliding attention (layer_types) is not supported in this format: the window of its '
                    'training and that of its engines differ')
  # This format counts the entries of the list of hidden states, whose first one is the embedding.
  taps = tuple(i - 1 for i in fields.list_of('aux_hidden_state_layer_ids', int))
  config, vocab_size = _body(body, fields, taps, {})
  fields.refuse('target_hidden_size', 'a target of another width', config.width)
  draft_vocab_size = fields.positive('draft_vocab_size', int, vocab_size)
  if draft_vocab_size < vocab_size:
    config = dataclasses.replace(config, vocab_size=draft_vocab_size)
  elif draft_vocab_size > vocab_size:
    raise UserError(f'{file}: draft_vocab_size is {draft_vocab_size}, but the target has {vocab_size} tokens')
  verifier = (values.get('speculators_config') or {}).get('verifier') or {}
  return config, Info(file.parent, 'speculators', vocab_size, None, str(verifier.get('name_or_path') or ''))


def default_target_layers(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
  """The layers that a z-lab checkpoint taps where it does not name them: even steps from 1 to L - 3."""
  if num_taps == 1:
    return (num_target_layers // 2,)
  return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def _body(
    body: Fields, around: Fields, taps: Sequence[int], extra: dict[str, Any]
) -> tuple[drafter_lib.DrafterConfig, int]:
  """What both formats say in the same words, with a few keys outside the body; and the target's vocabulary."""
  path = body.path
  for key, what, *harmless in (
      ('hidden_act', 'another activation', 'silu'),
      ('attention_bias', 'bias in attention', False),
      ('mlp_bias', 'bias in the MLP', False),
      ('partial_rotary_factor', 'partial rotary', 1, 1.0),
  ):
    body.refuse(key, what, *harmless)
  heads = body.positive('num_attention_heads', int)
  kv_heads, head_dim = body.positive('num_key_value_heads', int), body.positive('head_dim', int)
  tensors_lib.check_heads(path, heads, kv_heads, head_dim)
  from_anchor = around.get('sample_from_anchor', bool, False)
  config = drafter_lib.DrafterConfig(
      num_layers=body.positive('num_hidden_layers', int),
      # Of as many slots one more token is drafted where the anchor's own slot predicts one.
      block_size=around.positive('block_size', int) + from_anchor,
      from_anchor=from_anchor,
      target_layers=tuple(taps),
      mask_token_id=around.get('mask_token_id', int),
      width=body.positive('hidden_size', int),
      mlp_width=body.positive('intermediate_size', int),
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=head_dim,
      rope_theta=_rope_theta(body),
      norm_eps=body.positive('rms_norm_eps', float),
      **extra,
  )
  if list(taps) != sorted(set(taps)) or taps[0] < 0:
    raise UserError(f'{path}: the tapped layers, {list(taps)}, must ascend from 0 on')
  if config.block_size < 2:
    raise UserError(f'{around.path}: block_size is {config.num_slots}: no token is drafted')
  if config.conv_taps and config.width % config.conv_group:
    raise UserError(f'{path}: conv_group_size is {config.conv_group}, which does not divide {config.width}')
  return config, body.positive('vocab_size', int)


def _rope_theta(body: Fields) -> float:
  """The rotary base, from `rope_theta` or `rope_parameters`. Without one 10000 would be wrong for most targets."""
  nested = [body.get(key, dict, {}) for key in ('rope_parameters', 'rope_scaling')]
  for key, o in zip(('rope_parameters', 'rope_scaling'), nested):
    scaling = Fields(body.path, o, prefix=f'{key}.')
    scaling.refuse('rope_type', 'rotary scaling', 'default')
    scaling.refuse('type', 'rotary scaling', 'default')
    scaling.refuse('partial_rotary_factor', 'partial rotary', 1, 1.0)
    if any(isinstance(value, dict) for value in o.values()):
      raise UserError(f'{body.path}: a rotary base of its own for some layers ({key}) is not supported')
  return Fields(body.path, {'rope_theta': body.get('rope_theta', float, None)}, *nested).positive('rope_theta', float)


def _sliding(fields: Fields, num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Windows of the layers, and those that are causal inside the block, as z-lab's model reads them."""
  kinds = fields.get('layer_types', list, None)
  if kinds is None:
    fields.refuse('use_sliding_window', 'a sliding window without layer_types', False)
    kinds = ['full_attention'] * num_layers
  if len(kinds) != num_layers or not set(kinds) <= {'full_attention', 'sliding_attention'}:
    raise UserError(f'{fields.path}: layer_types, {kinds}, must name full_attention or sliding_attention for each of '
                    f'{num_layers} layers')
  slides = [kind == 'sliding_attention' for kind in kinds]
  windows = ()
  if any(slides):
    if not fields.get('use_sliding_window', bool, False):
      raise UserError(f'{fields.path}: layer_types names sliding_attention, but use_sliding_window is not true')
    window = fields.positive('sliding_window', int)
    windows = tuple(window if slide else 0 for slide in slides)
  # Sliding layers are causal unless the config says otherwise; what it says holds for all layers.
  causal = fields.get('is_causal', bool, None)
  return windows, tuple(i for i, slide in enumerate(slides) if (slide if causal is None else causal))


def _tensors(folder: Path) -> dict[str, np.ndarray]:
  """All tensors of a folder, one file or several, without the `model.` prefix that some have."""
  single, index = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
  if index.exists():
    try:
      files = sorted({folder / name for name in json.loads(index.read_text('utf-8'))['weight_map'].values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
      raise UserError(f'{index} is damaged: {error}') from error
  else:
    files = [single]
  tensors = {}
  for file in files:
    try:
      tensors.update(safetensors_numpy.load_file(file))
    except OSError as error:
      raise UserError(f'cannot read {file}: {error.strerror or error}') from error
    except safetensors.SafetensorError as error:
      raise UserError(f'{file} is damaged: {error}') from error
    except (KeyError, TypeError) as error:
      raise UserError(f'{file} holds numbers of a kind that is not supported ({error}); wanted: bfloat16, float16 or '
                      'float32') from error
  # Codebooks are plain parameters in published files, and embeddings where z-lab's package writes them.
  plain = lambda name: name.removeprefix('model.').replace('_codebook.weight', '_codebook')
  return {plain(name): tensor for name, tensor in tensors.items() if plain(name) not in _DERIVED}


def _draft_ids(
    config: drafter_lib.DrafterConfig, info: Info, offsets: np.ndarray | None, in_draft: np.ndarray | None
) -> tuple[drafter_lib.DrafterConfig, np.ndarray | None]:
  """Token ids of the draft vocabulary, from d2t (target id = draft id + d2t[draft id]) and t2d (a mask), checked."""
  if not config.vocab_size:
    if offsets is not None and np.any(offsets):
      raise UserError(f'{info.path}: d2t maps tokens, but draft_vocab_size is that of the target')
    return config, None
  if offsets is None or offsets.shape != (config.vocab_size,):
    raise UserError(f'{info.path}: draft_vocab_size is {config.vocab_size}, which needs as many offsets in d2t')
  ids = np.arange(config.vocab_size) + offsets
  if ids[0] < 0 or ids[-1] >= info.vocab_size or np.any(np.diff(ids) <= 0):
    raise UserError(f'{info.path}: d2t must lead to ascending tokens of 0 to {info.vocab_size - 1}')
  if in_draft is not None and not np.array_equal(np.flatnonzero(in_draft), ids):
    raise UserError(f'{info.path}: t2d and d2t name different tokens')
  return config, ids.astype(np.int32)


# ---- Names and shapes ---------------------------------------------------------------------------


class _Rule(NamedTuple):
  """Where a tensor goes.

  Attributes:
    path: its place in the parameters.
    shape: in the file, (out, in) for a kernel.
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]


def _rules(config: drafter_lib.DrafterConfig, vocab_size: int) -> dict[str, _Rule]:
  """A rule for every tensor of a drafter's body, by its name in the file."""
  c = config
  width, queries, keys = c.width, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  rules = {
      'fc.weight': _Rule(('fc', 'kernel'), (width, len(c.target_layers) * width)),
      'hidden_norm.weight': _Rule(('hidden_norm', 'scale'), (width,)),
      'norm.weight': _Rule(('norm', 'scale'), (width,)),
  }
  in_layer = {
      'self_attn.q_proj.weight': (('attn', 'q_proj', 'kernel'), (queries, width)),
      'self_attn.k_proj.weight': (('attn', 'k_proj', 'kernel'), (keys, width)),
      'self_attn.v_proj.weight': (('attn', 'v_proj', 'kernel'), (keys, width)),
      'self_attn.o_proj.weight': (('attn', 'o_proj', 'kernel'), (width, queries)),
      'self_attn.q_norm.weight': (('attn', 'q_norm', 'scale'), (c.head_dim,)),
      'self_attn.k_norm.weight': (('attn', 'k_norm', 'scale'), (c.head_dim,)),
      'mlp.gate_proj.weight': (('mlp', 'gate_proj', 'kernel'), (c.mlp_width, width)),
      'mlp.up_proj.weight': (('mlp', 'up_proj', 'kernel'), (c.mlp_width, width)),
      'mlp.down_proj.weight': (('mlp', 'down_proj', 'kernel'), (width, c.mlp_width)),
      'input_layernorm.weight': (('attn_norm', 'scale'), (width,)),
      'post_attention_layernorm.weight': (('mlp_norm', 'scale'), (width,)),
  }
  if c.conv_taps:
    dynamic = 2 * c.conv_taps * (width // c.conv_group)
    for theirs, ours in (('attention_conv', 'attn_conv'), ('mlp_conv', 'mlp_conv')):
      in_layer[f'{theirs}.base_kernel'] = ((ours, 'base'), (2, c.conv_taps, width))
      in_layer[f'{theirs}.kernel_projection.weight'] = ((ours, 'projection', 'kernel'), (dynamic, width))
  for i in range(c.num_layers):
    rules |= {f'layers.{i}.{name}': _Rule((f'layers_{i}', *path), shape) for name, (path, shape) in in_layer.items()}
  if c.selector_rank:
    rank = c.selector_rank
    for name in ('predecessor', 'successor'):
      rules[f'candidate_selector.{name}_codebook'] = _Rule(('selector', name), (vocab_size, rank))
    rules['candidate_selector.hidden_projection.weight'] = _Rule(('selector', 'projection', 'kernel'), (rank, width))
  return rules


def _params(config: drafter_lib.DrafterConfig, info: Info, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
  """The body's tensors as parameters.

  Raises:
    UserError: with all tensors that are missing, left over, or of another shape.
  """
  rules = _rules(config, info.vocab_size)
  problems = [f'{name} is missing' for name in rules if name not in tensors]
  problems += [f'{name} has no place in this drafter' for name in sorted(tensors.keys() - rules.keys())]
  params: dict[str, Any] = {'feature_scale': np.ones(len(config.target_layers) * config.width, np.float32)}
  for name, rule in rules.items():
    tensor = tensors.get(name)
    if tensor is None:
      continue
    if tensor.shape != rule.shape or tensor.dtype not in (np.float32, np.float16, ml_dtypes.bfloat16):
      problems.append(f'{name} is {tensor.dtype} {list(tensor.shape)}, not a float {list(rule.shape)}')
      continue
    tensor = tensor.astype(np.float32)
    if not np.isfinite(tensor).all():
      problems.append(f'{name} holds numbers that are not finite')
    node = params
    for part in rule.path[:-1]:
      node = node.setdefault(part, {})
    node[rule.path[-1]] = np.ascontiguousarray(tensor.T) if rule.path[-1] == 'kernel' else tensor
  if problems:
    rest = f'\n  and {len(problems) - 20} more' if len(problems) > 20 else ''
    raise UserError(f'{info.path} does not fit its config.json:\n  ' + '\n  '.join(problems[:20]) + rest)
  return params


# ---- Against the target -------------------------------------------------------------------------


def check_target(
    config: drafter_lib.DrafterConfig, info: Info, target: target_lib.TargetConfig, tokenizer: Any = None
) -> None:
  """Refuses a drafter that was made for another target.

  Args:
    config: the drafter's shape.
    info: what its checkpoint says, see `load_config`.
    target: the target's shape.
    tokenizer: a `dspec.data.chat.Tokenizer`: no text may use the mask token.

  Raises:
    UserError: with every difference.
  """
  problems = []
  for what, of_drafter, of_target in (
      ('width', config.width, target.width),
      ('vocabulary', info.vocab_size, target.vocab_size),
      ('layers', info.num_target_layers or target.num_layers, target.num_layers),
  ):
    if of_drafter != of_target:
      problems.append(f'{what}: it was made for a target of {of_drafter}, this one has {of_target}')
  last = config.target_layers[-1]
  if last >= target.num_layers:
    problems.append(f'it taps layer {last}; the target has layers 0 to {target.num_layers - 1}')
  elif last == target.num_layers - 1:
    problems.append(f'it taps the last layer, {last}: whether before or after the final norm, formats and engines '
                    'disagree')
  mask = config.mask_token_id
  if not 0 <= mask < target.vocab_size:
    problems.append(f'its mask token, {mask}, is outside the embedding; its rows are 0 to {target.vocab_size - 1}')
  elif tokenizer is not None and mask in tokenizer.used_ids:
    problems.append(f'its mask token, {mask}, is {tokenizer.token(mask)!r}, which text can make')
  if config.selector_candidates > target.vocab_size:
    problems.append(f'it chooses among {config.selector_candidates} tokens; the target has {target.vocab_size}')
  _refuse(info, problems)


def check_copies(params: Any, info: Info, target_params: Any) -> None:
  """Refuses a checkpoint whose own embedding or head is not the target's: only the target's are used here.

  Args:
    params: the drafter's.
    info: from `load_drafter`.
    target_params: the target's parameters; they may be rounded otherwise than the copies.

  Raises:
    UserError: with their distance.
  """
  head_VxD = np.asarray(target_lib.head_VxD(target_params))
  if 'draft_ids' in params:
    head_VxD = head_VxD[params['draft_ids']]
  embedding_VxD = np.asarray(target_params['embed']['embedding'])
  problems = [
      _foreign('embedding (embed_tokens)', info.embedding_VxD, embedding_VxD),
      _foreign('head (lm_head)', info.head_VxD, head_VxD),
  ]
  _refuse(info, list(filter(None, problems)))


def _refuse(info: Info, problems: list[str]) -> None:
  if problems:
    made_for = f' (it was made for {info.target})' if info.target else ''
    raise UserError(f'{info.path} does not fit the target{made_for}:\n  ' + '\n  '.join(problems))


def _foreign(what: str, own: np.ndarray | None, of_target: np.ndarray) -> str:
  """What is wrong with a checkpoint's copy of a matrix of the target; '' if it is that copy."""
  if own is None:
    return ''
  if own.shape != of_target.shape:
    return f'its own {what} is {list(own.shape)}, that of the target {list(of_target.shape)}'
  difference = size = 0.0
  for start in range(0, len(own), 8192):  # Float32 copies of whole embeddings are large.
    ours = of_target[start : start + 8192].astype(np.float32)
    difference += float(np.square(own[start : start + 8192].astype(np.float32) - ours).sum())
    size += float(np.square(ours).sum())
  distance = math.sqrt(difference / size) if size else math.inf
  if not distance < _OWN_ROWS:
    return f'its own {what} is not that of the target: their relative distance is {distance:.2f}'
  return ''


# ---- Writing ------------------------------------------------------------------------------------


def check_window(window: int) -> None:
  """Refuses a drafter that sees a window of the context, for which the formats have no word.

  Raises:
    UserError: with what to do.
  """
  if window:
    raise UserError(
        f'--config.drafter.window={window}: the formats cannot say that a block sees the last {window} positions of '
        'the context alone, and an engine would show it all of them; train one with --config.drafter.window=0, in a '
        '--workdir of its own, and export that'
    )


def check_export(config: drafter_lib.DrafterConfig, format: str) -> None:
  """Refuses a drafter that a format cannot express, so that engines would not run it as it was trained.

  Raises:
    UserError: with what is wrong and what to do.
  """
  if format not in FORMATS:
    raise UserError(f'--format={format}: unknown; there are: {", ".join(FORMATS)}')
  check_window(config.window)
  slides = tuple(i for i, window in enumerate(config.layer_windows) if window)
  if format == 'dflash':
    if config.from_anchor:
      raise UserError('this drafter samples from the anchor, which --format=dflash cannot say; use speculators')
    if len(set(config.layer_windows) - {0}) > 1:
      raise UserError(f'sliding windows of several lengths, {config.layer_windows}, cannot be exported')
    if config.causal_layers not in ((), slides, tuple(range(config.num_layers))):
      raise UserError(f'causal layers {config.causal_layers} cannot be exported: all, none, or those that slide')
    return
  for what, found in (
      ('sliding or causal layers', slides or config.causal_layers),
      ('convolutions and a selector (DFlash 2)', config.conv_taps or config.selector_rank),
      ('scaled embeddings', config.embedding_scale != 1),
      ('scaled or capped logits', config.logit_scale != 1 or config.logit_softcap),
  ):
    if found:
      raise UserError(f'this drafter has {what}, which --format=speculators cannot say; use --format=dflash')


def save_dflash(
    folder: Path, config: drafter_lib.DrafterConfig, params: Any, target: target_lib.TargetConfig
) -> None:
  """Writes config.json and model.safetensors, bfloat16, in z-lab's layout.

  `feature_scale` goes into `fc`. A draft vocabulary has no place in this format: the drafter will draft from all of the
  target's tokens.

  Args:
    folder: an existing one.
    config: the drafter's shape.
    params: its parameters.
    target: the target's shape.

  Raises:
    UserError: see `check_export`.
  """
  check_export(config, 'dflash')
  c = config
  inner = {'mask_token_id': c.mask_token_id, 'target_layer_ids': list(c.target_layers)}
  for key, value, default in (
      ('input_embedding_scale', c.embedding_scale, 1.0), ('output_multiplier', c.logit_scale, 1.0),
      ('final_logit_softcapping', c.logit_softcap, 0.0), ('conv_kernel_size', c.conv_taps, 0),
      ('conv_group_size', c.conv_group, 0), ('selector_rank', c.selector_rank, 0),
      ('selector_top_k', c.selector_candidates, 0),
  ):
    if value != default:
      inner[key] = value
  values = {
      'architectures': [_DFLASH2 if c.selector_rank else _DFLASH],
      'block_size': c.block_size,
      'dflash_config': inner,
      'num_target_layers': target.num_layers,
      **_body_values(c, target),
  }
  slides = tuple(i for i, window in enumerate(c.layer_windows) if window)
  if c.causal_layers != slides:
    values['is_causal'] = bool(c.causal_layers)
  _write(folder, values, dict(_body_tensors(c, params, target.vocab_size)))


def save_speculators(
    folder: Path, config: drafter_lib.DrafterConfig, params: Any, target: target_lib.TargetConfig, target_params: Any,
    target_name: str,
) -> None:
  """Writes config.json and model.safetensors, bfloat16, in the layout of speculators.

  Args:
    folder: an existing one.
    config: the drafter's shape.
    params: its parameters; `feature_scale` goes into `fc`.
    target: the target's shape.
    target_params: its parameters: the format wants copies of embedding and head.
    target_name: as engines know it.

  Raises:
    UserError: see `check_export`.
  """
  check_export(config, 'speculators')
  c = config
  draft_ids = np.asarray(params['draft_ids'], np.int64) if c.vocab_size else np.arange(target.vocab_size)
  architecture = _TARGET_ARCHITECTURES.get(target.family)
  values = {
      'architectures': ['DFlashSpeculator'],
      'speculators_model_type': 'dflash',
      'block_size': c.num_slots,
      'aux_hidden_state_layer_ids': [i + 1 for i in c.target_layers],
      'mask_token_id': c.mask_token_id,
      'draft_vocab_size': len(draft_ids),
      'sample_from_anchor': c.from_anchor,
      'tie_word_embeddings': False,
      'dtype': 'bfloat16',
      # The head is not the embedding here, whatever the target does.
      'transformer_layer_config': {**_body_values(c, target), 'tie_word_embeddings': False},
      'speculators_config': {
          'algorithm': 'dflash',
          'default_proposal_method': 'greedy',
          'proposal_methods': [{'proposal_type': 'greedy', 'speculative_tokens': c.block_size - 1}],
          'verifier': {'name_or_path': target_name, 'architectures': [architecture] if architecture else []},
      },
  }
  tensors = dict(_body_tensors(c, params, target.vocab_size))
  tensors['embed_tokens.weight'] = _bfloat16(target_params['embed']['embedding'])
  tensors['lm_head.weight'] = _bfloat16(np.asarray(target_lib.head_VxD(target_params))[draft_ids])
  if c.vocab_size:
    tensors['d2t'] = draft_ids - np.arange(len(draft_ids))
    tensors['t2d'] = np.isin(np.arange(target.vocab_size), draft_ids)
  _write(folder, values, tensors)


def _body_values(config: drafter_lib.DrafterConfig, target: target_lib.TargetConfig) -> dict[str, Any]:
  """The drafter as a Qwen3, which it is but for the features, whatever the target is."""
  c = config
  windows = c.layer_windows or (0,) * c.num_layers
  return {
      'model_type': 'qwen3',
      'hidden_size': c.width,
      'intermediate_size': c.mlp_width,
      'num_hidden_layers': c.num_layers,
      'num_attention_heads': c.num_heads,
      'num_key_value_heads': c.num_kv_heads,
      'head_dim': c.head_dim,
      'hidden_act': 'silu',
      'attention_bias': False,
      'attention_dropout': 0.0,
      'rms_norm_eps': c.norm_eps,
      # Older readers know the first of these alone, newer ones the second.
      'rope_theta': c.rope_theta,
      'rope_parameters': {'rope_theta': c.rope_theta, 'rope_type': 'default'},
      'layer_types': ['sliding_attention' if window else 'full_attention' for window in windows],
      'sliding_window': max(windows) or None,
      'use_sliding_window': any(windows),
      'max_window_layers': c.num_layers,
      'max_position_embeddings': target.max_length,
      'vocab_size': target.vocab_size,
      'tie_word_embeddings': target.tie_embeddings,
      'dtype': 'bfloat16',
  }


def _body_tensors(
    config: drafter_lib.DrafterConfig, params: Any, vocab_size: int
) -> Iterator[tuple[str, np.ndarray]]:
  for name, rule in _rules(config, vocab_size).items():
    array = params
    for part in rule.path:
      array = array[part]
    array = np.asarray(array, np.float32)
    if name == 'fc.weight':
      array = array * np.asarray(params['feature_scale'], np.float32)[:, None]
    yield name, _bfloat16(array.T if rule.path[-1] == 'kernel' else array)


def _bfloat16(array: Any) -> np.ndarray:
  return np.ascontiguousarray(np.asarray(array).astype(ml_dtypes.bfloat16))  # The writer takes memory as it lies.


def _write(folder: Path, values: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
  try:
    safetensors_numpy.save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
    (folder / 'config.json').write_text(json.dumps(values, indent=2) + '\n', 'utf-8')
    # The writer of tensors leaves a file that nobody else may read, and engines often run as somebody else.
    (folder / 'model.safetensors').chmod((folder / 'config.json').stat().st_mode)
  except (OSError, safetensors.SafetensorError) as error:
    raise UserError(f'cannot write to {folder}: {error}') from error
