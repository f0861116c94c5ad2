"""arXiv 2606.11552, Table 4: each term alone.

  python -m dspec.main --config=experiments/paper/table4.py:embedded

As it is, for accelerators, on Meta-Llama-3-8B-Instruct and answers of its own; with `:embedded` on SmolLM2 on a CPU.
Seeds as in table2.py, whose arms `uniform`, `weighting` and `chain` these are again.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.paper(budget)
  config.experiment = 'table4'
  config.arms = (
      ('uniform', config_lib.TERMS['uniform']),
      ('weighting', config_lib.TERMS['weighting']),
      ('first_error_alone', {'loss.gamma': None, 'loss.chain': 0.0}),
      ('chain_alone', {'loss.gamma': None, 'loss.first_error': 0.0}),
      ('chain', {}),
  )
  return config
