"""arXiv 2606.11552, Table 2: the three terms one after the other, and their strengths.

  python -m dspec.main --config=experiments/paper/table2.py:embedded
  python -m dspec.main --config=experiments/paper/table2.py:embedded --config.seed=1
  python -m dspec.main --config=experiments/paper/table2.py:embedded --config.seed=2
  python -m dspec.main --mode=compare --out=runs/table2 \\
    --runs=runs/table2-embedded,runs/table2-embedded-seed1,runs/table2-embedded-seed2

As it is, for accelerators, on Meta-Llama-3-8B-Instruct and answers of its own; with `:embedded` on SmolLM2 on a CPU.
The paper trains on ShareGPT as it was written: --config.data.prompts=FILE --config.data.responses=as_written.
`:embedded` trains the four arms of the ablation, `:embedded_sweep` the sweeps of gamma, alpha_f, alpha_c and the
learning rate, too. Nothing was tuned on these benchmarks: the strengths are the paper's.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.paper('embedded' if budget == 'embedded_sweep' else budget)
  config.experiment = 'table2'
  config.arms = tuple(config_lib.TERMS.items())
  if budget in ('', 'embedded_sweep'):
    uniform, weighting, first_error = (config_lib.TERMS[name] for name in ('uniform', 'weighting', 'first_error'))
    config.arms += (
        *((f'uniform-lr{rate:g}', {**uniform, 'train.learning_rate': rate}) for rate in (1e-4, 1e-2)),
        *((f'gamma{gamma:g}', {**weighting, 'loss.gamma': gamma}) for gamma in (7.0, 20.0)),
        *((f'first_error{alpha:g}', {**first_error, 'loss.first_error': alpha}) for alpha in (0.5, 1.0)),
        *((f'chain{alpha:g}', {'loss.chain': alpha}) for alpha in (5.0, 10.0, 20.0, 30.0, 50.0)),
    )
  return config
