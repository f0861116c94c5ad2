"""Cross-entropy with weights that decay along the block (arXiv 2606.11552).

  python -m dspec.main --config=experiments/positional_weighting.py

Time on 2 CPU cores: not measured yet.
Accepted length, held out / HumanEval: not measured yet.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'positional_weighting'
  config.loss.gamma = 10.0
  return config
