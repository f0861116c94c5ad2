"""Small random blocks, shared by the tests of the losses."""

import numpy as np
import pytest


@pytest.fixture
def blocks():
  """A function (seed, lead=(B, A), slots, vocab) -> float32 logits, labels, valid.

  About half of the slots are correct; some blocks are cut short, some have a hole, one has no valid
  slot, and the first one is right everywhere.
  """

  def draw(seed, lead=(3, 4), slots=5, vocab=7):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=lead + (slots, vocab)).astype(np.float32)
    labels = rng.integers(0, vocab, size=lead + (slots,))
    keep = rng.random(labels.shape) < 0.5
    labels = np.where(keep, logits.argmax(-1), labels)
    valid = rng.random(labels.shape) < 0.85
    flat = valid.reshape(-1, slots)
    flat[0], flat[-1] = True, False
    flat[-1, 1:] = True  # valid slots behind an invalid one do not count
    labels.reshape(-1, slots)[0] = logits.reshape(-1, slots, vocab)[0].argmax(-1)
    return logits, labels, valid

  return draw
