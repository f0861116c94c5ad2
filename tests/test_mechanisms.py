"""The study of test-time mechanisms: every result is there once, says what plain decoding says, and adds up."""

import json

import jax
import numpy as np
import pytest

from dspec import config as config_lib
from dspec import evaluate
from dspec import mechanisms
from dspec import train
from dspec.data import evaluation_sets
from dspec.decoding import speculative
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib

OF = (
    ('plain', {}), ('block of 2', {'block_size': 2}), ('rejection', {'drafter_temperature': 1.0}),
    ('select 2', {'drafter_temperature': 1.0, 'num_drafts': 2}), ('tree 5', {'tree_size': 5}),
)


def make_config(**changes):
  config = config_lib.default('smoke').copy_and_resolve_references().unlock()
  config.drafter.update(num_layers=1, block_size=4, target_layers=(0, 1), mask_token_id=1, vocab_size=0)
  config.evaluate.sets = ('held_out',)
  config.mechanisms.update(of=OF, temperatures=(0.0, 1.0), batch_sizes=(2,), num_prompts=3, max_new_tokens=9)
  config.mechanisms.update(**changes)
  return config


@pytest.fixture(scope='module')
def study(untrained_target, tmp_path_factory):
  """A function (config, folder) that runs two random drafters of a random target, and a folder of its results."""
  target, params = untrained_target()
  rng = np.random.default_rng(0)
  prompts = [rng.integers(3, 23, n).tolist() for n in (5, 3, 7, 4)]

  def run(config, folder):
    drafter = drafter_lib.Drafter(train.make_drafter_config(config, target.config))
    arms = [(name, config, train.init_params(drafter, jax.random.key(i)), {}) for i, name in enumerate('ab')]
    sets = {'held_out': evaluation_sets.PromptSet(tuple(map(tuple, prompts)))}
    return mechanisms.run(config, folder, target.config, params, arms, sets)

  folder = tmp_path_factory.mktemp('study')
  return run, folder, run(make_config(), folder)


def test_every_mechanism_says_what_plain_decoding_says(study):
  _, _, results = study
  assert len(results) == len({json.dumps({k: r[k] for k in mechanisms._SETTING}) for r in results}) == 2 * 5 * 2
  for result in results:
    assert len(result['gained']) == len(result['rounds']) == result['num_prompts'] == 3
    assert result['tokens'] == sum(result['gained']) + 3  # With the prefill's.
    if result['mechanism'] != 'rejection' or result['temperature'] == 0:
      assert result['identical_prompts'] == 3
      assert result['tokens'] == result['plain_tokens']
  # Drafts of a wider tree include those of the single block.
  at = {(r['arm'], r['mechanism']): sum(r['rounds']) for r in results if r['temperature'] == 0}
  assert all(at[arm, 'tree 5'] <= at[arm, 'plain'] <= at[arm, 'block of 2'] for arm in 'ab')
  assert all(max(r['gained']) <= 2 * max(r['rounds']) for r in results if r['mechanism'] == 'block of 2')


def test_goes_on_where_it_was_stopped(study, tmp_path, monkeypatch):
  run, folder, results = study
  lines = (folder / 'mechanisms.jsonl').read_text().splitlines(keepends=True)
  assert len(lines) == len(results)
  # Stopped in the middle of the last line of all.
  path = tmp_path / 'mechanisms.jsonl'
  path.write_text(''.join(lines[:-1]) + lines[-1][:20])
  compiled, original = [], evaluate.compile_speculative
  monkeypatch.setattr(
      evaluate, 'compile_speculative', lambda *args, **options: compiled.append(options) or original(*args, **options))
  again = run(make_config(), tmp_path)
  [options] = compiled
  assert options['drafting'] == speculative.Drafting(tree_size=5)
  assert again[:-1] == results[:-1]
  untimed = lambda result: {k: v for k, v in result.items() if 'seconds' not in k}
  assert untimed(again[-1]) == untimed(results[-1])
  assert len(path.read_text().splitlines()) == len(results)


def test_summary_recomputed(study):
  _, _, results = study
  found = mechanisms.summarise(results, samples=20, seed=0)
  tau = lambda r: sum(r['gained']) / sum(r['rounds'])
  of = {tuple(r[k] for k in ('temperature', 'batch_size', 'arm', 'mechanism')): r for r in results}
  for (t, b, arm, mechanism), s in zip(of, found, strict=True):
    r = of[t, b, arm, mechanism]
    assert s['accepted_length']['micro'] == pytest.approx(tau(r))
    plain = r['plain_tokens'] / r['plain_seconds']
    assert s['speed_up'] == pytest.approx(r['tokens'] / r['seconds'] / plain)
    for key, base, name in (
        ('over_mechanism', of[t, b, arm, 'plain'], 'plain'), ('over_arm', of[t, b, 'a', mechanism], 'a')):
      if base is r:
        assert s[key] is None
      else:
        assert s[key]['over'] == name and s[key]['micro'] == pytest.approx(tau(r) / tau(base) - 1)


@pytest.mark.parametrize('changes, text', [
    ({'of': ('tree',)}, 'must be a pair'),
    ({'of': (('a', {'trees': 3}),)}, "'a': no option 'trees'; there are: block_size, drafter_temperature"),
    ({'of': (('a', {'num_drafts': 4}),)}, "'a': num_drafts is 4"),
    ({'of': (('a', {'block_size': 1}),)}, "'a': block_size is 1"),
    ({'of': (('a', {}), ('a', {'tree_size': 3}))}, 'names must differ'),
    ({'temperatures': ()}, 'needs mechanisms.sets'),
    ({'sets': ('humaneval',)}, 'must be among evaluate.sets'),
    ({'temperatures': (-1.0,)}, 'must be at least 0'),
    ({'batch_sizes': (0,)}, 'at least 1'),
])
def test_bad_studies(changes, text):
  mechanisms.check(make_config())
  with pytest.raises(UserError, match='--config.mechanisms') as error:
    mechanisms.check(make_config(**changes))
  assert text in str(error.value)
