"""Hugging Face folders against `transformers`: what it computed is in tests/golden/huggingface, with the script."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

from huggingface_hub import constants
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
from tokenizers import pre_tokenizers

from dspec.checkpoints import huggingface
from dspec.checkpoints import targets
from dspec.checkpoints import tensors
from dspec import config as config_lib
from dspec.errors import UserError
from dspec.models import target as target_lib

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'huggingface'
FAMILIES = ('llama', 'llama3', 'qwen2', 'qwen3', 'gemma3')
VOCAB = 61
TEMPLATE = '{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}'


def write_tokenizer(folder, **changes):
  """A byte-level tokenizer of 60 tokens as `tokenizers` saves it, two of them special."""
  letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:58]
  description = {
      'version': '1.0', 'truncation': None, 'padding': None, 'normalizer': None,
      'added_tokens': [
          {'id': 58 + i, 'content': text, 'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False,
           'special': True} for i, text in enumerate(('<|im_start|>', '<|im_end|>'))],
      'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True},
      'post_processor': {'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': '<|im_start|>', 'type_id': 0}},
                                                                  {'Sequence': {'id': 'A', 'type_id': 0}}], 'pair': [],
                         'special_tokens': {'<|im_start|>': {'id': '<|im_start|>', 'ids': [58], 'tokens': ['<|im_start|>']}}},
      'decoder': {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': True, 'use_regex': True},
      'model': {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
                'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False, 'ignore_merges': False,
                'vocab': {letter: i for i, letter in enumerate(letters)}, 'merges': []},
  } | changes
  (folder / 'tokenizer.json').write_text(json.dumps(description))
  (folder / 'tokenizer_config.json').write_text(json.dumps({'bos_token': '<|im_start|>', 'chat_template': TEMPLATE}))


@pytest.fixture
def folder(tmp_path):
  """A function name -> a copy of that checkpoint, with a tokenizer."""

  def copy(name):
    shutil.copytree(GOLDEN / name, tmp_path / name)
    write_tokenizer(tmp_path / name)
    return tmp_path / name

  return copy


def edit(path, **changes):
  """Changes fields of a JSON file; None drops one."""
  values = json.loads(path.read_text()) | changes
  path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def forward(config, params, tokens, positions, *, length, steps=1, taps=None):
  """Logits and tapped layers of tokens at their positions, fed to the cache in `steps` equal parts."""
  module = target_lib.Target(config)
  taps = tuple(range(config.num_layers)) if taps is None else taps

  @jax.jit
  def run(params, tokens, positions, cache):
    hidden, features, cache = module.apply({'params': params}, tokens, positions, cache, taps)
    return target_lib.logits(params, hidden, jnp.float32), features, cache

  cache = target_lib.init_cache(config, tokens.shape[0], length)
  logits, features = [], []
  for part, at in zip(np.split(tokens, steps, 1), np.split(positions, steps, 1)):
    some_logits, some_features, cache = run(params, jnp.asarray(part), jnp.asarray(at), cache)
    logits.append(some_logits)
    features.append(some_features)
  return np.concatenate(logits, 1), np.concatenate(features, 1)


def assert_close(got, want, tolerance=1e-4):
  assert np.abs(got - want).max() < tolerance * np.abs(want).max()


def assert_equals_transformers(config, params, want):
  tokens = want['tokens']
  b, t = tokens.shape
  positions = np.broadcast_to(np.arange(t), (b, t))
  layers = np.concatenate(list(want['layers']), -1)
  logits, features = forward(config, params, tokens, positions, length=t)
  assert_close(features, layers)
  assert_close(logits, want['logits'])
  # By and by, over the cache; and in a cache that is longer than the rows.
  logits, features = forward(config, params, tokens, positions, length=t + 9, steps=t)
  assert_close(features, layers)
  assert_close(logits, want['logits'])


# ---- Parity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', FAMILIES)
def test_logits_and_every_layer_equal_transformers(name):
  config = huggingface.read_config(GOLDEN / name)
  params = huggingface.load_params(GOLDEN / name, config)
  assert_equals_transformers(config, params, np.load(GOLDEN / name / 'expected.npz'))


@pytest.mark.parametrize('name', FAMILIES)
def test_long_positions_equal_transformers(name):
  config = huggingface.read_config(GOLDEN / name)
  params = huggingface.load_params(GOLDEN / name, config)
  want = np.load(GOLDEN / name / 'expected.npz')
  start, (b, t) = int(want['positions_from']), want['tokens'].shape
  # Nothing is known below `start`: positions enter by rotation alone, so a module with an empty past is built by hand.
  far = np.broadcast_to(start + np.arange(t), (b, t))
  tree = jnp.zeros(b, jnp.int32), jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
  hidden, _, _ = target_lib.Target(config).apply(
      {'params': params}, jnp.asarray(want['tokens']), jnp.asarray(far), target_lib.init_cache(config, b, 1), (), tree)
  assert_close(np.asarray(target_lib.logits(params, hidden, jnp.float32)), want['far_logits'])


@pytest.mark.parametrize('name', FAMILIES)
def test_padded_rows_equal_rows_alone(name):
  config = huggingface.read_config(GOLDEN / name)
  params = huggingface.load_params(GOLDEN / name, config)
  tokens = np.load(GOLDEN / name / 'expected.npz')['tokens']
  short, t = 7, tokens.shape[1]
  padded = np.where(np.arange(t)[None, :] < np.array([t, short])[:, None], tokens, 0)
  positions = np.broadcast_to(np.arange(t), tokens.shape)
  together, _ = forward(config, params, padded, positions, length=t)
  alone, _ = forward(config, params, tokens[1:, :short], positions[1:, :short], length=short)
  assert_close(together[1:, :short], alone, 1e-5)


@pytest.mark.parametrize('name', ['llama3', 'gemma3'])
def test_a_chain_as_a_tree_equals_the_cache(name):
  # Windows and rotations inside a tree: nodes 8..19 in one tree on top of a cache of 8.
  config = huggingface.read_config(GOLDEN / name)
  params = huggingface.load_params(GOLDEN / name, config)
  want = np.load(GOLDEN / name / 'expected.npz')
  tokens, start = jnp.asarray(want['tokens']), 8
  b, t = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(t), (b, t))
  module = target_lib.Target(config)
  cache = target_lib.init_cache(config, b, t)
  _, _, cache = module.apply({'params': params}, tokens[:, :start], positions[:, :start], cache)
  n = t - start
  tree = jnp.full(b, start), jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (b, n, n))
  hidden, _, _ = module.apply({'params': params}, tokens[:, start:], positions[:, start:], cache, (), tree)
  assert_close(np.asarray(target_lib.logits(params, hidden, jnp.float32)), want['logits'][:, start:])


@pytest.mark.parametrize('name', FAMILIES)
def test_fresh_checkpoints_of_transformers(name, tmp_path, monkeypatch):
  pytest.importorskip('torch', reason="needs pip install '.[interop]'")
  pytest.importorskip('transformers', reason="needs pip install '.[interop]'")
  monkeypatch.syspath_prepend(str(GOLDEN))
  make = __import__('make')
  model = make.build(name, seed=17)
  model.save_pretrained(tmp_path)
  config = huggingface.read_config(tmp_path)
  assert_equals_transformers(config, huggingface.load_params(tmp_path, config), make.expected(model, seed=18))
  sys.modules.pop('make')


def test_the_real_target_survives_the_format(smollm2, tmp_path):
  """SmolLM2 written as Hugging Face names and shapes it, in bfloat16, and read again."""
  config, params, _ = smollm2
  stored = {}
  flat = jax.tree_util.tree_flatten_with_path(params)[0]
  names = {rule.path: name for name, rule in huggingface.tensor_rules(config).items()}
  for path, array in flat:
    path = tuple(key.key for key in path)
    stored[names[path]] = np.ascontiguousarray(array.T if path[-1] == 'kernel' else array).astype(ml_dtypes.bfloat16)
  safetensors_numpy.save_file(stored, tmp_path / 'model.safetensors')
  got = huggingface.load_params(tmp_path, config, dtype=ml_dtypes.bfloat16)
  for path, array in flat:
    array = np.asarray(array).astype(ml_dtypes.bfloat16)
    loaded = got
    for key in path:
      loaded = loaded[key.key]
    assert loaded.dtype == (ml_dtypes.bfloat16 if array.ndim > 1 else np.float32)
    np.testing.assert_array_equal(loaded.astype(np.float32), array.astype(np.float32))


# ---- Published models, by their shapes -------------------------------------------------------------

# Parameters as their model cards and papers give them: arXiv 2407.21783, 2505.09388, 2503.19786.
LLAMA = {'architectures': ['LlamaForCausalLM'], 'rms_norm_eps': 1e-5, 'eos_token_id': [128001, 128009], 'vocab_size': 128256}
QWEN = {
    'architectures': ['Qwen3ForCausalLM'], 'rms_norm_eps': 1e-6, 'eos_token_id': 151645, 'vocab_size': 151936,
    'head_dim': 128, 'num_attention_heads': 32, 'num_key_value_heads': 8, 'rope_theta': 1_000_000,
    'max_position_embeddings': 40960, 'num_hidden_layers': 36}
PUBLISHED = {
    'Meta-Llama-3-8B-Instruct': (8_030_261_248, LLAMA | {
        'hidden_size': 4096, 'intermediate_size': 14336, 'num_hidden_layers': 32, 'num_attention_heads': 32,
        'num_key_value_heads': 8, 'rope_theta': 500_000.0, 'max_position_embeddings': 8192, 'rope_scaling': None,
        'tie_word_embeddings': False}),
    'Llama-3.2-3B-Instruct': (3_212_749_824, LLAMA | {
        'hidden_size': 3072, 'intermediate_size': 8192, 'num_hidden_layers': 28, 'num_attention_heads': 24,
        'num_key_value_heads': 8, 'head_dim': 128, 'rope_theta': 500_000.0, 'max_position_embeddings': 131072,
        'tie_word_embeddings': True, 'rope_scaling': {
            'factor': 32.0, 'high_freq_factor': 4.0, 'low_freq_factor': 1.0, 'original_max_position_embeddings': 8192,
            'rope_type': 'llama3'}}),
    'Qwen3-4B': (4_022_468_096, QWEN | {
        'hidden_size': 2560, 'intermediate_size': 9728, 'tie_word_embeddings': True}),
    'Qwen3-8B': (8_190_735_360, QWEN | {
        'hidden_size': 4096, 'intermediate_size': 12288, 'tie_word_embeddings': False}),
    'gemma-3-270m-it': (268_098_176, {
        'architectures': ['Gemma3ForCausalLM'], 'hidden_size': 640, 'intermediate_size': 2048, 'num_hidden_layers': 18,
        'num_attention_heads': 4, 'num_key_value_heads': 1, 'head_dim': 256, 'vocab_size': 262144, 'rms_norm_eps': 1e-6,
        'rope_theta': 1_000_000.0, 'rope_local_base_freq': 10_000.0, 'sliding_window': 512, 'query_pre_attn_scalar': 256,
        'max_position_embeddings': 32768, 'eos_token_id': [1, 106], 'hidden_activation': 'gelu_pytorch_tanh'}),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_models_have_their_published_sizes(name, tmp_path):
  count, fields = PUBLISHED[name]
  (tmp_path / 'config.json').write_text(json.dumps(fields))
  config = huggingface.read_config(tmp_path)
  assert sum(int(np.prod(shape)) for shape in tensors.shapes(config).values()) == count


def test_older_and_newer_spellings_of_rotary_positions_agree(tmp_path):
  def read(**changes):
    edit(tmp_path / 'config.json', **changes)
    return huggingface.read_config(tmp_path)

  (tmp_path / 'config.json').write_text(json.dumps(PUBLISHED['Llama-3.2-3B-Instruct'][1]))
  old = huggingface.read_config(tmp_path)
  scaling = PUBLISHED['Llama-3.2-3B-Instruct'][1]['rope_scaling']
  assert read(rope_scaling=None, rope_theta=None, rope_parameters={**scaling, 'rope_theta': 500_000.0}) == old
  assert len(old.rope_divisors) == 64 and old.rope_divisors[0] == 1 and old.rope_divisors[-1] == pytest.approx(32)
  gemma = PUBLISHED['gemma-3-270m-it'][1]
  (tmp_path / 'config.json').write_text(json.dumps(gemma))
  old = huggingface.read_config(tmp_path)
  assert old.local_layers == tuple(i for i in range(18) if i not in (5, 11, 17)) and old.attention_scale == 1 / 16
  kinds = ['full_attention' if i in (5, 11, 17) else 'sliding_attention' for i in range(18)]
  assert read(
      rope_theta=None, rope_local_base_freq=None, layer_types=kinds, rope_parameters={
          'full_attention': {'rope_type': 'default', 'rope_theta': 1e6},
          'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4}}) == old


def test_every_end_of_sequence_stops(folder):
  path = folder('qwen3')
  edit(path / 'generation_config.json', eos_token_id=[58, 59])
  assert huggingface.read_config(path).eos_ids == (58, 59, 2)
  edit(path / 'generation_config.json', eos_token_id=59)
  assert huggingface.read_config(path).eos_ids == (59, 2)


# ---- Loading ---------------------------------------------------------------------------------------


def test_tensors_are_placed_one_by_one_in_the_order_of_the_files(folder):
  path, placed = folder('qwen3'), []
  place = lambda name, array: placed.append(name) or ('placed', name, array.dtype)
  config, params, _ = huggingface.load_target(path, dtype=ml_dtypes.bfloat16, place=place)
  assert params['layers_3']['mlp']['up_proj']['kernel'] == (
      'placed', ('layers_3', 'mlp', 'up_proj', 'kernel'), ml_dtypes.bfloat16)
  assert params['norm']['scale'][2] == np.float32
  assert sorted(placed) == sorted(tensors.shapes(config))
  index = json.loads((path / 'model.safetensors.index.json').read_text())['weight_map']
  names = {rule.path: name for name, rule in huggingface.tensor_rules(config).items()}
  files = [index[names[path]] for path in placed]
  assert files == sorted(files) and len(set(files)) == 5


def test_a_large_checkpoint_needs_little_more_than_its_largest_tensor(tmp_path):
  """Loaded and thrown away tensor by tensor, in a process of its own: the peak of its private memory."""
  fields = json.loads((GOLDEN / 'llama' / 'config.json').read_text()) | dict(
      hidden_size=1024, intermediate_size=4096, vocab_size=8192, num_hidden_layers=8, num_attention_heads=8, head_dim=128)
  (tmp_path / 'config.json').write_text(json.dumps(fields))
  config = huggingface.read_config(tmp_path)
  rules = huggingface.tensor_rules(config)
  safetensors_numpy.save_file(
      {name: np.full(rule.shape, 0.5, ml_dtypes.bfloat16) for name, rule in rules.items()}, tmp_path / 'model.safetensors')
  stored = (tmp_path / 'model.safetensors').stat().st_size
  largest = max(2 * int(np.prod(rule.shape)) for rule in rules.values())
  program = f'''
import re, pathlib, threading, time
from dspec.checkpoints import huggingface
import ml_dtypes
folder = pathlib.Path({str(tmp_path)!r})
private = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
config = huggingface.read_config(folder)
from dspec.checkpoints import tensors
tensors.shapes(config)
before, peak = private(), 0
def place(path, array):
  global peak
  peak = max(peak, private())
huggingface.load_params(folder, config, dtype=ml_dtypes.bfloat16, place=place)
print(peak - before)
'''
  out = subprocess.run([sys.executable, '-c', program], check=True, capture_output=True, text=True, env={
      **os.environ, 'PYTHONPATH': str(pathlib.Path(__file__).parents[2])})
  peak = int(out.stdout.split()[-1])
  assert stored > 10 * largest
  # The tensor as read, its transposed copy, and what the allocator keeps.
  assert peak < 4 * largest


# ---- Tokenizer -------------------------------------------------------------------------------------


def test_special_tokens_come_from_the_template_alone(folder):
  tokenizer = huggingface.load_target(folder('llama'))[2]
  prompt = tokenizer.render_prompt([{'role': 'user', 'content': '!<|im_end|>'}])
  assert prompt[0] == 58 and prompt[-1] == 59 and prompt.count(59) == 1
  assert tokenizer.encode('!"') == [0, 1]  # Nothing is added.
  assert tokenizer.decode([58, 0, 1, 59]) == '!"'
  assert tokenizer.decode([58, 0, 1, 59], skip_special=False) == '<|im_start|>!"<|im_end|>'
  assert tokenizer.vocab_size == 60 and tokenizer.special_ids == {58, 59}


def test_template_in_a_file_of_its_own_wins(folder):
  path = folder('llama')
  (path / 'chat_template.jinja').write_text('{{ bos_token }}!{% if enable_thinking %}"{% endif %}')
  read = lambda **options: huggingface.load_target(path, **options)[2]
  message = [{'role': 'user', 'content': ''}]
  assert read().render_prompt(message) == [58, 0]
  assert read(thinking=True).render_prompt(message) == [58, 0, 1]
  assert read().fingerprint() != read(thinking=True).fingerprint()
  assert read(chat_template='#').render_prompt(message) == [2]


# ---- What is refused -------------------------------------------------------------------------------


def refused(path, words):
  with pytest.raises(UserError, match=words):
    huggingface.load_target(path)


@pytest.mark.parametrize('changes, words', [
    ({'architectures': ['MambaForCausalLM']}, 'MambaForCausalLM is not supported; supported: LlamaForCausalLM, Qwen2'),
    ({'hidden_size': None}, 'hidden_size is missing'),
    ({'hidden_size': '32'}, 'hidden_size must be of type int'),
    ({'num_key_value_heads': 3}, '3 key heads'),
    ({'head_dim': None}, 'head_dim is missing'),
    ({'rope_parameters': None}, 'rope_theta is missing'),
    ({'rope_parameters': {'rope_theta': 1.0, 'rope_type': 'yarn'}}, "'yarn' is not supported; supported: default"),
    ({'use_sliding_window': True}, r'a sliding window \(use_sliding_window=True\) is not supported'),
    ({'layer_types': ['sliding_attention'] * 4}, 'sliding_attention are not supported'),
    ({'hidden_act': 'gelu'}, 'activation gelu is not supported; for this architecture silu'),
    ({'vocab_size': 59}, '60 tokens but 59 rows'),
])
def test_refuses_fields(folder, changes, words):
  path = folder('qwen3')
  edit(path / 'config.json', **changes)
  refused(path, words)


def test_refuses_without_an_end(folder):
  path = folder('qwen3')
  edit(path / 'config.json', eos_token_id=None)
  (path / 'generation_config.json').unlink()
  refused(path, 'config.json: eos_token_id must be a number or a list')


def test_refuses_missing_and_damaged_files(folder, tmp_path):
  refused(tmp_path, 'config.json cannot be read: No such file.*a model folder holds config.json')
  path = folder('llama')
  (path / 'config.json').write_text('{')
  refused(path, 'config.json is damaged')
  path = folder('qwen2')
  (path / 'tokenizer.json').write_text('{"model": {"type": "BPE"}}')
  refused(path, 'tokenizer.json is damaged or of an unknown kind')
  write_tokenizer(path, model={'type': 'Unigram'})
  refused(path, 'type Unigram is not supported; supported: BPE')
  write_tokenizer(path)
  (path / 'model.safetensors').unlink()
  refused(path, 'model.safetensors is missing')


@pytest.mark.parametrize('keep', [4, 100, 20_000])
def test_refuses_truncated_weights(folder, keep):
  path = folder('llama')
  file = path / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:keep])
  refused(path, f'model.safetensors is damaged or incomplete \\({keep} bytes\\).*fetch it again')


def test_refuses_an_index_that_does_not_fit(folder):
  path = folder('qwen3')
  index_path = path / 'model.safetensors.index.json'
  index = json.loads(index_path.read_text())
  name, file = next(iter(index['weight_map'].items()))
  other = next(value for value in index['weight_map'].values() if value != file)
  index_path.write_text(json.dumps({'weight_map': index['weight_map'] | {name: other}}))
  refused(path, f'{other} lacks {name}')
  index_path.write_text(json.dumps({'weight_map': index['weight_map'] | {name: 'model-9.safetensors'}}))
  refused(path, 'not there: model-9.safetensors')
  index_path.write_text('{}')
  refused(path, '"weight_map" must hold')


def test_reports_every_tensor_problem_at_once(folder):
  path = folder('llama')
  weights = safetensors_numpy.load_file(path / 'model.safetensors')
  weights.pop('model.norm.weight')
  weights['model.layers.9.mlp.up_proj.weight'] = weights['model.layers.0.mlp.up_proj.weight']
  weights['model.layers.0.mlp.up_proj.weight'] = np.zeros((3, 2), np.float32)
  weights['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.zeros(4, np.float32)  # Of old files; not needed.
  safetensors_numpy.save_file(weights, path / 'model.safetensors')
  with pytest.raises(UserError) as error:
    huggingface.load_target(path)
  for words in ('unknown tensor model.layers.9.mlp.up_proj.weight', 'missing tensor model.norm.weight',
                r'up_proj.weight has shape (3, 2), expected (48, 32)'):
    assert words in str(error.value)
  assert 'inv_freq' not in str(error.value)


@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize('value', [np.inf, np.nan])
def test_refuses_values_that_are_not_finite(folder, dtype, value):
  path = folder('llama')
  weights = {k: v.astype(dtype) for k, v in safetensors_numpy.load_file(path / 'model.safetensors').items()}
  weights['lm_head.weight'][3, 2] = value
  safetensors_numpy.save_file(weights, path / 'model.safetensors')
  refused(path, 'lm_head.weight holds values that are not finite')


def test_refuses_integers(folder):
  path = folder('llama')
  weights = safetensors_numpy.load_file(path / 'model.safetensors')
  weights['lm_head.weight'] = weights['lm_head.weight'].astype(np.int8)
  safetensors_numpy.save_file(weights, path / 'model.safetensors')
  refused(path, 'lm_head.weight has the unsupported type I8')


def test_no_template_says_how_to_give_one(folder, tmp_path):
  path = folder('llama')
  (path / 'tokenizer_config.json').unlink()
  config = config_lib.default()
  config.target.path = str(path)
  with pytest.raises(UserError, match='no chat template.*--config.target.chat_template='):
    targets.load(config, path)[2].render_prompt([{'role': 'user', 'content': '!'}])
  config.target.chat_template = str(tmp_path / 'mine.jinja')
  with pytest.raises(UserError, match='mine.jinja cannot be read'):
    targets.load(config, path)
  (tmp_path / 'mine.jinja').write_text('"{{ messages[0].content }}')
  assert targets.load(config, path)[2].render_prompt([{'role': 'user', 'content': '!'}]) == [1, 0]


# ---- The hub ---------------------------------------------------------------------------------------


def test_hub_errors_say_what_to_do(monkeypatch, tmp_path):
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
  with pytest.raises(UserError, match='hub:nobody/nothing cannot be fetched.*--config.target.path'):
    huggingface.fetch('nobody/nothing')
  with pytest.raises(UserError, match='write hub:ORGANISATION/MODEL'):
    huggingface.fetch('a/b/c/d')


def test_gated_and_unknown_models(monkeypatch):
  def raises(kind):
    def download(*args, **kwargs):
      raise kind.__new__(kind)  # Without the server's answer, which only the hub's own client can make.

    monkeypatch.setattr(huggingface.huggingface_hub, 'snapshot_download', download)

  raises(huggingface.hub_errors.GatedRepoError)
  with pytest.raises(UserError, match='hub:a/b is gated: accept its terms at https://huggingface.co/a/b.*HF_TOKEN'):
    huggingface.fetch('a/b')
  raises(huggingface.hub_errors.RepositoryNotFoundError)
  with pytest.raises(UserError, match='hub:a/b@main: the hub has no such model or revision'):
    huggingface.fetch('a/b@main')


def test_fingerprint_follows_every_file(folder):
  path = folder('qwen3')
  before = targets.fingerprint(path)
  assert before == targets.fingerprint(path)
  (path / 'notes.txt').write_text('nothing that counts')
  assert before == targets.fingerprint(path)
  file = path / 'model-00003-of-00005.safetensors'
  content = bytearray(file.read_bytes())
  content[-1] ^= 1
  file.write_bytes(content)
  assert before != targets.fingerprint(path)
