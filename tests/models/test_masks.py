"""Every mask against loops over its definition."""

from hypothesis import given, settings, strategies as st
import jax.numpy as jnp
import numpy as np

from dspec.models import masks

SHAPES = st.sampled_from([(1, 1, 4), (2, 3, 6), (3, 2, 9)])  # few, each compiles


def draw_mask(mask):
  return [''.join('x' if seen else '.' for seen in row) for row in np.asarray(mask)]


def test_causal_drawn():
  got = masks.causal(jnp.array([[1, 2, 3]]), 5)[0]
  assert draw_mask(got) == ['xx...', 'xxx..', 'xxxx.']


def test_context_drawn():
  got = masks.context(jnp.array([[0, 2, 4, 9]]), 6)[0]
  assert draw_mask(got) == ['......', 'xx....', 'xxxx..', 'xxxxxx']
  got = masks.context(jnp.array([[0, 2, 4, 9]]), 6, window=3)[0]
  assert draw_mask(got) == ['......', 'xx....', '.xxx..', '......']


def test_documents_drawn():
  starts = jnp.array([[0, 0, 2, 2, 2]])
  got = masks.causal(jnp.arange(5)[None], 5, starts_BxT=starts)[0]
  assert draw_mask(got) == ['x....', 'xx...', '..x..', '..xx.', '..xxx']
  got = masks.causal(jnp.arange(5)[None], 5, window=2, starts_BxT=starts)[0]
  assert draw_mask(got) == ['x....', 'xx...', '..x..', '..xx.', '...xx']
  anchors, starts = jnp.array([[0, 1, 2, 3, 5]]), jnp.array([[0, 0, 2, 2, 2]])
  got = masks.context(anchors, 6, starts_BxA=starts)[0]
  assert draw_mask(got) == ['......', 'x.....', '......', '..x...', '..xxx.']
  got = masks.context(anchors, 6, window=2, starts_BxA=starts)[0]
  assert draw_mask(got) == ['......', 'x.....', '......', '..x...', '...xx.']


def test_nearby_drawn():
  got = masks.nearby(jnp.array([[4, 1]]), 5, 3, window=3)[0]
  assert draw_mask(got[0]) == ['..xxx', '...xx', '....x']  # It is `context` that leaves out the anchor, 4.
  assert draw_mask(got[1]) == ['xxxxx', 'xxxxx', '.xxxx']


def test_own_block_drawn():
  assert draw_mask(masks.own_block(3)) == ['xxx', 'xxx', 'xxx']
  assert draw_mask(masks.own_block(4, window=2)) == ['xx..', 'xxx.', '.xxx', '..xx']
  assert draw_mask(masks.own_block(3, causal=True)) == ['x..', 'xx.', 'xxx']
  assert draw_mask(masks.own_block(4, window=2, causal=True)) == ['x...', 'xx..', '.xx.', '..xx']


@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, data=st.data())
def test_masks_by_loops(shape, data):
  rows, columns, num_keys = shape
  positions = np.array(data.draw(st.lists(
      st.integers(0, num_keys + 2), min_size=rows * columns, max_size=rows * columns)))
  positions = positions.reshape(rows, columns)
  causal = masks.causal(jnp.asarray(positions), num_keys)
  context = masks.context(jnp.asarray(positions), num_keys)
  window = data.draw(st.integers(1, num_keys))
  windowed = masks.context(jnp.asarray(positions), num_keys, window)
  assert causal.shape == context.shape == (rows, columns, num_keys)
  for r in range(rows):
    for c in range(columns):
      for key in range(num_keys):
        assert causal[r, c, key] == (key <= positions[r, c])
        assert context[r, c, key] == (key < positions[r, c])
        assert windowed[r, c, key] == (0 < positions[r, c] - key <= window)


def labels_by_loops(anchors, is_anchor, supervised, block_size):
  rows, num_anchors = anchors.shape
  want = np.zeros((rows, num_anchors, block_size - 1), bool)
  for r in range(rows):
    for a in range(num_anchors):
      if not is_anchor[r, a]:
        continue
      for k in range(1, block_size):
        position = anchors[r, a] + k
        if position >= supervised.shape[1] or not supervised[r, position]:
          break
        want[r, a, k - 1] = True
  return want


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(1, 2, 5, 2), (2, 3, 8, 4), (2, 1, 3, 6)]),
    seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.7, 0.9, 1.0]))
def test_valid_labels_by_loops(shape, seed, share):
  rows, num_anchors, length, block_size = shape
  rng = np.random.default_rng(seed)
  anchors = rng.integers(0, length, size=(rows, num_anchors))
  is_anchor = rng.random(anchors.shape) < 0.8
  supervised = rng.random((rows, length)) < share
  got = np.asarray(masks.valid_labels(
      jnp.asarray(anchors), jnp.asarray(is_anchor), jnp.asarray(supervised), block_size))
  np.testing.assert_array_equal(got, labels_by_loops(anchors, is_anchor, supervised, block_size))
  assert got.dtype == bool
  assert not (got[..., 1:] & ~got[..., :-1]).any()  # a prefix


def test_valid_labels_drawn():
  supervised = jnp.array([[0, 0, 1, 1, 1, 0, 1, 1]], bool)
  anchors = jnp.array([[0, 1, 2, 4, 5, 7, 3]])
  is_anchor = jnp.array([[1, 1, 1, 1, 1, 1, 0]], bool)
  got = masks.valid_labels(anchors, is_anchor, supervised, 4)[0]
  # The anchor itself need not be supervised; what follows it must be, without a gap.
  assert draw_mask(got) == ['...', 'xxx', 'xx.', '...', 'xx.', '...', '...']
  # Where a document begins after an answer, with an answer.
  starts = jnp.array([[0, 0, 0, 3, 3, 3, 6, 6]])
  got = masks.valid_labels(anchors, is_anchor, supervised, 4, starts)[0]
  assert draw_mask(got) == ['...', 'x..', '...', '...', '...', '...', '...']
  got = masks.valid_labels(jnp.array([[3, 6]]), jnp.ones((1, 2), bool), jnp.ones((1, 8), bool), 4, starts)[0]
  assert draw_mask(got) == ['xx.', 'x..']
