"""Cached target features: what the target computes, whole files only, nothing computed twice."""

import shutil
import types

import grain
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspec.data import features
from dspec.errors import UserError
from dspec.models import target as target_lib

TAPS = (0, 1)
WIDTH = 16


@pytest.fixture(scope='module')
def target(untrained_target):
  return untrained_target(3, width=WIDTH)


@pytest.fixture(scope='module')
def expected(target):
  """A function: tokens [B, T] -> tapped outputs [B, T, N*D], all positions in one pass, float32."""
  module, params = target

  @jax.jit
  def forward(tokens):
    positions = jnp.tile(jnp.arange(tokens.shape[1])[None], (tokens.shape[0], 1))
    cache = target_lib.init_cache(module.config, *tokens.shape)
    return module.apply({'params': params}, tokens, positions, cache, TAPS)[1]

  def padded(tokens):  # To one shape; nothing before the padding can see it.
    tokens = np.asarray(tokens)
    full = np.zeros((3, 70), np.int32)
    full[: len(tokens), : tokens.shape[1]] = tokens
    return np.asarray(forward(full))[: len(tokens), : tokens.shape[1]]

  return padded


def close(found, wanted):
  """Equal but for rounding to bfloat16 (8 bits)."""
  assert found.dtype == ml_dtypes.bfloat16
  np.testing.assert_allclose(
      np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=2.0**-8, atol=1e-3)


# Below, at and past the borders of a prefill chunk.
@pytest.mark.parametrize('length', [1, 32, 33, 70])
def test_compute(target, expected, length):
  tokens = np.random.default_rng(length).integers(0, 23, (3, length))
  found = features.compute(*target, jnp.asarray(tokens, jnp.int32), TAPS)
  assert found.shape == (3, length, len(TAPS) * WIDTH)
  close(np.asarray(found), expected(tokens))


def test_documents_of_a_row_do_not_see_one_another(target, expected):
  """Across the borders of chunks; what is changed in one document, or in the padding, changes no other."""
  tokens = np.random.default_rng(5).integers(0, 23, (3, 70))
  starts = np.zeros((3, 70), np.int32)
  borders = [(0, 31, 33, 60, 70), (0, 1, 70), (0, 40, 70)]
  for row, of_row in zip(starts, borders):
    for start, end in zip(of_row, of_row[1:]):
      row[start:end] = start
  compute = lambda tokens: np.asarray(
      features.compute(*target, jnp.asarray(tokens, jnp.int32), TAPS, jnp.asarray(starts)))
  found = compute(tokens)
  for r, of_row in enumerate(borders):
    for start, end in zip(of_row, of_row[1:]):
      close(found[r, start:end], expected(tokens[r : r + 1, start:end])[0])
  changed = tokens.copy()
  changed[0, 31:33] = (changed[0, 31:33] + 1) % 23
  changed[1:, -1] = (changed[1:, -1] + 1) % 23
  same = (compute(changed).view(np.uint16) == found.view(np.uint16)).all(-1)
  assert same[0, :31].all() and same[0, 33:].all() and not same[0, 31:33].any()
  assert same[1:, :-1].all() and not same[1:, -1].any()


def test_record_round_trip():
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 2**16, (7, 5), dtype=np.uint16)  # Infinities and NaN among them.
  array = bits.view(ml_dtypes.bfloat16)
  for given in (array, np.asfortranarray(array), np.repeat(array, 2, 1)[:, ::2]):
    record = features.decode_record(features.encode_record([3, 1, 49151], [False, False, True], given))
    assert record['features'].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(record['features'].view(np.uint16), bits)
    assert record['tokens'].dtype == np.int32
    assert record['tokens'].tolist() == [3, 1, 49151]
    assert record['supervised'].tolist() == [False, False, True]
  assert 'features' not in features.decode_record(features.encode_record([3], [False], None))


# ---- Files -----------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def rows():
  rng = np.random.default_rng(1)
  return [(rng.integers(0, 23, n).tolist(), rng.integers(0, 2, n).astype(bool).tolist()) for n in (40, 5, 33, 64, 2, 12, 32)]


@pytest.fixture
def write(target, rows, monkeypatch):
  """Writes the rows as three files."""
  monkeypatch.setattr(features, '_ROWS_PER_FILE', 3)
  return lambda folder, module=target[0]: features.write(
      folder, module, target[1], rows, TAPS, batch_size=2)


def read(paths):
  source = grain.sources.ArrayRecordDataSource([str(path) for path in paths])
  return [features.decode_record(source[i]) for i in range(len(source))]


def test_write(write, rows, expected, tmp_path):
  paths = write(tmp_path)
  assert sorted(tmp_path.iterdir()) == sorted(paths)
  assert len(paths) == 3
  records = read(paths)
  assert len(records) == len(rows)
  for record, (tokens, supervised) in zip(records, rows):
    assert record['tokens'].tolist() == tokens
    assert record['supervised'].tolist() == supervised
    close(record['features'], expected([tokens])[0])


def test_write_tokens_only(write, rows, tmp_path):
  records = read(write(tmp_path, None))
  assert [record['tokens'].tolist() for record in records] == [tokens for tokens, _ in rows]
  assert not any('features' in record for record in records)


def test_a_stopped_write_is_taken_up(write, tmp_path, monkeypatch):
  whole, folder = tmp_path / 'whole', tmp_path / 'stopped'
  whole.mkdir()
  folder.mkdir()
  first = {path.name: path.read_bytes() for path in write(whole)}
  names = sorted(first)
  original, calls = features.compute, []

  def stopping(*args):
    calls.append(args)
    if len(calls) == 4:  # The second batch of the second file.
      raise KeyboardInterrupt
    return original(*args)

  with monkeypatch.context() as patch:
    patch.setattr(features, 'compute', stopping)
    with pytest.raises(KeyboardInterrupt):
      write(folder)
  assert [path.name for path in folder.glob('*.array_record')] == names[:1]
  time = (folder / names[0]).stat().st_mtime_ns
  (folder / names[1]).with_suffix('.partial').write_bytes(b'what a stop has left')

  calls.clear()
  monkeypatch.setattr(features, 'compute', lambda *args: calls.append(args) or original(*args))
  paths = write(folder)
  assert len(calls) == 3  # Two batches for the second file, one for the third.
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
  assert sorted(path.name for path in paths) == names
  assert (folder / names[0]).stat().st_mtime_ns == time

  calls.clear()
  write(folder)
  assert not calls


# ---- Disk ------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch):
  """A function that sets the free bytes."""

  def set_free(free):
    usage = types.SimpleNamespace(total=10**12, used=0, free=free)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)

  return set_free


def test_check_disk(disk, tmp_path):
  folder = tmp_path / 'not' / 'there yet'
  disk(10**12)
  size = features.check_disk(folder, 1_000_000, 2880)
  assert 1_000_000 * 2880 * 2 <= size <= 1.1 * 1_000_000 * 2880 * 2
  disk(size)
  assert features.check_disk(folder, 1_000_000, 2880) == size
  disk(size - 1)
  with pytest.raises(UserError) as error:
    features.check_disk(folder, 1_000_000, 2880)
  message = str(error.value)
  for word in (str(folder), '1000000 tokens', f'{size / 1e9:.2f} GB', f'{(size - 1) / 1e9:.2f} GB',
               '--config.cache_dir', '--config.data.features=online'):
    assert word in message


def test_the_estimate_covers_a_row_of_the_default_target(tmp_path, disk):
  disk(10**12)
  wide = np.zeros((200, 2880), ml_dtypes.bfloat16)
  size = len(features.encode_record([0] * 200, [True] * 200, wide))
  assert size <= features.check_disk(tmp_path, 200, 2880) <= 1.1 * size
