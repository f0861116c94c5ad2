"""All three terms of arXiv 2606.11552: weighting, first-error focal, chain.

  python -m dspec.main --config=experiments/chain_loss.py

Time on 2 CPU cores: 9 minutes from an empty cache.
Accepted length, held out / HumanEval: 1.549 [1.458, 1.657] / 1.204 [1.169, 1.243]
(as the arm `chain` of experiments/results/ablation).
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'chain_loss'
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  config.loss.chain = 40.0
  return config
