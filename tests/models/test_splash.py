"""The kernel, interpreted, against the attention in plain XLA: values, gradients, empty tiles, and on a mesh."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import masks
from dspec.models import splash

ROOT = pathlib.Path(__file__).parents[2]
NAMES = 'q', 'k_own', 'v_own', 'keys', 'values'


def draw(b=2, t=300, a=20, k=16, h=4, kv=2, d=64, packed=False, seed=0):
  """Arrays and places of rows: an anchor without context, one at the row's end, and slots without an anchor."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  arrays = (
      normal(b, a, k, h, d), normal(b, a, k, kv, d), normal(b, a, k, kv, d), normal(b, kv, d, t), normal(b, kv, t, d))
  anchors = np.zeros((b, a), np.int32)
  for row in anchors:
    row[: a - 3] = [0, *np.sort(rng.choice(np.arange(1, t - 1), a - 5, replace=False)), t - 1]
  starts = np.zeros((b, t), np.int32)
  if packed:
    for row, borders in zip(starts, ((40, 171, 260), (1, 2, 150, 290))):
      for border in borders:
        row[border:] = border
    anchors[:, 1] = 40, 1  # The first token of a document.
    anchors[:, : a - 3].sort(1)
  seen = jnp.asarray(anchors)
  if not packed:
    return arrays, drafter_lib.Places(seen, seen)
  of_anchors = np.take_along_axis(starts, anchors, 1)
  return arrays, drafter_lib.Places(*map(jnp.asarray, (anchors - of_anchors, anchors, of_anchors, starts)))


def value_and_gradients(attention, arrays, places):
  """What comes out, and the gradients of a sum that gives each output another weight."""
  weights = jnp.asarray(np.random.default_rng(9).normal(size=arrays[0].shape), jnp.float32)

  def loss(arrays):
    out = attention(*arrays[:3], arrays[3:], places)
    return jnp.sum(out * weights.reshape(out.shape)), out

  (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
  return [out, *gradients]


@pytest.fixture
def small_tiles(monkeypatch):
  monkeypatch.setattr(splash, '_TILE', 128)


@pytest.mark.parametrize('shape, options', [
    ({}, {}),
    ({'packed': True, 'd': 128, 'h': 2}, {'window': 37}),
    ({'packed': True, 'k': 15, 'kv': 1}, {}),
    ({'packed': True, 'd': 6}, {'layer_window': 9, 'causal': True}),
    ({'d': 6, 'h': 2}, {'window': 150, 'layer_window': 40}),
])
def test_against_xla(shape, options, small_tiles):
  arrays, places = draw(**shape)
  wanted = value_and_gradients(functools.partial(drafter_lib.block_attention, **options), arrays, places)
  found = value_and_gradients(
      functools.partial(splash.block_attention, interpret=True, **options), arrays, places)
  for name, got, want in zip(('out', *NAMES), found, wanted):
    assert np.isfinite(got).all() and np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(), err_msg=name)
