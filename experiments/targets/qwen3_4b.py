"""All three terms on Qwen3-4B, thinking off.

  python -m dspec.main --config=experiments/targets/qwen3_4b.py

For accelerators, with the settings of the paper (`dspec.config.use_paper_scale`); `:smoke` runs the whole path in tiny
numbers. The model comes from the Hugging Face Hub (Apache-2.0).
Not trained yet by us: there is no expected number.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'qwen3_4b'
  config_lib.use_target(config, 'qwen3_4b')
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  config.loss.chain = 40.0
  if budget != 'smoke':
    config_lib.use_paper_scale(config)
  return config
