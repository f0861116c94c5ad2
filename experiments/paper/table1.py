"""arXiv 2606.11552, Table 1: how many right draft tokens are thrown away behind a wrong one.

  python -m dspec.main --config=experiments/paper/table1.py:embedded

As it is, for accelerators, on Meta-Llama-3-8B-Instruct and answers of its own; with `:embedded` on SmolLM2 on a CPU.
The column `waste` is the table; the paper has it for uniform training alone.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.paper(budget)
  config.experiment = 'table1'
  config.arms = tuple((name, config_lib.TERMS[name]) for name in ('uniform', 'chain'))
  return config
