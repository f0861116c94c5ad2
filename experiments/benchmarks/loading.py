"""How much memory it takes to load a large checkpoint: a synthetic Hugging Face folder, read in a process of its own.

  python experiments/benchmarks/loading.py --folder=/tmp/checkpoint --layers=32

Writes a Llama of Llama-3-8B's widths in bfloat16 (0.44 GB a layer; and twice 1.05 GB for embedding and head), in shards
of at most 5 GB, then loads it twice: handing each tensor away, as to an accelerator, and keeping them all. Prints the
peak of the process's private memory (RssAnon of /proc/self/status, Linux only), next to the largest tensor.

With --layers=8: checkpoint 5.59 GB, largest tensor 1.05 GB; handed away, a peak of 1.07 GB; kept, 5.62 GB.
"""

import json
import pathlib
import re
import subprocess
import sys
import time

from absl import app
from absl import flags
import ml_dtypes
import numpy as np
from safetensors import numpy as safetensors_numpy

from dspec.checkpoints import huggingface
from dspec.checkpoints import tensors

_FOLDER = flags.DEFINE_string('folder', None, 'Where the checkpoint is written, if it is not there.', required=True)
_LAYERS = flags.DEFINE_integer('layers', 4, 'Of the synthetic model.')
_READ = flags.DEFINE_enum('read', '', ['', 'away', 'kept'], 'Only load it; what the two processes are started with.')
_SHARD = 5 * 10**9


def private_memory() -> int:
  """Bytes of this process that are neither shared nor backed by a file."""
  status = pathlib.Path('/proc/self/status').read_text()
  return int(re.search(r'RssAnon:\s+(\d+) kB', status)[1]) * 1024


def write(folder: pathlib.Path, layers: int) -> None:
  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps({
      'architectures': ['LlamaForCausalLM'], 'vocab_size': 128256, 'hidden_size': 4096, 'intermediate_size': 14336,
      'num_hidden_layers': layers, 'num_attention_heads': 32, 'num_key_value_heads': 8, 'rms_norm_eps': 1e-5,
      'rope_theta': 500000.0, 'max_position_embeddings': 8192, 'eos_token_id': 128009, 'tie_word_embeddings': False}))
  rules = huggingface.tensor_rules(huggingface.read_config(folder))
  shards, size = [{}], 0
  for name, rule in rules.items():
    tensor_bytes = 2 * int(np.prod(rule.shape))
    if size + tensor_bytes > _SHARD:
      shards, size = [*shards, {}], 0
    shards[-1][name], size = rule.shape, size + tensor_bytes
  files, random = {}, np.random.default_rng(0)
  for i, shard in enumerate(shards, 1):
    file = f'model-{i:05d}-of-{len(shards):05d}.safetensors'
    row = random.normal(size=2**20).astype(ml_dtypes.bfloat16)
    safetensors_numpy.save_file({name: np.resize(row, shape) for name, shape in shard.items()}, folder / file)
    files.update(dict.fromkeys(shard, file))
  (folder / huggingface.INDEX).write_text(json.dumps({'weight_map': files}))


def read(folder: pathlib.Path, keep: bool) -> None:
  config = huggingface.read_config(folder)
  tensors.shapes(config)  # What tracing the model takes is not counted.
  before, peak, begin = private_memory(), 0, time.perf_counter()

  def place(path, array):
    nonlocal peak
    peak = max(peak, private_memory())
    return array if keep else path

  huggingface.load_params(folder, config, dtype=ml_dtypes.bfloat16, place=place)
  print(json.dumps({'peak': peak - before, 'seconds': time.perf_counter() - begin}))


def main(argv) -> None:
  folder = pathlib.Path(_FOLDER.value)
  if _READ.value:
    return read(folder, _READ.value == 'kept')
  if not folder.exists():
    write(folder, _LAYERS.value)
  config = huggingface.read_config(folder)
  sizes = [2 * int(np.prod(rule.shape)) for rule in huggingface.tensor_rules(config).values()]
  print(f'checkpoint {sum(sizes) / 1e9:.2f} GB, largest tensor {max(sizes) / 1e9:.2f} GB')
  for kind, what in (('away', 'each tensor handed away'), ('kept', 'all of them kept')):
    done = subprocess.run([sys.executable, argv[0], f'--folder={folder}', f'--read={kind}'], check=True, text=True,
                          stdout=subprocess.PIPE)
    result = json.loads(done.stdout)
    print(f"{what}: peak {result['peak'] / 1e9:.2f} GB of private memory, {result['seconds']:.0f} s")


if __name__ == '__main__':
  app.run(main)
