"""The four arms of arXiv 2606.11552, Table 2: same data, initial weights and anchors; one table.

Each arm is the full objective with some terms off, so an override such as --config.loss.gamma=7
reaches every arm that has the term.

  python -m dspec.main --config=experiments/ablation.py

Time on 2 CPU cores: 23 minutes with the data in the cache.
Accepted length, held out / HumanEval (seed 0, 24 prompts each; all in experiments/results/ablation):
  uniform      1.259 [1.192, 1.337]                   1.060 [1.047, 1.075]
  weighting    1.378 [1.301, 1.468]   +9.4 %          1.102 [1.080, 1.125]   +3.9 %
  first_error  1.479 [1.391, 1.577]  +17.4 %          1.162 [1.130, 1.196]   +9.6 %
  chain        1.549 [1.458, 1.657]  +23.0 %          1.204 [1.169, 1.243]  +13.5 %
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'ablation'
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  config.loss.chain = 40.0
  if not budget:
    config.evaluate.update(num_prompts=40, batch_size=40)  # All that are held out, for narrower intervals.
  config.arms = (
      ('uniform', {'loss.gamma': None, 'loss.first_error': 0.0, 'loss.chain': 0.0}),
      ('weighting', {'loss.first_error': 0.0, 'loss.chain': 0.0}),
      ('first_error', {'loss.chain': 0.0}),
      ('chain', {}),
  )
  return config
