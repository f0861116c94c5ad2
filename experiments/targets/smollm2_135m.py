"""All three terms on SmolLM2-135M-Instruct, from the hub and in full precision; experiments/chain_loss.py has it quantised.

  python -m dspec.main --config=experiments/targets/smollm2_135m.py

The budgets are those of `dspec.config.default`. The model comes from the Hugging Face Hub (Apache-2.0).
Not trained yet by us: there is no expected number.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'smollm2_135m'
  config_lib.use_target(config, 'smollm2_135m')
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  config.loss.chain = 40.0
  return config
