"""The target's tapped hidden states of whole rows, cached as ArrayRecord files."""

import functools
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from absl import logging
from array_record.python import array_record_module
import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tqdm

from dspec import multihost
from dspec import sharding
from dspec.decoding import autoregressive
from dspec.errors import UserError
from dspec.models import target as target_lib

_ROWS_PER_FILE = 256
_SPARE = 1.05  # Serialisation adds a little to the arrays.


@functools.partial(jax.jit, static_argnames=('model', 'taps'))
def compute(
    model: target_lib.Target, params: Any, tokens_BxT: jax.Array, taps: tuple[int, ...],
    starts_BxT: jax.Array | None = None,
) -> jax.Array:
  """Outputs of the tapped layers side by side, bfloat16 [B, T, N*D], in chunks so that long rows fit.

  With `starts` (see `pipeline.make_row`) they are those of each document by itself.
  """
  b, t = tokens_BxT.shape
  chunk = autoregressive.PREFILL_CHUNK
  padded = t + -t % chunk
  features = jnp.zeros((b, padded, len(taps) * model.config.width), jnp.bfloat16)
  store = lambda features, new, positions: jax.lax.dynamic_update_slice(
      features, new.astype(jnp.bfloat16), (0, positions[0, 0], 0)
  )
  cache = target_lib.init_cache(model.config, b, padded)
  lengths = jnp.full(b, t, jnp.int32)
  _, _, features = autoregressive.prefill(
      model, params, cache, tokens_BxT, lengths, taps, store, features, starts_BxT
  )
  return features[:, :t]


def check_disk(folder: pathlib.Path, num_tokens: int, feature_width: int) -> int:
  """Logs the size of the cache to come, in bytes, and returns it.

  Raises:
    UserError: when the disk has less room, before anything is computed.
  """
  size = int(num_tokens * feature_width * 2 * _SPARE)
  folder.mkdir(parents=True, exist_ok=True)
  free = shutil.disk_usage(folder).free
  logging.info('cached features: at most %.2f GB to write, %.1f GB free in %s', size / 1e9, free / 1e9, folder)
  if size > free:
    raise UserError(
        f'{folder}: the features of up to {num_tokens} tokens need {size / 1e9:.2f} GB, but the disk has '
        f'{free / 1e9:.2f} GB left. Free some, put the cache elsewhere with --config.cache_dir, or set '
        '--config.data.features=online.'
    )
  return size


def encode_record(tokens: Sequence[int], supervised: Sequence[bool], features: np.ndarray | None) -> bytes:
  """One row as bytes.

  Args:
    tokens: T ids.
    supervised: which of them the target says, T.
    features: bfloat16 [T, N*D], or None.
  """
  record = {'tokens': np.asarray(tokens, np.int32), 'supervised': np.asarray(supervised, bool)}
  if features is not None:
    # As integers: a bfloat16 array has no portable serialised type.
    record['features'] = np.ascontiguousarray(features).view(np.uint16)
  return flax.serialization.msgpack_serialize(record)


def decode_record(data: bytes) -> dict[str, Any]:
  """Inverse of `encode_record`."""
  record = flax.serialization.msgpack_restore(data)
  if 'features' in record:
    record['features'] = record['features'].view(ml_dtypes.bfloat16)
  return record


def file_paths(folder: pathlib.Path, num_rows: int) -> list[pathlib.Path]:
  """The files that `write` makes."""
  count = -(-num_rows // _ROWS_PER_FILE)
  return [folder / f'rows-{i:05d}-of-{count:05d}.array_record' for i in range(count)]


def write(
    folder: pathlib.Path,
    model: target_lib.Target | None,
    params: Any,
    rows: Sequence[tuple[Sequence[int], Sequence[bool]]],
    taps: tuple[int, ...],
    *,
    batch_size: int = 32,
) -> list[pathlib.Path]:
  """Writes rows, with their features, to ArrayRecord files; files that are there already are kept.

  Args:
    folder: where to.
    model: the target; None writes tokens only, for features computed online.
    params: its parameters, already in the compute dtype.
    rows: (tokens, which of them are supervised).
    taps: tapped layers.
    batch_size: rows the target reads together.

  Returns:
    The files. A file appears under its name only when it is complete.
  """
  paths, first = file_paths(folder, len(rows)), multihost.is_first()
  there = multihost.from_first(lambda: [path.exists() for path in paths])
  with tqdm.tqdm(total=len(rows), desc='target features', unit='row', disable=not first) as bar:
    for i, path in enumerate(paths):
      part = rows[i * _ROWS_PER_FILE : (i + 1) * _ROWS_PER_FILE]
      records = [] if there[i] else list(_records(model, params, part, taps, batch_size, bar))
      if records and first:
        partial = path.with_suffix('.partial')
        # One record a group: rows are read in random order.
        writer = array_record_module.ArrayRecordWriter(str(partial), 'group_size:1,uncompressed')
        for record in records:
          writer.write(record)
        writer.close()
        partial.rename(path)
      elif there[i]:
        bar.update(len(part))
  multihost.wait_for_all('the files of features')
  return paths


def _records(model, params, rows, taps, batch_size, bar):
  """Serialised rows in their order; computed in batches of similar length."""
  if model is None:
    for tokens, supervised in rows:
      yield encode_record(tokens, supervised, None)
      bar.update()
    return
  chunk = autoregressive.PREFILL_CHUNK
  width = max(len(tokens) for tokens, _ in rows)
  width += -width % chunk
  records = [b''] * len(rows)
  order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
  for start in range(0, len(order), batch_size):
    chosen = order[start : start + batch_size]
    tokens_BxT = np.zeros((batch_size, -(-max(len(rows[i][0]) for i in chosen) // chunk) * chunk), np.int32)
    for r, i in enumerate(chosen):
      tokens_BxT[r, : len(rows[i][0])] = rows[i][0]
    features = sharding.to_host(compute(model, params, tokens_BxT, taps))
    for r, i in enumerate(chosen):
      tokens, supervised = rows[i]
      records[i] = encode_record(tokens, supervised, features[r, : len(tokens)])
      bar.update()
  yield from records
