"""Cross-entropy with weights that decay along the block (arXiv 2606.11552).

  python -m dspec.main --config=experiments/positional_weighting.py

Time on 2 CPU cores: that of chain_loss.py, 9.5 minutes from an empty cache; not timed on its own.
Accepted length, held out / HumanEval: 1.299 [1.243, 1.360] / 1.072 [1.055, 1.089]
(as the arm `weighting` of experiments/results/ablation).
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'positional_weighting'
  config.loss.gamma = 10.0
  return config
