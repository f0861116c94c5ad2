"""What the target itself writes: prompts (arXiv 2406.08464) and answers, sampled in a continuously refilled batch."""

import collections
from concurrent import futures
import functools
import math
import pathlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from dspec import json_lines
from dspec import multihost
from dspec import sharding
from dspec.data import prompts as prompts_lib
from dspec.decoding import autoregressive
from dspec.decoding import sampling
from dspec.errors import UserError
from dspec.models import target as target_lib

_STEPS_PER_VISIT = 8  # Decoding steps between two looks at which rows have finished.
_MAX_ROUNDS = 4  # Of self-synthesis, before it is given up.
# Batches in flight at once. One CPU program leaves cores idle in its sequential parts; another fills them.
_CPU_STREAMS = 2
# Between two visits to a file of answers. It is closed in between: of an open file, a mounted bucket holds nothing.
_SECONDS_UNWRITTEN = 30.0


@functools.partial(jax.jit, static_argnames=('model', 'how'), donate_argnames=('rows', 'cache'))
def _admit(model, params, rows, cache, new, slots_R, how, key):
  """Prefills new rows and puts them, with their first token, into the batch; slots past its end are dropped."""
  own = target_lib.init_cache(model.config, slots_R.shape[0], rows.size)
  logits, own, _ = autoregressive.prefill(model, params, own, new.tokens_BxT, new.lengths_B)
  token_R = sampling.next_token(logits, how, key, new.seeds_B, new.lengths_B)
  new = autoregressive.append(new, token_R, model.config.eos_ids)
  put = lambda old, fresh: old.at[slots_R].set(fresh, mode='drop')
  return jax.tree.map(put, rows, new), jax.tree.map(put, cache, own)


@functools.partial(
    jax.jit, static_argnames=('model', 'steps', 'how'), donate_argnames=('rows', 'cache')
)
def _advance(model, params, rows, cache, steps, how, key):
  """Up to `steps` decoding steps of all rows."""
  _, rows, cache = jax.lax.while_loop(
      lambda state: (state[0] < steps) & ~state[1].done_B.all(),
      lambda state: (state[0] + 1, *autoregressive.step(model, params, *state[1:], how, key)),
      (0, rows, cache),
  )
  return rows, cache


def sample(
    model: target_lib.Target,
    params: Any,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    key: jax.Array,
    *,
    max_new_tokens: int,
    how: sampling.Sampling,
    batch_size: int,
) -> Iterator[tuple[int, list[int]]]:
  """Continues every prompt; finished rows make room for waiting ones.

  Args:
    model: the target.
    params: its parameters, already in the compute dtype.
    prompts: token ids, each at least one.
    seeds: one number a prompt; with `key` it fixes the continuation, whatever else is in the batch.
    key: source of randomness.
    max_new_tokens: length limit of a continuation.
    how: see `sampling.Sampling`.
    batch_size: rows decoded at once.

  Yields:
    (index of the prompt, its continuation; the last token is an EOS unless it was cut at the limit), as they finish.
  """
  if not prompts:
    return
  # Dealt out in advance, so that which rows share a batch does not depend on timing. The parts of a program on several
  # devices wait for one another, so two such programs must not run at once.
  count = _CPU_STREAMS if jax.default_backend() == 'cpu' and jax.device_count() == 1 else 1
  count = min(count, len(prompts), batch_size)
  stop = threading.Event()
  streams = [
      _stream(
          model, params, prompts, seeds, key, stop, range(start, len(prompts), count), max_new_tokens, how,
          batch_size // count,
      )
      for start in range(count)
  ]
  # The mesh of `jax.set_mesh` is that of this thread.
  yield from _interleave(streams, stop) if count > 1 else streams[0]


def _interleave(streams: Sequence[Iterator[Any]], stop: threading.Event) -> Iterator[Any]:
  """What all streams yield, as it comes; each runs in a thread of its own until `stop` is set."""
  results = queue.SimpleQueue()

  def drain(stream):
    try:
      for item in stream:
        results.put(item)
    finally:
      results.put(None)

  with futures.ThreadPoolExecutor(len(streams)) as pool:
    tasks = [pool.submit(drain, stream) for stream in streams]
    try:
      for _ in tasks:
        yield from iter(results.get, None)
        for task in futures.wait(tasks, return_when=futures.FIRST_COMPLETED).done:
          task.result()  # Raises what the stream has raised.
      for task in tasks:
        task.result()
    finally:
      stop.set()


def _stream(
    model, params, prompts, seeds, key, stop, indices, max_new_tokens, how, batch_size
) -> Iterator[tuple[int, list[int]]]:
  """`sample` of the prompts at `indices`, in one batch, until `stop` is set."""
  group = -(-batch_size // 4)  # Rows admitted together: a fixed shape, for one compilation.
  chunk = autoregressive.PREFILL_CHUNK
  size = -(-(max(map(len, prompts)) + max_new_tokens) // chunk) * chunk
  blank = lambda n: autoregressive.Rows(
      jnp.zeros((n, size), jnp.int32), jnp.ones(n, jnp.int32), jnp.ones(n, jnp.int32),
      jnp.ones(n, bool), jnp.zeros(n, jnp.uint32),
  )
  rows, cache = blank(batch_size), target_lib.init_cache(model.config, batch_size, size)
  waiting = collections.deque(indices)
  occupant = [None] * batch_size
  while (waiting or any(i is not None for i in occupant)) and not stop.is_set():
    free = [slot for slot, i in enumerate(occupant) if i is None]
    live = batch_size - len(free)
    while waiting and (len(free) >= min(group, len(waiting)) or not live):
      new, slots = jax.tree.map(np.array, blank(group)), np.full(group, batch_size)
      for r in range(min(group, len(waiting), len(free))):
        i, slot = waiting.popleft(), free.pop()
        occupant[slot], slots[r] = i, slot
        new.tokens_BxT[r, : len(prompts[i])] = prompts[i]
        new.lengths_B[r], new.limits_B[r] = len(prompts[i]), len(prompts[i]) + max_new_tokens
        new.done_B[r], new.seeds_B[r] = False, seeds[i]
        live += 1
      rows, cache = _admit(model, params, rows, cache, new, slots, how, key)
    rows, cache = _advance(model, params, rows, cache, _STEPS_PER_VISIT, how, key)
    done, lengths = sharding.to_host((rows.done_B, rows.lengths_B))
    finished = [slot for slot, i in enumerate(occupant) if i is not None and done[slot]]
    if finished:
      tokens = sharding.to_host(rows.tokens_BxT)
    for slot in finished:
      i, occupant[slot] = occupant[slot], None
      yield i, tokens[slot, len(prompts[i]) : lengths[slot]].tolist()


def sample_resumably(path: pathlib.Path, model, params, prompts, seeds, key, *, name: str, **options):
  """`sample`, appended to a JSON-lines file as rows finish; what the file holds already is not sampled again.

  Returns:
    The continuations in the order of the prompts.
  """
  with multihost.first_goes_first('what was written before'):
    found = {record['index']: record['tokens'] for record in json_lines.read_whole(path)}
  missing = [i for i in range(len(prompts)) if i not in found]
  multihost.wait_for_all('all have read what is there')
  first = multihost.is_first()
  unwritten, written_at = [], time.monotonic()
  with tqdm.tqdm(
      total=len(prompts), initial=len(prompts) - len(missing), desc=name, unit='row', smoothing=0.05, disable=not first
  ) as bar:
    new_tokens = 0
    stream = sample(model, params, [prompts[i] for i in missing], [seeds[i] for i in missing], key, **options)
    try:
      for position, tokens in stream:
        index = missing[position]
        found[index] = tokens
        unwritten.append({'index': index, 'tokens': tokens})
        if first and time.monotonic() - written_at >= _SECONDS_UNWRITTEN:
          json_lines.append(path, *unwritten)
          unwritten, written_at = [], time.monotonic()
        new_tokens += len(tokens)
        rate = new_tokens / max(bar.format_dict['elapsed'], 1e-9)
        bar.set_postfix_str(f'{rate:.0f} tokens/s', refresh=False)
        bar.update()
    finally:  # What was done when the run is stopped is kept.
      if first:
        json_lines.append(path, *unwritten)
  return [found[i] for i in range(len(prompts))]


def synthesise_prompts(
    folder: pathlib.Path, model, params, tokenizer, *, count: int, max_tokens: int, temperature: float,
    batch_size: int, seed: int,
) -> list[str]:
  """Prompts written by the target: sampled from its chat template up to the user's turn (arXiv 2406.08464).

  Prompts that are empty, repeated, or do not end within `max_tokens` are dropped; more are sampled until there
  are `count`.

  Raises:
    UserError: when the target writes too few distinct prompts.
  """
  prefix = tokenizer.user_prefix_ids()
  sampled = count + -(-count // 3)
  for _ in range(_MAX_ROUNDS):
    turns = sample_resumably(
        folder / 'sampled_prompts.jsonl', model, params, [prefix] * sampled, list(range(sampled)),
        jax.random.key(seed), name='writing prompts', max_new_tokens=max_tokens,
        how=sampling.Sampling(temperature), batch_size=batch_size,
    )
    ended = [turn[:-1] for turn in turns if turn and turn[-1] in model.config.eos_ids]
    kept = prompts_lib.drop_duplicates([tokenizer.decode(turn).strip() for turn in ended])
    kept = [prompt for prompt in kept if prompt]
    if len(kept) >= count:
      return kept[:count]
    # As many more as this yield calls for, and some.
    share = max(len(kept) / sampled, 0.1)
    sampled += math.ceil(1.1 * (count - len(kept)) / share) + 1
  raise UserError(
      f'of {sampled} sampled prompts only {len(kept)} are distinct and end within '
      f'--config.data.max_prompt_tokens={max_tokens}; {count} are wanted. Raise that limit or '
      '--config.data.prompt_temperature, or lower --config.data.num_prompts.'
  )
