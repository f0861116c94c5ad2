"""All three terms of arXiv 2606.11552: weighting, first-error focal, chain.

  python -m dspec.main --config=experiments/chain_loss.py

Time on 2 CPU cores: 9.5 minutes from an empty cache; 46 where they have no instructions for bfloat16.
Accepted length, held out / HumanEval: 1.618 [1.516, 1.734] / 1.191 [1.152, 1.231]
(24 prompts each; as the arm `chain` of experiments/results/ablation 1.586 / 1.206, of 40).
With `:long`, which took 26 minutes of training and 6 of evaluation after its data was made:
1.775 [1.693, 1.868] / 1.443 [1.374, 1.522] (40 prompts each; experiments/results/chain_loss_long).
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
