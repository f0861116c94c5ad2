"""The smallest TPU slice on which each target of the paper trains, found by compiling: no slice need be there.

  pip install '.[tpu]' && JAX_PLATFORMS=cpu python experiments/benchmarks/slices.py

For each target and generation of TPUs it compiles the train step and the decoding of `--mode=compile`, with the paper's
batch, begins where a measured slice says that it should fit, and ends when one fits and the next smaller one does not.
Writes table.md and slices.json to `--results`, and each compilation to compiled.jsonl there, as it ends: the same
command goes on where it was stopped. A compilation takes 3 to 10 minutes of one core, the whole table some hours.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

from absl import app
from absl import flags
import tabulate

from dspec import compile as compile_lib
from dspec import config as config_lib
from dspec import json_lines

_RESULTS = flags.DEFINE_string('results', 'experiments/results/slices', 'Folder of the table and what it is made of.')
_ONLY = flags.DEFINE_list('only', [], 'Targets, as llama3_8b; all by default.')
_COMPILE = flags.DEFINE_list('compile', [], 'TARGET,SLICE: only compile that; what each process is started with.')

TARGETS = ('llama3_8b', 'qwen3_8b', 'llama3_2_3b', 'qwen3_4b')
# Slices of Google Cloud, ascending, and what it calls them: N counts chips, for v5p TensorCores, two of a chip. Of one
# chip there are some, but these targets take several.
# https://cloud.google.com/tpu/docs/v5e, .../v6e and .../v5p.
_SQUARES = ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
SLICES = {
    'v5p': tuple(f'v5p:{size}' for size in ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8')),
    'v6e': tuple(f'v6e:{size}' for size in _SQUARES),
    'v5e': tuple(f'v5e:{size}' for size in _SQUARES),
}
_TYPES = {'v5p': 'v5p-{cores}', 'v6e': 'v6e-{chips}', 'v5e': 'v5litepod-{chips}'}
_ROWS = 32  # Of the paper's batch: fsdp, which splits it, must divide it.
# The drafter's layers are computed twice, so that the backward pass keeps their inputs only.
_REMAT = 'layers'
# GiB of all devices together, where nothing of a target is known yet: the search begins there.
_FIRST_GUESS = 200

Record = Mapping[str, Any]


def chips(slice_: str) -> int:
  """Of `GENERATION:AxB[xC]`."""
  count = 1
  for size in slice_.partition(':')[2].split('x'):
    count *= int(size)
  return count


def mesh(slice_: str) -> dict[str, int]:
  """Parameters and rows over as many chips as there are rows; more chips share each matrix product."""
  fsdp = min(chips(slice_), _ROWS)
  return {'fsdp': fsdp, 'tensor': chips(slice_) // fsdp}


def memory(slice_: str) -> float:
  """Bytes of a chip that a program may use."""
  return compile_lib.USABLE * compile_lib.HBM[slice_.partition(':')[0]] * 2**30


def predicted(slice_: str, records: Sequence[Record]) -> float:
  """Bytes a chip: what the most similar measured slice of the target takes in all, shared by these chips.

  Args:
    slice_: the slice.
    records: of the target, on any generation; those that do not say how much they take count for nothing.
  """
  known = [record for record in records if record['used']]
  if not known:
    return _FIRST_GUESS * 2**30 / chips(slice_)
  far = lambda record: abs(chips(record['slice']) / chips(slice_) - 1)
  nearest = min(known, key=far)
  return nearest['used'] * chips(nearest['slice']) / chips(slice_)


def next_slice(slices: Sequence[str], records: Sequence[Record]) -> str | None:
  """The slice of one generation to compile for; None once its smallest is known, or that there is none.

  Args:
    slices: ascending.
    records: of one target, on any generation.
  """
  fits = {record['slice']: record['fits'] for record in records}
  smallest = next((i for i, slice_ in enumerate(slices) if fits.get(slice_)), len(slices))
  largest_failed = max((i for i, slice_ in enumerate(slices) if fits.get(slice_) is False), default=-1)
  open_ = slices[largest_failed + 1 : smallest]
  if not open_:
    return None
  if smallest < len(slices):
    return open_[-1]  # Does the next smaller one do?
  return next((slice_ for slice_ in open_ if predicted(slice_, records) <= memory(slice_)), open_[-1])


def answer(slices: Sequence[str], records: Sequence[Record]) -> Record | None:
  """The record of the smallest slice that fits; None where there is none, or it is not known yet."""
  if next_slice(slices, records):
    return None
  return next((r for slice_ in slices for r in records if r['slice'] == slice_ and r['fits']), None)


def table(records: Sequence[Record]) -> str:
  """Markdown: a line for each target, a column for each generation; `...` where it is not known yet."""
  rows = []
  for target in TARGETS:
    own = [record for record in records if record['target'] == target]
    row = {'target': config_lib.TARGETS[target].path.rpartition('/')[2]}
    for generation, slices in SLICES.items():
      found = answer(slices, own)
      row[generation] = _cell(found) if found else '...' if next_slice(slices, own) else 'none'
    rows.append(row)
  return tabulate.tabulate(rows, headers='keys', tablefmt='github')


def _cell(record: Record) -> str:
  slice_, split = record['slice'], record['mesh']
  generation, _, size = slice_.partition(':')
  name = _TYPES[generation].format(chips=chips(slice_), cores=2 * chips(slice_))
  options = f'fsdp={split["fsdp"]}' + (f', tensor={split["tensor"]}' if split['tensor'] > 1 else '')
  return f'`{name}` ({size}; {options}): {record["used"] / 2**30:.1f} GiB of {compile_lib.HBM[generation]}'


def compile_for(target: str, slice_: str) -> dict[str, Any]:
  """Compiles in this process.

  Returns:
    A record: `fits`, `used` (bytes of a chip at the worst moment; None where the compiler does not say), what it is of.
  """
  config = config_lib.load(f'experiments/targets/{target}.py').copy_and_resolve_references()
  config.mesh.update(mesh(slice_))
  config.train.remat = _REMAT
  record = {'target': target, 'slice': slice_, 'mesh': mesh(slice_), 'remat': _REMAT}
  try:
    programs = compile_lib.run(config, slice_)
  except compile_lib.DoesNotFit as error:
    return {**record, 'fits': False, 'used': error.used, 'says': str(error).splitlines()[0]}
  peaks = {program.name: program.peak for program in programs}
  return {**record, 'fits': True, 'used': max(peaks.values()), 'peaks': peaks, 'flops': programs[0].flops}


def main(argv: Sequence[str]) -> None:
  if _COMPILE.value:
    print(json.dumps(compile_for(*_COMPILE.value)))
    return
  out = pathlib.Path(_RESULTS.value)
  path = out / 'compiled.jsonl'
  records = json_lines.read_whole(path)
  cells = [(target, generation) for target in _ONLY.value or TARGETS for generation in SLICES]
  for number, (target, generation) in enumerate(cells, 1):
    own = lambda target=target: [record for record in records if record['target'] == target]
    while slice_ := next_slice(SLICES[generation], own()):
      print(f'{time.strftime("%H:%M:%S")} {number} of {len(cells)}: {target} on {slice_}, '
            f'{predicted(slice_, own()) / 2**30:.1f} GiB predicted', flush=True)
      begin = time.perf_counter()
      # In a process of its own, so that what the compiler holds is given back.
      done = subprocess.run(
          [sys.executable, argv[0], f'--compile={target},{slice_}'], check=True, text=True, stdout=subprocess.PIPE)
      record = {**json.loads(done.stdout.splitlines()[-1]), 'seconds': round(time.perf_counter() - begin)}
      json_lines.append(path, record)
      records.append(record)
      used = f'{record["used"] / 2**30:.1f} GiB' if record['used'] else 'unknown'
      print(f'{time.strftime("%H:%M:%S")} {"fits" if record["fits"] else "does not fit"}: {used}, '
            f'{record["seconds"]} s', flush=True)
    (out / 'table.md').write_text(table(records) + '\n')
  (out / 'slices.json').write_text(json.dumps(records, indent=1) + '\n')
  print(table(records))


if __name__ == '__main__':
  app.run(main)
