"""Speed and memory of one run's work on the accelerators of this machine: training, and decoding one prompt.

  python experiments/benchmarks/accelerator.py

Takes a target of the paper by its shape, with random weights, and the paper's batch as eight devices would share it: 4
rows of 4096 tokens a device, 512 blocks in each, the drafter's layers computed twice. The programs are those of
`--mode=compile`. With --smoke, tiny sizes for any machine. Random weights accept no draft: what speculative decoding
gains is told for accepted lengths that one may have.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

from dspec import compile as compile_lib
from dspec import config as config_lib
from dspec import sharding
from dspec import train
from dspec.decoding import autoregressive
from dspec.models import target as target_lib

_TARGET = flags.DEFINE_enum('target', 'qwen3_8b', list(config_lib.TARGETS), 'Whose shape it is.')
_ROWS = flags.DEFINE_integer('rows', 4, 'Of a batch, for each device.')
_STEPS = flags.DEFINE_integer('steps', 50, 'Of training, timed; one goes before.')
_SMOKE = flags.DEFINE_bool('smoke', False, 'Tiny sizes: whether it runs, not how fast.')

_PROMPT_TOKENS = 64  # Few, as their prefill is timed with the answer.
_ACCEPTED = (1, 2, 4, 8)  # Accepted lengths that a speed is told for.
_KERNEL = re.compile(r'custom_call_target="([^"]*(?:fmha|flash|attention)[^"]*)"', re.IGNORECASE)


def at_paper_scale(target: str, rows: int) -> tuple[ml_collections.ConfigDict, target_lib.TargetConfig]:
  """What is measured: `rows` of the paper's batch on each device, and an answer of 256 tokens."""
  config = config_lib.default().copy_and_resolve_references()
  config_lib.use_target(config, target)
  config_lib.use_paper_scale(config)
  config.train.update(batch_size=rows * jax.device_count(), remat='layers')
  config.evaluate.update(batch_size=1, max_new_tokens=256)
  return config, compile_lib.target_shape(config)


def tiny() -> tuple[ml_collections.ConfigDict, target_lib.TargetConfig]:
  """The same, in seconds on a CPU."""
  config, shape = at_paper_scale('qwen3_8b', 2)
  config.data.update(max_prompt_tokens=32, max_response_tokens=32, row_tokens=96)
  config.drafter.update(num_layers=1, block_size=4, target_layers=(0,), mask_token_id=3)
  config.train.update(anchors=8, head_chunk=64)
  config.evaluate.update(max_new_tokens=8, dtype='float32')
  return config, dataclasses.replace(
      shape, vocab_size=256, num_layers=2, width=32, mlp_width=64, num_heads=4, num_kv_heads=2, head_dim=8)


def filled(shapes: Any, seed: int = 0) -> Any:
  """Arrays for a tree of parameters: small random matrices, scales of 1, whole numbers from 0."""
  keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(shapes))))

  def fill(x):
    key = next(keys)
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return jnp.zeros(x.shape, x.dtype, device=x.sharding)
    if len(x.shape) == 1:
      return jnp.ones(x.shape, x.dtype, device=x.sharding)
    return jax.jit(_normal, static_argnums=(1, 2), out_shardings=x.sharding)(key, x.shape, x.dtype)

  return jax.tree.map(fill, shapes)


def _normal(key, shape, dtype):
  return jax.random.normal(key, shape, dtype) * shape[-1] ** -0.5


def filled_state(shapes: train.TrainState) -> train.TrainState:
  """A state before its first step."""
  zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), tree)
  return train.TrainState(zeros(shapes.step), filled(shapes.params), zeros(shapes.opt_state))


def filled_batch(shapes: dict[str, jax.ShapeDtypeStruct], vocab_size: int, block_size: int) -> dict[str, jax.Array]:
  """Rows of random tokens, all of them an answer's, with blocks at random places; features, if any, are random."""
  rng = np.random.default_rng(0)
  rows, length = shapes['tokens'].shape
  arrays = {
      'tokens': rng.integers(vocab_size, size=(rows, length)),
      'supervised': np.ones((rows, length)),
      'anchors': np.sort(rng.integers(1, length - block_size, size=shapes['anchors'].shape), axis=1),
      'is_anchor': np.ones(shapes['anchors'].shape),
  }
  if 'starts' in shapes:  # One document a row, as the operations are counted.
    arrays['starts'] = np.zeros(shapes['starts'].shape)
  if 'features' in shapes:
    arrays['features'] = rng.normal(size=shapes['features'].shape)
  return {name: jax.device_put(arrays[name].astype(x.dtype), x.sharding) for name, x in shapes.items()}


def train_speed(
    config: ml_collections.ConfigDict, target_config: target_lib.TargetConfig, steps: int
) -> dict[str, Any]:
  """Times train steps on the mesh of `jax.set_mesh`.

  Raises:
    FloatingPointError: when the loss is not finite, and so the speed means nothing.
  """
  step, (state, batch, params), flops = compile_lib.train_step(config, jax.sharding.get_mesh(), target_config)
  begin = time.perf_counter()
  compiled = step.lower(state, batch, params).compile()
  compile_seconds = time.perf_counter() - begin
  # A kernel of Pallas has a name of its own in no program.
  attention = train.choose_attention(config, jax.sharding.get_mesh())
  attention = attention_of(compiled.as_text()) if attention == 'xla' else attention
  rows, length = batch['tokens'].shape
  batch = filled_batch(batch, target_config.vocab_size, config.drafter.block_size)
  state, params = filled_state(state), filled(params)
  state, metrics = compiled(state, batch, params)
  jax.block_until_ready(metrics)
  begin = time.perf_counter()
  for _ in tqdm.trange(steps, desc='train steps', mininterval=5):
    waited_for = metrics
    state, metrics = compiled(state, batch, params)
    jax.block_until_ready(waited_for)  # A step late, so that the device never waits.
  loss = float(metrics['loss'])
  seconds = (time.perf_counter() - begin) / steps
  if not np.isfinite(loss):
    raise FloatingPointError(f'loss {loss} after {steps} steps')
  kind, devices = jax.devices()[0].device_kind, jax.device_count()
  peak, rate = compile_lib.PEAK.get(kind), flops / seconds / devices / 1e12
  return {
      'batch': f'{rows} rows of {length} tokens, {config.train.anchors} blocks each',
      'compilation': f'{compile_seconds:.0f} s',
      'step': f'{seconds:.3f} s',
      'tokens/s': f'{rows * length / seconds:.0f}',
      'blocks/s': f'{rows * config.train.anchors / seconds:.0f}',
      'TFLOP/s a device': f'{rate:.1f}',
      'MFU': f'{rate / peak:.1%} of {peak}' if peak else f'no known peak of {kind}',
      'memory, peak': _peak_memory(),
      'attention': attention,
      'loss': f'{loss:.3f}',
  }


def decode_speed(config: ml_collections.ConfigDict, target_config: target_lib.TargetConfig) -> dict[str, Any]:
  """Times one prompt's answer, plain and speculative, prefill included, on the mesh of `jax.set_mesh`."""
  config = config_lib.apply_overrides(config, {'data.max_prompt_tokens': _PROMPT_TOKENS})
  new_tokens = config.evaluate.max_new_tokens
  target_config = dataclasses.replace(target_config, eos_ids=())  # To the limit, both.
  speculate, (params, drafter_params, prompts, lengths), _ = compile_lib.decoding(
      config, jax.sharding.get_mesh(), target_config)
  params, drafter_params = filled(params), filled(drafter_params)
  prompt = np.random.default_rng(0).integers(target_config.vocab_size, size=prompts.shape)
  prompts = jax.device_put(prompt.astype(prompts.dtype), prompts.sharding)
  lengths = jax.device_put(np.full(lengths.shape, prompts.shape[1], lengths.dtype), lengths.sharding)
  target = target_lib.Target(target_config, jnp.dtype(config.evaluate.dtype))
  plain = functools.partial(
      autoregressive.generate, target, params, prompts, lengths, jax.random.key(0), max_new_tokens=new_tokens)
  (rows, trace), seconds = _timed(lambda: speculate(params, drafter_params, prompts, lengths))
  rounds = int((np.asarray(trace.starts_BxR) >= 0).sum())
  plain_rows, plain_seconds = _timed(plain)
  same = (np.asarray(rows.tokens_BxT) == np.asarray(plain_rows.tokens_BxT)).mean()
  step, round_ = plain_seconds / new_tokens, seconds / rounds
  lengths_told = [length for length in _ACCEPTED if length <= config.drafter.block_size]
  speeds = ', '.join(f'{length / round_:.0f} at {length}' for length in lengths_told)
  return {
      'prompt and answer': f'{prompts.shape[1]} and {new_tokens} tokens, {config.evaluate.dtype}',
      'plain, tokens/s': f'{1 / step:.1f}',
      f'round of {config.drafter.block_size}': f'{round_ * 1e3:.2f} ms, {round_ / step:.2f} plain steps',
      'speculative, tokens/s': f'{speeds} accepted tokens a round',
      'tokens as plain': f'{same:.1%}',
      'memory, peak': _peak_memory(),
  }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
  """The result of a call, and seconds of a second one, which compiles nothing."""
  jax.block_until_ready(call())
  begin = time.perf_counter()
  result = jax.block_until_ready(call())
  return result, time.perf_counter() - begin


def attention_of(program: str) -> str:
  """How a compiled program computes attention: the library's kernels that it calls, or products and a softmax."""
  kernels = sorted(set(_KERNEL.findall(program)))
  return ', '.join(kernels) if kernels else 'matrix products and softmax, as XLA fuses them'


def _peak_memory() -> str:
  stats = jax.local_devices()[0].memory_stats() or {}
  if 'peak_bytes_in_use' not in stats:
    return 'not told by this kind of device'
  return f'{stats["peak_bytes_in_use"] / 2**30:.1f} of {stats["bytes_limit"] / 2**30:.1f} GiB'


def main(argv: Sequence[str]) -> None:
  del argv
  config, shape = tiny() if _SMOKE.value else at_paper_scale(_TARGET.value, _ROWS.value)
  print(f'{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}: '
        f'{"tiny shape" if _SMOKE.value else _TARGET.value}, random weights')
  with jax.set_mesh(sharding.make_mesh(config)):
    for title, measure in (
        ('training', lambda: train_speed(config, shape, 3 if _SMOKE.value else _STEPS.value)),
        ('decoding one prompt', lambda: decode_speed(config, shape))):
      print(f'\n{title}')
      for name, value in measure().items():
        print(f'  {name:24}{value}', flush=True)


if __name__ == '__main__':
  app.run(main)
