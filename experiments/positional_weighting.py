"""Cross-entropy with weights that decay along the block (arXiv 2606.11552).

  python -m dspec.main --config=experiments/positional_weighting.py

Time on 2 CPU cores: TBD by lead.
Accepted length, held out / HumanEval: TBD by lead.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'positional_weighting'
  config.loss.gamma = 10.0
  return config
