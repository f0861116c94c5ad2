"""What a round of decoding costs on this machine, and the block size that is fastest at that price.

Accepted length is not speed. With a_k the share of rounds that accept their first k drafts, a block of size K gains

    tau(K) = 1 + a_1 + ... + a_{K-1}

tokens a round, for draft(K) + verify(K) seconds. Accelerators verify a block in the time of a step, so the largest one
wins; a CPU pays for every token. The costs are measured once for a machine and models, and kept.
"""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from dspec import multihost
from dspec import sharding
from dspec.decoding import autoregressive
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.decoding import verify
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

_CONTEXT = 128  # Positions known before the measured round.
# In turns, so that a slow spell of the machine meets all parts. Other work only ever adds time: the fastest turn counts.
_CALLS, _TURNS = 4, 8
_INSTRUCTIONS = ('amx_bf16', 'avx512_bf16', 'avx512f', 'avx2')  # As Linux calls them.


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds for one prompt at temperature 0.

  Attributes:
    step: one token of plain decoding, in whichever precision is faster.
    draft: {K: adding K positions to the drafter's context, its pass, and the choice of its tokens}.
    verify: {K: the target's pass over the block, and what it accepts}.
  """

  step: float
  draft: dict[int, float]
  verify: dict[int, float]

  def speed_up(self, acceptance_S: Sequence[float], block_size: int) -> float:
    """Tokens per second relative to plain decoding: tau(K) * step / (draft(K) + verify(K)).

    Args:
      acceptance_S: share of rounds that accept their first 1, 2, ... drafts; at least block_size - 1 of them.
      block_size: K, one that was measured.
    """
    gained = 1 + sum(acceptance_S[: block_size - 1])
    return gained * self.step / (self.draft[block_size] + self.verify[block_size])

  def best_block_size(self, acceptance_S: Sequence[float]) -> int:
    """The measured block size of the largest `speed_up`; arguments as there."""
    fitting = [k for k in self.draft if k <= len(acceptance_S) + 1]
    return max(fitting, key=lambda k: self.speed_up(acceptance_S, k))

  def to_json(self) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(self)))  # Its keys are texts.

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> 'Costs':
    by_size = lambda seconds: {int(k): value for k, value in seconds.items()}
    return cls(values['step'], by_size(values['draft']), by_size(values['verify']))


def processor(info: pathlib.Path = pathlib.Path('/proc/cpuinfo')) -> str:
  """What the CPU is called, and which of the instructions it has that decide how fast its matrix products are.

  Args:
    info: of Linux; elsewhere there is none.
  """
  if not info.exists():
    return platform.processor() or platform.machine()
  fields = [line.partition(':') for line in info.read_text('utf-8', 'replace').splitlines()]
  fields = {name.strip(): value.strip() for name, _, value in reversed(fields)}  # The first core's.
  known = set(fields.get('flags', '').split())
  return ', '.join(
      [fields.get('model name', platform.machine()), *(name for name in _INSTRUCTIONS if name in known)])


def block_sizes(trained: int) -> list[int]:
  """Candidates up to the trained block size: powers of two, and itself."""
  return sorted({2**i for i in range(1, trained.bit_length()) if 2**i <= trained} | {trained})


def measured(
    folder: pathlib.Path, fingerprint: str, target: target_lib.Target, target_params: Any, drafter: drafter_lib.Drafter,
    drafter_params: Any, rival: tuple[target_lib.Target, Any],
) -> Costs:
  """The costs that the folder holds for this machine and these models, measured if it has none.

  Args:
    folder: of the kept costs.
    fingerprint: of the target's file.
    target: in the dtype of decoding.
    target_params: its parameters in that dtype.
    drafter: of the trained block size, in the dtype of decoding.
    drafter_params: of any drafter of this shape; costs do not depend on their values.
    rival: the target, and its parameters, in another precision in which plain decoding may be faster.
  """
  machine = [platform.node(), processor(), os.cpu_count(), jax.devices()[0].device_kind, jax.__version__,
             list(jax.sharding.get_mesh().devices.shape)]
  parts = [
      machine, fingerprint, dataclasses.asdict(drafter.config), jnp.dtype(target.dtype).name,
      jnp.dtype(drafter.dtype).name, _CONTEXT,
  ]
  path = folder / f'{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.json'
  if not multihost.from_first(path.exists):
    costs = measure(target, target_params, drafter, drafter_params, rival)
    if multihost.is_first():
      folder.mkdir(parents=True, exist_ok=True)
      part = path.with_suffix('.part')
      part.write_text(json.dumps({'of': parts, **costs.to_json()}, indent=2))
      part.replace(path)
  logging.info('costs of a round: %s', path)
  return Costs.from_json(multihost.from_first(lambda: json.loads(path.read_text())))


def measure(
    target: target_lib.Target, target_params: Any, drafter: drafter_lib.Drafter, drafter_params: Any,
    rival: tuple[target_lib.Target, Any],
) -> Costs:
  """Times every part of a round by itself. Arguments as of `measured`."""
  target_params, drafter_params, rival_params = sharding.put((target_params, drafter_params, rival[1]))
  sizes, timers, both, turns = block_sizes(drafter.config.block_size), {}, (target_params, drafter_params), []
  hidden = not multihost.is_first()
  with tqdm.tqdm(total=2 * len(sizes) + 2 + _TURNS, desc='measuring costs', disable=hidden) as bar:
    for k in sizes:
      shorter = drafter_lib.Drafter(dataclasses.replace(drafter.config, block_size=k), drafter.dtype)
      state, *parts = _parts(target, shorter, target_params, drafter_params)
      for name, part in zip(('draft', 'verify'), parts):
        timers[name, k] = _timer(part, both, state)
        bar.update()
    timers['step', 'same'] = _timer(_step(target), both, state)
    timers['step', 'rival'] = _timer(_step(rival[0]), (rival_params, drafter_params), state)
    bar.update(2)
    for _ in range(_TURNS):
      turns.append({name: timer() for name, timer in timers.items()})
      bar.update()
  fastest = {name: min(turn[name] for turn in turns) for name in timers}
  of = lambda wanted: {k: seconds for (name, k), seconds in fastest.items() if name == wanted}
  return Costs(min(of('step').values()), of('draft'), of('verify'))


def _parts(target, drafter, target_params, drafter_params):
  """A state in the middle of decoding, and the parts of a round, `(target, drafter, state) -> state`."""
  taps, k = drafter.config.target_layers, drafter.config.block_size
  prompt = jnp.asarray(np.random.default_rng(0).integers(target.config.vocab_size, size=(1, _CONTEXT)), jnp.int32)
  state = jax.jit(
      lambda *params: speculative.start(
          target, params[0], drafter, params[1], prompt, jnp.array([_CONTEXT]), jax.random.key(0), max_new_tokens=64,
          how=sampling.GREEDY)
  )(target_params, drafter_params)

  def draft(target_params, drafter_params, state):
    positions = state.rows.lengths_B[:, None] - 1 + jnp.arange(k)[None, :]
    # Whatever the features are; but they must not be known to the compiler.
    features = jnp.zeros((1, k, len(taps) * drafter.config.width)) + state.round
    cache = speculative.write_context(drafter, drafter_params, state.drafter_cache, features, positions)
    state = state.replace(drafter_cache=cache)
    logits = speculative.propose(target_params, drafter, drafter_params, state)
    tokens = drafter_lib.token_ids(drafter_params, sampling.most_probable(logits))
    drafts = state.trace.drafts_BxRxS.at[:, 0].set(tokens)
    return state.replace(trace=state.trace.replace(drafts_BxRxS=drafts))

  def verify_drafts(target_params, drafter_params, state):
    start = state.rows.lengths_B[:, None] - 1
    anchor = jnp.take_along_axis(state.rows.tokens_BxT, start, 1)
    drafts = state.trace.drafts_BxRxS[:, 0]
    hidden, _, cache = target.apply(
        {'params': target_params}, jnp.concatenate([anchor, drafts], 1), start + jnp.arange(k)[None, :],
        state.target_cache, taps)
    tokens = sampling.most_probable(target_lib.logits(target_params, hidden, target.dtype))
    accepted = state.trace.accepted_BxR.at[:, 0].set(verify.match(drafts, tokens))
    return state.replace(target_cache=cache, trace=state.trace.replace(accepted_BxR=accepted))

  return state, draft, verify_drafts


def _step(target):
  def step(target_params, drafter_params, state):
    rows, cache = autoregressive.step(
        target, target_params, state.rows, state.target_cache, sampling.GREEDY, state.key)
    # The same position again and again: a cost, not a text.
    rows = rows.replace(lengths_B=state.rows.lengths_B, done_B=state.rows.done_B)
    return state.replace(rows=rows, target_cache=cache)

  return step


def _timer(part, params, state) -> Callable[[], float]:
  """Compiles a part; each call of what it returns gives the seconds of the part, the mean of a few.

  The state is given away and returned, so that caches are not copied.
  """
  where = jax.tree.map(lambda x: x.sharding, state)
  compiled = jax.jit(part, donate_argnums=2, out_shardings=where).lower(*params, state).compile()
  state = jax.block_until_ready(compiled(*params, jax.tree.map(jnp.copy, state)))

  def seconds() -> float:
    nonlocal state
    begin = time.perf_counter()
    for _ in range(_CALLS):
      state = compiled(*params, state)
    jax.block_until_ready(state)
    return (time.perf_counter() - begin) / _CALLS

  return seconds
