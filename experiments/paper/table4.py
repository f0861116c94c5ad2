"""arXiv 2606.11552, Table 4: each term alone.

  python -m dspec.main --config=experiments/paper/table4.py:embedded

As it is, for accelerators, on Meta-Llama-3-8B-Instruct and answers of its own; with `:embedded` on SmolLM2 on a CPU.
The arms `uniform`, `weighting` and `chain` are those of table2.py. Where these have been trained, `:embedded_alone`
trains the others only, and the runs are put side by side:

  python -m dspec.main --config=experiments/paper/table4.py:embedded_alone
  python -m dspec.main --mode=compare --out=runs/table4 --runs=runs/table2-embedded,runs/table4-embedded_alone
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.paper('embedded' if budget == 'embedded_alone' else budget)
  config.experiment = 'table4'
  config.arms = (
      ('uniform', config_lib.TERMS['uniform']),
      ('weighting', config_lib.TERMS['weighting']),
      ('first_error_alone', {'loss.gamma': None, 'loss.chain': 0.0}),
      ('chain_alone', {'loss.gamma': None, 'loss.first_error': 0.0}),
      ('chain', {}),
  )
  if budget == 'embedded_alone':
    config.arms = tuple((name, options) for name, options in config.arms if name.endswith('_alone'))
  return config
