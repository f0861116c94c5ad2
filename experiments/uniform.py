"""Plain cross-entropy, all slots weighing the same: what the other experiments are held against.

  python -m dspec.main --config=experiments/uniform.py

Time on 2 CPU cores: that of chain_loss.py, 9.5 minutes from an empty cache; not timed on its own.
Accepted length, held out / HumanEval: 1.243 [1.196, 1.298] / 1.051 [1.040, 1.065]
(as the arm `uniform` of experiments/results/ablation).
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'uniform'
  return config
