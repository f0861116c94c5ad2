"""Programs compiled for devices that are not there: sizes by hand, operations counted in the program, refusals."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from dspec import compile as compile_lib
from dspec import config as config_lib
from dspec import sharding
from dspec import train
from dspec.data import features
from dspec.data import pipeline
from dspec.errors import UserError
from dspec.losses.objective import Objective
from dspec.models import drafter as drafter_lib

ROOT = pathlib.Path(__file__).parents[1]
# In a process of its own, where the devices may still be chosen.
SCRIPT = '''
import dataclasses, json, sys
from dspec import compile as compile_lib, config as config_lib
config = config_lib.default('smoke').copy_and_resolve_references()
config_lib.use_target(config, 'smollm2_135m')
config.train.batch_size = 8
config.mesh.update(json.loads(sys.argv[2]))
print(json.dumps([dataclasses.asdict(program) for program in compile_lib.run(config, sys.argv[1])]))
'''


def compiled(topology, **mesh):
  done = subprocess.run(
      [sys.executable, '-c', SCRIPT, topology, json.dumps(mesh)], capture_output=True, text=True, timeout=600,
      env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}, check=False)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1]), done.stdout


def size_of_arguments(mesh):
  """Bytes a device of the train step's arguments: everything that is split by mesh, counted by hand."""
  fsdp, tensor = mesh.get('fsdp', 1), mesh.get('tensor', 1)
  width, mlp, kv, vocab, taps = 576, 1536, 192, 49152, 5
  layer = 2 * width * width + 2 * width * kv + 3 * width * mlp
  # The target in bfloat16, its norms in float32.
  target = 2 * (vocab * width + 30 * layer) / (fsdp * tensor) + 4 * 61 * width
  fc = taps * width * width
  norms = 2 * (2 * width + 2 * 64) + 2 * width
  drafter = (2 * layer + fc) / (fsdp * tensor) + norms
  # The parameters and the optimizer's two moments in float32; features scale and draft vocabulary; counters.
  state = 4 * 3 * drafter + 4 * taps * width + 4 * 8192
  rows = 8 / (8 / tensor)
  length = 60 + 24 + 64
  length += -length % 32
  batch = rows * (length * (4 + 1) + 2 * (4 + 1) + 2 * length * taps * width)
  return target + state + batch


@pytest.mark.parametrize('mesh', [{'fsdp': 8}, {'data': 2, 'fsdp': 4}])
def test_sizes_by_hand(mesh):
  (step, decoding), printed = compiled('cpu:8', **mesh)
  assert step['name'] == 'train step' and decoding['name'] == 'decoding'
  assert step['arguments'] == pytest.approx(size_of_arguments(mesh), rel=1e-3)
  for program in (step, decoding):
    assert program['peak'] == program['arguments'] + program['temporaries'] + program['output']
    assert f"{program['peak'] / 2**30:.2f}" in printed
    sizes = [size for size, *_ in program['largest']]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 2**20
  # The state takes the place of the old one: what comes out beside it are numbers.
  assert 0 <= step['output'] < 1000


def test_largest_arrays():
  text = '''HloModule x
%fused_computation (p: f32[512,512]) -> f32[512,512] {
  %inner = f32[512,512]{1,0} multiply(%p, %p)
}
ENTRY %main (a: bf16[8,4]) -> f32[16,8] {
  %a = bf16[8,4]{1,0} parameter(0), metadata={op_name="x"}
  %b = f32[16,8]{1,0:T(8,128)} fusion(%a), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(f)/dot"}
  %c = pred[] compare(%a, %a)
  ROOT %d = f32[16,8]{1,0} copy(%b)
}
'''
  assert compile_lib.largest(text) == ((512, 'f32[16,8]', 'jit(f)/dot'), (64, 'bf16[8,4]', 'x'))


def count_products(jaxpr):
  """Floating-point operations of all matrix products of a program, those of a loop as often as it runs."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      (contracting, _), _ = equation.params['dimension_numbers']
      depth = int(np.prod([equation.invars[0].aval.shape[axis] for axis in contracting]))
      total += 2 * depth * int(np.prod(equation.outvars[0].aval.shape))
    times = equation.params.get('length', 1) if equation.primitive.name == 'scan' else 1
    for value in equation.params.values():
      for inner in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(inner, 'jaxpr', inner)
        if hasattr(inner, 'eqns'):
          total += times * count_products(inner)
  return total


@pytest.mark.parametrize('online', [False, True])
def test_operations_are_those_of_the_program(online, untrained_target):
  """On short rows, where attention, of which a program computes masked pairs too, is next to nothing."""
  target, params = untrained_target(
      vocab_size=512, num_layers=2, width=128, mlp_width=384, num_heads=4, num_kv_heads=2, head_dim=32)
  config = drafter_lib.from_target(target.config, num_layers=2, block_size=4, target_layers=(0, 1), mask_token_id=3)
  drafter, length, rows, anchors = drafter_lib.Drafter(config), 32, 4, 6
  batch = {
      'tokens': jnp.zeros((rows, length), jnp.int32), 'supervised': jnp.ones((rows, length), bool),
      'anchors': jnp.zeros((rows, anchors), jnp.int32), 'is_anchor': jnp.ones((rows, anchors), bool)}
  if not online:
    batch['features'] = jnp.zeros((rows, length, 2 * 128), jnp.bfloat16)
  optimizer = train.make_optimizer(config_lib.default())
  models = {'optimizer': optimizer, 'target': target, 'drafter': drafter}
  state = jax.eval_shape(lambda: train.init_state(jax.random.key(0), batch, params, None, **models))
  jaxpr = jax.make_jaxpr(lambda state: train.train_step(
      state, batch, params, spec=Objective(), head_chunk=72, **models))(state)
  counted = count_products(jaxpr.jaxpr)
  got = compile_lib.train_flops(
      target.config, config, rows=rows, length=length, anchors=anchors, document=length, online=online)
  assert got <= counted * 1.001 and got == pytest.approx(counted, rel=0.05)


def test_operations_grow_with_what_is_seen():
  config = config_lib.load(str(ROOT / 'experiments/targets/llama3_8b.py'))
  target = compile_lib.target_shape(config)
  drafter = train.make_drafter_config(config, target)
  count = lambda **changes: compile_lib.train_flops(
      target, drafter, **{
          'rows': 32, 'length': 4096, 'anchors': 512, 'document': 4096, 'online': False, **changes})
  # Per anchor, by arXiv 2606.11552's sizes: 16 slots through 4 layers of queries, keys, values, output and the MLP.
  layer = 16 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + (2048 + 16) * 2 * 4096)
  head = 15 * 128256 * 4096
  per_anchor = 2 * 32 * (3 * 4 * layer + 2 * head)
  assert count(anchors=512) - count(anchors=511) == pytest.approx(per_anchor)
  assert count(rows=64) == pytest.approx(2 * count())


def test_pairs_of_documents_are_counted_once():
  """In a row of four documents there are a quarter of the pairs, of target and drafter."""
  config = config_lib.load(str(ROOT / 'experiments/targets/llama3_8b.py'))
  target = compile_lib.target_shape(config)
  drafter = train.make_drafter_config(config, target)
  count = lambda document: compile_lib.train_flops(
      target, drafter, rows=1, length=4096, anchors=512, document=document, online=True)
  pairs = 3 * 4 * 512 * 16 * 2048 + 31 * 4096 * 2048  # Of four layers, thrice; of the target's, up to the last tapped.
  assert count(4096) - count(1024) == pytest.approx(0.75 * pairs * 4 * 4096)


@pytest.mark.parametrize('row_tokens', [0, 64])
@pytest.mark.parametrize('kind', ['cached', 'online'])
def test_batches_are_those_of_the_pipeline(row_tokens, kind, untrained_target):
  target = untrained_target(width=16)[0].config
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.data.update(row_tokens=row_tokens, features=kind, max_prompt_tokens=10, max_response_tokens=20)
  config.drafter.target_layers = (0, 1)
  length = compile_lib.row_length(config, target)
  assert length == (row_tokens or 96)
  array = np.zeros((5, 2 * 16), jnp.bfloat16) if kind == 'cached' else None
  row = pipeline.make_row(
      [features.encode_record([1] * 5, [True] * 5, array)], np.random.default_rng(0), length=length,
      anchors=config.train.anchors, packed=bool(row_tokens))
  mesh = jax.sharding.AbstractMesh((1, 1, 1), sharding.AXES)
  found = compile_lib._batch(config, mesh, length, target)
  wanted = {name: ((config.train.batch_size, *x.shape), x.dtype) for name, x in row.items()}
  assert {name: (x.shape, x.dtype) for name, x in found.items()} == wanted


@pytest.mark.parametrize('topology, text', [
    ('', 'must read v4|v5e|v5p|v6e:AxB'), ('v5e', 'must read'), ('v5e:8', 'must read'), ('v7:2x2', 'must read'),
    ('cpu:0', 'must read'), ('v5e:2x', 'must read')])
def test_topologies_that_do_not_exist(topology, text):
  with pytest.raises(UserError) as error:
    compile_lib.run(config_lib.default('smoke'), topology)
  assert text in str(error.value) and f'--topology={topology!r}' in str(error.value)


def test_for_a_tpu():
  pytest.importorskip('libtpu', reason="needs pip install '.[tpu]'")
  (step, decoding), printed = compiled('v5e:2x4', fsdp=8)
  assert step['arguments'] == pytest.approx(size_of_arguments({'fsdp': 8}), rel=0.1)  # Padded to tiles.
  assert 0 < decoding['peak'] < 16 * 2**30
  assert 'of memory' in printed


def test_sizes_of_arguments():
  where = lambda *spec: NamedSharding(AbstractMesh((4, 2), ('fsdp', 'tensor')), PartitionSpec(*spec))
  arguments = {
      'kernel': jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=where('fsdp', 'tensor')),
      'rows': [jax.ShapeDtypeStruct((16, 3), jnp.bfloat16, sharding=where(('fsdp', 'tensor')))],
      'scale': jax.ShapeDtypeStruct((5,), jnp.int8, sharding=where())}
  assert compile_lib.size_of(arguments) == 2 * 3 * 4 + 2 * 3 * 2 + 5


REFUSED = SCRIPT.rpartition('print(')[0] + '''
try:
  compile_lib.run(config, sys.argv[1])
except compile_lib.DoesNotFit as error:
  print(error.used)
  raise
'''


def refused(script, topology, mesh, text):
  """Runs a script that must end with a refusal of `text`: what it printed."""
  done = subprocess.run(
      [sys.executable, '-c', script, topology, mesh], capture_output=True, text=True, timeout=600,
      env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}, check=False)
  assert done.returncode == 1
  assert f'DoesNotFit: train step on {topology}: {text}' in done.stderr
  assert '--config.train.head_chunk' in done.stderr
  return done.stdout.splitlines()


@pytest.mark.parametrize('change, mesh, text', [
    ('config.train.update(batch_size=8192, head_chunk=10**8)', '{"fsdp": 8}', 'RESOURCE_EXHAUSTED'),
    # Nothing is compiled for a copy of 8 billion parameters, and a drafter in training, on each device.
    ('config_lib.use_target(config, "llama3_8b"); config.train.batch_size = 8', '{}', 'parameters and batch alone'),
])
def test_what_does_not_fit_is_told_with_advice(change, mesh, text):
  pytest.importorskip('libtpu', reason="needs pip install '.[tpu]'")
  printed = refused(REFUSED.replace('config.train.batch_size = 8', change), 'v5e:2x4', mesh, text)
  assert int(printed[-1]) > 16 * 2**30


def test_temporaries_that_do_not_fit_beside_the_arguments():
  """The compiler looks at temporaries alone; here each fits a device, and both do not."""
  script = REFUSED.replace('try:', '''
step = compile_lib.run(config, sys.argv[1])[0]
print(step.arguments, step.temporaries, step.peak)
compile_lib.HBM['cpu'] = (max(step.arguments, step.temporaries) + step.peak) / 2**31 / compile_lib.USABLE
try:''')
  printed = refused(script, 'cpu:8', '{"fsdp": 8}', 'arguments and temporaries take')
  arguments, temporaries, peak = map(int, printed[-2].split())
  assert max(arguments, temporaries) < peak == int(printed[-1])
