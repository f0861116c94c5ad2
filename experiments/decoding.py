"""Do test-time mechanisms add to the three terms? Self-selection and draft trees on the uniform and the full drafter.

  python -m dspec.main --config=experiments/decoding.py

Drafts of self-selection (arXiv 2511.00606) are drawn at temperature 1 and scored by the expected accepted length under
the target; trees (arXiv 2604.12989) hold the most probable prefixes. The two drafters are those of the ablation.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'decoding'
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  config.loss.chain = 40.0
  config.arms = (
      ('uniform', {'loss.gamma': None, 'loss.first_error': 0.0, 'loss.chain': 0.0}),
      ('chain', {}),
  )
  config.mechanisms.of = (
      ('plain', {}),
      ('rejection', {'drafter_temperature': 1.0}),
      *((f'select {m}', {'drafter_temperature': 1.0, 'num_drafts': m}) for m in (2, 4, 8)),
      *((f'tree {b}', {'tree_size': b}) for b in (8, 16, 64, 256)),
  )
  if budget == 'smoke':
    config.mechanisms.update(of=config.mechanisms.of[:3] + config.mechanisms.of[5:6], num_prompts=2, max_new_tokens=8)
  return config
