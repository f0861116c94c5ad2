"""Do test-time mechanisms add to the three terms? Self-selection and draft trees on the uniform and the full drafter.

  python -m dspec.main --config=experiments/decoding.py

Drafts of self-selection (arXiv 2511.00606) are drawn at temperature 1 and scored by the expected accepted length under
the target; trees (arXiv 2604.12989) hold the most probable prefixes. The two drafters are those of the ablation.

They do. Accepted length, 8 held-out prompts of 48 tokens, seed 0 (intervals, other sizes, speeds: experiments/results/decoding):

                     T=0, uniform     all three terms        T=1, uniform     all three terms
  one draft          1.333            1.679  (+25.9 %)       1.129            1.237   (+9.5 %)
  by rejection       1.213            1.593  (+31.4 %)       1.150            1.321  (+14.9 %)
  select 8           1.446            1.861  (+28.7 %)       1.171            1.315  (+12.2 %)
  tree 16            1.573            2.077  (+32.0 %)       1.258            1.452  (+15.4 %)
  tree 64            1.757            2.307  (+31.3 %)       1.362            1.573  (+15.5 %)
  tree 256           1.969            2.458  (+24.8 %)       1.463            1.709  (+16.8 %)

(in brackets the gain over uniform with the same mechanism; batch 8). A tree of 256 gives +48 % to the uniform drafter and +46 % to
the other; eight drafts +9 and +11 %, less than the 15 to 20 % of arXiv 2511.00606. On a CPU only small trees pay: there every node costs.

Time on 2 CPU cores: 50 minutes with the data in the cache.
"""

import ml_collections

from dspec import config as config_lib


def get_config(budget: str = '') -> ml_collections.ConfigDict:
  config = config_lib.default(budget)
  config.experiment = 'decoding'
  config.loss.gamma = 10.0
  config.loss.first_error = 0.3
  config.loss.chain = 40.0
  config.arms = tuple((name, config_lib.TERMS[name]) for name in ('uniform', 'chain'))
  config.mechanisms.of = (
      ('plain', {}),
      ('rejection', {'drafter_temperature': 1.0}),
      *((f'select {m}', {'drafter_temperature': 1.0, 'num_drafts': m}) for m in (2, 4, 8)),
      *((f'tree {b}', {'tree_size': b}) for b in (8, 16, 64, 256)),
  )
  if budget == 'smoke':
    config.mechanisms.update(of=config.mechanisms.of[:3] + config.mechanisms.of[5:6], num_prompts=2, max_new_tokens=8)
  return config
