"""The four arms of arXiv 2606.11552, Table 2: same data, initial weights and anchors; one table.

Each arm is the full objective with some terms off, so an override such as --config.loss.gamma=7
reaches every arm that has the term.

  python -m dspec.main --config=experiments/ablation.py

Time on 2 CPU cores: not measured yet.
Accepted length, held out / HumanEval: not measured yet.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'ablation'
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  config.loss.chain = 40.0
  config.arms = (
      ('uniform', {'loss.gamma': None, 'loss.first_error': 0.0, 'loss.chain': 0.0}),
      ('weighting', {'loss.first_error': 0.0, 'loss.chain': 0.0}),
      ('first_error', {'loss.chain': 0.0}),
      ('chain', {}),
  )
  return config
