"""Twenty steps on every mesh given, with four objectives each; prints losses and what else tests of placement look at.

  python tests/meshes.py DATA_FOLDER '[[8, 1, 1], [2, 2, 2]]'
"""

import functools
import itertools
import json
import pathlib
import re
import sys

import jax
import numpy as np
import tiny

from dspec import sharding
from dspec import train
from dspec.data import pipeline
from dspec.losses import Objective, objective
from dspec.models import drafter as drafter_lib

OBJECTIVES = (Objective(), Objective(3.0), Objective(3.0, 0.3), Objective(3.0, 0.3, 40.0))
STEPS = 20


def choose_objective(scores, valid, which):
  """One program for all objectives: compiling is what takes time here."""
  return jax.lax.switch(which, [functools.partial(objective, spec=spec) for spec in OBJECTIVES], scores, valid)


def held(program: str) -> list[list[int]]:
  """Shapes of all float32 matrices that a device holds while it runs a compiled program."""
  return sorted({(int(rows), int(columns)) for rows, columns in re.findall(r'f32\[(\d+),(\d+)\]', program)})


def read_batches(folder: pathlib.Path) -> list[dict]:
  """The same for all, read once."""
  data, t = tiny.make_data(folder, 'cached'), tiny.make_config().train
  return list(itertools.islice(iter(pipeline.batches(
      data.paths, seed=0, batch_size=t.batch_size, length=data.length, anchors=t.anchors)), STEPS))


def run(target, target_params, batches, sizes) -> dict:
  """What one mesh gives."""
  config = tiny.make_config(**{f'mesh.{axis}': size for axis, size in zip(sharding.AXES, sizes)})
  mesh = sharding.make_mesh(config)
  drafter = drafter_lib.Drafter(train.make_drafter_config(config, target.config))
  models = {'optimizer': train.make_optimizer(config), 'target': target, 'drafter': drafter}
  draft_ids = np.arange(drafter.config.vocab_size, dtype=np.int32)
  with jax.set_mesh(mesh):
    target_params = sharding.put(target_params)
    placed = [sharding.put_batch(mesh, batch) for batch in batches]
    init = functools.partial(train.init_state, **models)
    inputs = jax.random.key(0), placed[0], target_params, draft_ids
    shardings = sharding.of(mesh, jax.eval_shape(init, *inputs))
    init = jax.jit(init, out_shardings=shardings)
    step = jax.jit(
        lambda state, batch, target_params, which: train.train_step(
            state, batch, target_params, **models, spec=which, head_chunk=config.train.head_chunk),
        donate_argnums=0, out_shardings=(shardings, sharding.replicated(mesh)))
    losses, compiled = [], None
    for which in range(len(OBJECTIVES)):
      state, own = init(*inputs), []
      for batch in placed:
        arguments = state, batch, target_params, np.int32(which)
        compiled = compiled or step.lower(*arguments).compile()
        state, metrics = compiled(*arguments)
        own.append(metrics['loss'])
      losses.append(np.asarray(own).tolist())
  return {
      'losses': losses, 'held': held(compiled.as_text()), 'target': tiny.parts(target_params),
      'state': tiny.parts(state)}


if __name__ == '__main__':
  train.objective = choose_objective
  COMMON = *tiny.make_target(), read_batches(pathlib.Path(sys.argv[1]))
  print(json.dumps([run(*COMMON, sizes) for sizes in json.loads(sys.argv[2])]))
