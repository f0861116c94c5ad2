"""Cross-entropy with weights that decay along the block (arXiv 2606.11552).

  python -m dspec.main --config=experiments/positional_weighting.py

Time on 2 CPU cores: that of chain_loss.py, 9 minutes from an empty cache; not timed on its own.
Accepted length, held out / HumanEval: 1.378 [1.301, 1.468] / 1.102 [1.080, 1.125]
(as the arm `weighting` of experiments/results/ablation).
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'positional_weighting'
  config.loss.gamma = 10.0
  return config
