"""Drafters in both formats: names, bytes and meaning, refusals, and z-lab's own package on the same weights."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from dspec.checkpoints import dflash
from dspec.decoding import speculative
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

# Heads times their size is not the width, the MLP is no multiple of it, and no two sizes are the same.
D, I, H, HKV, HD, N, LAYERS, V, K = 16, 22, 4, 2, 6, 3, 2, 31, 5
TARGET = target_lib.TargetConfig(
    family='llama', vocab_size=V, num_layers=7, width=D, mlp_width=24, num_heads=4, num_kv_heads=2, head_dim=4,
    rope_theta=500.0, norm_eps=1e-5, max_length=128, tie_embeddings=False, eos_ids=(2,))
DRAFTER = drafter_lib.DrafterConfig(
    num_layers=LAYERS, block_size=K, target_layers=(0, 2, 5), mask_token_id=30, width=D, mlp_width=I, num_heads=H,
    num_kv_heads=HKV, head_dim=HD, rope_theta=10_000_000.0, norm_eps=1e-6)
DFLASH2 = {'conv_taps': 2, 'conv_group': 4, 'selector_rank': 8, 'selector_candidates': 6}
IDS = (1, 4, 5, 17, 29)  # A draft vocabulary.


def shapes(dflash2=False):
  """{name: shape} of a published drafter, written down from the format's description."""
  found = {'fc.weight': (D, N * D), 'hidden_norm.weight': (D,), 'norm.weight': (D,)}
  for i in range(LAYERS):
    layer = f'layers.{i}.'
    found |= {
        layer + 'self_attn.q_proj.weight': (H * HD, D), layer + 'self_attn.k_proj.weight': (HKV * HD, D),
        layer + 'self_attn.v_proj.weight': (HKV * HD, D), layer + 'self_attn.o_proj.weight': (D, H * HD),
        layer + 'self_attn.q_norm.weight': (HD,), layer + 'self_attn.k_norm.weight': (HD,),
        layer + 'mlp.gate_proj.weight': (I, D), layer + 'mlp.up_proj.weight': (I, D),
        layer + 'mlp.down_proj.weight': (D, I), layer + 'input_layernorm.weight': (D,),
        layer + 'post_attention_layernorm.weight': (D,)}
    if dflash2:
      for conv in ('attention_conv', 'mlp_conv'):
        found |= {f'{layer}{conv}.base_kernel': (2, 2, D), f'{layer}{conv}.kernel_projection.weight': (2 * 2 * 4, D)}
  if dflash2:
    found |= {'candidate_selector.predecessor_codebook': (V, 8), 'candidate_selector.successor_codebook': (V, 8),
              'candidate_selector.hidden_projection.weight': (8, D)}
  return found


def draw(shape, rng):
  """Random bfloat16; vectors are norm scales, around one."""
  x = rng.normal(size=shape) * 1.5 / np.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.3 * rng.normal(size=shape)
  return x.astype(ml_dtypes.bfloat16)


def tensors(seed=0, dflash2=False):
  rng = np.random.default_rng(seed)
  return {name: draw(shape, rng) for name, shape in shapes(dflash2).items()}


def zlab_config(**changes):
  """config.json of a published drafter of the older kind."""
  return {
      'architectures': ['DFlashDraftModel'], 'model_type': 'qwen3', 'block_size': K, 'num_target_layers': 7,
      'dflash_config': {'mask_token_id': 30, 'target_layer_ids': [0, 2, 5]}, 'num_hidden_layers': LAYERS,
      'hidden_size': D, 'intermediate_size': I, 'num_attention_heads': H, 'num_key_value_heads': HKV, 'head_dim': HD,
      'rms_norm_eps': 1e-6, 'rope_theta': 10000000, 'rope_scaling': None, 'hidden_act': 'silu',
      'attention_bias': False, 'layer_types': ['full_attention'] * LAYERS, 'sliding_window': None,
      'use_sliding_window': False, 'vocab_size': V, 'tie_word_embeddings': False, 'dtype': 'bfloat16', **changes}


def speculators_config(**changes):
  body = zlab_config()
  for key in ('architectures', 'block_size', 'dflash_config', 'num_target_layers', 'rope_theta'):
    del body[key]
  body['rope_parameters'] = {'rope_theta': 10000000.0, 'rope_type': 'default'}
  return {
      'architectures': ['DFlashSpeculator'], 'speculators_model_type': 'dflash', 'transformer_layer_config': body,
      'draft_vocab_size': V, 'block_size': K, 'aux_hidden_state_layer_ids': [1, 3, 6], 'mask_token_id': 30,
      'sample_from_anchor': False,
      'speculators_config': {
          'algorithm': 'dflash', 'default_proposal_method': 'greedy',
          'proposal_methods': [{'proposal_type': 'greedy', 'speculative_tokens': K - 1}],
          'verifier': {'name_or_path': 'some/target', 'architectures': ['LlamaForCausalLM']}},
      **changes}


def write(folder, config, arrays):
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  safetensors_numpy.save_file(arrays, folder / 'model.safetensors', metadata={'format': 'pt'})
  return folder


@pytest.fixture(scope='module')
def target_params():
  """Random, and exact in bfloat16."""
  module = target_lib.Target(TARGET)
  tokens = jnp.zeros((1, 2), jnp.int32)
  shape = jax.eval_shape(module.init, jax.random.key(0), tokens, tokens, target_lib.init_cache(TARGET, 1, 2))['params']
  rng = np.random.default_rng(5)
  params = jax.tree.map(lambda x: draw(x.shape[::-1], rng).astype(np.float32).T, shape)
  return {**params, 'lm_head': {'kernel': draw((V, D), rng).astype(np.float32).T}}


def own(target_params, rows=slice(None)):
  """What a speculators checkpoint holds of its target."""
  copy = lambda x: np.ascontiguousarray(x).astype(ml_dtypes.bfloat16)
  return {'embed_tokens.weight': copy(target_params['embed']['embedding']),
          'lm_head.weight': copy(target_lib.head_VxD(target_params)[rows])}


def vocabulary():
  return {'d2t': np.array(IDS) - np.arange(len(IDS)), 't2d': np.isin(np.arange(V), IDS)}


def same_bytes(got, want):
  assert got.keys() == want.keys()
  for name, array in want.items():
    assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
    assert got[name].tobytes() == array.tobytes(), name


def saved(folder):
  return json.loads((folder / 'config.json').read_text()), safetensors_numpy.load_file(folder / 'model.safetensors')


# ---- Names, bytes and meaning --------------------------------------------------------------------


SLIDING = {'layer_types': ['full_attention', 'sliding_attention'], 'sliding_window': 4, 'use_sliding_window': True}
INNER = zlab_config()['dflash_config']


@pytest.mark.parametrize('changes, fields', [
    ({}, {}),
    (SLIDING, {'layer_windows': (0, 4), 'causal_layers': (1,)}),
    ({**SLIDING, 'is_causal': False}, {'layer_windows': (0, 4)}),
    ({'is_causal': True}, {'causal_layers': (0, 1)}),
    ({'dflash_config': {
        **INNER, 'input_embedding_scale': 4, 'output_multiplier': 0.5, 'final_logit_softcapping': 30.0}},
     {'embedding_scale': 4.0, 'logit_scale': 0.5, 'logit_softcap': 30.0}),
    ({'architectures': ['DFlash2DraftModel'], 'dflash_config': {
        **INNER, 'conv_kernel_size': 2, 'conv_group_size': 4, 'selector_rank': 8, 'selector_top_k': 6}}, DFLASH2),
])
def test_a_dflash_checkpoint_in_and_out(tmp_path, changes, fields):
  arrays = tensors(dflash2='conv_taps' in fields)
  config, params, info = dflash.load_drafter(write(tmp_path / 'in', zlab_config(**changes), arrays))
  assert config == dataclasses.replace(DRAFTER, **fields)
  assert (info.format, info.vocab_size, info.num_target_layers) == ('dflash', V, 7)
  np.testing.assert_array_equal(params['fc']['kernel'], arrays['fc.weight'].astype(np.float32).T)
  np.testing.assert_array_equal(
      params['layers_1']['attn']['k_proj']['kernel'], arrays['layers.1.self_attn.k_proj.weight'].astype(np.float32).T)
  np.testing.assert_array_equal(
      params['layers_0']['mlp_norm']['scale'], arrays['layers.0.post_attention_layernorm.weight'].astype(np.float32))

  (tmp_path / 'out').mkdir()
  dflash.save_dflash(tmp_path / 'out', config, params, TARGET)
  values, got = saved(tmp_path / 'out')
  same_bytes(got, arrays)
  assert dflash.load_config(tmp_path / 'out')[0] == config
  same_keys = ('architectures', 'model_type', 'block_size', 'dflash_config', 'num_target_layers', 'layer_types',
               'head_dim', 'hidden_act', 'rope_theta', 'vocab_size', 'sliding_window', 'is_causal')
  wanted = zlab_config(**changes)
  assert {key: values.get(key) for key in same_keys} == {key: wanted.get(key) for key in same_keys}


def test_parameters_are_those_of_the_module(tmp_path):
  """Names and shapes that the loader makes are what flax would make."""
  for fields, dflash2 in (({}, False), (DFLASH2, True)):
    changes = {} if not dflash2 else {'architectures': ['DFlash2DraftModel'], 'dflash_config': {
        **INNER, 'conv_kernel_size': 2, 'conv_group_size': 4, 'selector_rank': 8, 'selector_top_k': 6}}
    config, params, _ = dflash.load_drafter(write(tmp_path / str(dflash2), zlab_config(**changes), tensors(1, dflash2)))
    module = drafter_lib.Drafter(dataclasses.replace(DRAFTER, **fields))
    want = jax.eval_shape(
        module.init, jax.random.key(0), jnp.zeros((1, 1, N * D)), jnp.zeros((1, 1, K, D)), jnp.zeros((1, 1), jnp.int32))
    params.pop('selector', None)
    shape = lambda tree: jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), tree)
    assert shape(params) == shape(want['params'])


@pytest.mark.parametrize('pruned, from_anchor', [(False, False), (True, False), (True, True)])
def test_a_speculators_checkpoint_in_and_out(tmp_path, target_params, pruned, from_anchor):
  arrays = {**tensors(), **own(target_params, list(IDS) if pruned else slice(None)), **(vocabulary() if pruned else {})}
  wanted = speculators_config(draft_vocab_size=len(IDS) if pruned else V, sample_from_anchor=from_anchor)
  if from_anchor:
    wanted['speculators_config']['proposal_methods'][0]['speculative_tokens'] = K
  config, params, info = dflash.load_drafter(write(tmp_path / 'in', wanted, arrays))
  assert config == dataclasses.replace(
      DRAFTER, vocab_size=len(IDS) if pruned else 0, from_anchor=from_anchor, block_size=K + from_anchor)
  assert (info.format, info.vocab_size, info.target) == ('speculators', V, 'some/target')
  if pruned:
    np.testing.assert_array_equal(params['draft_ids'], IDS)
    assert params['draft_ids'].dtype == np.int32
  assert ('draft_ids' in params) == pruned
  dflash.check_copies(params, info, target_params)

  (tmp_path / 'out').mkdir()
  dflash.save_speculators(tmp_path / 'out', config, params, TARGET, target_params, 'some/target')
  values, got = saved(tmp_path / 'out')
  same_bytes(got, arrays)
  assert dflash.load_config(tmp_path / 'out')[0] == config
  body, wanted_body = values.pop('transformer_layer_config'), wanted.pop('transformer_layer_config')
  assert {key: values[key] for key in wanted} == wanted
  assert {key: body.get(key) for key in wanted_body} == wanted_body


def test_formats_into_each_other(tmp_path, target_params):
  """The body is the same; only speculators keeps a draft vocabulary."""
  first = write(
      tmp_path / 'a', speculators_config(draft_vocab_size=len(IDS)),
      {**tensors(), **own(target_params, list(IDS)), **vocabulary()})
  config, params, _ = dflash.load_drafter(first)
  (tmp_path / 'b').mkdir()
  dflash.save_dflash(tmp_path / 'b', config, params, TARGET)
  same_bytes(saved(tmp_path / 'b')[1], tensors())
  assert dflash.load_config(tmp_path / 'b')[0] == DRAFTER


def test_the_scale_of_the_features_goes_into_fc(tmp_path):
  """Feature f times scale f times column f of fc, rounded once."""
  _, params, _ = dflash.load_drafter(write(tmp_path / 'in', zlab_config(), tensors()))
  scale = np.random.default_rng(3).uniform(0.01, 3, N * D).astype(np.float32)
  (tmp_path / 'out').mkdir()
  dflash.save_dflash(tmp_path / 'out', DRAFTER, {**params, 'feature_scale': scale}, TARGET)
  got = saved(tmp_path / 'out')[1]['fc.weight'].astype(np.float64)
  want = tensors()['fc.weight'].astype(np.float64) * scale
  np.testing.assert_allclose(got, want, rtol=2**-8)
  assert not np.array_equal(got, tensors()['fc.weight'])


def test_default_layers_of_published_drafters():
  assert dflash.default_target_layers(36, 5) == (1, 9, 17, 25, 33)  # Qwen3-8B
  assert dflash.default_target_layers(32, 5) == (1, 8, 15, 22, 29)  # Llama-3.1-8B
  assert dflash.default_target_layers(28, 1) == (14,)


# ---- Every spelling ------------------------------------------------------------------------------


def inner(**changes):
  return {'dflash_config': {**INNER, **changes}}


@pytest.mark.parametrize('changes', [
    {'block_size': None, **inner(block_size=K)},
    {**inner(block_size=K)},
    {'rope_theta': None, 'rope_parameters': {'rope_theta': 1e7, 'rope_type': 'default'}},
    {'rope_parameters': {'rope_theta': 1e7, 'rope_type': 'default'}, 'rope_scaling': {'type': 'default'}},
    {'dflash_config': {}, 'mask_token_id': 30, 'target_layer_ids': [0, 2, 5]},
    {'num_target_layers': None},
    {'architectures': ['Qwen3DFlashDraftModel']},
    {'layer_types': None},
    {'torch_dtype': 'bfloat16', 'dtype': None, 'auto_map': {'AutoModel': 'dflash.DFlashDraftModel'}},
])
def test_the_same_in_other_words(tmp_path, changes):
  values = {key: value for key, value in zlab_config(**changes).items() if value is not None}
  assert dflash.load_config(write(tmp_path / 'in', values, {}))[0] == DRAFTER


def test_layers_that_are_not_named(tmp_path):
  """Two layers of seven: the first one and L - 3."""
  values = zlab_config(dflash_config={'mask_token_id': 30})
  assert dflash.load_config(write(tmp_path / 'in', values, {}))[0].target_layers == (1, 4)


def test_prefix_parts_and_other_floats(tmp_path):
  """`model.` before names, several files with an index, codebooks with `.weight`, float32, tensors that are derived."""
  changes = {'architectures': ['DFlash2DraftModel'], **inner(
      conv_kernel_size=2, conv_group_size=4, selector_rank=8, selector_top_k=6)}
  arrays = tensors(2, True)
  want = dflash.load_drafter(write(tmp_path / 'a', zlab_config(**changes), arrays))[1]
  rename = lambda name: 'model.' + name.replace('_codebook', '_codebook.weight')
  renamed = {rename(name): x.astype(np.float32) for name, x in arrays.items()}
  renamed['model.rotary_emb.inv_freq'] = np.ones(3, np.float32)
  folder = write(tmp_path / 'b', zlab_config(**changes), {})
  (folder / 'model.safetensors').unlink()
  names = sorted(renamed)
  index = {}
  for i, part in enumerate((names[:9], names[9:])):
    index |= dict.fromkeys(part, f'part-{i}.safetensors')
    safetensors_numpy.save_file({name: renamed[name] for name in part}, folder / f'part-{i}.safetensors')
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': index}))
  got = dflash.load_drafter(folder)[1]
  assert jax.tree.structure(got) == jax.tree.structure(want)
  assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(want)))


# ---- Refusals ------------------------------------------------------------------------------------


def message(function, *args):
  with pytest.raises(UserError) as error:
    function(*args)
  return str(error.value)


@pytest.mark.parametrize('changes, text', [
    ({'architectures': ['LlamaForCausalLM'], 'dflash_config': None}, 'does not describe a DFlash drafter'),
    ({'architectures': ['Qwen3DSparkModel']}, 'architecture Qwen3DSparkModel is not supported'),
    ({'block_size': None}, 'block_size is missing'),
    ({'block_size': 1}, 'no token is drafted'),
    ({'block_size': '5'}, 'block_size must be of type int'),
    (inner(block_size=8), 'block_size is there twice, as 8 and 5'),
    ({'dflash_config': {'target_layer_ids': [0, 2, 5]}}, 'mask_token_id is missing'),
    (inner(target_layer_ids=[2, 0, 5]), 'must ascend'),
    (inner(target_layer_ids=[0, 2.0]), 'elements of type int'),
    (inner(target_layer_ids=[-1, 2]), 'must ascend from 0'),
    ({'dflash_config': {'mask_token_id': 30}, 'num_target_layers': None}, 'target_layer_ids is missing'),
    ({'rope_theta': None}, 'rope_theta is missing'),
    ({'rope_parameters': {'rope_theta': 10000.0}}, 'rope_theta is there twice'),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}}, "rotary scaling (rope_scaling.rope_type='yarn')"),
    ({'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 1e7}},
     "rotary scaling (rope_parameters.rope_type='llama3')"),
    ({'rope_parameters': {'full_attention': {'rope_theta': 1e7}}}, 'of its own for some layers'),
    ({'partial_rotary_factor': 0.25}, 'partial rotary'),
    ({'rope_parameters': {'rope_theta': 1e7, 'partial_rotary_factor': 0.5}}, 'partial rotary'),
    ({'rms_norm_eps': None}, 'rms_norm_eps is missing'),
    ({'head_dim': None}, 'head_dim is missing'),
    ({'head_dim': 5}, 'cannot work'),
    ({'num_key_value_heads': 3}, 'cannot work'),
    ({'hidden_size': -4}, 'hidden_size must be above 0'),
    ({'hidden_act': 'gelu'}, "another activation (hidden_act='gelu')"),
    ({'attention_bias': True}, 'bias in attention'),
    (inner(projector_type='domino'), 'a correction head'),
    (inner(shift_label=True), 'labels that are shifted'),
    (inner(causal=True), 'causality'),
    ({'layer_types': ['full_attention']}, 'layer_types'),
    ({'layer_types': ['full_attention', 'chunked_attention']}, 'layer_types'),
    ({**SLIDING, 'use_sliding_window': False}, 'use_sliding_window is not true'),
    ({**SLIDING, 'sliding_window': None}, 'sliding_window is missing'),
    ({'layer_types': None, 'use_sliding_window': True, 'sliding_window': 4}, 'without layer_types'),
    ({'architectures': ['DFlash2DraftModel']}, 'conv_kernel_size is missing'),
    ({'architectures': ['DFlash2DraftModel'], **inner(
        conv_kernel_size=2, conv_group_size=5, selector_rank=8, selector_top_k=6)}, 'does not divide 16'),
])
def test_dflash_configs_that_are_refused(tmp_path, changes, text):
  values = {key: value for key, value in zlab_config(**changes).items() if value is not None}
  found = message(dflash.load_drafter, write(tmp_path / 'in', values, tensors()))
  assert text in found and str(tmp_path / 'in') in found


@pytest.mark.parametrize('changes, text', [
    ({'speculators_model_type': 'eagle3'}, "a speculator of type 'eagle3' is not supported"),
    ({'transformer_layer_config': None}, 'transformer_layer_config is missing'),
    ({'transformer_layer_config': {**speculators_config()['transformer_layer_config'], **SLIDING}},
     'sliding attention'),
    ({'aux_hidden_state_layer_ids': [0, 3, 6]}, 'must ascend from 0'),
    ({'aux_hidden_state_layer_ids': None}, 'aux_hidden_state_layer_ids is missing'),
    ({'mask_token_id': None}, 'mask_token_id is missing'),
    ({'target_hidden_size': 32}, 'a target of another width'),
    ({'projector_type': 'domino'}, 'a correction head'),
    ({'draft_vocab_size': V + 1}, 'the target has 31 tokens'),
    ({'draft_vocab_size': 4}, 'as many offsets in d2t'),
])
def test_speculators_configs_that_are_refused(tmp_path, changes, text):
  arrays = {**tensors(), **vocabulary()}
  values = {'draft_vocab_size': len(IDS), **changes}
  assert text in message(dflash.load_drafter, write(tmp_path / 'in', speculators_config(**values), arrays))


@pytest.mark.parametrize('offsets, in_draft, text', [
    ([1, 3, 3, 14, 27], vocabulary()['t2d'], 'ascending tokens of 0 to 30'),
    ([1, 3, 0, 14, 25], vocabulary()['t2d'], 'ascending tokens'),
    ([0, 3, 3, 14, 25], vocabulary()['t2d'], 'name different tokens'),
])
def test_draft_vocabularies_that_are_refused(tmp_path, offsets, in_draft, text):
  arrays = {**tensors(), 'd2t': np.array(offsets), 't2d': in_draft}
  folder = write(tmp_path / 'in', speculators_config(draft_vocab_size=len(IDS)), arrays)
  assert text in message(dflash.load_drafter, folder)


def test_all_tensors_that_do_not_fit_are_named(tmp_path):
  arrays = tensors()
  del arrays['norm.weight']
  arrays['layers.2.mlp.up_proj.weight'] = arrays['layers.1.mlp.up_proj.weight']
  arrays['fc.weight'] = np.ascontiguousarray(arrays['fc.weight'].T)
  arrays['layers.0.self_attn.q_proj.weight'] = arrays['layers.0.self_attn.q_proj.weight'].astype(np.int8)
  arrays['layers.1.self_attn.q_norm.weight'][2] = np.nan
  found = message(dflash.load_drafter, write(tmp_path / 'in', zlab_config(), arrays))
  for text in ('norm.weight is missing', 'layers.2.mlp.up_proj.weight has no place',
               'fc.weight is bfloat16 [48, 16], not a float [16, 48]', 'layers.0.self_attn.q_proj.weight is int8',
               'layers.1.self_attn.q_norm.weight holds numbers that are not finite'):
    assert text in found


def test_files_that_are_missing_or_damaged(tmp_path):
  assert 'cannot read' in message(dflash.load_drafter, tmp_path / 'nowhere')
  folder = write(tmp_path / 'in', zlab_config(), tensors())
  (folder / 'model.safetensors').write_bytes((folder / 'model.safetensors').read_bytes()[:-1])
  assert 'model.safetensors is damaged' in message(dflash.load_drafter, folder)
  (folder / 'model.safetensors').unlink()
  assert 'cannot read' in message(dflash.load_drafter, folder)
  (folder / 'config.json').write_text('{"a": ')
  assert 'config.json is damaged' in message(dflash.load_drafter, folder)
  (folder / 'config.json').write_text('[]')
  assert 'not a JSON object' in message(dflash.load_drafter, folder)


INFO = dflash.Info(None, 'dflash', V, 7, 'some/target')


@pytest.mark.parametrize('drafter, info, target, text', [
    ({}, {}, {'width': 32}, 'width: it was made for a target of 16, this one has 32'),
    ({}, {'vocab_size': 30}, {}, 'vocabulary: it was made for a target of 30, this one has 31'),
    ({}, {}, {'num_layers': 8}, 'layers: it was made for a target of 7, this one has 8'),
    ({'target_layers': (0, 7)}, {}, {}, 'taps layer 7; the target has layers 0 to 6'),
    ({'target_layers': (0, 6)}, {}, {}, 'taps the last layer, 6'),
    ({'mask_token_id': V}, {}, {}, 'mask token, 31, is outside the embedding; its rows are 0 to 30'),
    ({'mask_token_id': -1}, {}, {}, 'mask token, -1, is outside'),
    ({'mask_token_id': 8}, {}, {}, "mask token, 8, is 'token 8', which text can make"),
    ({**DFLASH2, 'selector_candidates': 32}, {}, {}, 'among 32 tokens'),
])
def test_another_target_is_refused(drafter, info, target, text):
  tokenizer = types.SimpleNamespace(used_ids=frozenset(range(30)), token=lambda i: f'token {i}')
  check = lambda d, i, t: dflash.check_target(
      dataclasses.replace(DRAFTER, **d), dataclasses.replace(INFO, **i), dataclasses.replace(TARGET, **t), tokenizer)
  check({}, {}, {})
  check({}, {'num_target_layers': None}, {'num_layers': 8})
  found = message(check, drafter, info, target)
  assert text in found and 'made for some/target' in found


def test_copies_of_another_target_are_refused(target_params):
  """Rounding and four bits are let through, other weights and shapes are not."""
  copies = own(target_params)
  rng = np.random.default_rng(8)
  noisy = lambda x, share: (x + share * rng.normal(size=x.shape) * np.std(x)).astype(ml_dtypes.bfloat16)
  embedding, head = (copies[name].astype(np.float32) for name in ('embed_tokens.weight', 'lm_head.weight'))
  info = lambda e, h: dataclasses.replace(INFO, embedding_VxD=e, head_VxD=h)
  dflash.check_copies({}, info(noisy(embedding, 0.05), noisy(head, 0.05)), target_params)
  dflash.check_copies({}, info(None, None), target_params)
  dflash.check_copies({'draft_ids': np.array(IDS)}, info(None, head[list(IDS)]), target_params)
  assert 'embedding (embed_tokens) is not that' in message(
      dflash.check_copies, {}, info(noisy(embedding, 0.3), None), target_params)
  assert 'head (lm_head) is not that' in message(dflash.check_copies, {}, info(None, embedding), target_params)
  assert 'head (lm_head) is [30, 16]' in message(dflash.check_copies, {}, info(None, head[:30]), target_params)
  assert 'head (lm_head) is not that' in message(
      dflash.check_copies, {'draft_ids': np.array(IDS)}, info(None, head[:len(IDS)]), target_params)


@pytest.mark.parametrize('format, changes, text', [
    ('gguf', {}, '--format=gguf: unknown'),
    ('dflash', {'window': 16}, 'train one with --config.drafter.window=0'),
    ('speculators', {'window': 16}, 'train one with --config.drafter.window=0'),
    ('dflash', {'from_anchor': True}, 'samples from the anchor'),
    ('dflash', {'layer_windows': (3, 4)}, 'several lengths'),
    ('dflash', {'causal_layers': (1,)}, 'causal layers (1,)'),
    ('speculators', {'layer_windows': (3, 3)}, 'sliding or causal layers'),
    ('speculators', {'causal_layers': (0, 1)}, 'sliding or causal layers'),
    ('speculators', DFLASH2, 'DFlash 2'),
    ('speculators', {'logit_softcap': 30.0}, 'scaled or capped logits'),
])
def test_exports_that_are_refused(format, changes, text):
  assert text in message(dflash.check_export, dataclasses.replace(DRAFTER, **changes), format)


# ---- Against z-lab's package ---------------------------------------------------------------------


TAPS, TINY_V = (0, 2, 3), 11  # So few tokens that even a random drafter is right at times.


@pytest.fixture(scope='module')
def zlab():
  """z-lab's model and torch. They come with the extra `interop`."""
  reason = "needs the packages of the extra `interop`: pip install '.[interop]'"
  torch = pytest.importorskip('torch', reason=reason)
  transformers = pytest.importorskip('transformers', reason=reason)
  pytest.importorskip('dflash', reason=reason)
  model = pytest.importorskip('dflash.model', reason=reason)
  torch.manual_seed(0)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch.cuda, 'synchronize', lambda *args: None)  # Its clock wants a GPU.
    yield types.SimpleNamespace(torch=torch, transformers=transformers, model=model)


@pytest.fixture(scope='module')
def llama(zlab):
  """(their tiny Llama, our module, its parameters)."""
  config = zlab.transformers.LlamaConfig(
      vocab_size=TINY_V, hidden_size=D, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4,
      num_key_value_heads=2, head_dim=4, rms_norm_eps=1e-5, rope_theta=500.0, max_position_embeddings=256,
      tie_word_embeddings=False, attention_bias=False)
  model = zlab.transformers.LlamaForCausalLM(config).eval()
  randomise(zlab, model, 3)
  ours = dataclasses.replace(TARGET, vocab_size=TINY_V, num_layers=5, max_length=256, eos_ids=())
  state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
  params = {
      'embed': {'embedding': state['model.embed_tokens.weight']}, 'norm': {'scale': state['model.norm.weight']},
      'lm_head': {'kernel': state['lm_head.weight'].T}}
  for i in range(5):
    get = lambda name: state[f'model.layers.{i}.{name}.weight']
    params[f'layers_{i}'] = {
        'attn_norm': {'scale': get('input_layernorm')}, 'mlp_norm': {'scale': get('post_attention_layernorm')},
        'attn': {name: {'kernel': get(f'self_attn.{name}').T} for name in ('q_proj', 'k_proj', 'v_proj', 'o_proj')},
        'mlp': {name: {'kernel': get(f'mlp.{name}').T} for name in ('gate_proj', 'up_proj', 'down_proj')}}
  return model, target_lib.Target(ours), jax.tree.map(jnp.asarray, params)


def randomise(zlab, model, seed):
  """Strong weights, exact in bfloat16, so that tokens are irregular and nothing hides behind small numbers."""
  rng = np.random.default_rng(seed)
  with zlab.torch.no_grad():
    for parameter in model.parameters():
      parameter.copy_(zlab.torch.from_numpy(draw(tuple(parameter.shape), rng).astype(np.float32)))


VARIANTS = {
    'plain': {},
    'sliding': {**SLIDING, 'sliding_window': 6},
    'sliding, not causal': {**SLIDING, 'sliding_window': 6, 'is_causal': False},
    'causal': {'is_causal': True},
    'scaled': {'dflash': {'input_embedding_scale': 2.0, 'output_multiplier': 0.5, 'final_logit_softcapping': 2.0}},
    'DFlash 2': {'dflash': {'conv_kernel_size': 2, 'conv_group_size': 4, 'selector_rank': 8, 'selector_top_k': 6,
                            'output_multiplier': 0.5, 'final_logit_softcapping': 2.0}},
}


@pytest.fixture(scope='module')
def their_drafter(zlab, tmp_path_factory):
  """A function of a variant's name -> (their random drafter, the folder where it has saved itself)."""
  made = {}

  def make(variant):
    if variant not in made:
      changes = dict(VARIANTS[variant])
      extra = changes.pop('dflash', {})
      config = zlab_config(**changes)
      inner = {'mask_token_id': 10, 'target_layer_ids': list(TAPS), **extra}
      config |= {'dflash_config': inner, 'num_target_layers': 5, 'vocab_size': TINY_V, 'dtype': 'float32'}
      kind = zlab.model.DFlash2DraftModel if variant == 'DFlash 2' else zlab.model.DFlashDraftModel
      model = kind(zlab.transformers.Qwen3Config(**config)).eval()
      randomise(zlab, model, list(VARIANTS).index(variant))
      folder = tmp_path_factory.mktemp('theirs')
      model.save_pretrained(folder)
      made[variant] = model, folder
    return made[variant]

  return make


@pytest.fixture(scope='module')
def block():
  """Features of eight positions, embeddings of a block behind them, its anchor."""
  rng = np.random.default_rng(1)
  return (rng.normal(size=(1, 8, N * D)).astype(np.float32), rng.normal(size=(1, K, D)).astype(np.float32),
          np.array([4], np.int32))


def their_hidden(zlab, model, features, embeddings):
  t = zlab.torch
  with t.no_grad():
    return model(
        target_hidden=t.from_numpy(features), noise_embedding=t.from_numpy(embeddings),
        position_ids=t.arange(features.shape[1] + embeddings.shape[1])[None])


def compare(zlab, llama, theirs, folder, block):
  """Hidden states, logits, and draft tokens of one block."""
  features, embeddings, anchors = block
  config, params, info = dflash.load_drafter(folder)
  dflash.check_target(config, info, llama[1].config)
  hidden = drafter_lib.Drafter(config).apply(
      {'params': params}, jnp.asarray(features), jnp.asarray(embeddings)[:, None],
      jnp.array([[features.shape[1]]]))[:, 0]
  want = their_hidden(zlab, theirs, features, embeddings)
  close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
  close(hidden, want.numpy())

  slots = drafter_lib.draft_slots(hidden[:, None], config)[:, 0]
  plain = target_lib.logits(llama[2], slots, jnp.float32)
  logits = drafter_lib.adjust_logits(params, config, slots, plain, jnp.asarray(anchors), jnp.float32)
  with zlab.torch.no_grad():
    their_logits = theirs.compute_logits(want[:, 1:], llama[0].lm_head)
    if isinstance(theirs, zlab.model.DFlash2DraftModel):
      tokens, candidates, _ = theirs.propose(want[:, 1:], zlab.torch.from_numpy(anchors).long(), llama[0].lm_head, 0.0)
      found = np.isfinite(logits[0]).nonzero()[1].reshape(K - 1, -1)
      np.testing.assert_array_equal(found, np.sort(candidates[0].numpy()))
      assert (tokens != their_logits.argmax(-1)).any()  # The selector had something to say.
    else:
      tokens = their_logits.argmax(-1)
      close(logits, their_logits.numpy())
  np.testing.assert_array_equal(logits.argmax(-1), tokens.numpy())


@pytest.mark.parametrize('variant', VARIANTS)
def test_their_drafter_here(zlab, llama, their_drafter, block, variant):
  compare(zlab, llama, *their_drafter(variant), block)


@pytest.mark.parametrize('variant', VARIANTS)
def test_our_export_there(zlab, llama, their_drafter, block, tmp_path, variant):
  """Their loader reads what we have written, scale of the features and all, and every tensor is used."""
  config, params, _ = dflash.load_drafter(their_drafter(variant)[1])
  scale = np.float32(2.0) ** np.random.default_rng(0).integers(-3, 3, N * D)  # Exact in bfloat16.
  params = {**params, 'feature_scale': scale}
  dflash.save_dflash(tmp_path, config, params, llama[1].config)
  kind = type(their_drafter(variant)[0])
  theirs, report = kind.from_pretrained(tmp_path, dtype=zlab.torch.float32, output_loading_info=True)
  assert not any(report[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
  compare(zlab, llama, theirs.eval(), tmp_path, block)
  got = drafter_lib.Drafter(config).apply(
      {'params': params}, jnp.asarray(block[0]), jnp.asarray(block[1])[:, None], jnp.array([[8]]))
  np.testing.assert_allclose(
      got[:, 0], their_hidden(zlab, theirs, *block[:2]).numpy(), rtol=1e-4, atol=1e-4 * np.abs(got).max())


@pytest.mark.parametrize('variant, stop', [
    ('plain', None), ('plain', 1), ('sliding', None), ('scaled', None), ('DFlash 2', None)])
def test_the_same_rounds_as_their_loop(zlab, llama, their_drafter, variant, stop):
  """Their generation and ours: tokens, and the tokens that every round gains.

  Near the limit their blocks are cut, and may draft otherwise: those rounds are left out.
  """
  model, target, target_params = llama
  theirs, folder = their_drafter(variant)
  config, params, _ = dflash.load_drafter(folder)
  new, lengths = 50, set()
  target = target_lib.Target(dataclasses.replace(target.config, eos_ids=() if stop is None else (stop,)))
  for seed in (0, 2, 7):
    prompt = np.random.default_rng(seed).integers(0, 10, size=(1, 6))
    want = zlab.model.dflash_generate(
        theirs, model, zlab.torch.from_numpy(prompt), new, None if stop is None else [stop], return_stats=True)
    rows, trace = speculative.generate(
        target, target_params, drafter_lib.Drafter(config), params, jnp.asarray(prompt, jnp.int32), jnp.array([6]),
        max_new_tokens=new)
    np.testing.assert_array_equal(rows.tokens_BxT[0, : int(rows.lengths_B[0])], want.output_ids[0].numpy())
    starts = 6 + np.cumsum([0, *want.acceptance_lengths])[:-1]
    whole = int((starts + K <= 6 + new).sum())
    gained = np.asarray(trace.gained_BxR[0])
    np.testing.assert_array_equal(gained[:whole], want.acceptance_lengths[:whole])
    lengths |= set(gained[:whole].tolist())
  assert len(lengths) > 1 and max(lengths) > 1  # Drafts were accepted, and rejected.
