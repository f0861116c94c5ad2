"""arXiv 2606.11552, Table 6: trained at a block size of 16, decoded at others.

  python -m dspec.main --config=experiments/paper/table6.py:embedded

As it is, for accelerators, on Meta-Llama-3-8B-Instruct and answers of its own; with `:embedded` on SmolLM2 on a CPU.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.paper(budget)
  config.experiment = 'table6'
  config.arms = tuple((name, config_lib.TERMS[name]) for name in ('uniform', 'chain'))
  m, e = config.mechanisms, config.evaluate
  m.of = tuple((f'K={k}', {'block_size': k}) for k in (2, 4, 8, 16, 32))
  m.temperatures = (0.0,)
  if budget == 'smoke':
    m.update(of=m.of[:2], batch_sizes=(2,), num_prompts=2, max_new_tokens=8)
  else:
    e.sets = ('held_out', 'aime')
    m.update(sets=e.sets, batch_sizes=(e.batch_size,), num_prompts=e.num_prompts, max_new_tokens=e.max_new_tokens)
  return config
