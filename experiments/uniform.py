"""Plain cross-entropy, all slots weighing the same: what the other experiments are held against.

  python -m dspec.main --config=experiments/uniform.py

Time on 2 CPU cores: not measured yet.
Accepted length, held out / HumanEval: not measured yet.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'uniform'
  return config
