"""arXiv 2606.11552, Table 8: from a streak-distilled drafter (SpecDiff-2, arXiv 2511.00606) on.

Streak distillation is the chain term alone, on answers that the target draws at temperature 1. First that, then from
its drafter on all four arms:

  python -m dspec.main --config=experiments/paper/table8.py:embedded_distil
  python -m dspec.main --config=experiments/paper/table8.py:embedded_distil --mode=export --out=runs/streak_distilled
  python -m dspec.main --config=experiments/paper/table8.py:embedded

Without `embedded`, `:distil` and nothing, for accelerators on Meta-Llama-3-8B-Instruct. Drafters are handed on in the
format dflash, which has neither a window nor a draft vocabulary: so have these not.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  scale = budget.removesuffix('distil').removesuffix('_')
  config = config_lib.paper(scale)
  config.drafter.update(window=0, vocab_size=0)
  if budget.endswith('distil'):
    config.experiment = 'table8_distil'
    config.data.response_temperature = 1.0
    config.loss.update(gamma=None, first_error=0.0)
  else:
    config.experiment = 'table8'
    config.drafter.init = 'runs/streak_distilled'
    config.arms = tuple(config_lib.TERMS.items())
  return config
