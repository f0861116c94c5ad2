"""A training run small enough to be repeated on every mesh: what tests of devices and processes start in processes.

  python tests/tiny.py RUN.json [HOST:PORT NUMBER_OF_PROCESSES PROCESS]
"""

import json
import pathlib
import sys
import time

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from dspec import config as config_lib
from dspec import evaluate
from dspec import multihost
from dspec import sharding
from dspec import train
from dspec.checkpoints import training as checkpoints
from dspec.data import dataset
from dspec.data import features
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

LENGTH, TAPS, MASK = 24, (0, 1), 1
# Heads, key heads, MLP, vocabulary and width divide among eight devices, and no two of them are alike.
SHAPE = target_lib.TargetConfig(
    family='llama', vocab_size=88, num_layers=3, width=32, mlp_width=40, num_heads=16, num_kv_heads=8, head_dim=4,
    rope_theta=100.0, norm_eps=1e-5, max_length=128, tie_embeddings=True, eos_ids=(2,))


def make_target() -> tuple[target_lib.Target, dict]:
  """(module, float32 parameters as numpy arrays, as a file would give them)."""
  model = target_lib.Target(SHAPE)
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = model.init(jax.random.key(0), tokens, tokens, target_lib.init_cache(SHAPE, 1, 2))['params']
  return model, jax.tree.map(np.asarray, params)


def make_rows() -> list[tuple[list[int], list[bool]]]:
  """Rows of unequal length, two without an anchor: devices hold unequal numbers of slots."""
  rng = np.random.default_rng(0)
  shapes = ((24, 5), (6, 6), (9, 7), (24, 2), (5, 5), (12, 3), (20, 9), (24, 1), (17, 4), (7, 2), (24, 12))
  return [(rng.integers(3, SHAPE.vocab_size, n).tolist(), [t >= p for t in range(n)]) for n, p in shapes]


def make_data(folder: pathlib.Path, kind: str) -> dataset.Dataset:
  """The rows on disk, written if they are not there; kind is 'cached' or 'online'."""
  model, params = make_target()
  params = sharding.put(params)
  (folder / kind).mkdir(parents=True, exist_ok=True)
  paths = features.write(folder / kind, model if kind == 'cached' else None, params, make_rows(), TAPS)
  return dataset.Dataset(tuple(paths), (), LENGTH, np.arange(SHAPE.vocab_size), {})


def make_config(**changes) -> ml_collections.ConfigDict:
  """All terms of the loss; `changes` by dotted key."""
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.drafter.update(num_layers=1, block_size=4, target_layers=TAPS, mask_token_id=MASK, vocab_size=56, window=5)
  config.loss.update(gamma=3.0, first_error=0.3, chain=40.0)
  config.train.update(
      steps=20, batch_size=16, anchors=3, head_chunk=48, compute_dtype='float32', log_every=1, checkpoint_every=100)
  return config_lib.apply_overrides(config, changes)


def parts(tree) -> dict[str, list[list[int]]]:
  """{path: [shape of an array, shape of what one device holds of it]}."""
  return {
      jax.tree_util.keystr(path, simple=True, separator='/'): [list(x.shape), list(x.addressable_shards[0].data.shape)]
      for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def main(run: dict) -> None:
  """Trains; prints what each step logged, how the parameters ended, and how the state lay that was saved last.

  Args:
    run: `folder` of data, `workdir`, `kind` of features, `config`, changes by dotted key, and `delay` of each batch in
      seconds.
  """
  put_batch = sharding.put_batch
  sharding.put_batch = lambda mesh, batch: (time.sleep(run.get('delay', 0)), put_batch(mesh, batch))[1]
  save, saved = checkpoints.save, {}
  checkpoints.save = lambda manager, step, state, *others: (
      saved.update(parts(state)), save(manager, step, state, *others))
  config = make_config(**run['config'])
  with jax.set_mesh(sharding.make_mesh(config)):
    data = make_data(pathlib.Path(run['folder']), run['kind'])
  target, target_params = make_target()
  drafter = drafter_lib.Drafter(train.make_drafter_config(config, SHAPE))
  prompts = [tokens[:n] for (tokens, _), n in zip(make_rows(), (5, 3, 9, 1))]
  validate = evaluate.validator(target, target_params, drafter, prompts, max_new_tokens=12)
  params, summary = train.run(config, pathlib.Path(run['workdir']), data, target, target_params, validate)
  print(json.dumps({
      'devices': jax.device_count(),
      'evaluated_step': summary['evaluated_step'],
      'state': saved,
      'curve': [{k: v for k, v in record.items() if 'second' not in k} for record in summary['curve']],
      'params': {jax.tree_util.keystr(path): np.asarray(x).tolist()
                 for path, x in jax.tree_util.tree_flatten_with_path(params)[0]},
  }))


if __name__ == '__main__':
  if sys.argv[2:]:
    multihost.initialize(sys.argv[2], *map(int, sys.argv[3:]))
  logging.set_verbosity(logging.INFO)
  try:
    main(json.loads(pathlib.Path(sys.argv[1]).read_text()))
  except KeyboardInterrupt:
    sys.exit(130)
