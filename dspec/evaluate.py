"""Real speculative decoding of prompts, and what it was worth: accepted length, waste, tokens/s.

Conventions (arXiv 2606.11552 and its neighbours). A round is one draft and one verification. Its
gain counts the bonus token; the token of the prefill belongs to no round; the last round is cut at
the EOS or the length limit. The accepted length pools all rounds (micro) or averages per prompt
first, then over prompts (macro).

    plain = compile_autoregressive(target, params, ...)                      # once
    fast = compile_speculative(target, params, drafter, ...)                 # once for all drafters of one shape
    reference = decode_reference(plain, prompts, name)                       # once for each set of prompts
    evaluation = decode_speculatively(fast, drafter_params, reference, name)
    report = result(evaluation, reference.tokens_per_second, samples=2000, seed=0)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from dspec import json_lines
from dspec import multihost
from dspec import sharding
from dspec.decoding import autoregressive
from dspec.decoding import replay
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

Prompt = Sequence[int]
_NARROWEST = 128  # Width of prompts, in tokens.


# ---- Decoding ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A decoder that is compiled for few shapes of batches, never inside of a time that is measured.

  Attributes:
    compile: width P of prompts -> `(prompts_BxP, lengths_B, seeds_B) -> Rows`; a speculative one
      `(drafter_params, prompts_BxP, lengths_B, seeds_B) -> (Rows, Trace)`; one that replays takes the answers, by seed,
      before the prompts. Keeps what it has compiled.
    batch_size: B.
    width_limit: the widest prompts that fit the context.
    eos_ids: tokens that end an answer.
    dtype: of the matrix products.
    replays: whether it is given the answers; see `dspec.decoding.replay`.
  """

  compile: Callable[[int], Callable[..., Any]]
  batch_size: int
  width_limit: int
  eos_ids: tuple[int, ...]
  dtype: str
  replays: bool = False


@dataclasses.dataclass(frozen=True)
class Reference:
  """Autoregressive answers to a set of prompts. They depend on no drafter: all arms share them.

  Attributes:
    prompts: token ids; those of later turns of a conversation behind all first ones.
    questions: for each prompt the number of the question that it belongs to: with its later turns and other samples.
    tokens: the answer to each prompt, int32, its EOS included.
    batches: indices of the prompts that were decoded together, by length of their answers.
    seconds: wall-clock time of decoding these batches, without compilation.
  """

  prompts: tuple[tuple[int, ...], ...]
  questions: tuple[int, ...]
  tokens: tuple[np.ndarray, ...]
  batches: tuple[tuple[int, ...], ...]
  seconds: float

  @property
  def tokens_per_second(self) -> float:
    return sum(map(len, self.tokens)) / self.seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
  """What speculative decoding of one prompt did (S = K-1 draft slots).

  Attributes:
    prompt: token ids; pairs the records of two drafters.
    question: see `Reference`; intervals are over questions.
    tokens: the answer, int32, the prefill's token first.
    gained_R: tokens that each round added, bonus included, after the cut.
    accepted_R: drafts among them.
    correct_S: rounds whose draft at the slot equals the token finally output there, whatever came
      before.
    inside_S: rounds whose slot lies inside the answer; only there is the right token known.
    wasted: correct drafts behind a wrong one.
    identical: whether the answer is the autoregressive one, token for token.
    ended: whether it ended in an EOS, not at the length limit.
  """

  prompt: tuple[int, ...]
  question: int
  tokens: np.ndarray
  gained_R: np.ndarray
  accepted_R: np.ndarray
  correct_S: np.ndarray
  inside_S: np.ndarray
  wasted: int
  identical: bool
  ended: bool

  @property
  def rounds(self) -> int:
    return len(self.gained_R)

  @property
  def gained(self) -> int:
    """Tokens of the answer without the prefill's."""
    return int(self.gained_R.sum())

  def to_json(self) -> dict[str, Any]:
    """All but the prompt and its question."""
    values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[2:]}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}

  @classmethod
  def from_json(cls, prompt: Sequence[int], question: int, line: Mapping[str, Any]) -> 'Record':
    """The inverse of `to_json`; the line may hold more."""
    values = {f.name: line[f.name] for f in dataclasses.fields(cls)[2:]}
    arrays = {name: np.array(value, np.int32) for name, value in values.items() if isinstance(value, list)}
    return cls(tuple(prompt), question, **{**values, **arrays})


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
  """One drafter, or several of the same kind, on one set of prompts.

  Attributes:
    records: one for each prompt, in the reference's order.
    seconds: wall-clock time of decoding, without compilation.
    batch_size: rows decoded at once.
    dtype: of the matrix products.
    replayed: whether the answers were given: neither their speed nor that they are the target's was seen.
  """

  records: tuple[Record, ...]
  seconds: float
  batch_size: int
  dtype: str
  replayed: bool = False

  @property
  def tokens_per_second(self) -> float:
    return sum(len(record.tokens) for record in self.records) / self.seconds


def pool(evaluations: Sequence[Evaluation]) -> Evaluation:
  """Several drafters on the same prompts as one: of each question all rounds count, whoever drafted them."""
  records = tuple(record for evaluation in evaluations for record in evaluation.records)
  return dataclasses.replace(
      evaluations[0], records=records, seconds=sum(evaluation.seconds for evaluation in evaluations))


def prompt_width(length: int, limit: int) -> int:
  """The width that a prompt of this many tokens is decoded in: few widths, so that few programs are compiled.

  Args:
    length: of the prompt.
    limit: the widest that fits the context.
  """
  width = _NARROWEST
  while width < length:
    width *= 4
  return max(min(width, limit), length)


def compile_autoregressive(
    target: target_lib.Target,
    params: Any,
    *,
    batch_size: int,
    max_new_tokens: int,
    how: sampling.Sampling = sampling.GREEDY,
    key: jax.Array | None = None,
) -> Decoder:
  """One-token decoding.

  Args:
    target: the target; its dtype is that of the matrix products.
    params: its parameters.
    batch_size: rows decoded at once.
    max_new_tokens: length limit of every answer.
    how: how tokens are drawn.
    key: source of randomness; needed only above temperature 0.
  """
  params, key = sharding.put(params), jax.random.key(0) if key is None else key

  def compile_(width: int):
    prompts_BxP, lengths_B, seeds_B = _batch_shape(batch_size, width)
    program = autoregressive.generate.lower(
        target, params, prompts_BxP, lengths_B, key, seeds_B, max_new_tokens=max_new_tokens, how=how
    ).compile()
    return lambda prompts_BxP, lengths_B, seeds_B: program(params, prompts_BxP, lengths_B, key, seeds_B)

  return _decoder(compile_, target, batch_size, max_new_tokens)


def compile_speculative(
    target: target_lib.Target,
    target_params: Any,
    drafter: drafter_lib.Drafter,
    drafter_params: Any,
    *,
    batch_size: int,
    max_new_tokens: int,
    how: sampling.Sampling = sampling.GREEDY,
    drafting: speculative.Drafting = speculative.Drafting(),
    key: jax.Array | None = None,
) -> Decoder:
  """Speculative decoding, for all drafters of this shape.

  Args:
    target: the target.
    target_params: its parameters.
    drafter: the drafter; its config holds the decode-time block size.
    drafter_params: its parameters, or only their shapes.
    batch_size: rows decoded at once.
    max_new_tokens: length limit of every answer.
    how: how the target's tokens are drawn.
    drafting: what is drafted in a round.
    key: source of randomness; needed only above temperature 0.
  """
  target_params, key = sharding.put(target_params), jax.random.key(0) if key is None else key
  drafter_shapes = sharding.shapes(drafter_params)

  def compile_(width: int):
    prompts_BxP, lengths_B, seeds_B = _batch_shape(batch_size, width)
    program = speculative.generate.lower(
        target, target_params, drafter, drafter_shapes, prompts_BxP, lengths_B, key, seeds_B,
        max_new_tokens=max_new_tokens, how=how, drafting=drafting,
    ).compile()
    return lambda drafter_params, prompts_BxP, lengths_B, seeds_B: program(
        target_params, drafter_params, prompts_BxP, lengths_B, key, seeds_B)

  return _decoder(compile_, target, batch_size, max_new_tokens + drafter.config.block_size)


def compile_replay(
    target: target_lib.Target,
    target_params: Any,
    drafter: drafter_lib.Drafter,
    drafter_params: Any,
    *,
    batch_size: int,
    max_new_tokens: int,
) -> Decoder:
  """The rounds of `compile_speculative`, of one greedy draft each, towards the reference's answers.

  Arguments as there; the answers may have been drawn at any temperature.
  """
  target_params = sharding.put(target_params)
  drafter_shapes = sharding.shapes(drafter_params)

  def compile_(width: int):
    prompts_BxP, lengths_B, _ = _batch_shape(batch_size, width)
    answers_BxM, _, _ = _batch_shape(batch_size, max_new_tokens)
    program = replay.generate.lower(
        target, target_params, drafter, drafter_shapes, prompts_BxP, lengths_B, answers_BxM, lengths_B).compile()

    def run(drafter_params, answers, prompts_BxP, lengths_B, seeds_B):
      chosen = [answers[i] for i in seeds_B]
      answers_BxM = np.stack([np.pad(answer, (0, max_new_tokens - len(answer))) for answer in chosen])
      answer_lengths_B = np.array([len(answer) for answer in chosen], np.int32)
      return program(target_params, drafter_params, prompts_BxP, lengths_B, answers_BxM, answer_lengths_B)

    return run

  decoder = _decoder(compile_, target, batch_size, max_new_tokens + drafter.config.block_size)
  return dataclasses.replace(decoder, replays=True)


def _batch_shape(batch_size: int, width: int) -> tuple[jax.ShapeDtypeStruct, ...]:
  shape = jax.ShapeDtypeStruct
  return (
      shape((batch_size, width), jnp.int32), shape((batch_size,), jnp.int32), shape((batch_size,), jnp.uint32))


def _decoder(compile_: Callable[[int], Any], target: target_lib.Target, batch_size: int, reserved: int) -> Decoder:
  config = target.config
  return Decoder(
      functools.cache(compile_), batch_size, config.max_length - reserved, config.eos_ids,
      jnp.dtype(target.dtype).name)


def decode_reference(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    name: str,
    *,
    questions: Sequence[int] | None = None,
    follow_up: Callable[[int, list[np.ndarray]], Prompt | None] | None = None,
    path: pathlib.Path | None = None,
) -> Reference:
  """Answers prompts one token at a time.

  How long an answer becomes is not known before. So where answers ended on their own, they are decoded once more, in
  batches of like length: these are what drafters are timed on too, and in neither do short answers wait for long ones.

  Args:
    decoder: from `compile_autoregressive`.
    prompts: token ids of each, at least one. Sampling of prompt i is seeded with i.
    name: what the progress bar shows.
    questions: see `Reference`; by default every prompt is one.
    follow_up: (number of a prompt, the answers so far) -> the prompt of the next turn, or None after the last one.
    path: a file that answers are appended to, and read from if it is there.

  Raises:
    UserError: if there is no prompt, or one is empty or too wide.
  """
  if not prompts:
    raise UserError(f'{name}: no prompts to evaluate')
  first = len(prompts)
  prompts, questions = [tuple(prompt) for prompt in prompts], list(questions or range(first))
  conversation = list(range(first))  # Of each prompt, the first turn that it continues.
  tokens: list[np.ndarray] = []

  def answer(i, rows, row):
    return {'tokens': rows.tokens_BxT[row, len(prompts[i]) : rows.lengths_B[row]].tolist()}

  while len(tokens) < len(prompts):
    new = range(len(tokens), len(prompts))
    widths = _widths(decoder, prompts, name)
    batches = _batches(new, decoder.batch_size, lambda i: (widths[i], len(prompts[i])))
    lines, seconds = _decode(decoder, (), prompts, widths, batches, name, path, answer)
    tokens += [np.array(lines[i]['tokens'], np.int32) for i in new]
    for i in new if follow_up else ():
      start = conversation[i]
      answers = [tokens[j] for j in range(len(tokens)) if conversation[j] == start]
      prompt = follow_up(start, answers)
      if prompt is not None:
        prompts.append(tuple(prompt))
        questions.append(questions[start])
        conversation.append(start)
  timed = _batches(
      range(len(prompts)), decoder.batch_size, lambda i: (widths[i], len(tokens[i]), len(prompts[i])))
  if len(prompts) > first or set(map(frozenset, timed)) != set(map(frozenset, batches)):
    again = path and path.with_suffix(f'.timed{path.suffix}')
    _, seconds = _decode(decoder, (), prompts, widths, timed, f'{name}, timed', again, lambda *_: {})
  return Reference(tuple(prompts), tuple(questions), tuple(tokens), timed, seconds)


def decode_speculatively(
    decoder: Decoder,
    drafter_params: Any,
    reference: Reference,
    name: str,
    *,
    path: pathlib.Path | None = None,
) -> Evaluation:
  """Answers the reference's prompts with a drafter and measures every round.

  Batches are the same as the reference's, so that the two times may be compared. Rows that fill
  the last batch cost time in both and count in neither: for exact speeds take a multiple of the
  batch size.

  Args:
    decoder: from `compile_speculative` or `compile_replay`.
    drafter_params: the drafter's parameters.
    reference: from `decode_reference`, of the same batch size.
    name: what the progress bar shows.
    path: a file that records are appended to, and read from if it is there.
  """
  prompts, questions = reference.prompts, reference.questions

  def describe(i, output, row):
    rows, trace = output
    return measure(rows, trace, row, prompts[i], questions[i], reference.tokens[i], decoder.eos_ids).to_json()

  args = (sharding.put(drafter_params), *([reference.tokens] if decoder.replays else []))
  lines, seconds = _decode(
      decoder, args, prompts, _widths(decoder, prompts, name), reference.batches, name, path, describe)
  records = tuple(Record.from_json(prompts[i], questions[i], lines[i]) for i in range(len(prompts)))
  return Evaluation(records, seconds, decoder.batch_size, decoder.dtype, decoder.replays)


def validator(
    target: target_lib.Target, target_params: Any, drafter: drafter_lib.Drafter, prompts: Sequence[Prompt], *,
    max_new_tokens: int
) -> Callable[[Any], float]:
  """A function of a drafter's parameters: the accepted length, over all rounds, on a few prompts decoded as one batch.

  At temperature 0. The program is compiled at the first call and takes the parameters as they lie on their devices; all
  processes call it together, and get the same.

  Args:
    target: the target.
    target_params: its parameters.
    drafter: the drafter; its config holds the decode-time block size.
    prompts: token ids of each.
    max_new_tokens: length limit of every answer.
  """
  decoders = []

  def validate(drafter_params: Any) -> float:
    drafter_params = sharding.put(target_lib.cast(drafter_params, drafter.dtype))
    if not decoders:
      decoders.append(compile_speculative(
          target, target_params, drafter, drafter_params, batch_size=len(prompts), max_new_tokens=max_new_tokens))
    [decoder] = decoders
    width = max(_widths(decoder, prompts, 'validation'))
    _, trace = sharding.to_host(
        decoder.compile(width)(drafter_params, *_rows(prompts, range(len(prompts)), len(prompts), width)))
    return float(trace.gained_BxR.sum() / max((trace.starts_BxR >= 0).sum(), 1))

  return validate


def _widths(decoder: Decoder, prompts: Sequence[Prompt], name: str) -> list[int]:
  lengths, limit = [len(prompt) for prompt in prompts], decoder.width_limit
  if min(lengths) < 1 or max(lengths) > limit:
    raise UserError(f'{name}: prompts must have 1 to {limit} tokens, these have {min(lengths)} to {max(lengths)}')
  return [prompt_width(length, limit) for length in lengths]


def _batches(
    indices: Iterable[int], batch_size: int, size: Callable[[int], Any]
) -> tuple[tuple[int, ...], ...]:
  """Batches of like size, the largest first."""
  order = sorted(indices, key=size, reverse=True)
  return tuple(tuple(order[start : start + batch_size]) for start in range(0, len(order), batch_size))


def _decode(
    decoder: Decoder, args: tuple, prompts: Sequence[Prompt], widths: Sequence[int], batches: Sequence[Sequence[int]],
    name: str, path: pathlib.Path | None, describe: Callable[[int, Any, int], dict[str, Any]]
) -> tuple[dict[int, dict[str, Any]], float]:
  """{index of a prompt: its line}, and the seconds of decoding; batches that `path` has are not decoded again.

  Args:
    decoder: what decodes.
    args: what its programs take before the prompts.
    prompts: all, by index.
    widths: of all.
    batches: indices of the prompts that are wanted.
    name: of the progress bar.
    path: as of `decode_reference`.
    describe: (index, output of the program as numpy arrays, row) -> what is to be kept.
  """
  lines = multihost.from_first(lambda: json_lines.read_whole(path)) if path else []
  known = {line['index']: line for line in lines}
  todo = [batch for batch in batches if not all(i in known for i in batch)]
  silent = not todo or not multihost.is_first()
  with tqdm.tqdm(total=sum(map(len, todo)), desc=name, unit='prompt', disable=silent) as bar:
    for batch in todo:
      program = decoder.compile(max(widths[i] for i in batch))
      prompts_BxP, lengths_B, seeds_B = _rows(prompts, batch, decoder.batch_size, max(widths[i] for i in batch))
      begin = time.perf_counter()
      output = jax.block_until_ready(program(*args, prompts_BxP, lengths_B, seeds_B))
      seconds = time.perf_counter() - begin
      output = sharding.to_host(output)
      lines = [{'index': i, 'seconds': seconds / len(batch), **describe(i, output, row)} for row, i in enumerate(batch)]
      known.update((line['index'], line) for line in lines)
      if path and multihost.is_first():
        json_lines.append(path, *lines)
      bar.update(len(batch))
  wanted = {i: known[i] for batch in batches for i in batch}
  return wanted, sum(line['seconds'] for line in wanted.values())


def _rows(
    prompts: Sequence[Prompt], batch: Sequence[int], batch_size: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """`prompts_BxP, lengths_B, seeds_B` of a batch, filled by repeating its rows, which end when their originals do."""
  indices = np.resize(np.array(batch, np.uint32), batch_size)
  prompts_BxP = np.zeros((batch_size, width), np.int32)
  for row, i in enumerate(indices):
    prompts_BxP[row, : len(prompts[i])] = prompts[i]
  return prompts_BxP, np.array([len(prompts[i]) for i in indices], np.int32), indices


# ---- Measures ------------------------------------------------------------------------------------


def measure(
    rows: autoregressive.Rows,
    trace: speculative.Trace,
    row: int,
    prompt: Prompt,
    question: int,
    reference: np.ndarray,
    eos_ids: tuple[int, ...],
) -> Record:
  """What happened to a row of a batch.

  Args:
    rows: finished rows, numpy arrays.
    trace: of their rounds, numpy arrays.
    row: which one.
    prompt: its token ids.
    question: the number of its question.
    reference: the autoregressive answer.
    eos_ids: tokens that end an answer.
  """
  slots_S = np.arange(1, trace.drafts_BxRxS.shape[-1] + 1)
  length = rows.lengths_B[row]
  output = rows.tokens_BxT[row, :length]
  ran_R = trace.starts_BxR[row] >= 0
  starts_R, drafts_RxS = trace.starts_BxR[row][ran_R], trace.drafts_BxRxS[row][ran_R]
  gained_R = trace.gained_BxR[row][ran_R]
  accepted_R = np.minimum(trace.accepted_BxR[row][ran_R], gained_R)
  positions_RxS = starts_R[:, None] + slots_S
  inside_RxS = positions_RxS < length
  right_RxS = output[np.minimum(positions_RxS, length - 1)]
  correct_RxS = inside_RxS & (drafts_RxS == right_RxS)
  tokens = output[len(prompt) :]
  return Record(
      prompt=tuple(prompt),
      question=question,
      tokens=tokens,
      gained_R=gained_R,
      accepted_R=accepted_R,
      correct_S=correct_RxS.sum(0),
      inside_S=inside_RxS.sum(0),
      wasted=int((correct_RxS & (slots_S > accepted_R[:, None])).sum()),
      identical=np.array_equal(tokens, reference),
      ended=bool(tokens[-1] in eos_ids),
  )


def summarise(records: Sequence[Record], *, samples: int, seed: int) -> dict[str, Any]:
  """A set's measures, JSON-able, under the names that `dspec.report` uses.

  - accepted_length: see the module; 95 % intervals by the percentile bootstrap over prompts.
    Prompts without a round (the prefill gave an EOS) have none and are left out; if no prompt has
    a round, all these are 0.
  - acceptance_by_slot: of all rounds, the share whose slots 1..k were all accepted, after the cut.
  - slot_accuracy: of the rounds whose slot k lies inside the answer, the share whose draft there
    equals the token finally output, whatever came before.
  - accepted_distribution: of all rounds, the share that accepted 0, 1, .. K-1 drafts, after the cut.
  - chain_breaker: the mean slot of the first wrong draft, of the rounds that have one before their end; None without.
  - waste (arXiv 2606.11552, Table 1): a slot inside the answer is correct if its draft equals the
    token finally output there; the bonus token's slot counts as correct. Of all correct slots, the
    share behind a wrong draft, and so thrown away: wasted / (gained + wasted), pooled over rounds.

  Args:
    records: of at least one prompt.
    samples: bootstrap resamples.
    seed: of the resampling.

  Returns:
    num_prompts, new_tokens (those of the rounds, without the prefill's), rounds, identical_prompts,
    block_size, ended_share, waste, accepted_length {micro, micro_interval, macro, macro_interval},
    acceptance_by_slot [S], accepted_distribution [S+1], chain_breaker, slot_accuracy [S].
  """
  accepted = np.concatenate([record.accepted_R for record in records])
  bonus = np.concatenate([record.gained_R for record in records]) > accepted  # Not cut before it.
  num_slots = len(records[0].correct_S)
  correct_S = sum(record.correct_S for record in records)
  inside_S = sum(record.inside_S for record in records)
  gained = sum(record.gained for record in records)
  wasted = sum(record.wasted for record in records)
  share_S1 = np.bincount(accepted, minlength=num_slots + 1) / max(len(accepted), 1)
  broken = accepted[bonus & (accepted < num_slots)]
  return {
      'num_prompts': len(records),
      'new_tokens': gained,
      'rounds': len(accepted),
      'identical_prompts': sum(record.identical for record in records),
      'block_size': num_slots + 1,
      'ended_share': sum(record.ended for record in records) / len(records),
      'waste': wasted / max(gained + wasted, 1),
      'accepted_length': accepted_length(sums(records), samples=samples, seed=seed),
      'acceptance_by_slot': share_S1[::-1].cumsum()[::-1][1:].tolist(),
      'accepted_distribution': share_S1.tolist(),
      'chain_breaker': float(broken.mean() + 1) if len(broken) else None,
      'slot_accuracy': (correct_S / np.maximum(inside_S, 1)).tolist(),
  }


def sums(records: Sequence[Record]) -> np.ndarray:
  """`[2, N]`: tokens gained and rounds of each question, all its turns and samples together."""
  found: dict[int, list[int]] = {}
  for record in records:
    of_question = found.setdefault(record.question, [0, 0])
    of_question[0] += record.gained
    of_question[1] += record.rounds
  return np.array([found[question] for question in sorted(found)], np.float64).reshape(-1, 2).T


def accepted_length(sums_2xN: np.ndarray, *, samples: int, seed: int) -> dict[str, Any]:
  """{micro, micro_interval, macro, macro_interval} of N questions' `sums`, see `summarise`."""
  drafted = sums_2xN[:, sums_2xN[1] > 0]
  micro, micro_interval = _bootstrap(_micro, drafted, samples, seed)
  macro, macro_interval = _bootstrap(_macro, drafted, samples, seed)
  return {'micro': micro, 'micro_interval': micro_interval, 'macro': macro, 'macro_interval': macro_interval}


def gain(
    records: Sequence[Record], baseline: Sequence[Record], *, samples: int, seed: int
) -> dict[str, Any]:
  """How much longer the accepted length is than the baseline's, on the same prompts.

  Args:
    records: of the drafter in question.
    baseline: of the drafter to compare with; same prompts, same order.
    samples: bootstrap resamples; a resample draws prompts, and takes both drafters' rounds of each.
    seed: of the resampling.

  Returns:
    {'micro': ratio of the micro accepted lengths - 1, 'interval': its 95 % interval}; zeros if
    there is no round.

  Raises:
    UserError: if the prompts differ.
  """
  prompts = lambda records: {(record.question, record.prompt) for record in records}
  if prompts(records) != prompts(baseline):
    raise UserError('a gain needs the same prompts in the same order: evaluate both on one set')
  return gain_of_sums(sums(records), sums(baseline), samples=samples, seed=seed)


def gain_of_sums(
    sums_2xN: np.ndarray, baseline_2xN: np.ndarray, *, samples: int, seed: int
) -> dict[str, Any]:
  """`gain` of the `sums` of the same N questions in the same order."""
  ratio, interval = _bootstrap(_ratio, _paired(sums_2xN, baseline_2xN), samples, seed)
  return {'micro': ratio, 'interval': interval}


def mean_of_sets(
    sets: Mapping[str, np.ndarray], baseline: Mapping[str, np.ndarray] | None, *, samples: int, seed: int
) -> dict[str, Any]:
  """The mean of several sets' micro accepted lengths, each set counting alike, as in the tables of arXiv 2606.11552.

  Args:
    sets: `sums` by set; each holds a round or more.
    baseline: those of the drafter to compare with, on the same questions in the same order; None without.
    samples: bootstrap resamples; questions are drawn within each set.
    seed: of the resampling.

  Returns:
    {mean, interval, gain: {micro, interval} or None}; gain is that of the means.
  """
  rng = np.random.default_rng(seed)
  columns = [_paired(ours, baseline[name] if baseline else ours) for name, ours in sets.items()]
  drawn = [c[:, rng.integers(0, c.shape[1], (samples, c.shape[1]))] for c in columns]
  ours = lambda of: np.mean([_micro(c[:2]) for c in of], axis=0)
  ratio = lambda of: ours(of) / np.mean([_micro(c[2:]) for c in of], axis=0) - 1
  interval = lambda values: np.percentile(values, [2.5, 97.5]).tolist()
  gain = {'micro': float(ratio(columns)), 'interval': interval(ratio(drawn))} if baseline else None
  return {'mean': float(ours(columns)), 'interval': interval(ours(drawn)), 'gain': gain}


def _paired(sums_2xN: np.ndarray, baseline_2xN: np.ndarray) -> np.ndarray:
  """`[4, M]`: both sums of the questions in which both have rounds."""
  both = (sums_2xN[1] > 0) & (baseline_2xN[1] > 0)
  return np.concatenate([sums_2xN[:, both], baseline_2xN[:, both]])


def _ratio(columns_4xN: np.ndarray) -> np.ndarray:
  return _micro(columns_4xN[:2]) / _micro(columns_4xN[2:]) - 1


def result(
    evaluation: Evaluation, plain_tokens_per_second: float, *, samples: int, seed: int
) -> dict[str, Any]:
  """What `dspec.report` wants of an arm on a set, beside plain decoding's speed; `gain` is for the caller to fill.

  A replay has no speed and no identical prompts: None.
  """
  measured = summarise(evaluation.records, samples=samples, seed=seed)
  if evaluation.replayed:
    measured['identical_prompts'] = None
  return {
      **measured,
      'dtype': evaluation.dtype,
      'batch_size': evaluation.batch_size,
      'speculative_tokens_per_second': None if evaluation.replayed else evaluation.tokens_per_second,
      'autoregressive_tokens_per_second': plain_tokens_per_second,
      'sums': sums(evaluation.records).astype(int).tolist(),
      'gain': None,
  }


def _micro(sums_2xN: np.ndarray) -> np.ndarray:
  return sums_2xN[0].sum(-1) / sums_2xN[1].sum(-1)


def _macro(sums_2xN: np.ndarray) -> np.ndarray:
  return (sums_2xN[0] / sums_2xN[1]).mean(-1)


def _bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray], columns_CxN: np.ndarray, samples: int, seed: int
) -> tuple[float, list[float]]:
  """A statistic of N prompts and its 95 % percentile interval; zeros if there is no prompt."""
  n = columns_CxN.shape[1]
  if not n:
    return 0.0, [0.0, 0.0]
  drawn = np.random.default_rng(seed).integers(0, n, (samples, n))
  interval = np.percentile(statistic(columns_CxN[:, drawn]), [2.5, 97.5])
  return float(statistic(columns_CxN)), interval.tolist()
