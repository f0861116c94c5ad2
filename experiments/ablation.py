"""The four arms of arXiv 2606.11552, Table 2: same data, initial weights and anchors; one table.

Each arm is the full objective with some terms off, so an override such as --config.loss.gamma=7
reaches every arm that has the term.

  python -m dspec.main --config=experiments/ablation.py

Time on 2 CPU cores: 25 minutes with the data in the cache.
Accepted length, held out / HumanEval (seed 0, 40 prompts each; all in experiments/results/ablation):
  uniform      1.243 [1.196, 1.298]                   1.051 [1.040, 1.065]
  weighting    1.299 [1.243, 1.360]   +4.5 %          1.072 [1.055, 1.089]   +2.0 %
  first_error  1.428 [1.363, 1.498]  +14.8 %          1.134 [1.110, 1.159]   +7.8 %
  chain        1.586 [1.514, 1.672]  +27.6 %          1.206 [1.172, 1.242]  +14.8 %
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
  config.arms = tuple(config_lib.TERMS.items())
  return config
