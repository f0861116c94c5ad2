"""arXiv 2606.11552, Table 7: the three terms with draft trees (arXiv 2604.12989), one prompt at a time.

  python -m dspec.main --config=experiments/paper/table7.py:embedded

As it is, for accelerators, on Meta-Llama-3-8B-Instruct and answers of its own; with `:embedded` on SmolLM2 on a CPU.
Trees have 256 nodes, as is best there; on a CPU such a tree costs more than it saves, but its accepted length carries
over.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.paper(budget)
  config.experiment = 'table7'
  config.arms = tuple(config_lib.TERMS.items())
  m, e = config.mechanisms, config.evaluate
  m.update(of=(('plain', {}), ('tree 256', {'tree_size': 256})), temperatures=(0.0,), batch_sizes=(1,))
  if budget == 'smoke':
    m.update(of=(('plain', {}), ('tree 8', {'tree_size': 8})), num_prompts=1, max_new_tokens=8)
  else:
    m.update(sets=e.sets, num_prompts=8 if budget else 128, max_new_tokens=e.max_new_tokens)
  return config
