"""From a config to training rows on disk: prompts, answers, features; each stage cached under a hash of its inputs."""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import pathlib
from typing import Any

from absl import logging
import jax
import ml_collections
import numpy as np

from dspec import multihost
from dspec.data import chat
from dspec.data import features as features_lib
from dspec.data import pipeline
from dspec.data import prompts as prompts_lib
from dspec.data import responses as responses_lib
from dspec.decoding import sampling
from dspec.errors import UserError
from dspec.models import target as target_lib

# Part of every key: raised whenever the same inputs would give other data.
_VERSION = 1
_RECORD_VERSION = 2  # Of the rows on disk.
TRAINED_ON = 256  # Prompts of training that may be evaluated on, too.


@dataclasses.dataclass(frozen=True)
class Dataset:
  """What training and evaluation read.

  Attributes:
    paths: ArrayRecord files of the training rows.
    held_out: token ids of the prompts kept from training.
    length: T, long enough for every row.
    answer_counts: how often each token occurs in the answers, int64 [V].
    stats: counts for the report.
    trained_on: token ids of the prompts of the first training rows, at most `TRAINED_ON`.
    packs: of each training row the records that it holds, see `pipeline.pack`; None: every record is a row.
  """

  paths: tuple[pathlib.Path, ...]
  held_out: tuple[tuple[int, ...], ...]
  length: int
  answer_counts: np.ndarray
  stats: dict[str, Any]
  trained_on: tuple[tuple[int, ...], ...] = ()
  packs: tuple[tuple[int, ...], ...] | None = None

  def coverage(self, ids: np.ndarray) -> float:
    """Share of the answers' tokens that are among these."""
    return float(self.answer_counts[ids].sum() / self.answer_counts.sum())


def _key(**parts) -> str:
  return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def prepare(
    config: ml_collections.ConfigDict,
    cache_dir: pathlib.Path,
    model: target_lib.Target,
    params: Any,
    tokenizer: chat.Tokenizer,
    target_fingerprint: str,
) -> Dataset:
  """Makes, or finds in the cache, the data that the config describes.

  Args:
    config: the whole config; `data`, `drafter.target_layers` and `drafter.mask_token_id` are read.
    cache_dir: see `dspec.config.cache_dir`.
    model: the target in its compute dtype.
    params: its parameters, already in that dtype.
    tokenizer: the target's.
    target_fingerprint: hash of the target's file.

  Raises:
    UserError: no usable prompt or answer, too small a disk, a mask token that occurs in the data.
  """
  data = config.data
  source = _prompt_source(data)
  text_key = _key(
      version=_VERSION, target=target_fingerprint, tokenizer=tokenizer.fingerprint(),
      dtype=str(np.dtype(model.dtype)), source=source,
      **{k: data[k] for k in (
          'seed', 'num_prompts', 'held_out', 'max_prompt_tokens', 'prompt_temperature',
          'max_response_tokens', 'response_temperature')},
      **({} if data.responses == 'regenerated' else {'responses': data.responses}),
  )
  folder = cache_dir / 'data' / text_key
  folder.mkdir(parents=True, exist_ok=True)
  logging.info('data: %s', folder)

  with _only_writer(folder) if multihost.is_first() else contextlib.nullcontext():
    if multihost.is_first():
      (folder / 'source.json').write_text(json.dumps({'data': data.to_dict(), 'key': text_key}, indent=2))
    multihost.wait_for_all('the lock on the data')
    return _prepare(config, folder, model, params, tokenizer)


@contextlib.contextmanager
def _only_writer(folder: pathlib.Path):
  """Runs that want the same data wait for the one that is making it. The lock goes with its process."""
  with (folder / 'lock').open('w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      logging.info('%s: another run is writing this data; waiting for it', folder)
      fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _prepare(config, folder, model, params, tokenizer) -> Dataset:
  data = config.data
  taps = tuple(config.drafter.target_layers)
  online = data.features == 'online'
  name = 'tokens' if online else 'features'
  name += '-' + _key(taps=() if online else taps, version=_RECORD_VERSION)
  feature_width = len(taps) * model.config.width

  def check_disk(num_tokens):
    if not online:
      features_lib.check_disk(folder, num_tokens, feature_width)

  if data.responses == 'as_written':
    held_out, rows, stats = _as_written(data, tokenizer)
  else:
    # Before the answers, whose lengths are not known yet: that every one is as long as it may be.
    check_most = (lambda most: None) if (folder / name).exists() else check_disk
    held_out, rows, stats = _regenerated(data, folder, model, params, tokenizer, check_most)
  # A block needs an anchor and one label.
  rows = [(ids, said) for ids, said in rows if any(a and b for a, b in itertools.pairwise(said))]
  if not rows:
    raise UserError(f'--config.data.prompts={data.prompts}: no answer has two tokens; nothing to train on')
  mask_id = config.drafter.mask_token_id
  if any(mask_id in ids for ids, _ in rows):
    raise UserError(
        f'--config.drafter.mask_token_id={mask_id}: this token ({tokenizer.token(mask_id)!r}) occurs in the '
        'data; choose a row of the embedding that no text uses'
    )
  num_tokens = sum(len(ids) for ids, _ in rows)
  files = features_lib.file_paths(folder / name, len(rows))
  if not all(path.exists() for path in files):
    check_disk(num_tokens)
  (folder / name).mkdir(exist_ok=True)
  paths = features_lib.write(folder / name, None if online else model, params, rows, taps)
  answered = np.concatenate([np.asarray(ids)[np.asarray(said)] for ids, said in rows])
  stats = {
      'training_prompts': len(rows), 'training_tokens': len(answered), 'row_tokens': num_tokens,
      'held_out_prompts': len(held_out), 'features': data.features, 'responses': data.responses, **stats,
  }
  logging.info(
      '%d answers, %d tokens; %.0f %% cut; %d prompts held out',
      len(rows), stats['training_tokens'], 100 * stats['truncated_share'], len(held_out),
  )
  lengths, packs = [len(ids) for ids, _ in rows], None
  length = max(lengths)
  length += -length % 32  # Few shapes, few compilations.
  if data.row_tokens:
    length = data.row_tokens
    packs = pipeline.pack(lengths, length, data.seed)
    filled = sum(min(n, length) for n in lengths) / (len(packs) * length)
    stats |= {'rows': len(packs), 'filled_share': filled}
    logging.info('%d rows of %d tokens, %.1f %% filled', len(packs), length, 100 * filled)
  counts = np.bincount(answered, minlength=model.config.vocab_size)
  trained_on = tuple(tuple(ids[: said.index(True)]) for ids, said in rows[:TRAINED_ON])
  return Dataset(tuple(paths), tuple(map(tuple, held_out)), length, counts, stats, trained_on, packs)


def _regenerated(data, folder, model, params, tokenizer, check_most):
  """Held-out prompts, rows (ids, supervised), and counts; the answers are the target's own."""
  prompts = _prompts(data, folder, model, params, tokenizer)
  ids, too_long = [], 0
  for prompt in prompts:
    tokens = tokenizer.encode(prompt)
    too_long += len(tokens) > data.max_prompt_tokens
    if len(tokens) <= data.max_prompt_tokens:
      ids.append(tokenizer.render_prompt([{'role': 'user', 'content': prompt}]))
  held_out, training = ids[: data.held_out], ids[data.held_out :]
  if not training:
    raise UserError(
        f'--config.data.prompts={data.prompts}: of {len(prompts)} prompts {len(ids)} have at most '
        f'--config.data.max_prompt_tokens={data.max_prompt_tokens} tokens and {data.held_out} are held out; '
        'none is left to train on'
    )
  check_most(sum(map(len, training)) + len(training) * data.max_response_tokens)
  answers = responses_lib.sample_resumably(
      folder / 'responses.jsonl', model, params, training, list(range(len(training))),
      jax.random.fold_in(jax.random.key(data.seed), 1), name='writing answers',
      max_new_tokens=data.max_response_tokens, how=sampling.Sampling(data.response_temperature),
      batch_size=data.generation_batch_size,
  )
  eos = model.config.eos_ids
  truncated = sum(answer[-1] not in eos for answer in answers)
  rows = [(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(training, answers)]
  return held_out, rows, {'truncated_share': truncated / len(answers), 'too_long_prompts': too_long}


def _as_written(data, tokenizer):
  """As `_regenerated`, of conversations with the answers that their file has, cut where they get too long."""
  conversations = prompts_lib.read_conversations(data.prompts)
  order = np.random.default_rng(data.seed).permutation(len(conversations))[: data.num_prompts]
  chosen = [conversations[i] for i in order]
  opening = lambda messages: list(itertools.takewhile(lambda m: m['role'] != 'assistant', messages))
  held_out = [tokenizer.render_prompt(opening(messages)) for messages in chosen[: data.held_out]]
  room = data.max_prompt_tokens + data.max_response_tokens
  fitting = [ids for ids in held_out if len(ids) <= room]
  rows = [row for messages in chosen[data.held_out :] for row in tokenizer.render_conversation(messages)]
  if not rows:
    raise UserError(
        f'--config.data.prompts={data.prompts}: of {len(conversations)} conversations {data.held_out} are held out, '
        'and the others hold no answer'
    )
  truncated = sum(len(ids) > room for ids, _ in rows)
  rows = [(ids[:room], said[:room]) for ids, said in rows]
  return fitting, rows, {
      'truncated_share': truncated / len(rows), 'too_long_prompts': len(held_out) - len(fitting)}


def _prompt_source(data) -> str:
  """What the prompts depend on: a file's content, not its name."""
  if data.prompts == 'self' or data.prompts.startswith('tfds:'):
    return data.prompts
  return hashlib.sha256(pathlib.Path(data.prompts).expanduser().read_bytes()).hexdigest()


def _prompts(data, folder, model, params, tokenizer) -> list[str]:
  if data.prompts == 'self':
    return responses_lib.synthesise_prompts(
        folder, model, params, tokenizer, count=data.num_prompts, max_tokens=data.max_prompt_tokens,
        temperature=data.prompt_temperature, batch_size=data.generation_batch_size, seed=data.seed,
    )
  prompts = prompts_lib.drop_duplicates(prompts_lib.read(data.prompts))
  order = np.random.default_rng(data.seed).permutation(len(prompts))[: data.num_prompts]
  return [prompts[i] for i in order]
