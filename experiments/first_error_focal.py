"""Weighted cross-entropy, and more of it at each block's first wrong slot (arXiv 2606.11552).

  python -m dspec.main --config=experiments/first_error_focal.py

Time on 2 CPU cores: not measured yet.
Accepted length, held out / HumanEval: not measured yet.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'first_error_focal'
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  return config
