"""The target against a numpy forward, against itself uncached, and a real model's recorded tokens.

`tests/golden/smollm2_greedy.json` holds greedy tokens of SmolLM2 as dspec decoded them,
with their margins; `../shared/data/smollm2_greedy_reference.json`, where a checkout
has it, those of another implementation.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.decoding import autoregressive
from dspec.models import target as target_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / 'tests' / 'golden' / 'smollm2_greedy.json'
REFERENCE = ROOT.parent / 'shared' / 'data' / 'smollm2_greedy_reference.json'
TAPS = (0, 1)


@functools.partial(jax.jit, static_argnames=('module', 'taps'))
def run(module, params, tokens, positions, cache, taps=TAPS):
  """Logits, tapped features and the cache."""
  hidden, features, cache = module.apply({'params': params}, tokens, positions, cache, taps)
  return target_lib.logits(params, hidden, jnp.float32), features, cache


def naive_forward(reference, config, params, tokens):
  """Logits [T, V] and every layer's output, one query, head and position at a time."""
  x = np.asarray(params['embed']['embedding'], np.float64)[tokens]
  t, outputs, r = len(tokens), [], reference
  groups = config.num_heads // config.num_kv_heads
  for i in range(config.num_layers):
    p = params[f'layers_{i}']
    h = r.rms(x, p['attn_norm']['scale'], config.norm_eps)
    heads = lambda name, n: r.dense(h, p['attn'][name]).reshape(t, n, config.head_dim)
    q = r.rope(heads('q_proj', config.num_heads), np.arange(t), config.rope_theta)
    k = r.rope(heads('k_proj', config.num_kv_heads), np.arange(t), config.rope_theta)
    v = heads('v_proj', config.num_kv_heads)
    out = np.zeros((t, config.num_heads, config.head_dim))
    for position in range(t):
      for head in range(config.num_heads):
        own, past = head // groups, slice(position + 1)
        out[position, head] = r.attend(q[position, head], k[past, own], v[past, own])
    x = x + r.dense(out.reshape(t, -1), p['attn']['o_proj'])
    x = x + r.mlp(r.rms(x, p['mlp_norm']['scale'], config.norm_eps), p['mlp'])
    outputs.append(x)
  hidden = r.rms(x, params['norm']['scale'], config.norm_eps)
  head = params['lm_head']['kernel'] if 'lm_head' in params else params['embed']['embedding'].T
  return hidden @ np.asarray(head, np.float64), outputs


def whole(b, t):
  return jnp.tile(jnp.arange(t)[None, :], (b, 1))


@pytest.mark.parametrize('tied', [False, True])
def test_logits_and_features_against_numpy(tiny_target, reference, tied):
  module, params = tiny_target
  if tied:
    params = {k: v for k, v in params.items() if k != 'lm_head'}
  tokens = np.random.default_rng(0).integers(0, 13, size=(2, 9))
  got, features, _ = run(
      module, params, jnp.asarray(tokens), whole(2, 9), target_lib.init_cache(module.config, 2, 9))
  assert features.shape == (2, 9, 2 * 16) and features.dtype == got.dtype == jnp.float32
  for row in range(2):
    want, outputs = naive_forward(reference, module.config, params, tokens[row])
    np.testing.assert_allclose(got[row], want, atol=2e-4)
    np.testing.assert_allclose(features[row, :, :16], outputs[0], atol=1e-4)
    np.testing.assert_allclose(features[row, :, 16:], outputs[1], atol=1e-4)


def test_without_taps_there_are_no_features(tiny_target):
  module, params = tiny_target
  cache = target_lib.init_cache(module.config, 2, 3)
  _, features, _ = run(module, params, whole(2, 3), whole(2, 3), cache, taps=())
  assert features.shape == (2, 3, 0)


@pytest.mark.parametrize('step,size', [(1, 66), (5, 72)])
def test_in_pieces_as_at_once(tiny_target, step, size):
  """Rows start at different positions, and sizes beyond 64 attend in several lengths of view."""
  module, params = tiny_target
  tokens = jnp.asarray(np.random.default_rng(step).integers(0, 13, size=(2, 60 + step * 2)))
  n = tokens.shape[1]
  want, wanted_features, wanted_cache = run(
      module, params, tokens, whole(2, n), target_lib.init_cache(module.config, 2, size))
  cache = target_lib.init_cache(module.config, 2, size)
  _, _, cache = run(module, params, tokens[:, :40], whole(2, 40), cache)
  lag = jnp.array([[0], [3]])  # the second row reads its last three tokens again
  got, features = [], []
  for start in range(40, n, step):
    positions = jnp.minimum(start + jnp.arange(step)[None, :] - lag, n - 1)
    a, b, cache = run(module, params, jnp.take_along_axis(tokens, positions, 1), positions, cache)
    got.append(a)
    features.append(b)
  got, features = jnp.concatenate(got, 1), jnp.concatenate(features, 1)
  np.testing.assert_allclose(got[0], want[0, 40:], atol=1e-4)
  np.testing.assert_allclose(got[1], want[1, 37:n - 3], atol=1e-4)
  np.testing.assert_allclose(features[0], wanted_features[0, 40:], atol=1e-4)
  np.testing.assert_allclose(cache[2][0][0], wanted_cache[2][0][0], atol=1e-4)


def test_right_padding_changes_nothing(tiny_target):
  module, params = tiny_target
  tokens = np.random.default_rng(3).integers(0, 13, size=(1, 6))
  want, features, _ = run(
      module, params, jnp.asarray(tokens), whole(1, 6), target_lib.init_cache(module.config, 1, 6))
  padded = np.concatenate([np.tile(tokens, (2, 1)), [[0] * 5, [7] * 5]], 1)
  # The cache is shorter than the padding: what does not fit is dropped.
  cache = target_lib.init_cache(module.config, 2, 9)
  got, got_features, cache = run(module, params, jnp.asarray(padded), whole(2, 11), cache)
  for row in range(2):
    np.testing.assert_allclose(got[row, :6], want[0], atol=1e-5)
    np.testing.assert_allclose(got_features[row, :6], features[0], atol=1e-5)
  # The padding left behind in the cache is overwritten before anyone looks at it.
  token, position = jnp.array([[4], [4]]), jnp.array([[6], [6]])
  step, _, _ = run(module, params, token, position, cache)
  longer = jnp.asarray(np.concatenate([tokens, [[4]]], 1))
  want, _, _ = run(module, params, longer, whole(1, 7), target_lib.init_cache(module.config, 1, 7))
  np.testing.assert_allclose(step[:, 0], np.tile(want[:, -1], (2, 1)), atol=1e-5)


def test_finished_rows_write_nothing_and_disturb_nobody(tiny_target):
  module, params = tiny_target
  tokens = jnp.asarray(np.random.default_rng(4).integers(0, 13, size=(2, 6)))
  _, _, cache = run(module, params, tokens, whole(2, 6), target_lib.init_cache(module.config, 2, 8))
  block = jnp.array([[1, 2], [3, 4]])
  both, _, _ = run(module, params, block, jnp.array([[6, 7], [6, 7]]), cache)
  for outside in (8, 100):
    got, _, after = run(module, params, block, jnp.array([[6, 7], [outside, outside]]), cache)
    np.testing.assert_allclose(got[0], both[0], atol=1e-6)
    assert np.isfinite(got).all()
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after)):
      np.testing.assert_array_equal(old[1], new[1])
      assert not np.array_equal(old[0], new[0])


def test_partly_outside_the_cache(tiny_target):
  """A block that overlaps the end of the cache keeps what fits; inside, nothing changes."""
  module, params = tiny_target
  tokens = jnp.asarray(np.random.default_rng(5).integers(0, 13, size=(1, 8)))
  want, _, _ = run(module, params, tokens, whole(1, 8), target_lib.init_cache(module.config, 1, 8))
  cache = target_lib.init_cache(module.config, 1, 6)
  got, _, _ = run(module, params, tokens, whole(1, 8), cache)
  np.testing.assert_allclose(got[:, :6], want[:, :6], atol=1e-5)


def test_bfloat16_is_close_to_float32(tiny_target):
  module, params = tiny_target
  tokens = jnp.asarray(np.random.default_rng(6).integers(0, 13, size=(2, 9)))
  cache = target_lib.init_cache(module.config, 2, 9)
  want, _, _ = run(module, params, tokens, whole(2, 9), cache)
  half = module.clone(dtype=jnp.bfloat16)
  got, features, _ = run(half, target_lib.cast(params, jnp.bfloat16), tokens, whole(2, 9), cache)
  assert features.dtype == got.dtype == jnp.float32
  error = np.linalg.norm(got - want) / np.linalg.norm(want)
  assert 1e-5 < error < 0.05


def test_cast_keeps_norms_and_embed_reads_rows(tiny_target):
  module, params = tiny_target
  cast = target_lib.cast(params, jnp.bfloat16)
  assert cast['norm']['scale'].dtype == jnp.float32
  assert cast['layers_0']['attn']['q_proj']['kernel'].dtype == jnp.bfloat16
  embedded = target_lib.embed(cast, jnp.array([[3, 0]]))
  assert embedded.dtype == jnp.float32
  want = np.asarray(params['embed']['embedding'])[[3, 0]].astype(jnp.bfloat16).astype(np.float32)
  np.testing.assert_array_equal(embedded[0], want)
  assert target_lib.head_VxD(params).shape == (13, 16)


def teacher_forced(config, params, rows):
  """Logits of every position of right-padded rows, in one pass without a cache of earlier steps."""
  length = max(map(len, rows))
  tokens = jnp.asarray([row + [0] * (length - len(row)) for row in rows], jnp.int32)
  cache = target_lib.init_cache(config, len(rows), length)
  positions = whole(len(rows), length)
  got, _, _ = run(target_lib.Target(config), params, tokens, positions, cache, taps=())
  return np.asarray(got)


def margins_of(logits_NxV):
  best = np.sort(logits_NxV, axis=-1)
  return best[:, -1] - best[:, -2]


def check_steps(logits_TxV, prompt_ids, greedy_ids, margins):
  """The logits name each recorded token, wherever it had won clearly."""
  first, n = len(prompt_ids) - 1, len(greedy_ids)
  logits = logits_TxV[first:first + n]
  clear = np.asarray(margins) > 1e-3
  assert clear.mean() > 0.9
  np.testing.assert_array_equal(logits.argmax(-1)[clear], np.asarray(greedy_ids)[clear])
  np.testing.assert_allclose(margins_of(logits), margins, atol=5e-3)


@pytest.mark.skipif(not REFERENCE.exists(), reason='this checkout has no ../shared/data')
def test_smollm2_against_another_implementation(smollm2):
  config, params, _ = smollm2
  prompts = json.loads(REFERENCE.read_text())['prompts']
  logits = teacher_forced(config, params, [p['prompt_ids'] + p['greedy_ids'] for p in prompts])
  for row, prompt in enumerate(prompts):
    check_steps(logits[row], prompt['prompt_ids'], prompt['greedy_ids'], prompt['top1_minus_top2'])
    first = logits[row, len(prompt['prompt_ids']) - 1]
    top = prompt['first_step_top5']
    np.testing.assert_allclose(first[[t['id'] for t in top]], [t['logit'] for t in top], atol=2e-3)
    assert set(np.argsort(first)[-5:]) == {t['id'] for t in top}
    np.testing.assert_allclose(
        jax.nn.logsumexp(first), prompt['first_step_logsumexp'], atol=2e-3)


def test_smollm2_against_golden_tokens(smollm2):
  config, params, tokenizer = smollm2
  golden = json.loads(GOLDEN.read_text())
  prompts = golden['prompts']
  for prompt in prompts:
    messages = [{'role': 'user', 'content': prompt['user']}]
    assert tokenizer.render_prompt(messages) == prompt['prompt_ids']
  rows = [p['prompt_ids'] + p['greedy_ids'] for p in prompts]
  logits = teacher_forced(config, params, rows)
  for row, prompt in enumerate(prompts):
    check_steps(logits[row], prompt['prompt_ids'], prompt['greedy_ids'], prompt['margins'])

  # With the cache, one token at a time, the same tokens come out.
  width = max(len(p['prompt_ids']) for p in prompts)
  padded = [p['prompt_ids'] + [0] * (width - len(p['prompt_ids'])) for p in prompts]
  decoded = autoregressive.generate(
      target_lib.Target(dataclasses.replace(config, eos_ids=())), params, jnp.asarray(padded),
      jnp.asarray([len(p['prompt_ids']) for p in prompts]), jax.random.key(0),
      max_new_tokens=len(prompts[0]['greedy_ids']))
  for row, prompt in enumerate(prompts):
    assert min(prompt['margins']) > 1e-3
    got = np.asarray(decoded.tokens_BxT[row, :decoded.lengths_B[row]])
    np.testing.assert_array_equal(got, rows[row])
