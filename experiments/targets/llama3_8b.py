"""All three terms on Meta-Llama-3-8B-Instruct, the main target of arXiv 2606.11552.

  python -m dspec.main --config=experiments/targets/llama3_8b.py

For accelerators, with the settings of the paper (`dspec.config.use_paper_scale`); `:smoke` runs the whole path in tiny
numbers. The model comes from the Hugging Face Hub, where it is gated: accept its terms at
https://huggingface.co/meta-llama/Meta-Llama-3-8B-Instruct and set HF_TOKEN.
Not trained yet by us: there is no expected number.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'llama3_8b'
  config_lib.use_target(config, 'llama3_8b')
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  config.loss.chain = 40.0
  if budget != 'smoke':
    config_lib.use_paper_scale(config)
  return config
