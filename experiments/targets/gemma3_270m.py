"""All three terms on Gemma 3 270M (instruction-tuned): another family, small enough for a laptop.

  python -m dspec.main --config=experiments/targets/gemma3_270m.py

The budgets are those of `dspec.config.default`. The model comes from the Hugging Face Hub: accept the Gemma Terms of Use at
https://huggingface.co/google/gemma-3-270m-it and set HF_TOKEN.
Not trained yet by us: there is no expected number.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'gemma3_270m'
  config_lib.use_target(config, 'gemma3_270m')
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  config.loss.chain = 40.0
  return config
