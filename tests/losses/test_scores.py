"""Scores against numpy in float64, and the chunked form against the plain one."""

from hypothesis import given, settings, strategies as st
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.losses import score_slots, score_slots_chunked, valid_prefix


def draw(seed, lead, width=8, vocab=37, scale=1.0):
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=lead + (width,)).astype(np.float32)
  head = (scale * rng.normal(size=(vocab, width))).astype(np.float32)
  labels = rng.integers(0, vocab, size=lead)
  return hidden, head, labels


def numpy_log_probs(logits, labels):
  logits = np.asarray(logits, np.float64)
  top = logits.max(-1, keepdims=True)
  log_probs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
  return np.take_along_axis(log_probs, labels[..., None], -1)[..., 0]


def test_valid_prefix_stops_at_the_first_invalid_slot():
  valid = jnp.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
  want = [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
  np.testing.assert_array_equal(valid_prefix(valid), np.array(want, bool))


def test_score_slots_matches_float64():
  hidden, head, labels = draw(0, (3, 4, 5))
  logits = hidden @ head.T
  labels[0] = logits[0].argmax(-1)
  scores = score_slots(logits, labels)
  np.testing.assert_allclose(scores.log_probs, numpy_log_probs(logits, labels), rtol=1e-5)
  np.testing.assert_array_equal(scores.correct, logits.argmax(-1) == labels)
  assert scores.log_probs.dtype == jnp.float32


def test_score_slots_takes_the_softmax_of_bfloat16_logits_in_float32():
  logits = jnp.asarray(draw(1, (6,))[0], jnp.bfloat16)
  labels = np.arange(6)
  scores = score_slots(logits, labels)
  want = numpy_log_probs(logits.astype(jnp.float32), labels)
  np.testing.assert_allclose(scores.log_probs, want, rtol=1e-5)


def test_a_sure_slot_keeps_its_small_loss_under_large_logits():
  logits = jnp.array([[1e4, 1e4 - 8.0]])
  np.testing.assert_allclose(
      score_slots(logits, jnp.array([0])).log_probs, [-np.log1p(np.exp(-8.0))], rtol=1e-4)


def test_the_lower_id_wins_a_tie():
  hidden, head = np.zeros((2, 3), np.float32), np.ones((5, 3), np.float32)
  labels = np.array([0, 1])
  np.testing.assert_array_equal(score_slots(hidden @ head.T, labels).correct, [True, False])
  chunked = score_slots_chunked(hidden, head, labels, chunk_size=2)
  np.testing.assert_array_equal(chunked.correct, [True, False])


@settings(max_examples=6, deadline=None)
@given(
    lead=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    chunk_size=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_chunked_equals_plain_in_value_and_gradient(lead, chunk_size, seed):
  hidden, head, labels = draw(seed, lead)
  rng = np.random.default_rng(seed + 1)
  valid = rng.random(lead) < 0.8
  cotangent = rng.normal(size=lead).astype(np.float32)

  def chunked(hidden):
    scores = score_slots_chunked(hidden, head, labels, valid, chunk_size=chunk_size)
    return jnp.sum(jnp.where(valid_prefix(valid), scores.log_probs, 0) * cotangent), scores

  def plain(hidden):
    scores = score_slots(hidden @ head.T, labels, valid)
    return jnp.sum(jnp.where(valid_prefix(valid), scores.log_probs, 0) * cotangent), scores

  (_, want), want_grad = jax.jit(jax.value_and_grad(plain, has_aux=True))(hidden)
  (_, differentiated), grad = jax.jit(jax.value_and_grad(chunked, has_aux=True))(hidden)
  for got in (differentiated, jax.jit(chunked)(hidden)[1]):
    np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got.correct, want.correct)
  np.testing.assert_allclose(grad, want_grad, rtol=1e-4, atol=1e-5)


def test_chunked_gradient_matches_finite_differences():
  hidden, head, labels = draw(2, (5,), width=3)
  f = lambda h: jnp.sum(score_slots_chunked(h, head, labels, chunk_size=2).log_probs)
  grad = np.asarray(jax.grad(f)(hidden))
  step, want = 1e-5, np.zeros_like(grad)
  for index in np.ndindex(hidden.shape):
    ends = []
    for sign in (1, -1):
      moved = hidden.astype(np.float64)
      moved[index] += sign * step
      ends.append(numpy_log_probs(moved @ head.T.astype(np.float64), labels).sum())
    want[index] = (ends[0] - ends[1]) / (2 * step)
  np.testing.assert_allclose(grad, want, rtol=1e-3, atol=1e-4)


def test_bfloat16_operands_keep_the_gradient_of_a_sure_slot():
  # p(label) is about 0.9995: a softmax rounded to bfloat16 is 1 there, and the gradient half lost.
  hidden, head, _ = draw(3, (20,), width=16)
  hidden = np.asarray(jnp.asarray(hidden, jnp.bfloat16), np.float32)
  head = np.asarray(jnp.asarray(head, jnp.bfloat16), np.float32)
  labels = (hidden @ head.T).argmax(-1)
  # Scales by powers of two stay exact in bfloat16.
  hidden = hidden * np.array([1, 2, 4, 8] * 5, np.float32)[:, None]
  grads = {}
  for dtype in (jnp.float32, jnp.bfloat16):
    f = lambda h: jnp.sum(
        score_slots_chunked(h, head, labels, chunk_size=8, compute_dtype=dtype).log_probs)
    grads[dtype] = np.asarray(jax.grad(f)(hidden))
  p = np.exp(numpy_log_probs(hidden @ head.T, labels))
  sure = (p > 0.99) & (p < 0.9999)
  assert sure.sum() >= 3
  error = np.linalg.norm(grads[jnp.bfloat16] - grads[jnp.float32], axis=-1)
  np.testing.assert_array_less(error, 0.01 * np.linalg.norm(grads[jnp.float32], axis=-1))


def test_hidden_gradient_has_the_dtype_of_the_hidden_states():
  hidden, head, labels = draw(4, (6,))
  f = lambda h: jnp.sum(score_slots_chunked(h, head, labels, chunk_size=4).log_probs)
  assert jax.grad(f)(jnp.asarray(hidden, jnp.bfloat16)).dtype == jnp.bfloat16


def test_garbage_in_invalid_slots_reaches_neither_value_nor_gradient():
  hidden, head, labels = draw(5, (2, 4))
  valid = np.array([[1, 1, 0, 1], [0, 1, 1, 1]], bool)
  kept = np.asarray(valid_prefix(valid))
  hidden[~kept] = np.array([np.nan, np.inf, -np.inf, 1e38, 1, 1, 1, 1], np.float32)
  labels[~kept] = -100

  def total(hidden):
    scores = score_slots_chunked(hidden, head, labels, valid, chunk_size=3)
    return jnp.sum(jnp.where(kept, scores.log_probs, 0))

  value, grad = jax.value_and_grad(total)(hidden)
  want = numpy_log_probs(hidden[kept] @ head.T, labels[kept]).sum()
  np.testing.assert_allclose(value, want, rtol=1e-5)
  np.testing.assert_array_equal(np.asarray(grad)[~kept], 0)
  assert np.all(np.asarray(grad)[kept] != 0)


def loss_of_rows(rows, chunk_size, width=16, vocab=1024):
  hidden = jax.ShapeDtypeStruct((rows // 4, 4, width), jnp.float32)
  head = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
  labels = jax.ShapeDtypeStruct((rows // 4, 4), jnp.int32)
  f = lambda h, w, y: -jnp.mean(score_slots_chunked(h, w, y, chunk_size=chunk_size).log_probs)
  return f, (hidden, head, labels)


@pytest.mark.parametrize('differentiate', [False, True])
def test_memory_does_not_grow_with_rows_times_vocabulary(differentiate):
  def temp_bytes(rows, chunk_size):
    f, arguments = loss_of_rows(rows, chunk_size)
    f = jax.jit(jax.grad(f) if differentiate else f)
    return f.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

  few, many, whole = temp_bytes(512, 64), temp_bytes(2048, 64), temp_bytes(2048, 2048)
  assert many < 2048 * 1024 * 4 / 3
  # What grows is of size rows x width (a few copies), not rows x vocabulary.
  assert many - few < (2048 - 512) * 16 * 4 * 8
  assert whole >= 2048 * 1024 * 4  # and the measure does see logits when they are whole


def head_products(jaxpr):
  """Matmuls in a jaxpr, inner ones included (a loop's body counts once)."""
  count = 0
  for equation in jaxpr.eqns:
    count += equation.primitive.name == 'dot_general'
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      count += head_products(inner)
  return count


def shapes_in(jaxpr):
  found = set()
  for equation in jaxpr.eqns:
    found |= {variable.aval.shape for variable in equation.outvars}
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      found |= shapes_in(inner)
  return found


def test_one_head_product_to_evaluate_and_two_to_train():
  f, arguments = loss_of_rows(512, 64)
  assert head_products(jax.make_jaxpr(f)(*arguments).jaxpr) == 1
  assert head_products(jax.make_jaxpr(jax.grad(f))(*arguments).jaxpr) == 2


def test_the_head_is_not_differentiated():
  hidden, head, labels = draw(6, (7,))
  f = lambda h, w: jnp.sum(score_slots_chunked(h, w, labels, chunk_size=4).log_probs)
  np.testing.assert_array_equal(jax.grad(f, argnums=1)(hidden, head), np.zeros_like(head))


def test_no_gradient_of_the_head_is_ever_made():
  hidden, head, labels = draw(7, (7,))
  forward = lambda h: jnp.sum(
      score_slots_chunked(h, head, labels, chunk_size=4, compute_dtype=jnp.bfloat16).log_probs)
  _, backward = jax.vjp(forward, hidden)
  assert head.shape not in shapes_in(jax.make_jaxpr(backward)(jnp.float32(1)).jaxpr)


@pytest.mark.parametrize('labels_shape, valid_shape', [((3, 5), (4, 5)), ((4, 5), (1, 5))])
def test_shapes_must_agree(labels_shape, valid_shape):
  hidden, head, _ = draw(8, (4, 5))
  labels, valid = np.zeros(labels_shape, int), np.ones(valid_shape, bool)
  with pytest.raises(ValueError, match='shape'):
    score_slots(hidden @ head.T, labels, valid)
  with pytest.raises(ValueError, match='shape'):
    score_slots_chunked(hidden, head, labels, valid, chunk_size=4)


def test_chunk_size_below_one_is_refused():
  hidden, head, labels = draw(9, (4,))
  with pytest.raises(ValueError, match='chunk_size'):
    score_slots_chunked(hidden, head, labels, chunk_size=0)
