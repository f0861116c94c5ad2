"""Acceptance against a loop."""

from hypothesis import given, settings, strategies as st
import jax.numpy as jnp
import numpy as np

from dspec.decoding import verify


@settings(max_examples=40, deadline=None)
@given(slots=st.sampled_from([1, 4, 15]), vocab=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_greedy_by_loops(slots, vocab, seed):
  rng = np.random.default_rng(seed)
  drafts = rng.integers(0, vocab, size=(5, slots))
  target = rng.integers(0, vocab, size=(5, slots + 1))
  got = verify.greedy(jnp.asarray(drafts), jnp.asarray(target))
  assert got.dtype == jnp.int32 and got.shape == (5,)
  for row in range(5):
    accepted = 0
    while accepted < slots and drafts[row, accepted] == target[row, accepted]:
      accepted += 1
    assert got[row] == accepted


def test_the_bonus_is_not_compared():
  target = jnp.array([[4, 5, 6, 7]] * 4)
  drafts = jnp.array([[4, 5, 6], [4, 5, 9], [9, 5, 6], [5, 6, 7]])
  np.testing.assert_array_equal(verify.greedy(drafts, target), [3, 2, 0, 0])
