"""Answers, features and speculative decoding of a tiny target on one mesh; prints what came out.

  python tests/decode.py '{"mesh.tensor": 8}'
"""

import json
import sys

import jax
import numpy as np
import tiny

from dspec import evaluate
from dspec import sharding
from dspec import train
from dspec.data import features
from dspec.data import responses
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.models import drafter as drafter_lib


def main(config) -> dict:
  target, params = tiny.make_target()
  params = sharding.put(params)
  prompts = [tokens[:n] for (tokens, _), n in zip(tiny.make_rows(), (5, 3, 9, 1, 4, 12, 7, 2, 6, 8, 3))]
  # Batches that the mesh divides, and one that it does not.
  answers = {}
  for batch_size, temperature in ((16, 0.0), (3, 1.0)):
    found = responses.sample(
        target, params, prompts, range(len(prompts)), jax.random.key(1), max_new_tokens=12, batch_size=batch_size,
        how=sampling.Sampling(temperature))
    answers[f'sampled in {batch_size}'] = [answer for _, answer in sorted(found)]
  shape = train.make_drafter_config(config, target.config)
  drafter = drafter_lib.Drafter(shape)
  drafter_params = train.init_params(drafter, jax.random.key(2))
  drafter_params['draft_ids'] = np.arange(shape.vocab_size, dtype=np.int32)
  for batch_size, tree_size in ((8, 0), (3, 5)):
    options = {'batch_size': batch_size, 'max_new_tokens': 12}
    reference = evaluate.decode_reference(evaluate.compile_autoregressive(target, params, **options), prompts, 'plain')
    fast = evaluate.compile_speculative(
        target, params, drafter, drafter_params, drafting=speculative.Drafting(tree_size=tree_size), **options)
    evaluation = evaluate.decode_speculatively(fast, drafter_params, reference, 'speculative')
    assert all(record.identical for record in evaluation.records)
    answers[f'decoded in {batch_size}'] = [record.tokens.tolist() for record in evaluation.records]
    answers[f'accepted in {batch_size}'] = [record.accepted_R.tolist() for record in evaluation.records]
  tokens = np.random.default_rng(0).integers(3, 80, (8, 40))
  found = sharding.to_host(features.compute(target, params, tokens, tiny.TAPS)).astype(np.float32)
  split = {axis: np.prod(x.addressable_shards[0].data.shape) / x.size for axis, x in (
      ('kernel', params['layers_0']['mlp']['down_proj']['kernel']), ('embedding', params['embed']['embedding']))}
  return {'answers': answers, 'features': found.tolist(), 'split': split}


if __name__ == '__main__':
  CONFIG = tiny.make_config(**json.loads(sys.argv[1]))
  with jax.set_mesh(sharding.make_mesh(CONFIG)):
    print(json.dumps(main(CONFIG)))
