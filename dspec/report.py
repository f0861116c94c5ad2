"""Tables, plots and the paper's numbers beside ours: report.json, report.md and PNG files."""

import json
import pathlib
from typing import Any, Mapping, Sequence

from matplotlib.figure import Figure
import tabulate

from dspec import paper

# Okabe and Ito's colours, which colour-blind eyes tell apart.
_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
_CURVES = {  # Key of a training record -> title of its panel.
    'accepted_length': 'accepted length (training blocks)',
    'validation_accepted_length': 'accepted length (held-out prompts)',
    'loss': 'objective (differs between arms)',
    'cross_entropy': 'cross-entropy',
    'first_error': 'first-error term',
    'chain': 'chain term',
    'gradient_norm': 'gradient norm',
}
_NOTES = """\
- **Accepted length**: tokens a round of drafting and verifying, the bonus token counted, the token
  of the prefill not, cut at the end of the answer. The first column pools all rounds (*micro*);
  *macro* averages per prompt, then over prompts. In brackets: 95 % bootstrap interval over prompts;
  the turns of a conversation count as one. The *mean* is that of the benchmarks' micro lengths.
- **Gain**: of the micro accepted length, relative to the named arm, on the same prompts.
- **Waste**: of all draft tokens equal to the target's greedy token (bonus counted), the share
  thrown away because an earlier slot was wrong.
- **Exact**: prompts whose speculative output equals plain greedy decoding token for token. In
  float32 it must be all. In bfloat16 verifying K tokens at once rounds differently from decoding
  one at a time, and near-ties may fall the other way.
- **Speed-up**: ratio of the two tokens/s: wall clock, same run, prompts, batch size and dtype (the
  table below and the section Machine). Accepted lengths carry over to other machines, speeds do
  not.
  Neither is known where rounds were replayed (`evaluate.replay`): there the answers are plain decoding's, and a round
  is what drafting gets right of them.
- **Chain breaker**: mean slot of the first wrong draft, of the rounds that have one.
- **Paper**: arXiv 2606.11552, Tables 1 to 4 and 6, same loss strengths and block size. Data, harness and
  budget all differ, and the target where the column names another: compare the order of the arms, not the values.
"""

_COST_NOTES = """\
The block size of each arm is the fastest one at the costs below, measured by themselves on this machine, and at the
arm's acceptance on the first set. Plain decoding is the faster of float32 and the precision of the table, but *exact*
compares with plain decoding in the same precision. **Bound**: accepted length * plain step / (draft + verify), and in
brackets what share of it the speed-up reaches.
"""

_MECHANISM_NOTES = """\
All in float32, against plain decoding that draws with the same key: mechanisms that verify by matching say the same
text, above temperature 0 too, but for rounding: a token alone is computed in another order than several, and a number
drawn close to the border between two tokens may then fall on the other side of it. Those that verify by rejection say
another text of the same distribution. Speed-ups are of this machine; a CPU pays for every node of a tree. Gains are of
the accepted length: *by mechanism* over the first one with the same arm, *by arm* over the first one with the same
mechanism.
"""


def write(workdir: str | pathlib.Path, results: Mapping[str, Any]) -> str:
  """Writes report.json, report.md, acceptance_by_slot.png, training.png and others into `workdir`.

  Args:
    workdir: folder; made when it is not there.
    results: JSON-able, with
      experiment: text; seed: int; command: text; times: {stage: seconds};
      target, data, machine: {name: number or text};
      target also has published: a key of `dspec.config.TARGETS`, '' for another one;
      sets: {name: what is known of its source}; missing_sets: names of those that could not be had;
      arms: list of {name, loss: {gamma, first_error, chain}, train: {name: number},
        curve: [{step, and any of loss, accepted_length, cross_entropy, ..., or of validation_accepted_length}],
        sets: {name: S},
        mean: {mean, interval [2], gain} over the benchmarks, or None}.
        latency: as sets, of prompts decoded one at a time; may be empty.
      costs: {arm: {step, draft: {K: .}, verify: {K: .}}}, seconds for one prompt, see `dspec.decoding.costs`; arms may
        be missing.
      mechanisms: list as of `mechanisms.summarise`; may be empty.
      S has num_prompts, new_tokens, rounds, identical_prompts, block_size, tree_size (0: no tree), dtype, batch_size,
        ended_share, waste (shares in [0, 1]), accepted_length: {micro, micro_interval [2], macro,
        macro_interval [2]}, acceptance_by_slot [K-1] (share of rounds in which slots 1..k were all
        accepted), accepted_distribution [K] (share of rounds that accepted 0, 1, .. drafts), chain_breaker (mean slot
        or None), slot_accuracy [K-1] (draft equals the target's token, whatever came before),
        sums [2][questions] (tokens gained, rounds), prompts (a hash of them),
        speculative_tokens_per_second, autoregressive_tokens_per_second; the first and identical_prompts None of a replay,
        gain: {over: an arm's name, micro (0.31 means +31 %), interval [2]} or None.

  Returns:
    The table for the terminal.
  """
  workdir = pathlib.Path(workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  (workdir / 'report.json').write_text(json.dumps(results, indent=2) + '\n', encoding='utf-8')
  acceptance_figure(results['arms']).savefig(workdir / 'acceptance_by_slot.png', dpi=120)
  training_figure(results['arms']).savefig(workdir / 'training.png', dpi=120)
  if results['mechanisms']:
    mechanism_figure(results['mechanisms']).savefig(workdir / 'mechanisms.png', dpi=120)
  if _by_steps(results['arms']):
    steps_figure(results['arms']).savefig(workdir / 'steps.png', dpi=120)
  (workdir / 'report.md').write_text(markdown(results), encoding='utf-8')
  return terminal_table(results)


def terminal_table(results: Mapping[str, Any]) -> str:
  """A line for each arm and set, narrow enough for a terminal, and the same for one prompt at a time."""
  left_out = ('macro', 'tokens/s', 'plain tokens/s')
  rows = comparison_rows(results['arms'])
  tables = [table([{key: row[key] for key in row if key not in left_out} for row in rows], 'simple')]
  rows = latency_rows(results)
  if rows:
    tables += ['One prompt at a time:', table(rows, 'simple')]
  rows = mechanism_rows(results['mechanisms'])
  if rows:
    tables += ['Mechanisms:', table(rows, 'simple')]
  return '\n\n'.join(tables)


def latency_rows(results: Mapping[str, Any]) -> list[dict[str, str]]:
  """For each arm and set {column: text} of what was decoded one prompt at a time."""
  arms, left_out = results['arms'], ('macro', 'gain', 'waste')
  measures = [(arm['name'], s) for arm in arms for s in arm['latency'].values()]
  rows = []
  for row, (name, s) in zip(comparison_rows(arms, 'latency'), measures, strict=True):
    rows.append({
        **{key: row[key] for key in row if key not in left_out}, 'block size': str(s['block_size']), 'bound': ''})
    if name in results['costs'] and not s['tree_size']:
      costs = results['costs'][name]
      round_seconds = sum(costs[part][str(s['block_size'])] for part in ('draft', 'verify'))
      bound = s['accepted_length']['micro'] * costs['step'] / round_seconds
      reached = s['speculative_tokens_per_second'] / s['autoregressive_tokens_per_second']
      rows[-1]['bound'] = f'{bound:.2f}x ({reached / bound:.0%})'
  return rows if results['costs'] else [{key: row[key] for key in row if key != 'bound'} for row in rows]


def mechanism_rows(study: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
  """For each arm, mechanism, temperature, batch size and set {column: text}."""
  return [{
      'set': s['set'], 'T': f"{s['temperature']:g}", 'batch': str(s['batch_size']), 'mechanism': s['mechanism'],
      'arm': s['arm'],
      'accepted length': with_interval(s['accepted_length']['micro'], s['accepted_length']['micro_interval'], '.3f'),
      'by mechanism': gain_text(s['over_mechanism']), 'by arm': gain_text(s['over_arm']),
      'speed-up': f"{s['speed_up']:.2f}x", 'same text': f"{s['identical_prompts']}/{s['num_prompts']}",
  } for s in study]


def mechanism_figure(study: Sequence[Mapping[str, Any]]) -> Figure:
  """A panel for each set and temperature, at the smallest batch size: accepted length by mechanism and arm."""
  places = list(dict.fromkeys((s['set'], s['temperature']) for s in study))
  names = list(dict.fromkeys(s['mechanism'] for s in study))
  arms = list(dict.fromkeys(s['arm'] for s in study))
  batch_size = min(s['batch_size'] for s in study)
  figure, panels = _panels(len(places), columns=2)
  for panel, place in zip(panels, places):
    here = [s for s in study if (s['set'], s['temperature'], s['batch_size']) == (*place, batch_size)]
    _grouped_bars(panel, names, arms, {(s['mechanism'], s['arm']): s['accepted_length'] for s in here})
    panel.set(title=f'{place[0]}, T={place[1]:g}', ylabel='accepted length')
  _legend(figure, panels)
  return figure


def bars(values: Sequence[tuple[str, str, Mapping[str, Any], Sequence[float]]]) -> Figure:
  """Accepted length by set, a bar for each arm.

  Args:
    values: (set, arm, {micro, micro_interval}, the values of single seeds, drawn as dots).
  """
  sets, arms = (list(dict.fromkeys(value[i] for value in values)) for i in (0, 1))
  figure, [panel] = _panels(1, columns=1)
  figure.set_size_inches(1.5 + 0.3 * len(sets) * (len(arms) + 1), 4)
  _grouped_bars(panel, sets, arms, {(name, arm): length for name, arm, length, _ in values})
  for name, arm, _, dots in values:
    panel.plot([_place(sets, arms, name, arm)] * len(dots), dots, 'k.', markersize=4)
  panel.set_ylabel('accepted length')
  _legend(figure, [panel])
  return figure


def cost_rows(results: Mapping[str, Any]) -> list[dict[str, str]]:
  """For each arm and block size {column: text} of what a round costs."""
  rows = []
  for name, costs in results['costs'].items():
    for k, draft in costs['draft'].items():
      whole = draft + costs['verify'][k]
      rows.append({
          'arm': name, 'block size': k, 'draft, ms': f'{1e3 * draft:.1f}',
          'verify, ms': f"{1e3 * costs['verify'][k]:.1f}", 'plain step, ms': f"{1e3 * costs['step']:.1f}",
          'round / step': f"{whole / costs['step']:.2f}",
      })
  return rows


def comparison_rows(
    arms: Sequence[Mapping[str, Any]], of: str = 'sets', published: str | None = None
) -> list[dict[str, str]]:
  """The main table: for each arm and set {column: text}; columns empty in all rows are left out.

  Args:
    arms: see `write`.
    of: 'sets' or 'latency'.
    published: the target, as in `dspec.paper.column`, for a column of the paper's numbers; None for none.
  """
  rows = []

  def of_paper(loss, name, block_size) -> dict[str, str]:
    if published is None:
      return {}
    length, waste = paper.accepted_length(published, loss, name, block_size), paper.waste(loss, name)
    return {
        paper.column(published): '' if length is None else f'{length:.3f}',
        'its waste': '' if waste is None else f'{waste:.1%}'}

  for arm in arms:
    for set_name, s in arm[of].items():
      length, gain = s['accepted_length'], s['gain']
      fast, plain = s['speculative_tokens_per_second'], s['autoregressive_tokens_per_second']
      rows.append({
          'arm': arm['name'],
          'set': set_name,
          'accepted length': with_interval(length['micro'], length['micro_interval'], '.3f'),
          'macro': with_interval(length['macro'], length['macro_interval'], '.3f'),
          'gain': gain_text(gain),
          'waste': f"{s['waste']:.1%}",
          'tokens/s': '' if fast is None else f'{fast:.1f}',
          'plain tokens/s': '' if fast is None else f'{plain:.1f}',
          'speed-up': '' if fast is None else f'{fast / plain:.2f}x',
          'exact': exact_text(s),
          **of_paper(arm['loss'], set_name, s.get('block_size')),
      })
    if of == 'sets' and arm.get('mean'):
      mean, block_size = arm['mean'], next(iter(arm['sets'].values()))['block_size']
      rows.append({
          **dict.fromkeys(rows[-1], ''), 'arm': arm['name'], 'set': 'mean',
          'accepted length': with_interval(mean['mean'], mean['interval'], '.3f'), 'gain': gain_text(mean['gain']),
          **of_paper(arm['loss'], 'mean', block_size),
      })
  return [{key: row[key] for key in row if any(other[key] for other in rows)} for row in rows]


def markdown(results: Mapping[str, Any]) -> str:
  """The text of report.md."""
  arms = results['arms']
  sets = [(arm['name'], name, s) for arm in arms for name, s in arm['sets'].items()]
  over = dict.fromkeys(s['gain']['over'] for _, _, s in sets if s['gain'])
  details = [{
      'arm': arm, 'set': name, 'prompts': s['num_prompts'], 'new tokens': s['new_tokens'],
      'rounds': s['rounds'], 'answers ended': f"{s['ended_share']:.1%}",
      'chain breaker': '' if s['chain_breaker'] is None else f"{s['chain_breaker']:.2f}",
      'block size': s['block_size'], 'dtype': s['dtype'], 'batch size': s['batch_size'],
  } for arm, name, s in sets]
  training = [{
      'arm': arm['name'],
      **{key: _text(value) for key, value in {**arm['loss'], **arm['train']}.items()},
  } for arm in arms]
  alone, costs = latency_rows(results), cost_rows(results)
  latency = ['## One prompt at a time', table(alone)] if alone else []
  if costs:
    latency += [_COST_NOTES, table(costs)]
  study = mechanism_rows(results['mechanisms'])
  if study:
    latency += ['## Test-time mechanisms', '![mechanisms](mechanisms.png)', _MECHANISM_NOTES, table(study)]
  parts = [
      f"# {results['experiment']} (seed {results['seed']})",
      f"    {results['command']}",
      f"## Speculative decoding at temperature {results['config']['evaluate']['temperature']:g}",
      table(comparison_rows(arms, published=results['target']['published'])),
      *(f'Gain is over the arm `{name}`.' for name in over),
      _NOTES,
      table(details),
      *(f'Without {name}: it could not be had.' for name in results['missing_sets']),
      *latency,
      '## Acceptance by slot',
      '![acceptance by slot](acceptance_by_slot.png)',
      'Share of rounds in which slots 1 to k were all accepted:',
      _slot_table(sets, 'acceptance_by_slot'),
      'Share of rounds by the number of drafts accepted; the chain breaker stands behind them:',
      _slot_table(sets, 'accepted_distribution', start=0),
      "Share of rounds in which slot k's draft equals the target's token, whatever came before:",
      _slot_table(sets, 'slot_accuracy'),
      '## Training',
      *(['![accepted length by steps](steps.png)'] if _by_steps(arms) else []),
      '![training](training.png)',
      table(training),
  ]
  sources = [{'set': name, **{key: _text(value) for key, value in source.items()}}
             for name, source in results['sets'].items() if source]
  if sources:
    parts += ['## Benchmarks', table(sources)]
  for title in ('target', 'data', 'machine'):
    parts += [f'## {title.capitalize()}', _pairs(results[title])]
  times = {**results['times'], 'total': sum(results['times'].values())}
  parts += ['## Seconds', _pairs({key: round(float(value), 1) for key, value in times.items()})]
  return '\n\n'.join(part.strip('\n') for part in parts) + '\n'


def acceptance_figure(arms: Sequence[Mapping[str, Any]]) -> Figure:
  """A panel for each set, a line for each arm: acceptance against slot."""
  names = list(dict.fromkeys(name for arm in arms for name in arm['sets']))
  figure, panels = _panels(len(names), columns=len(names))
  for panel, name in zip(panels, names):
    for i, arm in enumerate(arms):
      if name in arm['sets']:
        shares = arm['sets'][name]['acceptance_by_slot']
        panel.plot(range(1, len(shares) + 1), shares, label=arm['name'], color=_colour(i),
                   marker='o', markersize=3)
    panel.set(title=name, xlabel='slot k', ylabel='rounds with slots 1..k accepted')
    panel.set_ylim(bottom=0)
  _legend(figure, panels)
  return figure


def _by_steps(arms: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
  """{loss: its arms by number of steps}, where arms of one loss differ in it; empty where none do."""
  groups: dict[str, list[Mapping[str, Any]]] = {}
  for arm in sorted(arms, key=lambda arm: arm['train']['steps']):
    groups.setdefault(json.dumps(arm['loss']), []).append(arm)
  return {key: group for key, group in groups.items() if len({arm['train']['steps'] for arm in group}) > 1}


def steps_figure(arms: Sequence[Mapping[str, Any]]) -> Figure:
  """A panel for each set, a line for each loss: accepted length against training steps."""
  groups = list(_by_steps(arms).values())
  names = list(dict.fromkeys(name for group in groups for arm in group for name in arm['sets']))
  figure, panels = _panels(len(names), columns=3)
  for panel, name in zip(panels, names):
    for i, group in enumerate(groups):
      lengths = [arm['sets'][name]['accepted_length'] for arm in group]
      micro = [length['micro'] for length in lengths]
      errors = [[abs(length['micro_interval'][side] - length['micro']) for length in lengths] for side in (0, 1)]
      panel.errorbar([arm['train']['steps'] for arm in group], micro, errors, label=group[0]['name'].rpartition('-')[0],
                     color=_colour(i), marker='o', markersize=3, capsize=2)
    panel.set(title=name, xlabel='steps', ylabel='accepted length', xscale='log')
  _legend(figure, panels)
  return figure


def training_figure(arms: Sequence[Mapping[str, Any]]) -> Figure:
  """A panel for each quantity, a line for each arm: training records against step."""
  keys = [key for key in _CURVES if any(key in record for arm in arms for record in arm['curve'])]
  figure, panels = _panels(len(keys), columns=3)
  for panel, key in zip(panels, keys):
    for i, arm in enumerate(arms):
      records = [record for record in arm['curve'] if key in record]
      panel.plot([record['step'] for record in records], [record[key] for record in records],
                 label=arm['name'], color=_colour(i), linewidth=1.2)
    panel.set(title=_CURVES[key], xlabel='step')
  _legend(figure, panels)
  return figure


# ---- Pieces --------------------------------------------------------------------------------------


def _panels(count: int, columns: int) -> tuple[Figure, list[Any]]:
  """A figure with `count` axes, at least one."""
  count = max(count, 1)
  columns = min(max(columns, 1), count)
  rows = -(-count // columns)
  # A Figure of its own, not pyplot's: a notebook that calls this keeps its backend.
  figure = Figure(figsize=(4.2 * columns + 0.4, 3.1 * rows + 0.5), layout='constrained')
  panels = list(figure.subplots(rows, columns, squeeze=False).flat)
  for panel in panels:
    panel.spines[['top', 'right']].set_visible(False)
    panel.grid(alpha=0.25)
  for panel in panels[count:]:
    panel.set_visible(False)
  return figure, panels


def _place(groups: Sequence[str], arms: Sequence[str], group: str, arm: str) -> float:
  return groups.index(group) + (arms.index(arm) - (len(arms) - 1) / 2) * 0.8 / len(arms)


def _grouped_bars(
    panel: Any, groups: Sequence[str], arms: Sequence[str], lengths: Mapping[tuple[str, str], Mapping[str, Any]]
) -> None:
  """Accepted lengths {(group, arm): {micro, micro_interval}} with their intervals."""
  for i, arm in enumerate(arms):
    found = {group: lengths[group, arm] for group in groups if (group, arm) in lengths}
    at = [_place(groups, arms, group, arm) for group in found]
    micro = [length['micro'] for length in found.values()]
    errors = [[abs(length['micro_interval'][side] - length['micro']) for length in found.values()] for side in (0, 1)]
    panel.bar(at, micro, 0.8 / len(arms), yerr=errors, label=arm, color=_colour(i), error_kw={'linewidth': 0.8})
  panel.set_xticks(range(len(groups)), groups, rotation=45, ha='right')
  panel.set_ylim(bottom=1)


def _colour(i: int) -> str:
  return _COLOURS[i % len(_COLOURS)]


def _legend(figure: Figure, panels: Sequence[Any]) -> None:
  handles = {}
  for panel in panels:
    for handle, label in zip(*panel.get_legend_handles_labels()):
      handles.setdefault(label, handle)
  if handles:
    figure.legend(handles.values(), handles.keys(), loc='outside lower center', ncols=4,
                  frameon=False)


def table(rows: Sequence[Mapping[str, Any]], style: str = 'github') -> str:
  if not rows:
    return '(nothing evaluated)'
  # Without numparse the texts stay as they are: '3.500' does not become '3.5'.
  return tabulate.tabulate(rows, headers='keys', tablefmt=style, disable_numparse=True)


def _slot_table(sets: Sequence[tuple[str, str, Mapping[str, Any]]], key: str, start: int = 1) -> str:
  rows = []
  for arm, name, s in sets:
    shares = {str(k): f'{share:.3f}' for k, share in enumerate(s[key], start=start)}
    rows.append({'arm': arm, 'set': name, **shares})
  return table(rows)


def _pairs(values: Mapping[str, Any]) -> str:
  return table([{'what': key.replace('_', ' '), 'value': _text(value)}
                 for key, value in values.items()])


def _text(value: Any) -> str:
  """A number in four significant digits, the whole part always in full."""
  if isinstance(value, float):
    return f'{value:.0f}' if abs(value) >= 1000 else f'{value:.4g}'
  return str(value)


def with_interval(value: float, bounds: Sequence[float], form: str) -> str:
  return f'{value:{form}} [{bounds[0]:{form}}, {bounds[1]:{form}}]'


def exact_text(measures: Mapping[str, Any]) -> str:
  """Answers that are plain decoding's, of how many; '' where they were given."""
  identical = measures['identical_prompts']
  return '' if identical is None else f"{identical}/{measures['num_prompts']}"


def gain_text(found: Mapping[str, Any] | None) -> str:
  return with_interval(found['micro'], found['interval'], '+.1%') if found else ''
