"""The sets of prompts that drafters are evaluated on: held out from training, or trained on, and benchmarks."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools
import pathlib
from typing import Any

from absl import logging
import ml_collections

from dspec.data import benchmarks
from dspec.data import chat
from dspec.data import dataset
from dspec.errors import UserError
from dspec.models import target as target_lib

OF_DATA = ('held_out', 'trained_on')
NAMES = (*OF_DATA, *benchmarks.BENCHMARKS)


@dataclasses.dataclass(frozen=True)
class PromptSet:
  """Prompts as token ids.

  Attributes:
    ids: of each question's first turn.
    follow_up: (number of a question, token ids of its answers so far) -> token ids of the next turn, with what came
      before; None after the last one. None where every question has one turn.
    source: what the report says of it.
  """

  ids: tuple[tuple[int, ...], ...]
  follow_up: Callable[[int, Sequence[Sequence[int]]], list[int] | None] | None = None
  source: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def first(self, count: int) -> 'PromptSet':
    """Its first questions."""
    return dataclasses.replace(self, ids=self.ids[:count])


def load_benchmarks(config: ml_collections.ConfigDict, data_dir: pathlib.Path) -> dict[str, benchmarks.Benchmark]:
  """The benchmarks of `config.evaluate.sets`. One that cannot be had is named, and the others go on.

  Raises:
    UserError: if nothing is left to evaluate on.
  """
  found, problems = {}, []
  for name in config.evaluate.sets:
    if name not in OF_DATA:
      try:
        found[name] = benchmarks.load(name, prompts_dir=config.data.prompts_dir, data_dir=data_dir)
      except UserError as error:
        problems.append(str(error))
        logging.warning('%s\nThe evaluation goes on without it.', error)
  if problems and not found and not set(OF_DATA) & set(config.evaluate.sets):
    raise UserError('nothing is left of --config.evaluate.sets:\n' + '\n'.join(problems))
  return found


def make(
    config: ml_collections.ConfigDict, data: dataset.Dataset, found: Mapping[str, benchmarks.Benchmark],
    tokenizer: chat.Tokenizer, target_config: target_lib.TargetConfig
) -> dict[str, PromptSet]:
  """At most `config.evaluate.num_prompts` prompts of each set; those of a benchmark may be drawn by `.prompt_seed`.

  Args:
    config: the whole config.
    data: what was trained on, and what was not.
    found: as of `load_benchmarks`.
    tokenizer: of the target.
    target_config: the target's, for the length of its context.

  Raises:
    UserError: if no prompt of a set fits the context.
  """
  e, room, sets = config.evaluate, _room(config, target_config), {}
  for name in e.sets:
    if name in OF_DATA:
      sets[name] = PromptSet(tuple(map(tuple, _fitting(getattr(data, name), room, name)[: e.num_prompts])))
    elif name in found:
      problems = found[name].problems
      if e.prompt_seed is not None:
        problems = benchmarks.choose(problems, 0, e.prompt_seed)
      turns = [problem.turns for problem in problems]
      sets[name] = _benchmark(name, turns, tokenizer, room, e.num_prompts, found[name].metadata)
  return sets


def validation(
    config: ml_collections.ConfigDict, data: dataset.Dataset, target_config: target_lib.TargetConfig, count: int
) -> tuple[tuple[int, ...], ...]:
  """The last held-out prompts: to choose a checkpoint by, and so none that `make` reports.

  Args:
    config: the whole config.
    data: what was trained on, and what was not.
    target_config: the target's, for the length of its context.
    count: as `train.evaluate_prompts`, of one arm.

  Raises:
    UserError: if there are too few.
  """
  e = config.evaluate
  held_out = list(map(tuple, _fitting(data.held_out, _room(config, target_config), 'held_out')))
  reported = held_out[: e.num_prompts] if 'held_out' in e.sets else []
  left = [ids for ids in dict.fromkeys(held_out) if ids not in set(reported)]
  if len(left) < count:
    raise UserError(
        f'--config.train.evaluate_prompts={count}: of {len(held_out)} held-out prompts {len(reported)} are reported, '
        f'and {len(left)} others are left; lower it or --config.evaluate.num_prompts, or raise --config.data.held_out')
  return tuple(left[-count:])


def _room(config: ml_collections.ConfigDict, target_config: target_lib.TargetConfig) -> int:
  """Tokens that a prompt may have."""
  e = config.evaluate
  return target_config.max_length - e.max_new_tokens - max(
      e.block_size or config.drafter.block_size, e.latency_block_size)


def _benchmark(name, turns, tokenizer, room, count, source) -> PromptSet:
  # As long as it takes, and no longer: a template is slow to render.
  rendered, chosen = [], []
  for of_one in turns:
    ids = tokenizer.render_prompt(_messages(of_one[:1], ()))
    rendered.append(ids)
    if len(ids) <= room:
      chosen.append((ids, of_one))
    if len(chosen) == count:
      break
  _fitting(rendered, room, name)

  def follow_up(question, answers):
    of_one = chosen[question][1]
    if len(answers) == len(of_one):
      return None
    ids = tokenizer.render_prompt(_messages(of_one[: len(answers) + 1], map(tokenizer.decode, answers)))
    if len(ids) > room:
      logging.warning('%s: turn %d of a question does not fit the context', name, len(answers) + 1)
      return None
    return ids

  several = any(len(of_one) > 1 for _, of_one in chosen)
  return PromptSet(tuple(tuple(ids) for ids, _ in chosen), follow_up if several else None, source)


def _messages(turns: Sequence[str], answers) -> list[chat.Message]:
  """Turns of a user, each but the last one followed by its answer."""
  messages = []
  for turn, answer in itertools.zip_longest(turns, answers):
    messages.append({'role': 'user', 'content': turn})
    if answer is not None:
      messages.append({'role': 'assistant', 'content': answer})
  return messages


def _fitting(prompts: Sequence[Sequence[int]], room: int, name: str) -> list[Sequence[int]]:
  """The prompts that leave room in the target's context for the answer and one more block."""
  kept = [ids for ids in prompts if len(ids) <= room]
  if not kept:
    raise UserError(
        f'{name}: none of {len(prompts)} prompts has at most {room} tokens, which is what the context leaves; lower '
        '--config.evaluate.max_new_tokens or shorten the prompts'
    )
  if len(kept) < len(prompts):
    logging.warning('%s: %d of %d prompts do not fit the context', name, len(prompts) - len(kept), len(prompts))
  return kept
