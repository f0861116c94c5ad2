"""arXiv 2606.11552, Table 5: answers as they were written, against those of the target itself.

  python -m dspec.main --config=experiments/paper/table5.py:as_written --config.data.prompts=conversations.jsonl
  python -m dspec.main --config=experiments/paper/table5.py:regenerated --config.data.prompts=conversations.jsonl
  python -m dspec.main --mode=compare --runs=runs/table5-as_written,runs/table5-regenerated --out=runs/table5

The file holds conversations, as ShareGPT does, which the paper uses: one {"conversations": [...]} or {"messages":
[...]} a line. Regenerated, the target answers their first turns anew. `:embedded_as_written` and
`:embedded_regenerated` do it with SmolLM2 on a CPU.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  responses = 'as_written' if budget.endswith('as_written') else 'regenerated'
  config = config_lib.paper(budget.removesuffix(responses).removesuffix('_'))
  config.experiment = 'table5'
  config.data.responses = responses
  if responses == 'as_written':
    config.data.prompts = 'conversations.jsonl'
  config.arms = tuple(config_lib.TERMS.items())
  return config
