"""Whether a run fits before it is launched: its programs, compiled for a TPU slice that need not be there.

  python -m dspec.main --config=experiments/targets/llama3_8b.py --mode=compile --topology=v5p:2x2x2

Nothing is loaded: of the target only its shape is known. The TPU compiler is that of the package libtpu
(pip install '.[tpu]'). With `--topology=cpu:8`, for eight devices of this machine's own kind.
"""

import dataclasses
import functools
import math
import os
import re
from typing import Any

from absl import logging
import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
import ml_collections
import tabulate

from dspec import config as config_lib
from dspec import sharding
from dspec import train
from dspec.checkpoints import huggingface
from dspec.checkpoints import targets
from dspec.checkpoints import tensors
from dspec.decoding import speculative
from dspec.errors import UserError
from dspec.losses.objective import Objective
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

# GiB of memory of a chip: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm.
HBM = {'v4': 32, 'v5e': 16, 'v5p': 95, 'v6e': 32}
# The share that programs may use; the TPU compiler keeps the rest (it speaks of 15.75 of 16 GiB, and 31.25 of 32).
USABLE = 0.975
# TFLOP/s of dense matrix products in bfloat16, by JAX's name of a device; TPUs: as above, a page for each generation;
# GPUs: the data sheets, https://www.nvidia.com/en-us/data-center/h100, .../h200 and .../a100, where figures of the
# first two are with sparsity, twice these.
PEAK = {
    'TPU v4': 275, 'TPU v5 lite': 197, 'TPU v5': 459, 'TPU v6 lite': 918,
    'NVIDIA A100-SXM4-40GB': 312, 'NVIDIA A100-SXM4-80GB': 312,
    'NVIDIA H100 80GB HBM3': 989.5, 'NVIDIA H200': 989.5,
}
_TEMPLATE_TOKENS = 64  # Room for a chat template around a prompt.
_LISTED = 5  # Largest arrays that are shown.
_ADVICE = """\
It does not fit. What helps, the cheapest first:
  more devices for the parameters   --config.mesh.fsdp, --config.mesh.tensor, or a larger topology
  activations computed twice        --config.train.remat=layers
  a batch in parts                  --config.train.accumulate
  fewer logits at once              --config.train.head_chunk
  fewer blocks or rows a step       --config.train.anchors, --config.train.batch_size"""


class DoesNotFit(UserError):
  """A program that takes more memory than a device has.

  Attributes:
    used: bytes of one device that it would take, or its temporaries alone; None where the compiler does not say.
  """

  def __init__(self, message: str, used: int | None):
    super().__init__(message)
    self.used = used


@dataclasses.dataclass(frozen=True)
class Program:
  """What the compiler says of a program; bytes are of one device.

  Attributes:
    name: what it does.
    arguments: bytes of what it is given, and so of what lies in memory, used or not.
    output: bytes of what it returns, but for what takes the place of an argument.
    temporaries: bytes of what lives in between.
    peak: all of these at their worst moment.
    flops: of all devices, counted by hand (`train_flops`); None where nobody has.
    largest: (bytes, type and shape, where it comes from) of its largest arrays.
  """

  name: str
  arguments: int
  output: int
  temporaries: int
  peak: int
  flops: float | None
  largest: tuple[tuple[int, str, str], ...]


def run(config: ml_collections.ConfigDict, topology: str) -> list[Program]:
  """Compiles the train step and the decoding of an evaluation batch, and prints what they take.

  Args:
    config: validated.
    topology: `GENERATION:AxB[xC]`, as v5e:2x4, or `cpu:N`.

  Raises:
    DoesNotFit: for a program that does not fit a device.
    UserError: for a topology that does not exist, or a mesh that does not fit it.
  """
  devices = _devices(topology)
  mesh = sharding.make_mesh(config, devices)
  sharding.check_batch(mesh, config.train.batch_size, config.train.accumulate)
  target_config = target_shape(config)
  memory = HBM.get(topology.partition(':')[0], 0) * 2**30
  limit = USABLE * memory or math.inf
  programs = []
  with jax.set_mesh(mesh):
    for name, build in (('train step', train_step), ('decoding', decoding)):
      logging.info('compiling the %s for %s', name, topology)
      function, arguments, flops = build(config, mesh, target_config)
      # What every device is given lies there whatever the compiler does: no need to wait for it.
      size = size_of(arguments)
      if size > limit:
        raise DoesNotFit(_too_large(name, topology, 'parameters and batch alone', size, limit), size)
      program = _compile(name, _lower(function, mesh, *arguments), flops, topology)
      # The compiler refuses temporaries that do not fit, but does not ask what else lies there.
      if program.peak > limit:
        raise DoesNotFit(_too_large(name, topology, 'arguments and temporaries', program.peak, limit), program.peak)
      programs.append(program)
  print(_table(programs, len(devices), memory))
  for program in programs:
    print(f'\nLargest arrays of the {program.name}, a device:')
    rows = [(f'{size / 2**20:.0f} MiB', shape, origin) for size, shape, origin in program.largest]
    print(tabulate.tabulate(rows, tablefmt='plain'))
  return programs


def target_shape(config: ml_collections.ConfigDict) -> target_lib.TargetConfig:
  """The target's, without its weights; of those of `dspec.config.TARGETS` without a network."""
  known = next((of for of in config_lib.TARGETS.values() if of.path == config.target.path), None)
  if known:
    return huggingface.config_from_fields(config.target.path, known.shape)
  return targets.read_config(targets.locate(config, config_lib.cache_dir(config)))


def _devices(topology: str) -> list[Any]:
  generation, _, size = topology.partition(':')
  if generation == 'cpu' and re.fullmatch('[1-9][0-9]*', size):
    jax.config.update('jax_num_cpu_devices', int(size))
    return jax.devices('cpu')
  if generation not in HBM or not re.fullmatch('[1-9][0-9]*(x[1-9][0-9]*){1,2}', size):
    raise UserError(f'--topology={topology!r}: must read {"|".join(HBM)}:AxB[xC], such as v5e:2x4, or cpu:N')
  # There is no TPU VM to ask, and no TPU that two processes could want.
  os.environ.update(TPU_SKIP_MDS_QUERY='1', ALLOW_MULTIPLE_LIBTPU_LOAD='1')
  try:
    return list(topologies.get_topology_desc(platform='tpu', topology_name=topology).devices)
  except (RuntimeError, ValueError, NotImplementedError) as error:
    raise UserError(
        f"--topology={topology}: {str(error).strip().splitlines()[0]}; the TPU compiler comes with pip install '.[tpu]'"
    ) from error


def train_step(config: ml_collections.ConfigDict, mesh: Mesh, target_config: target_lib.TargetConfig):
  """The step of `dspec.train`, and what it is called with, but for its content; under `jax.set_mesh(mesh)`.

  Returns:
    (jitted function of a state, which it takes over, a batch and the target's parameters; these arguments as
    jax.ShapeDtypeStruct; `train_flops`).
  """
  t = config.train
  dtype = jnp.dtype(t.compute_dtype)
  target = target_lib.Target(target_config, dtype)
  drafter_config = train.make_drafter_config(config, target_config)
  models = {
      'optimizer': train.make_optimizer(config), 'target': target,
      'drafter': drafter_lib.Drafter(drafter_config, dtype, t.remat, train.choose_attention(config, mesh))}
  length = row_length(config, target_config)
  batch = _batch(config, mesh, length, target_config)
  target_params = _target_params(target_config, dtype)
  draft_ids = jax.ShapeDtypeStruct((drafter_config.vocab_size,), jnp.int32) if drafter_config.vocab_size else None
  key = jax.eval_shape(lambda: jax.random.key(0))
  state = jax.eval_shape(functools.partial(train.init_state, **models, ema=t.ema), key, batch, target_params, draft_ids)
  shardings = sharding.of(mesh, state)
  state = jax.tree.map(lambda x, where: x.update(sharding=where), state, shardings)
  spec = Objective(config.loss.gamma, config.loss.first_error, config.loss.chain, config.loss.reduction)
  step = jax.jit(
      functools.partial(
          train.train_step, **models, spec=spec, head_chunk=t.head_chunk, accumulate=t.accumulate, ema=t.ema),
      donate_argnums=0, out_shardings=(shardings, sharding.replicated(mesh)), keep_unused=True)
  flops = train_flops(
      target_config, drafter_config, rows=t.batch_size, length=length, anchors=t.anchors,
      document=min(length, document_length(config, target_config)), online=config.data.features == 'online')
  return step, (state, batch, target_params), flops


def decoding(config: ml_collections.ConfigDict, mesh: Mesh, target_config: target_lib.TargetConfig):
  """What an evaluation runs, prefill and all rounds of a batch; under `jax.set_mesh(mesh)`.

  Returns:
    (jitted function of the target's parameters, the drafter's, prompts and their lengths; these arguments as
    jax.ShapeDtypeStruct; None, as nobody has counted).
  """
  e = config.evaluate
  dtype = jnp.dtype(e.dtype)
  drafter_config = train.make_drafter_config(config, target_config)
  drafter_config = dataclasses.replace(drafter_config, block_size=e.block_size or drafter_config.block_size)
  drafter = drafter_lib.Drafter(drafter_config, dtype)
  params = jax.eval_shape(functools.partial(train.init_params, drafter), jax.eval_shape(lambda: jax.random.key(0)))
  params = sharding.shapes(jax.tree.map(lambda x: _cast(x, dtype), params))
  width = min(
      config.data.max_prompt_tokens + _TEMPLATE_TOKENS,
      target_config.max_length - e.max_new_tokens - drafter_config.block_size)
  row = lambda shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=_of_batch(mesh, shape))
  generate = functools.partial(speculative.generate, max_new_tokens=e.max_new_tokens)
  program = jax.jit(
      lambda target_params, params, prompts, lengths: generate(
          target_lib.Target(target_config, dtype), target_params, drafter, params, prompts, lengths),
      keep_unused=True)
  arguments = _target_params(target_config, dtype), params, row((e.batch_size, width)), row((e.batch_size,))
  return program, arguments, None


def size_of(arguments: Any) -> int:
  """Bytes that one device holds of a tree of arrays, or of their shapes."""
  return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(arguments))


def _lower(program, mesh: Mesh, *arguments) -> jax.stages.Lowered:
  platform = mesh.devices.flat[0].platform
  return program.trace(*arguments).lower(lowering_platforms=(platform,))


def row_length(config: ml_collections.ConfigDict, target_config: target_lib.TargetConfig) -> int:
  """T of the longest rows that the data may have."""
  return config.data.row_tokens or document_length(config, target_config)


def document_length(config: ml_collections.ConfigDict, target_config: target_lib.TargetConfig) -> int:
  """Tokens of the longest conversation that the data may have, as `dspec.data.dataset` rounds rows of one."""
  length = config.data.max_prompt_tokens + config.data.max_response_tokens + _TEMPLATE_TOKENS
  length += -length % 32
  return min(length, target_config.max_length)


def _batch(config, mesh: Mesh, length: int, target_config) -> dict[str, jax.ShapeDtypeStruct]:
  """As `dspec.data.pipeline.make_row` makes its rows."""
  t = config.train
  shapes = {
      'tokens': ((length,), jnp.int32), 'supervised': ((length,), jnp.bool_),
      'anchors': ((t.anchors,), jnp.int32), 'is_anchor': ((t.anchors,), jnp.bool_)}
  if config.data.row_tokens:
    shapes['starts'] = (length,), jnp.int32
  if config.data.features == 'cached':
    shapes['features'] = (length, len(config.drafter.target_layers) * target_config.width), jnp.bfloat16
  batch = {}
  for name, (shape, dtype) in shapes.items():
    shape = t.batch_size, *shape
    batch[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=_of_batch(mesh, shape))
  return batch


def _of_batch(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
  return NamedSharding(mesh, sharding.dividing(mesh, sharding.BATCH, shape))


def _target_params(target_config, dtype) -> Any:
  params: dict[str, Any] = {}
  for path, shape in tensors.shapes(target_config).items():
    holder = params
    for name in path[:-1]:
      holder = holder.setdefault(name, {})
    holder[path[-1]] = _cast(jax.ShapeDtypeStruct(shape, jnp.float32), dtype)
  return sharding.shapes(params)


def _cast(x: jax.ShapeDtypeStruct, dtype) -> jax.ShapeDtypeStruct:
  """As `target.cast` does it to arrays: matrices only."""
  return x.update(dtype=dtype) if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating) else x


def _compile(name: str, lowered: jax.stages.Lowered, flops: float | None, topology: str) -> Program:
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    message = str(error)
    used = re.search(r'(?:[Uu]sed |\()([\d.]+)([KMG])\)? (?:of|exceeds)', message)
    raise DoesNotFit(
        f'{name} on {topology}: {_shortened(message)}\n{_ADVICE}',
        used and int(float(used[1]) * 2 ** {'K': 10, 'M': 20, 'G': 30}[used[2]])) from error
  memory = compiled.memory_analysis()
  arguments, aliased = memory.argument_size_in_bytes, memory.alias_size_in_bytes
  output, temporaries = memory.output_size_in_bytes - aliased, memory.temp_size_in_bytes
  return Program(
      name, arguments, output, temporaries, arguments + output + temporaries, flops, largest(compiled.as_text()))


def _too_large(name: str, topology: str, what: str, size: int, limit: float) -> str:
  return (f'{name} on {topology}: {what} take {size / 2**30:.2f} GiB, and a device has '
          f'{limit / 2**30:.2f} GiB for programs\n{_ADVICE}')


def _shortened(message: str) -> str:
  """Of the compiler's account of a lack of memory, the sums and the largest allocations."""
  lines = [line.strip() for line in message.splitlines() if line.strip()]
  kept = [line for line in lines if re.search(r'RESOURCE_EXHAUSTED|[Uu]sed|Exceeded|Size:|Shape:|Operator:', line)]
  return '\n'.join(kept[:20])


_SIZES = {'f32': 4, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 's8': 1, 'u8': 1, 'pred': 1, 's64': 8, 'u64': 8, 'f64': 8}
_INSTRUCTION = re.compile(r'= (?P<type>\w+)\[(?P<shape>[\d,]+)\]\S* (?P<kind>[\w-]+)\(')
_ORIGIN = re.compile(r'op_name="([^"]*)"')


def largest(text: str) -> tuple[tuple[int, str, str], ...]:
  """Of the largest arrays of a compiled program (bytes, type and shape, origin), one for each shape."""
  found: dict[str, tuple[int, str, str]] = {}
  fused = False
  for line in text.splitlines():
    if line and not line[0].isspace():  # The head of a computation. What a fusion makes inside is never in memory.
      fused = 'fused' in line.split('(')[0]
    match = None if fused else _INSTRUCTION.search(line)
    if match and match['type'] in _SIZES:
      shape = f"{match['type']}[{match['shape']}]"
      size = _SIZES[match['type']] * math.prod(map(int, match['shape'].split(',')))
      origin = _ORIGIN.search(line)
      found.setdefault(shape, (size, shape, origin[1] if origin else match['kind']))
  return tuple(sorted(found.values(), reverse=True)[:_LISTED])


def train_flops(
    target: target_lib.TargetConfig, drafter: drafter_lib.DrafterConfig, *, rows: int, length: int, anchors: int,
    document: int, online: bool
) -> float:
  """Floating-point operations of a train step that no program can do without; two for each product and sum.

  Attention is counted for the pairs that a mask lets through; rematerialisation and masked pairs are not counted.

  Args:
    target: the target's shape.
    drafter: the drafter's.
    rows: B.
    length: T.
    anchors: A.
    document: tokens of each of the documents that fill a row; none sees another. Where they are of unknown lengths,
      the longest possible give an upper bound.
    online: whether the target's features are computed in the step.
  """
  d, heads, kv = drafter, drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
  slots = anchors * d.block_size
  context = length * len(d.target_layers) * d.width * d.width  # fc.
  context += d.num_layers * length * d.width * 2 * kv
  block = d.num_layers * slots * (d.width * (2 * heads + 2 * kv) + 3 * d.width * d.mlp_width)
  seen = min(d.window or document, document / 2) + d.block_size
  attention = d.num_layers * slots * seen * 2 * heads
  # The backward pass has two products for each of the forward pass; the head, which is frozen, has one.
  head = 2 * anchors * (d.block_size - 1) * (d.vocab_size or target.vocab_size) * d.width
  total = 3 * (context + block + attention) + head
  if online:
    layers = max(d.target_layers) + 1
    t, t_heads = target, target.num_heads * target.head_dim
    t_kv = t.num_kv_heads * t.head_dim
    matrices = t.width * (2 * t_heads + 2 * t_kv) + 3 * t.width * t.mlp_width
    total += layers * (length * matrices + length * document / 2 * 2 * t_heads)
  return 2.0 * rows * total


def _table(programs: list[Program], devices: int, memory: int) -> str:
  gib = lambda size: f'{size / 2**30:.2f}'
  rows = [{
      'program': p.name, 'arguments, GiB': gib(p.arguments), 'temporaries, GiB': gib(p.temporaries),
      'output, GiB': gib(p.output), 'peak, GiB': gib(p.peak),
      **({'of memory': f'{p.peak / memory:.0%}'} if memory else {}),
      'TFLOP': '' if p.flops is None else f'{p.flops / 1e12:.3g}',
  } for p in programs]
  return f'A device, of {devices}:\n' + tabulate.tabulate(rows, headers='keys', disable_numparse=True)
