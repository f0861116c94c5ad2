"""Test-time mechanisms on trained drafters: do self-selection and draft trees add to what a loss gives?

Every arm decodes the same prompts with every mechanism, temperature and batch size, in float32, and is compared with
plain decoding that draws with the same key. Each result is a line of `mechanisms.jsonl` as soon as it is there, so that
a stopped study goes on where it was.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from absl import logging
import jax
import ml_collections
import numpy as np

from dspec import evaluate
from dspec import json_lines
from dspec import multihost
from dspec import sharding
from dspec import train
from dspec.data import evaluation_sets
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

OPTIONS = ('block_size', 'drafter_temperature', 'num_drafts', 'tree_size')
# What a result is of; the rest of its line was measured.
_SETTING = ('arm', 'set', 'mechanism', *OPTIONS, 'temperature', 'batch_size', 'num_prompts', 'max_new_tokens')


def drafting(options: Mapping[str, Any] | ml_collections.ConfigDict) -> speculative.Drafting:
  """What the `OPTIONS` of a mechanism ask for.

  Raises:
    UserError: for values out of range or that do not go together.
  """
  return speculative.Drafting(
      sampling.Sampling(options.get('drafter_temperature', 0.0)), num_drafts=options.get('num_drafts', 1),
      tree_size=options.get('tree_size', 0),
  )


def check(config: ml_collections.ConfigDict) -> None:
  """Refuses what `run` could not do.

  Raises:
    UserError: with the option and what is wrong.
  """
  m = config.mechanisms
  for entry in m.of:
    if not (isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[1], Mapping)):
      raise UserError(f"--config.mechanisms.of: {entry!r} must be a pair as ('select 4', {{'num_drafts': 4}})")
    name, changes = entry
    unknown = [option for option in changes if option not in OPTIONS]
    if unknown:
      raise UserError(f'--config.mechanisms.of, {name!r}: no option {unknown[0]!r}; there are: {", ".join(OPTIONS)}')
    try:
      drafting(changes)
      if changes.get('block_size', 2) < 2:
        raise UserError(f"block_size is {changes['block_size']}: must be at least 2")
    except UserError as error:
      raise UserError(f'--config.mechanisms.of, {name!r}: {error}') from error
  names = [name for name, _ in m.of]
  if len(set(names)) < len(names):
    raise UserError(f'--config.mechanisms.of: names must differ, these are {", ".join(names)}')
  if m.of and not (m.sets and m.temperatures and m.batch_sizes):
    raise UserError('--config.mechanisms.of: needs mechanisms.sets, mechanisms.temperatures and mechanisms.batch_sizes')
  if m.of and not set(m.sets) <= set(config.evaluate.sets):
    raise UserError(f'--config.mechanisms.sets={m.sets}: must be among evaluate.sets={config.evaluate.sets}')
  if not all(temperature >= 0 for temperature in m.temperatures):
    raise UserError(f'--config.mechanisms.temperatures={m.temperatures}: must be at least 0')
  if not all(isinstance(size, int) and size >= 1 for size in m.batch_sizes):
    raise UserError(f'--config.mechanisms.batch_sizes={m.batch_sizes}: must be whole numbers of at least 1')


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, target_config: target_lib.TargetConfig, params: Any,
    trained: Sequence[tuple], sets: Mapping[str, evaluation_sets.PromptSet],
) -> list[dict[str, Any]]:
  """Decodes what `config.mechanisms` asks for, but for what the workdir already has.

  Args:
    config: the whole config.
    workdir: of mechanisms.jsonl.
    target_config: the target's.
    params: the target's parameters, float32.
    trained: (name, config, drafter parameters, summary) of each arm.
    sets: of prompts; of conversations the first turns.

  Returns:
    A result for each arm, mechanism, temperature, batch size and set: the setting's names and values, and
    gained and rounds (lists, one number a prompt), tokens (with the prefill's), seconds, plain_tokens, plain_seconds,
    identical_prompts.
  """
  m = config.mechanisms
  path = workdir / 'mechanisms.jsonl'
  done = {_setting(line): line for line in multihost.from_first(lambda: json_lines.read_whole(path))}
  target, params = target_lib.Target(target_config), sharding.put(params)
  sets = {name: sets[name].first(m.num_prompts).ids for name in m.sets}
  results = []
  for temperature in m.temperatures:
    for batch_size in m.batch_sizes:
      options = {
          'batch_size': batch_size, 'max_new_tokens': m.max_new_tokens, 'how': sampling.Sampling(temperature),
          'key': jax.random.key(config.seed),
      }
      references = None
      for mechanism, changes in m.of:
        compiled = {}
        for arm_name, arm, arm_params, _ in trained:
          for set_name, prompts in sets.items():
            setting = {
                'arm': arm_name, 'set': set_name, 'mechanism': mechanism,
                **{name: changes.get(name) for name in OPTIONS}, 'temperature': temperature,
                'batch_size': batch_size, 'num_prompts': len(prompts), 'max_new_tokens': m.max_new_tokens,
            }
            if _setting(setting) not in done:
              references = references or _references(target, params, sets, options)
              shape = train.make_drafter_config(arm, target_config)
              shape = dataclasses.replace(shape, block_size=changes.get('block_size') or shape.block_size)
              drafter = drafter_lib.Drafter(shape)
              if drafter not in compiled:
                compiled[drafter] = evaluate.compile_speculative(
                    target, params, drafter, arm_params, drafting=drafting(changes), **options
                )
              name = f'{arm_name}, {set_name}, {mechanism}, T={temperature:g}, batch {batch_size}'
              measured = _measure(compiled[drafter], arm_params, references[set_name], name)
              done[_setting(setting)] = {**setting, **measured}
              if multihost.is_first():
                json_lines.append(path, done[_setting(setting)])
            results.append(done[_setting(setting)])
  logging.info('mechanisms: %d results in %s', len(results), path)
  return results


def _setting(line: dict[str, Any]) -> str:
  return json.dumps([line.get(name) for name in _SETTING])


def _references(target, params, sets, options) -> dict[str, evaluate.Reference]:
  plain = evaluate.compile_autoregressive(target, params, **options)
  temperature = options['how'].temperature
  return {
      name: evaluate.decode_reference(
          plain, prompts, f"plain, {name}, T={temperature:g}, batch {options['batch_size']}")
      for name, prompts in sets.items()
  }


def _measure(decoder, arm_params, reference: evaluate.Reference, name: str) -> dict[str, Any]:
  evaluation = evaluate.decode_speculatively(decoder, arm_params, reference, name)
  gained, rounds = evaluate.sums(evaluation.records).astype(int).tolist()
  return {
      'gained': gained,
      'rounds': rounds,
      'tokens': sum(len(record.tokens) for record in evaluation.records),
      'seconds': evaluation.seconds,
      'plain_tokens': sum(map(len, reference.tokens)),
      'plain_seconds': reference.seconds,
      'identical_prompts': sum(record.identical for record in evaluation.records),
  }


def summarise(results: Sequence[dict[str, Any]], *, samples: int, seed: int) -> list[dict[str, Any]]:
  """The results with accepted lengths and gains.

  Args:
    results: of `run`.
    samples: bootstrap resamples.
    seed: of the resampling.

  Returns:
    For each result its setting and accepted_length {micro, micro_interval, macro, macro_interval}; speed_up, over
    plain decoding; identical_prompts; over_mechanism and over_arm, the gains {over, micro, interval} over the first
    mechanism of the same arm and over the first arm with the same mechanism, None for the first ones.
  """
  sums = lambda result: np.array([result['gained'], result['rounds']], np.float64)
  place = lambda result: tuple(result[name] for name in ('set', 'temperature', 'batch_size'))
  first_mechanism, first_arm = {}, {}
  for result in results:
    first_mechanism.setdefault((*place(result), result['arm']), result)
    first_arm.setdefault((*place(result), result['mechanism']), result)
  options = {'samples': samples, 'seed': seed}

  def gain(result, base, name):
    if base is result:
      return None
    return {'over': base[name], **evaluate.gain_of_sums(sums(result), sums(base), **options)}

  return [{
      **{name: result[name] for name in _SETTING},
      'accepted_length': evaluate.accepted_length(sums(result), **options),
      'speed_up': result['tokens'] / result['seconds'] / (result['plain_tokens'] / result['plain_seconds']),
      'identical_prompts': result['identical_prompts'],
      'over_mechanism': gain(result, first_mechanism[(*place(result), result['arm'])], 'mechanism'),
      'over_arm': gain(result, first_arm[(*place(result), result['mechanism'])], 'arm'),
  } for result in results]
