"""Finished runs side by side: one table and one figure. Runs that differ in nothing but the seed count as one.

  python -m dspec.main --mode=compare --runs=runs/uniform,runs/chain_loss --out=runs/comparison

Everything comes from the runs' report.json. Intervals are over questions, all seeds of a question together; what the
seeds alone change is shown beside them.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from matplotlib.figure import Figure
import numpy as np

from dspec import config as config_lib
from dspec import evaluate
from dspec import paper
from dspec import report
from dspec.data import evaluation_sets
from dspec.errors import UserError

_BOOTSTRAP = {'samples': 2000, 'seed': 0}
# Options that make no other drafter and no other question.
_FREE = ('arms', 'experiment', 'seed', 'evaluate.latency', 'evaluate.bootstrap_samples', *config_lib.INERT)


@dataclasses.dataclass(frozen=True)
class _Arm:
  """An arm of a run: what it is called, what sets it apart but for its seed, and what its report says."""

  name: str
  run: pathlib.Path
  kind: str
  seed: int
  published: str
  measured: Mapping[str, Any]


def run(runs: Sequence[str], out: str) -> dict[str, Any]:
  """Writes compare.md, compare.json and compare.png, and prints the table.

  Args:
    runs: folders of finished runs; gains are over the first arm of the first one.
    out: a folder, made when it is not there.

  Returns:
    {'rows': one for each arm and set}, see `pooled`.

  Raises:
    UserError: for a folder without a report, or seeds that answered different prompts.
  """
  if not runs:
    raise UserError('--runs is missing: folders of finished runs, separated by commas')
  if not out:
    raise UserError('--out is missing: the folder to write the comparison to')
  arms = [arm for folder in runs for arm in _read(pathlib.Path(folder).expanduser())]
  groups: dict[str, list[_Arm]] = {}
  for arm in arms:
    groups.setdefault(arm.kind, []).append(arm)
  results = {'runs': list(runs), 'rows': pooled(_names(list(groups.values())))}
  folder = pathlib.Path(out).expanduser()
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'compare.json').write_text(json.dumps(results, indent=2) + '\n', encoding='utf-8')
  figure(results['rows']).savefig(folder / 'compare.png', dpi=120)
  (folder / 'compare.md').write_text(_markdown(results, arms[0].published), encoding='utf-8')
  print(report.table(table_rows(results['rows'], arms[0].published), 'simple'))
  print(f'\nComparison: {folder / "compare.md"}')
  return results


def _read(folder: pathlib.Path) -> list[_Arm]:
  path = folder / 'report.json'
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
  except OSError as error:
    raise UserError(f'--runs: cannot read {path}: {error.strerror}; give folders of finished runs') from error
  except ValueError as error:
    raise UserError(f'{path} is damaged: {error}') from error
  try:
    arms, defaults = [], config_lib.flatten(config_lib.default())  # Of options that an earlier version did not know.
    for arm in found['arms']:
      options = defaults | config_lib.flatten(found['config']) | dict(found['config']['arms']).get(arm['name'], {})
      kind = {key: value for key, value in options.items() if not key.startswith(_FREE)}
      missing = {'sums', 'prompts'} - set.intersection(*(set(s) for s in arm['sets'].values()))
      if missing:
        raise KeyError(*sorted(missing))
      arms.append(_Arm(
          arm['name'], folder, json.dumps(kind, sort_keys=True), found['seed'], found['target']['published'], arm))
    return arms
  except KeyError as error:
    raise UserError(f'{path} lacks {error}: it was written by another version; run its command again') from error


def _names(groups: Sequence[Sequence[_Arm]]) -> dict[str, list[_Arm]]:
  """{a name of its own: the arms of a group}."""
  names = [group[0].name for group in groups]
  return {
      name if names.count(name) == 1 else f'{group[0].run.name}/{name}': list(group)
      for name, group in zip(names, groups)
  }


def pooled(groups: Mapping[str, Sequence[_Arm]]) -> list[dict[str, Any]]:
  """One row for each group of arms and set, and one for the mean over benchmarks.

  Args:
    groups: by name, of arms that differ in their seeds alone.

  Returns:
    Rows with arm, set, seeds, loss, block_size, accepted_length {micro, micro_interval, macro, macro_interval} (of the
    mean: {micro, micro_interval}), by_seed [accepted length of each], waste, identical_prompts, num_prompts, gain
    {over, micro, interval, by_seed} or None: over the first group, where both answered the same prompts.

  Raises:
    UserError: if seeds of one group answered different prompts, or a seed is there twice.
  """
  rows, first = [], {}
  for name, arms in groups.items():
    seeds = [arm.seed for arm in arms]
    if len(set(seeds)) < len(seeds):
      runs = ', '.join(str(arm.run) for arm in arms)
      raise UserError(f'--runs: {name} is there twice with the same seed, in {runs}; give one of them')
    loss, of_sets, paired = arms[0].measured['loss'], {}, {}
    for set_name in arms[0].measured['sets']:
      measures = [_of_set(arm, set_name, arms[0]) for arm in arms]
      sums = [np.array(s['sums'], np.float64) for s in measures]
      of_sets[set_name] = sums
      prompts = measures[0]['prompts']
      base = first.setdefault(set_name, (name, sums, seeds, prompts))
      paired[set_name] = base[0] != name and base[3] == prompts
      identical = [s['identical_prompts'] for s in measures]
      wasted = [s['waste'] * s['new_tokens'] / (1 - s['waste']) for s in measures]
      rows.append({
          'arm': name, 'set': set_name, 'seeds': seeds, 'loss': loss, 'block_size': measures[0]['block_size'],
          'accepted_length': evaluate.accepted_length(sum(sums), **_BOOTSTRAP),
          'by_seed': [float(one[0].sum() / one[1].sum()) for one in sums],
          'waste': sum(wasted) / (sum(wasted) + sum(s['new_tokens'] for s in measures)),
          'identical_prompts': None if None in identical else sum(identical),
          'num_prompts': sum(s['num_prompts'] for s in measures),
          'gain': _gain(base, sums, seeds) if paired[set_name] else None,
      })
    benchmarks = [key for key in of_sets if key not in evaluation_sets.OF_DATA]
    if len(benchmarks) > 1:
      base = {key: first[key] for key in benchmarks} if all(paired[key] for key in benchmarks) else None
      mean = _mean({key: of_sets[key] for key in benchmarks}, seeds, base)
      rows.append({
          **dict.fromkeys(rows[-1]), 'arm': name, 'set': 'mean', 'seeds': seeds, 'loss': loss,
          'block_size': rows[-1]['block_size'], **mean,
      })
  return rows


def _of_set(arm: _Arm, set_name: str, first: _Arm) -> Mapping[str, Any]:
  found = arm.measured['sets'].get(set_name)
  if found is None or found['prompts'] != first.measured['sets'][set_name]['prompts']:
    raise UserError(
        f'--runs: {arm.run} and {first.run} are seeds of one arm, {arm.name}, but did not answer the same prompts of '
        f'{set_name}')
  return found


def _gain(base: tuple, sums: Sequence[np.ndarray], seeds: Sequence[int]) -> dict[str, Any]:
  name, base_sums, base_seeds, _ = base
  ratio = lambda ours, theirs: float(ours[0].sum() / ours[1].sum() / (theirs[0].sum() / theirs[1].sum()) - 1)
  paired = dict(zip(base_seeds, base_sums))
  return {
      'over': name, **evaluate.gain_of_sums(sum(sums), sum(base_sums), **_BOOTSTRAP),
      'by_seed': [ratio(one, paired[seed]) for seed, one in zip(seeds, sums) if seed in paired],
  }


def _mean(
    of_sets: Mapping[str, Sequence[np.ndarray]], seeds: Sequence[int], base: Mapping[str, tuple] | None
) -> dict[str, Any]:
  """What a row says of the mean of several sets; `base` as `_gain` takes it, for each set."""
  mean = lambda sets, i: float(np.mean([sums[i][0].sum() / sums[i][1].sum() for sums in sets.values()]))
  by_seed, gain = [mean(of_sets, i) for i in range(len(seeds))], None
  pooled_base = {key: sum(sums) for key, (_, sums, *_) in base.items()} if base else None
  found = evaluate.mean_of_sets({key: sum(sums) for key, sums in of_sets.items()}, pooled_base, **_BOOTSTRAP)
  if base:
    name, _, base_seeds, _ = next(iter(base.values()))
    theirs = {seed: mean({key: sums for key, (_, sums, *_) in base.items()}, i) for i, seed in enumerate(base_seeds)}
    both = [(ours, theirs[seed]) for seed, ours in zip(seeds, by_seed) if seed in theirs]
    gain = {'over': name, **found['gain'], 'by_seed': [ours / of_base - 1 for ours, of_base in both]}
  length = {'micro': found['mean'], 'micro_interval': found['interval']}
  return {'accepted_length': length, 'by_seed': by_seed, 'gain': gain}


def table_rows(rows: Sequence[Mapping[str, Any]], published: str) -> list[dict[str, str]]:
  """{column: text} of each row."""
  spread = lambda values, form: f'{min(values):{form}} to {max(values):{form}}' if len(values) > 1 else ''
  texts = []
  for row in rows:
    length, gain = row['accepted_length'], row['gain']
    beside = paper.accepted_length(published, row['loss'], row['set'], row['block_size'])
    texts.append({
        'arm': row['arm'], 'set': row['set'],
        'accepted length': report.with_interval(length['micro'], length['micro_interval'], '.3f'),
        'by seed': spread(row['by_seed'], '.3f'),
        'gain': report.gain_text(gain), 'gain by seed': spread(gain['by_seed'], '+.1%') if gain else '',
        'waste': '' if row['waste'] is None else f"{row['waste']:.1%}",
        'exact': report.exact_text(row),
        paper.column(published): '' if beside is None else f'{beside:.3f}',
    })
  return [{key: text[key] for key in text if any(other[key] for other in texts)} for text in texts]


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
  """Accepted length by set, a bar for each arm with its interval, a dot for each seed."""
  return report.bars(
      [(row['set'], row['arm'], row['accepted_length'], row['by_seed'] if len(row['by_seed']) > 1 else ())
       for row in rows])


def _markdown(results: Mapping[str, Any], published: str) -> str:
  rows = results['rows']
  over = next((row['gain']['over'] for row in rows if row['gain']), None)
  seeds = {row['arm']: row['seeds'] for row in rows}
  parts = [
      '# ' + ', '.join(seeds),
      f"    python -m dspec.main --mode=compare --runs={','.join(results['runs'])} --out=FOLDER",
      '![accepted lengths](compare.png)',
      report.table(table_rows(rows, published)),
      *([f'Gain is over `{over}`, on the same prompts.'] if over else []),
      'Seeds: ' + '; '.join(f'{name} {", ".join(map(str, of))}' for name, of in seeds.items()) + '. Accepted '
      'lengths pool all rounds of all seeds; in brackets 95 % bootstrap intervals over questions, each with all its '
      'seeds and turns. *By seed*: the lowest and the highest of the seeds alone. *Mean*: of the benchmarks, each '
      'counting alike.',
  ]
  return '\n\n'.join(parts) + '\n'
