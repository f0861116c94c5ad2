"""arXiv 2606.11552, Table 3: the three terms one after the other, on other targets.

  python -m dspec.main --config=experiments/paper/table3.py:llama3_2_3b
  python -m dspec.main --config=experiments/paper/table3.py:qwen3_4b
  python -m dspec.main --config=experiments/paper/table3.py:qwen3_8b
  python -m dspec.main --mode=compare --out=runs/table3 \\
    --runs=runs/table3-llama3_2_3b,runs/table3-qwen3_4b,runs/table3-qwen3_8b

For accelerators; with `:embedded` on SmolLM2 on a CPU. The fourth target, Meta-Llama-3-8B-Instruct, is that of
table2.py.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = 'llama3_2_3b') -> ml_collections.ConfigDict:
  target = budget if budget in config_lib.TARGETS else ''
  config = config_lib.paper('', target) if target else config_lib.paper(budget)
  config.experiment = 'table3'
  config.arms = tuple(config_lib.TERMS.items())
  return config
