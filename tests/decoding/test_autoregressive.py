"""The oracle itself against a loop that reads the whole text again for every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.decoding import autoregressive
from dspec.decoding import sampling
from dspec.models import target as target_lib

VOCAB = 40


def plain_loop(next_token, prompt, max_new_tokens, eos_ids):
  """Prompt and generated tokens of one row; `next_token` maps a text to a token."""
  text = list(prompt)
  for _ in range(max_new_tokens):
    text.append(int(next_token(text)))
    if text[-1] in eos_ids:
      break
  return text


def draw_prompts(seed, width, lengths):
  prompts = np.random.default_rng(seed).integers(6, VOCAB, size=(len(lengths), width))
  return prompts, np.asarray(lengths)


def reader(uncached, module, params, size):
  """A function text -> logits [V] after it; right padding keeps the shape fixed."""
  def last_logits(text):
    padded = np.array([text + [7] * (size - len(text))])
    return uncached(module, params, padded)[0][:, len(text) - 1]
  return last_logits


# Shorter than a prefill chunk, exactly one, and two with a short row; the last two cross a view.
CASES = [(7, (7, 3, 1, 5), 14), (64, (64, 59), 3), (70, (1, 70, 60), 9)]


@pytest.mark.parametrize('width,lengths,limit', CASES)
def test_greedy(make_target, uncached, width, lengths, limit):
  prompts, lengths = draw_prompts(width, width, lengths)
  for seed in range(2):
    module, params = make_target(VOCAB, seed)
    rows = autoregressive.generate(
        module, params, jnp.asarray(prompts), jnp.asarray(lengths), jax.random.key(0),
        max_new_tokens=limit)
    logits = reader(uncached, module, params, width + limit)
    for row, length in enumerate(lengths):
      want = plain_loop(
          lambda text: logits(text)[0].argmax(), prompts[row, :length], limit,
          module.config.eos_ids)
      assert rows.lengths_B[row] == len(want)
      np.testing.assert_array_equal(rows.tokens_BxT[row, :len(want)], want)
  assert rows.done_B.all()
  assert rows.tokens_BxT.shape == (len(lengths), width + limit)


def test_with_temperature(make_target, uncached):
  """A row's draw depends on its own seed and position, whatever the other rows do."""
  prompts, lengths = draw_prompts(0, 7, (7, 3, 1, 5))
  module, params = make_target(VOCAB, 1)
  key, how = jax.random.key(5), sampling.Sampling(0.8, top_k=9)
  rows = autoregressive.generate(
      module, params, jnp.asarray(prompts), jnp.asarray(lengths), key, max_new_tokens=14,
      how=how)
  logits = reader(uncached, module, params, 21)
  sample = jax.jit(sampling.next_token, static_argnums=1)
  for row, length in enumerate(lengths):
    seed = jnp.array([row], jnp.uint32)
    want = plain_loop(
        lambda text: sample(logits(text), how, key, seed, jnp.array([len(text)]))[0],
        prompts[row, :length], 14, module.config.eos_ids)
    np.testing.assert_array_equal(rows.tokens_BxT[row, :rows.lengths_B[row]], want)


def test_prefill_hands_every_position_to_its_consumer(make_target, uncached):
  module, params = make_target(VOCAB, 2)
  prompts, lengths = draw_prompts(1, 70, (70, 66))
  seen = jnp.zeros((2, 128, 16))
  put = lambda carry, features, positions: carry.at[jnp.arange(2)[:, None], positions].set(features)
  prefill = jax.jit(functools.partial(autoregressive.prefill, module, taps=(1,), consume=put))
  cache = target_lib.init_cache(module.config, 2, 75)
  logits, _, seen = prefill(params, cache, jnp.asarray(prompts), jnp.asarray(lengths), carry=seen)
  want, features = uncached(module, params, prompts, (1,))
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(logits[row], want[row, length - 1], atol=1e-4)
    np.testing.assert_allclose(seen[row, :length], features[row, :length], rtol=1e-4, atol=1e-2)


def test_append():
  rows = autoregressive.Rows(
      tokens_BxT=jnp.full((4, 5), 9), lengths_B=jnp.array([2, 2, 4, 3]),
      limits_B=jnp.array([5, 5, 5, 5]), done_B=jnp.array([False, False, False, True]),
      seeds_B=jnp.zeros(4, jnp.uint32))
  got = autoregressive.append(rows, jnp.array([1, 2, 3, 2]), (2, 7))
  np.testing.assert_array_equal(
      got.tokens_BxT, [[9, 9, 1, 9, 9], [9, 9, 2, 9, 9], [9, 9, 9, 9, 3], [9, 9, 9, 9, 9]])
  np.testing.assert_array_equal(got.lengths_B, [3, 3, 5, 3])
  np.testing.assert_array_equal(got.done_B, [False, True, True, True])


def test_no_new_tokens(make_target):
  module, params = make_target(VOCAB, 0)
  prompts, lengths = draw_prompts(0, 5, (5, 2))
  rows = autoregressive.generate(
      module, params, jnp.asarray(prompts), jnp.asarray(lengths), jax.random.key(0),
      max_new_tokens=0)
  np.testing.assert_array_equal(rows.lengths_B, lengths)
  np.testing.assert_array_equal(rows.tokens_BxT, prompts)


def test_is_eos():
  tokens = jnp.array([[1, 2], [3, 7]])
  got = autoregressive.is_eos(tokens, (2, 7))
  np.testing.assert_array_equal(got, [[False, True], [False, True]])
  assert not autoregressive.is_eos(tokens, ()).any()
