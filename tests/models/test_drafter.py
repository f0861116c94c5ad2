"""The drafter against loops over anchors and slots, and training against decoding forward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.models import drafter as drafter_lib

CONFIG = drafter_lib.DrafterConfig(
    num_layers=2, block_size=4, target_layers=(0, 1), mask_token_id=3, width=12, mlp_width=14,
    num_heads=4, num_kv_heads=2, head_dim=6, rope_theta=50.0, norm_eps=1e-3)
B, T, A, K, D = 2, 11, 4, CONFIG.block_size, CONFIG.width
# In the first row: no context, twice the same position, two blocks that overlap; in the second a
# block that reaches over the end.
ANCHORS = np.array([[0, 5, 5, 7], [1, 3, 10, 0]])


@pytest.fixture(scope='module')
def inputs():
  """Features [B, T, N*D], embeddings [B, A, K, D], anchors [B, A]."""
  rng = np.random.default_rng(0)
  return (jnp.asarray(rng.normal(size=(B, T, 2 * D)), jnp.float32),
          jnp.asarray(rng.normal(size=(B, A, K, D)), jnp.float32), jnp.asarray(ANCHORS))


@pytest.fixture(scope='module')
def params(random_params, inputs):
  return random_params(drafter_lib.Drafter(CONFIG), 1, *inputs)


@jax.jit
def train(params, features, embeddings, anchors):
  return drafter_lib.Drafter(CONFIG).apply({'params': params}, features, embeddings, anchors)


@jax.jit
def write(params, features, positions, cache):
  return drafter_lib.Drafter(CONFIG).apply(
      {'params': params}, features, positions, cache, method='write_context')


@jax.jit
def draft(params, embeddings, anchors, cache):
  return drafter_lib.Drafter(CONFIG).apply(
      {'params': params}, embeddings, anchors, cache, method='draft')


def naive_convolution(r, config, params, x, side, source):
  """[K, D] of `SlotConvolutions`, before (side 0) or after (1) a sublayer whose input was `source`."""
  out, base = np.zeros_like(x), np.asarray(params['base'], np.float64)
  for slot in range(len(x)):
    dynamic = r.dense(source[slot], params['projection'])
    dynamic = dynamic.reshape(2, config.conv_taps, -1)[side]
    for tap in range(min(config.conv_taps, slot + 1)):
      for channel in range(x.shape[1]):
        weight = base[side, tap, channel] + dynamic[tap, channel // config.conv_group]
        out[slot, channel] += weight * x[slot - tap, channel]
  return out


def naive_sublayer(r, config, params, name, sublayer, x):
  """A sublayer on its normed input, between its convolutions if it has them."""
  if not config.conv_taps:
    return sublayer(x)
  between = functools.partial(naive_convolution, r, config, params[f'{name}_conv'])
  return between(sublayer(between(x, 0, x)), 1, x)


def naive_block(r, config, params, features, embeddings, anchor):
  """Hidden states [K, D] of one block; features [T, F] beyond the anchor are never touched."""
  groups = config.num_heads // config.num_kv_heads
  eps, slots = config.norm_eps, np.arange(len(embeddings))
  first = max(anchor - config.window, 0) if config.window else 0
  features = np.asarray(features, np.float64)[first:anchor] * np.asarray(params['feature_scale'], np.float64)
  context = r.rms(r.dense(features, params['fc']), params['hidden_norm']['scale'], eps)
  x = np.asarray(embeddings, np.float64)
  for i in range(config.num_layers):
    p = params[f'layers_{i}']
    attn = p['attn']
    window = (config.layer_windows or (0,) * config.num_layers)[i] or 1000

    def heads(y, name, norm, positions):
      y = r.dense(y, attn[name])
      y = y.reshape(len(y), y.shape[1] // config.head_dim, config.head_dim)
      if norm is None:
        return y
      return r.rope(r.rms(y, attn[norm]['scale'], eps), positions, config.rope_theta)

    def attention(h):
      q = heads(h, 'q_proj', 'q_norm', anchor + slots)
      keys = np.concatenate([
          heads(context, 'k_proj', 'k_norm', np.arange(first, anchor)),
          heads(h, 'k_proj', 'k_norm', anchor + slots)])
      values = np.concatenate(
          [heads(context, 'v_proj', None, None), heads(h, 'v_proj', None, None)])
      positions = np.concatenate([np.arange(first, anchor), anchor + slots])
      out = np.zeros((len(slots), config.num_heads, config.head_dim))
      for slot in slots:
        seen = [j for j, position in enumerate(positions) if abs(position - anchor - slot) < window
                and (i not in config.causal_layers or position <= anchor + slot)]
        for head in range(config.num_heads):
          own = head // groups
          out[slot, head] = r.attend(q[slot, head], keys[seen, own], values[seen, own])
      return r.dense(out.reshape(len(slots), -1), attn['o_proj'])

    sublayer = functools.partial(naive_sublayer, r, config, p)
    x = x + sublayer('attn', attention, r.rms(x, p['attn_norm']['scale'], eps))
    x = x + sublayer('mlp', lambda h: r.mlp(h, p['mlp']), r.rms(x, p['mlp_norm']['scale'], eps))
  return r.rms(x, params['norm']['scale'], eps)


@pytest.mark.parametrize('window', [0, 1, 2, 3])
def test_training_forward_against_loops(params, inputs, reference, window):
  config = dataclasses.replace(CONFIG, window=window)
  got = jax.jit(drafter_lib.Drafter(config).apply)({'params': params}, *inputs)
  assert got.shape == (B, A, K, D) and got.dtype == jnp.float32
  features, embeddings, _ = inputs
  for row in range(B):
    for a in range(A):
      want = naive_block(
          reference, config, params, features[row], embeddings[row, a], ANCHORS[row, a])
      np.testing.assert_allclose(got[row, a], want, atol=1e-4, err_msg=f'row {row} block {a}')


@pytest.mark.parametrize('changes', [
    {}, {'window': 2}, {'window': 3}, {'window': 4, 'layer_windows': (3, 0), 'causal_layers': (1,)}])
def test_documents_of_a_row_against_loops(params, inputs, reference, changes):
  """Windows are cut out of the row, or not, as above; the last of a row is longer than what is left of it."""
  config = dataclasses.replace(CONFIG, **changes)
  starts = np.array([[0, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5], [0, 1, 1, 3, 3, 3, 3, 3, 3, 9, 9]])
  got = jax.jit(drafter_lib.Drafter(config).apply)({'params': params}, *inputs, jnp.asarray(starts))
  features, embeddings, _ = inputs
  for row in range(B):
    for a, anchor in enumerate(ANCHORS[row]):
      start = starts[row, anchor]
      want = naive_block(
          reference, config, params, features[row, start:], embeddings[row, a], anchor - start)
      np.testing.assert_allclose(got[row, a], want, atol=1e-4, err_msg=f'row {row} block {a}')


@pytest.mark.parametrize('changes', [
    {'layer_windows': (3, 0)}, {'layer_windows': (2, 5), 'causal_layers': (0,)}, {'causal_layers': (0, 1)},
    {'conv_taps': 2, 'conv_group': 4}, {'conv_taps': 6, 'conv_group': 12, 'layer_windows': (0, 4)},
    {'from_anchor': True, 'block_size': K + 1}])
def test_what_imported_drafters_have_against_loops(random_params, inputs, reference, changes):
  config = dataclasses.replace(CONFIG, **changes)
  params = random_params(drafter_lib.Drafter(config), 1, *inputs)
  got = jax.jit(drafter_lib.Drafter(config).apply)({'params': params}, *inputs)
  features, embeddings, _ = inputs
  for row in range(B):
    for a in range(A):
      want = naive_block(reference, config, params, features[row], embeddings[row, a], ANCHORS[row, a])
      np.testing.assert_allclose(got[row, a], want, atol=2e-4, err_msg=f'row {row} block {a}')


def test_slots_that_predict_from_the_anchor_on():
  """Four slots draft four tokens, where the anchor's own slot predicts one; the block then counts five."""
  config = dataclasses.replace(CONFIG, from_anchor=True, block_size=5)
  np.testing.assert_array_equal(drafter_lib.block_tokens(jnp.array([[7]]), config), [[[7, 3, 3, 3]]])
  hidden = jnp.arange(8.0).reshape(1, 1, 4, 2)
  np.testing.assert_array_equal(drafter_lib.draft_slots(hidden, config), hidden)
  np.testing.assert_array_equal(drafter_lib.draft_slots(hidden, CONFIG), hidden[:, :, 1:])


def test_adjusted_logits_against_loops():
  """Scale, cap, and the selector's path; everything that is no candidate is out."""
  rng = np.random.default_rng(4)
  vocab, rank, slots, candidates = 9, 5, 4, 3
  config = dataclasses.replace(
      CONFIG, logit_scale=0.5, logit_softcap=3.0, selector_rank=rank, selector_candidates=candidates)
  draw = lambda *shape: rng.normal(size=shape)
  logits, hidden, anchors = 4 * draw(B, slots, vocab), draw(B, slots, D), np.array([2, 8])
  selector = {'predecessor': draw(vocab, rank), 'successor': draw(vocab, rank), 'projection': {'kernel': draw(D, rank)}}
  got = drafter_lib.adjust_logits(
      jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {'selector': selector}), config,
      *(jnp.asarray(x, jnp.float32) for x in (hidden, logits)), jnp.asarray(anchors, jnp.int32), jnp.float32)
  changed = 0
  for row in range(B):
    before = anchors[row]
    for slot in range(slots):
      unary = 3 * np.tanh(logits[row, slot] * 0.5 / 3)
      want = np.full(vocab, -np.inf)
      for token in np.argsort(unary)[-candidates:]:
        context = selector['predecessor'][before] * (hidden[row, slot] @ selector['projection']['kernel'])
        want[token] = unary[token] + context @ selector['successor'][token]
      np.testing.assert_allclose(got[row, slot], want, atol=1e-4)
      before = np.argmax(want)
      changed += before != np.argmax(unary)
  assert changed  # Else the selector would not have been needed.


def test_decoding_forward_is_training_forward(params, inputs):
  """The cache is filled in pieces, wrong beyond the anchor and overwritten later or never."""
  features, embeddings, _ = inputs
  want = train(params, *inputs)
  rng = np.random.default_rng(2)
  order = np.argsort(ANCHORS, axis=1, kind='stable')
  size = T + K
  cache = jax.tree.map(  # what an earlier user of the memory left
      lambda x: jnp.asarray(100 * rng.normal(size=x.shape), jnp.float32),
      drafter_lib.init_cache(CONFIG, B, size))
  known = np.zeros(B, int)
  for turn in range(A):
    block = order[:, turn]
    anchor = ANCHORS[np.arange(B), block]
    # As decoding does: fixed-size pieces from the first unknown position on, right in a prefix.
    while (known < anchor).any():
      positions = known[:, None] + np.arange(K)[None, :]
      piece = 10 * rng.normal(size=(B, K, 2 * D))
      for row in range(B):
        right = min(rng.integers(1, K + 1), anchor[row] - known[row])
        piece[row, :right] = features[row, known[row]:known[row] + right]
        known[row] += right
      cache = write(params, jnp.asarray(piece, jnp.float32), jnp.asarray(positions), cache)
    got = draft(
        params, embeddings[np.arange(B), block][:, None], jnp.asarray(anchor)[:, None], cache)
    for row in range(B):
      np.testing.assert_allclose(got[row, 0], want[row, block[row]], atol=1e-4)


def test_positions_outside_the_cache_are_dropped(params, inputs):
  features, _, _ = inputs
  cache = drafter_lib.init_cache(CONFIG, B, T)
  positions = jnp.tile(jnp.arange(T)[None, :], (B, 1))
  full = write(params, features, positions, cache)
  again = write(params, features + 1, positions + jnp.array([[T], [0]]), full)
  for old, new in zip(jax.tree.leaves(full), jax.tree.leaves(again)):
    np.testing.assert_array_equal(old[0], new[0])
    assert not np.array_equal(old[1], new[1])


def test_nothing_leaks_from_the_anchor_on_or_from_other_blocks(params, inputs):
  features, embeddings, anchors = inputs
  want = np.asarray(train(params, *inputs))
  for position in (0, 4, 5, 9):
    got = np.asarray(train(params, features.at[:, position].add(3.0), embeddings, anchors))
    changed = (got != want).reshape(B, A, -1).any(-1)
    np.testing.assert_array_equal(changed, position < ANCHORS)
  for block in range(A):
    got = np.asarray(train(params, features, embeddings.at[:, block].add(1.0), anchors))
    changed = (got != want).reshape(B, A, -1).any(-1)
    np.testing.assert_array_equal(changed, np.tile(np.arange(A) == block, (B, 1)))


def test_every_slot_sees_its_whole_block_and_every_tapped_layer(params, inputs):
  features, embeddings, anchors = inputs
  want = np.asarray(train(params, *inputs))
  for slot in range(K):
    got = np.asarray(train(params, features, embeddings.at[:, :, slot].add(1.0), anchors))
    assert (got != want).any(-1).all()
  for layer in range(2):
    other = features.at[:, 0, layer * D:(layer + 1) * D].add(1.0)
    got = np.asarray(train(params, other, embeddings, anchors))
    np.testing.assert_array_equal((got != want).any((-1, -2)), ANCHORS > 0)


def test_without_context(params, inputs):
  """Values and gradients stay finite, and the context has no influence."""
  features, embeddings, _ = inputs
  anchors = jnp.zeros((B, A), jnp.int32)
  loss = lambda params, features: jnp.sum(train(params, features, embeddings, anchors)**2)
  value, (gradients, to_features) = jax.value_and_grad(loss, argnums=(0, 1))(params, features)
  assert np.isfinite(value)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
  np.testing.assert_array_equal(to_features, 0)


def value_and_gradients(params, inputs):
  """The traced program, and what it gives."""
  def loss(params, features, embeddings):
    out = drafter_lib.Drafter(CONFIG).apply({'params': params}, features, embeddings, inputs[2])
    return jnp.sum(jnp.sin(out)), out

  step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
  return str(step.trace(params, *inputs[:2]).jaxpr), step(params, *inputs[:2])


@pytest.mark.parametrize('anchors,limit,groups', [(4, 1, 4), (4, 3 * K * T, 2), (3, 2 * K * T, 2)])
def test_groups_of_anchors_change_nothing(params, inputs, monkeypatch, anchors, limit, groups):
  """In the last case a group is one anchor short."""
  inputs = inputs[0], inputs[1][:, :anchors], inputs[2][:, :anchors]
  program, ungrouped = value_and_gradients(params, inputs)
  assert 'scan[' not in program
  monkeypatch.setattr(drafter_lib, '_MAX_SCORES', limit)
  program, values = value_and_gradients(params, inputs)
  assert f'length={groups}' in program
  for got, want in zip(jax.tree.leaves(values), jax.tree.leaves(ungrouped)):
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-4)


def test_bfloat16_is_close_to_float32(params, inputs):
  want = train(params, *inputs)
  got = jax.jit(drafter_lib.Drafter(CONFIG, jnp.bfloat16).apply)({'params': params}, *inputs)
  assert got.dtype == jnp.float32
  error = np.linalg.norm(got - want) / np.linalg.norm(want)
  assert 1e-5 < error < 0.05


def test_block_tokens():
  got = drafter_lib.block_tokens(jnp.array([[7, 3], [9, 1]]), CONFIG)
  np.testing.assert_array_equal(got, [[[7, 3, 3, 3], [3, 3, 3, 3]], [[9, 3, 3, 3], [1, 3, 3, 3]]])
  assert got.dtype == jnp.int32


def test_from_target(tiny_config, random_params):
  config = drafter_lib.from_target(
      tiny_config, num_layers=2, block_size=5, target_layers=[0, 1], mask_token_id=12)
  assert config == drafter_lib.DrafterConfig(
      num_layers=2, block_size=5, target_layers=(0, 1), mask_token_id=12, width=16, mlp_width=20,
      num_heads=4, num_kv_heads=2, head_dim=6, rope_theta=100.0, norm_eps=1e-3, window=0, vocab_size=0)
  hash(config)
  embeddings, features = jnp.zeros((1, 1, 5, 16)), jnp.zeros((1, 2, 32))
  got = random_params(
      drafter_lib.Drafter(config), 0, features, embeddings, jnp.zeros((1, 1), jnp.int32))
  layer = {
      'attn_norm': {'scale': (16,)}, 'mlp_norm': {'scale': (16,)},
      'attn': {
          'q_proj': {'kernel': (16, 24)}, 'k_proj': {'kernel': (16, 12)},
          'v_proj': {'kernel': (16, 12)}, 'o_proj': {'kernel': (24, 16)},
          'q_norm': {'scale': (6,)}, 'k_norm': {'scale': (6,)}},
      'mlp': {
          'gate_proj': {'kernel': (16, 20)}, 'up_proj': {'kernel': (16, 20)},
          'down_proj': {'kernel': (20, 16)}}}
  # The tensors of a published DFlash drafter, with neither embedding nor head, and a scale that `fc` can take in.
  assert jax.tree.map(jnp.shape, got) == {
      'feature_scale': (32,), 'fc': {'kernel': (32, 16)}, 'hidden_norm': {'scale': (16,)}, 'norm': {'scale': (16,)},
      'layers_0': layer, 'layers_1': layer}


def test_draft_vocabulary():
  counts = np.array([3, 0, 0, 9, 3, 1])
  ids = drafter_lib.draft_vocabulary(counts, 5)
  np.testing.assert_array_equal(ids, [0, 1, 3, 4, 5])  # Of the two that never occur the lower one.
  assert ids.dtype == np.int32
  np.testing.assert_array_equal(drafter_lib.draft_vocabulary(counts, 2), [0, 3])

  head = jnp.arange(12.0).reshape(6, 2)
  params = {'draft_ids': jnp.asarray(ids)}
  np.testing.assert_array_equal(drafter_lib.draft_head(params, head), head[np.array(ids)])
  tokens = jnp.array([[5, 2, 0], [3, 1, 4]])
  rows = drafter_lib.draft_rows(params, tokens, 6)
  np.testing.assert_array_equal(rows, [[4, -1, 0], [2, 1, 3]])
  known = rows >= 0
  np.testing.assert_array_equal(drafter_lib.token_ids(params, rows)[known], tokens[known])
  for function in (lambda x: drafter_lib.draft_rows({}, x, 6), lambda x: drafter_lib.token_ids({}, x)):
    np.testing.assert_array_equal(function(tokens), tokens)


def test_rematerialised_layers_have_the_same_gradient_and_keep_less(params, inputs):
  features, embeddings, anchors = inputs

  def loss(remat):
    module = drafter_lib.Drafter(CONFIG, remat=remat)
    return lambda params: jnp.square(module.apply({'params': params}, features, embeddings, anchors)).sum()

  wanted, found = (jax.jit(jax.grad(loss(remat)))(params) for remat in ('none', 'layers'))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, wanted)
  # Matrix products of the program: forward, twice as many backward, and those of the layers once more.
  products = lambda remat: str(jax.make_jaxpr(jax.grad(loss(remat)))(params)).count('dot_general[')
  assert products('layers') > products('none') > 0
