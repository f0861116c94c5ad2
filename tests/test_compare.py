"""Runs side by side: seeds pooled by question, gains paired, bad runs refused; by the program, without a config."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from dspec import compare
from dspec import config as config_lib
from dspec.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
QUESTIONS = 30


def sums(mean, seed):
  rng = np.random.default_rng(seed)
  rounds = rng.integers(8, 20, QUESTIONS)
  return np.array([rounds + rng.poisson(mean * rounds), rounds])


def measures(found, prompts='p'):
  gained, rounds = found.sum(1).tolist()
  return {
      'sums': found.tolist(), 'prompts': prompts, 'new_tokens': gained, 'rounds': rounds, 'waste': 0.25,
      'block_size': 16, 'identical_prompts': QUESTIONS - 1, 'num_prompts': QUESTIONS}


def write(folder, seed, arms, *, prompts='p', **options):
  """A finished run: {arm: {set: sums}}."""
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.seed = seed
  config.update_from_flattened_dict(options)
  losses = {'uniform': (None, 0.0, 0.0), 'chain': (10.0, 0.3, 40.0)}
  overrides = {
      name: dict(zip(('loss.gamma', 'loss.first_error', 'loss.chain'), losses[name])) for name in arms}
  config.arms = tuple(overrides.items())
  folder.mkdir()
  (folder / 'report.json').write_text(json.dumps({
      'config': config_lib.to_dict(config), 'seed': seed, 'target': {'published': ''},
      'arms': [{
          'name': name, 'loss': dict(zip(('gamma', 'first_error', 'chain'), losses[name])),
          'sets': {key: measures(found, prompts) for key, found in sets.items()}} for name, sets in arms.items()]}))
  return str(folder)


@pytest.fixture
def runs(tmp_path):
  """Two seeds of two arms on two benchmarks and the held-out prompts: (folders, {(arm, set, seed): sums})."""
  found = {
      (arm, name, seed): sums(mean + 0.2 * (name == 'aime'), [seed, i, j])
      for i, (arm, mean) in enumerate((('uniform', 0.3), ('chain', 0.6)))
      for j, name in enumerate(('held_out', 'gsm8k', 'aime')) for seed in (0, 1)}
  folders = [
      write(tmp_path / f'seed{seed}', seed, {
          arm: {name: found[arm, name, seed] for name in ('held_out', 'gsm8k', 'aime')}
          for arm in ('uniform', 'chain')})
      for seed in (0, 1)]
  return folders, found


def micro(found):
  return found[0].sum() / found[1].sum()


def test_seeds_are_pooled_and_gains_paired(runs, tmp_path):
  folders, found = runs
  rows = {(row['arm'], row['set']): row for row in compare.run(folders, str(tmp_path / 'out'))['rows']}
  assert list(rows) == [(arm, name) for arm in ('uniform', 'chain') for name in ('held_out', 'gsm8k', 'aime', 'mean')]
  pooled = {key[:2]: found[(*key[:2], 0)] + found[(*key[:2], 1)] for key in found}
  for key, both in pooled.items():
    row = rows[key]
    assert row['seeds'] == [0, 1]
    assert row['accepted_length']['micro'] == pytest.approx(micro(both))
    assert row['by_seed'] == pytest.approx([micro(found[(*key, seed)]) for seed in (0, 1)])
    assert row['waste'] == pytest.approx(0.25)
    assert (row['identical_prompts'], row['num_prompts']) == (2 * QUESTIONS - 2, 2 * QUESTIONS)
    if key[0] == 'uniform':
      assert row['gain'] is None
      continue
    base = pooled['uniform', key[1]]
    ratio = lambda a, m, b, n, axis: (a.sum(axis) / m.sum(axis)) / (b.sum(axis) / n.sum(axis)) - 1
    columns = [*both.astype(float), *base.astype(float)]
    assert row['gain']['micro'] == pytest.approx(ratio(*columns, axis=0))
    interval = stats.bootstrap(
        columns, ratio, paired=True, vectorized=True, n_resamples=4000, confidence_level=0.95, method='percentile',
        rng=np.random.default_rng(3)).confidence_interval
    np.testing.assert_allclose(row['gain']['interval'], interval, atol=0.08 * np.ptp(row['gain']['interval']))
    assert row['gain']['by_seed'] == pytest.approx([
        micro(found['chain', key[1], seed]) / micro(found['uniform', key[1], seed]) - 1 for seed in (0, 1)])
  mean = lambda arm, at: (micro(at[arm, 'gsm8k']) + micro(at[arm, 'aime'])) / 2
  row = rows['chain', 'mean']
  assert row['accepted_length']['micro'] == pytest.approx(mean('chain', pooled))
  assert row['gain']['micro'] == pytest.approx(mean('chain', pooled) / mean('uniform', pooled) - 1)
  by_seed = [{key[:2]: value for key, value in found.items() if key[2] == seed} for seed in (0, 1)]
  assert row['by_seed'] == pytest.approx([mean('chain', at) for at in by_seed])
  assert row['gain']['by_seed'] == pytest.approx([mean('chain', at) / mean('uniform', at) - 1 for at in by_seed])


def test_files_by_the_program(runs, tmp_path):
  folders, _ = runs
  done = subprocess.run(
      [sys.executable, '-m', 'dspec.main', '--mode=compare', f'--runs={",".join(folders)}',
       f'--out={tmp_path}/new/out'],
      env={**os.environ, 'PYTHONPATH': str(ROOT)}, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr
  folder = tmp_path / 'new' / 'out'
  rows = json.loads((folder / 'compare.json').read_text())['rows']
  text = (folder / 'compare.md').read_text()
  for row in rows:
    length = row['accepted_length']
    assert f"{length['micro']:.3f} [{length['micro_interval'][0]:.3f}" in text
    assert f"{length['micro']:.3f}" in done.stdout
  assert '![accepted lengths](compare.png)' in text and (folder / 'compare.png').stat().st_size > 5000
  assert '3.420' in text  # The paper's mean of all three terms.
  [panel] = compare.figure(rows).axes
  heights = [bar.get_height() for container in panel.containers if hasattr(container, 'patches') for bar in container]
  assert heights == [row['accepted_length']['micro'] for row in rows]
  assert sorted(y for line in panel.lines for y in line.get_ydata() if line.get_marker() == '.') == sorted(
      y for row in rows for y in row['by_seed'])


def test_other_options_make_another_arm(tmp_path):
  arms = {'chain': {'gsm8k': sums(0.6, 1)}}
  folders = [write(tmp_path / 'a', 0, arms), write(tmp_path / 'b', 0, arms, **{'train.steps': 12})]
  rows = compare.run(folders, str(tmp_path / 'out'))['rows']
  assert [row['arm'] for row in rows] == ['a/chain', 'b/chain']
  assert rows[1]['gain']['micro'] == 0


def test_gain_needs_the_same_prompts(tmp_path):
  folders = [
      write(tmp_path / 'a', 0, {'uniform': {'gsm8k': sums(0.3, 1)}}),
      write(tmp_path / 'b', 0, {'chain': {'gsm8k': sums(0.6, 2)}}, prompts='others')]
  rows = compare.run(folders, str(tmp_path / 'out'))['rows']
  assert [row['gain'] for row in rows] == [None, None]


def test_bad_runs(tmp_path):
  good = write(tmp_path / 'good', 0, {'chain': {'gsm8k': sums(0.6, 1)}})
  again = write(tmp_path / 'again', 0, {'chain': {'gsm8k': sums(0.6, 1)}})
  other = write(tmp_path / 'other', 1, {'chain': {'gsm8k': sums(0.6, 1)}}, prompts='others')
  old, damaged = tmp_path / 'old', tmp_path / 'damaged'
  for folder in (old, damaged):
    folder.mkdir()
  content = json.loads((tmp_path / 'good' / 'report.json').read_text())
  del content['arms'][0]['sets']['gsm8k']['sums']
  (old / 'report.json').write_text(json.dumps(content))
  (damaged / 'report.json').write_text('{"arms": [')
  for folders, text in (
      ([], '--runs is missing'), ([good, str(tmp_path / 'none')], 'none/report.json: No such file'),
      ([str(damaged)], 'damaged'), ([str(old)], "lacks 'sums'"), ([good, again], 'twice with the same seed'),
      ([good, other], 'did not answer the same prompts of gsm8k')):
    with pytest.raises(UserError, match=text):
      compare.run(folders, str(tmp_path / 'out'))
  with pytest.raises(UserError, match='--out is missing'):
    compare.run([good], '')
  assert not (tmp_path / 'out').exists()
