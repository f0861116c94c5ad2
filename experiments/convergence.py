"""Does the gain of the three terms outlast convergence? Uniform and all three, at 1, 2, 4 and 8 times the default steps.

  python -m dspec.main --config=experiments/convergence.py

The ablation of DFlash (arXiv 2602.06036) finds that positional weighting only speeds up early training. Here is data
enough not to overfit, that of `:long`, and accepted length is measured on prompts of training and held-out ones apart:
where the two differ, a drafter has learned its rows by heart.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'convergence'
  config.loss.update(gamma=10.0, first_error=0.3, chain=40.0)
  config.evaluate.sets = ('held_out', 'trained_on')
  if not budget:
    config.data.update(config_lib.default('long').data)
    config.evaluate.update(num_prompts=64, batch_size=32, replay=True, latency_prompts=0)
  config.arms = tuple(
      (f'{name}-{times}x', {**config_lib.TERMS[name], 'train.steps': times * config.train.steps})
      for times in (1, 2, 4, 8) for name in ('uniform', 'chain'))
  return config
