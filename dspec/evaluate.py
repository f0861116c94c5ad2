"""Real speculative decoding of prompts, and what it was worth: accepted length, waste, tokens/s.

Conventions (arXiv 2606.11552 and its neighbours). A round is one draft and one verification. Its
gain counts the bonus token; the token of the prefill belongs to no round; the last round is cut at
the EOS or the length limit. The accepted length pools all rounds (micro) or averages per prompt
first, then over prompts (macro).

    decode = compile_autoregressive(target, params, ...)        # once
    fast = compile_speculative(target, params, drafter, ...)    # once for all drafters of one shape
    reference = decode_reference(decode, prompts, name)         # once for each set of prompts
    evaluation = decode_speculatively(fast, drafter_params, reference, name)
    report = result(evaluation, reference.tokens_per_second, samples=2000, seed=0)
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from dspec import multihost
from dspec import sharding
from dspec.decoding import autoregressive
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

Prompt = Sequence[int]


# ---- Decoding ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A decoder compiled for one shape of batch, so that no measured time holds a compilation.

  Attributes:
    run: `(prompts_BxP, lengths_B) -> Rows`; a speculative one
      `(drafter_params, prompts_BxP, lengths_B) -> (Rows, Trace)`.
    batch_size: B.
    prompt_width: P.
    eos_ids: tokens that end an answer.
    dtype: of the matrix products.
    compile_seconds: what compiling took.
  """

  run: Callable[..., Any]
  batch_size: int
  prompt_width: int
  eos_ids: tuple[int, ...]
  dtype: str
  compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Reference:
  """Autoregressive answers to a set of prompts. They depend on no drafter: all arms share them.

  Attributes:
    prompts: token ids.
    tokens: the answer to each prompt, int32, its EOS included.
    seconds: wall-clock time of decoding, without compilation.
  """

  prompts: tuple[tuple[int, ...], ...]
  tokens: tuple[np.ndarray, ...]
  seconds: float

  @property
  def tokens_per_second(self) -> float:
    return sum(map(len, self.tokens)) / self.seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
  """What speculative decoding of one prompt did (S = K-1 draft slots).

  Attributes:
    prompt: token ids; pairs the records of two drafters.
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


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
  """One drafter on one set of prompts.

  Attributes:
    records: one for each prompt, in the reference's order.
    seconds: wall-clock time of decoding, without compilation.
    batch_size: rows decoded at once.
    dtype: of the matrix products.
  """

  records: tuple[Record, ...]
  seconds: float
  batch_size: int
  dtype: str

  @property
  def tokens_per_second(self) -> float:
    return sum(len(record.tokens) for record in self.records) / self.seconds


def fitting(
    prompts: Sequence[Prompt],
    config: target_lib.TargetConfig,
    *,
    max_new_tokens: int,
    block_size: int,
) -> list[Prompt]:
  """The prompts that leave room in the target's context for the answer and one more block.

  Raises:
    UserError: if there is none.
  """
  room = config.max_length - max_new_tokens - block_size
  kept = [prompt for prompt in prompts if len(prompt) <= room]
  if not kept:
    raise UserError(
        f'none of {len(prompts)} prompts has at most {room} tokens, which is what the context of '
        f'{config.max_length} leaves; lower --config.evaluate.max_new_tokens or shorten the prompts'
    )
  return kept


def prompt_width(prompts: Sequence[Prompt]) -> int:
  """A width for all these prompts, a multiple of the prefill's chunk: one shape compiles once."""
  chunk = autoregressive.PREFILL_CHUNK
  return -(-max(map(len, prompts)) // chunk) * chunk


def compile_autoregressive(
    target: target_lib.Target,
    params: Any,
    *,
    batch_size: int,
    prompt_width: int,
    max_new_tokens: int,
    how: sampling.Sampling = sampling.GREEDY,
    key: jax.Array | None = None,
) -> Decoder:
  """One-token decoding, compiled.

  Args:
    target: the target; its dtype is that of the matrix products.
    params: its parameters.
    batch_size: rows decoded at once.
    prompt_width: see `prompt_width`.
    max_new_tokens: length limit of every answer.
    how: how tokens are drawn.
    key: source of randomness; needed only above temperature 0.
  """
  params, key = sharding.put(params), jax.random.key(0) if key is None else key
  compiled, seconds = _compile(autoregressive.generate.lower(
      target, params, *_batch_shape(batch_size, prompt_width), key, max_new_tokens=max_new_tokens, how=how
  ))
  run = lambda prompts_BxP, lengths_B: compiled(params, prompts_BxP, lengths_B, key)
  return _decoder(run, target, batch_size, prompt_width, seconds)


def compile_speculative(
    target: target_lib.Target,
    target_params: Any,
    drafter: drafter_lib.Drafter,
    drafter_params: Any,
    *,
    batch_size: int,
    prompt_width: int,
    max_new_tokens: int,
    how: sampling.Sampling = sampling.GREEDY,
    drafting: speculative.Drafting = speculative.Drafting(),
    key: jax.Array | None = None,
) -> Decoder:
  """Speculative decoding, compiled for all drafters of this shape.

  Args:
    target: the target.
    target_params: its parameters.
    drafter: the drafter; its config holds the decode-time block size.
    drafter_params: its parameters, or only their shapes.
    batch_size: rows decoded at once.
    prompt_width: see `prompt_width`.
    max_new_tokens: length limit of every answer.
    how: how the target's tokens are drawn.
    drafting: what is drafted in a round.
    key: source of randomness; needed only above temperature 0.
  """
  target_params, key = sharding.put(target_params), jax.random.key(0) if key is None else key
  compiled, seconds = _compile(speculative.generate.lower(
      target, target_params, drafter, sharding.shapes(drafter_params), *_batch_shape(batch_size, prompt_width), key,
      max_new_tokens=max_new_tokens, how=how, drafting=drafting,
  ))
  run = lambda drafter_params, prompts_BxP, lengths_B: compiled(
      target_params, drafter_params, prompts_BxP, lengths_B, key
  )
  return _decoder(run, target, batch_size, prompt_width, seconds)


def _batch_shape(batch_size: int, width: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
  return shape(batch_size, width), shape(batch_size)


def _compile(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
  begin = time.perf_counter()
  return lowered.compile(), time.perf_counter() - begin


def _decoder(run, target, batch_size, width, seconds) -> Decoder:
  dtype = jnp.dtype(target.dtype).name
  return Decoder(run, batch_size, width, target.config.eos_ids, dtype, seconds)


def decode_reference(decoder: Decoder, prompts: Sequence[Prompt], name: str) -> Reference:
  """Answers prompts one token at a time.

  Args:
    decoder: from `compile_autoregressive`.
    prompts: token ids of each, at least one.
    name: what the progress bar shows.

  Raises:
    UserError: if there is no prompt, or one is empty or wider than the decoder.
  """
  batches, seconds = _decode(decoder, (), prompts, name)
  tokens = {}
  for indices, rows in batches:
    for row, i in enumerate(indices):
      tokens[i] = rows.tokens_BxT[row, len(prompts[i]) : rows.lengths_B[row]]
  return Reference(
      prompts=tuple(tuple(prompt) for prompt in prompts),
      tokens=tuple(tokens[i] for i in range(len(prompts))),
      seconds=seconds,
  )


def decode_speculatively(
    decoder: Decoder, drafter_params: Any, reference: Reference, name: str
) -> Evaluation:
  """Answers the reference's prompts with a drafter and measures every round.

  Batches are the same as the reference's, so that the two times may be compared. Rows that fill
  the last batch cost time in both and count in neither: for exact speeds take a multiple of the
  batch size.

  Args:
    decoder: from `compile_speculative`.
    drafter_params: the drafter's parameters.
    reference: from `decode_reference`.
    name: what the progress bar shows.
  """
  batches, seconds = _decode(decoder, (sharding.put(drafter_params),), reference.prompts, name)
  records = {}
  for indices, (rows, trace) in batches:
    measured = measure(
        rows,
        trace,
        [reference.prompts[i] for i in indices],
        [reference.tokens[i] for i in indices],
        decoder.eos_ids,
    )
    records.update(zip(indices, measured, strict=True))
  return Evaluation(
      records=tuple(records[i] for i in range(len(records))),
      seconds=seconds,
      batch_size=decoder.batch_size,
      dtype=decoder.dtype,
  )


def _decode(decoder: Decoder, args: tuple, prompts: Sequence[Prompt], name: str):
  """[(indices of prompts, what `run` gave, as numpy arrays)], and the seconds of the runs alone."""
  lengths = [len(prompt) for prompt in prompts]
  if not lengths:
    raise UserError(f'{name}: no prompts to evaluate')
  if min(lengths) < 1 or max(lengths) > decoder.prompt_width:
    raise UserError(f'{name}: prompts must have 1 to {decoder.prompt_width} tokens, '
                    f'these have {min(lengths)} to {max(lengths)}')
  batches = _batches(prompts, decoder.batch_size, decoder.prompt_width)
  outputs, seconds = [], 0.0
  with tqdm.tqdm(total=len(prompts), desc=name, unit='prompt', disable=not multihost.is_first()) as bar:
    for indices, prompts_BxP, lengths_B in batches:
      begin = time.perf_counter()
      output = jax.block_until_ready(decoder.run(*args, prompts_BxP, lengths_B))
      seconds += time.perf_counter() - begin
      outputs.append((indices, sharding.to_host(output)))
      bar.update(len(indices))
  return outputs, seconds


def _batches(
    prompts: Sequence[Prompt], batch_size: int, width: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
  """Batches of prompts of like length, longest first: (indices, prompts_BxP, lengths_B).

  The last one is filled by repeating its rows, which then end when their originals do.
  """
  order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
  for start in range(0, len(order), batch_size):
    indices = order[start : start + batch_size]
    prompts_BxP = np.zeros((batch_size, width), np.int32)
    lengths_B = np.zeros(batch_size, np.int32)
    for row in range(batch_size):
      prompt = prompts[indices[row % len(indices)]]
      prompts_BxP[row, : len(prompt)] = prompt
      lengths_B[row] = len(prompt)
    yield indices, prompts_BxP, lengths_B


# ---- Measures ------------------------------------------------------------------------------------


def measure(
    rows: autoregressive.Rows,
    trace: speculative.Trace,
    prompts: Sequence[Prompt],
    references: Sequence[np.ndarray],
    eos_ids: tuple[int, ...],
) -> list[Record]:
  """What happened to the first rows of a batch, one record for each of `prompts`.

  Args:
    rows: finished rows, numpy arrays.
    trace: of their rounds, numpy arrays.
    prompts: token ids of the first rows; rows beyond them are padding.
    references: autoregressive answers to the prompts.
    eos_ids: tokens that end an answer.
  """
  slots_S = np.arange(1, trace.drafts_BxRxS.shape[-1] + 1)
  records = []
  for row, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
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
    records.append(Record(
        prompt=tuple(prompt),
        tokens=tokens,
        gained_R=gained_R,
        accepted_R=accepted_R,
        correct_S=correct_RxS.sum(0),
        inside_S=inside_RxS.sum(0),
        wasted=int((correct_RxS & (slots_S > accepted_R[:, None])).sum()),
        identical=np.array_equal(tokens, reference),
        ended=bool(tokens[-1] in eos_ids),
    ))
  return records


def summarise(records: Sequence[Record], *, samples: int, seed: int) -> dict[str, Any]:
  """A set's measures, JSON-able, under the names that `dspec.report` uses.

  - accepted_length: see the module; 95 % intervals by the percentile bootstrap over prompts.
    Prompts without a round (the prefill gave an EOS) have none and are left out; if no prompt has
    a round, all these are 0.
  - acceptance_by_slot: of all rounds, the share whose slots 1..k were all accepted, after the cut.
  - slot_accuracy: of the rounds whose slot k lies inside the answer, the share whose draft there
    equals the token finally output, whatever came before.
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
    acceptance_by_slot [S], slot_accuracy [S].
  """
  accepted = np.concatenate([record.accepted_R for record in records])
  num_slots = len(records[0].correct_S)
  correct_S = sum(record.correct_S for record in records)
  inside_S = sum(record.inside_S for record in records)
  gained = sum(record.gained for record in records)
  wasted = sum(record.wasted for record in records)
  reached_S = (accepted[:, None] >= np.arange(1, num_slots + 1)).sum(0)
  return {
      'num_prompts': len(records),
      'new_tokens': gained,
      'rounds': len(accepted),
      'identical_prompts': sum(record.identical for record in records),
      'block_size': num_slots + 1,
      'ended_share': sum(record.ended for record in records) / len(records),
      'waste': wasted / max(gained + wasted, 1),
      'accepted_length': accepted_length(sums(records), samples=samples, seed=seed),
      'acceptance_by_slot': (reached_S / max(len(accepted), 1)).tolist(),
      'slot_accuracy': (correct_S / np.maximum(inside_S, 1)).tolist(),
  }


def sums(records: Sequence[Record]) -> np.ndarray:
  """`[2, N]`: tokens gained and rounds of each prompt."""
  return np.array([(record.gained, record.rounds) for record in records], np.float64).reshape(-1, 2).T


def accepted_length(sums_2xN: np.ndarray, *, samples: int, seed: int) -> dict[str, Any]:
  """{micro, micro_interval, macro, macro_interval} of N prompts' `sums`, see `summarise`."""
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
  if [record.prompt for record in records] != [record.prompt for record in baseline]:
    raise UserError('a gain needs the same prompts in the same order: evaluate both on one set')
  return gain_of_sums(sums(records), sums(baseline), samples=samples, seed=seed)


def gain_of_sums(
    sums_2xN: np.ndarray, baseline_2xN: np.ndarray, *, samples: int, seed: int
) -> dict[str, Any]:
  """`gain` of the `sums` of the same N prompts in the same order."""
  both = (sums_2xN[1] > 0) & (baseline_2xN[1] > 0)
  columns = np.concatenate([sums_2xN[:, both], baseline_2xN[:, both]])
  ratio, interval = _bootstrap(lambda c: _micro(c[:2]) / _micro(c[2:]) - 1, columns, samples, seed)
  return {'micro': ratio, 'interval': interval}


def result(
    evaluation: Evaluation, plain_tokens_per_second: float, *, samples: int, seed: int
) -> dict[str, Any]:
  """What `dspec.report` wants of an arm on a set, beside plain decoding's speed; `gain` is for the caller to fill."""
  return {
      **summarise(evaluation.records, samples=samples, seed=seed),
      'dtype': evaluation.dtype,
      'batch_size': evaluation.batch_size,
      'speculative_tokens_per_second': evaluation.tokens_per_second,
      'autoregressive_tokens_per_second': plain_tokens_per_second,
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
