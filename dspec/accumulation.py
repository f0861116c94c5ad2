"""Gradient accumulation that is exact for every objective: a batch a part at a time, in the memory of one part.

The objective divides by sums over the whole batch: valid slots, blocks, first errors. A mean over parts would be
another objective. But it sees a batch only through its scores, two numbers a slot. So a first pass over the parts
scores the whole batch, the objective says what each score is worth, and a second pass takes that back to the
parameters. The price is the first pass: the drafter's forward one once more, a third of its work.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dspec import sharding
from dspec.losses import SlotScores

Batch = dict[str, jax.Array]


def value_and_grad(
    prepare: Callable[[Batch], Batch],
    score: Callable[[Any, Batch], tuple[SlotScores, jax.Array]],
    objective: Callable[[SlotScores, jax.Array], tuple[jax.Array, Any]],
    params: Any,
    batch: Batch,
    parts: int,
) -> tuple[tuple[jax.Array, Any], Any]:
  """`jax.value_and_grad` of the objective of a batch, has_aux=True, but for the order of sums.

  Args:
    prepare: adds to a part of the batch what needs no gradient; once, and kept for the second pass.
    score: (params, prepared part) -> its scores and valid slots; rows do not see each other in it.
    objective: (scores, valid) -> (value, aux), over all leading axes.
    params: to be differentiated.
    batch: arrays of B rows, split as `sharding.BATCH`.
    parts: M, which divides B. A part has every M-th row, so that each device has its share of every part.

  Returns:
    ((value, aux), gradient).
  """

  def part(m: jax.Array) -> Batch:
    take = lambda x: jax.lax.dynamic_index_in_dim(x.reshape(-1, parts, *x.shape[1:]), m, 1, keepdims=False)
    return jax.tree.map(lambda x: sharding.constrain(take(x), sharding.BATCH), batch)

  def first_pass(m):
    own = part(m)
    prepared = prepare(own)
    return score(params, prepared), {name: x for name, x in prepared.items() if name not in own}

  (scores, valid), prepared = jax.lax.map(first_pass, jnp.arange(parts))
  of_scores = jax.value_and_grad(
      lambda log_probs: objective(scores.replace(log_probs=log_probs), valid), has_aux=True)
  value_and_aux, worth = of_scores(scores.log_probs)

  def second_pass(gradient, of_part):
    m, prepared, worth = of_part
    own = {**part(m), **prepared}
    _, pull_back = jax.vjp(lambda params: score(params, own)[0].log_probs, params)
    return jax.tree.map(jnp.add, gradient, *pull_back(worth)), None

  nothing = jax.tree.map(jnp.zeros_like, params)
  gradient, _ = jax.lax.scan(second_pass, nothing, (jnp.arange(parts), prepared, worth))
  return value_and_aux, gradient
