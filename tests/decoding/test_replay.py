"""Replayed rounds are those of real speculative decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.decoding import autoregressive
from dspec.decoding import replay
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.errors import UserError

WIDTH, LENGTHS, LIMIT, K = 7, (7, 3, 1, 5), 14, 4


def compare(models, prompts, lengths, limit, temperature=0.0):
  """Decodes and replays; returns the trace of decoding, in whose rounds nothing may differ."""
  target, target_params, *_ = models
  key, how = jax.random.key(3), sampling.Sampling(temperature)
  rows, trace = speculative.generate(*models, prompts, lengths, key, max_new_tokens=limit, how=how)
  # The answers come from plain decoding, as in an evaluation.
  plain = autoregressive.generate(target, target_params, prompts, lengths, key, max_new_tokens=limit, how=how)
  answers = np.full((len(lengths), limit), 3)
  for row, (start, end) in enumerate(zip(lengths, plain.lengths_B)):
    answers[row, : end - start] = plain.tokens_BxT[row, start:end]
  got_rows, got = replay.generate(*models, prompts, lengths, jnp.asarray(answers, jnp.int32), plain.lengths_B - lengths)
  assert got_rows.done_B.all()
  np.testing.assert_array_equal(got_rows.lengths_B, rows.lengths_B)
  for row, end in enumerate(rows.lengths_B):
    np.testing.assert_array_equal(got_rows.tokens_BxT[row, :end], rows.tokens_BxT[row, :end])
  for name in ('starts_BxR', 'gained_BxR', 'drafts_BxRxS'):
    np.testing.assert_array_equal(getattr(got, name), getattr(trace, name), err_msg=name)
  # Behind the end of a row only decoding knows what the target would have said.
  inside = lambda trace: np.minimum(trace.accepted_BxR, trace.gained_BxR)
  np.testing.assert_array_equal(inside(got), inside(trace))
  return trace


def draw_prompts(seed, vocab, width=WIDTH, lengths=LENGTHS):
  prompts = np.random.default_rng(seed).integers(0, vocab, (len(lengths), width))
  return jnp.asarray(prompts, jnp.int32), jnp.asarray(lengths, jnp.int32)


@pytest.mark.parametrize('temperature,ids', [(0.0, ()), (1.0, (1, 3, 4))])
def test_rounds_of_a_real_drafter(make_target, make_drafter, temperature, ids):
  """Five tokens, so that random drafts are often right, and rows end at their EOS and at the limit."""
  for seed in range(8):
    target, params = make_target(5, seed)
    drafter, drafter_params = make_drafter(target.config, K, seed + 1, ids)
    compare((target, params, drafter, drafter_params), *draw_prompts(seed, 5), LIMIT, temperature)


# Two chunks of the prefill; one token; a block that is longer than the answer.
@pytest.mark.parametrize('width,lengths,limit,block_size', [(70, (1, 70, 60), 9, 3), (4, (1, 4), 1, 3), (4, (4, 2), 3, 8)])
def test_shapes_and_limits(make_target, make_drafter, scripted, width, lengths, limit, block_size):
  """Drafts that are the target's own token seven times of ten: prefixes of every length."""
  accepted = set()
  for seed in range(3):
    target, params = make_target(40, seed, mute=True)
    inner, inner_params = make_drafter(target.config, block_size, seed)
    prompts, lengths_B = draw_prompts(seed, 40, width, lengths)
    plain = autoregressive.generate(target, params, prompts, lengths_B, jax.random.key(0), max_new_tokens=limit)
    rng = np.random.default_rng(seed)
    tokens = np.pad(plain.tokens_BxT, ((0, 0), (0, 2 * block_size)))
    drafter, drafter_params = scripted(inner, inner_params, params, tokens, rng.random(tokens.shape) < 0.7)
    trace = compare((target, params, drafter, drafter_params), prompts, lengths_B, limit)
    accepted |= set(np.asarray(trace.accepted_BxR)[np.asarray(trace.starts_BxR) >= 0].tolist())
  assert limit == 1 or len(accepted) > 1


def test_a_drafter_of_another_target_is_refused(make_target, make_drafter):
  target, params = make_target(5, 0)
  other, _ = make_target(5, 0, width=32)
  drafter, drafter_params = make_drafter(other.config, K, 0)
  prompts, lengths = draw_prompts(0, 5)
  with pytest.raises(UserError, match='made for another target'):
    replay.generate(target, params, drafter, drafter_params, prompts, lengths, prompts, lengths)
