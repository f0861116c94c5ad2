"""Weighted cross-entropy, and more of it at each block's first wrong slot (arXiv 2606.11552).

  python -m dspec.main --config=experiments/first_error_focal.py

Time on 2 CPU cores: that of chain_loss.py, 9.5 minutes from an empty cache; not timed on its own.
Accepted length, held out / HumanEval: 1.428 [1.363, 1.498] / 1.134 [1.110, 1.159]
(as the arm `first_error` of experiments/results/ablation).
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'first_error_focal'
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  return config
