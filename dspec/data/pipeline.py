"""Batches for training: Grain reads rows in a shuffled, endless, checkpointable order and draws their anchors."""

import functools
from collections.abc import Sequence

import grain
import numpy as np

from dspec.data import features as features_lib


def make_row(
    record: bytes, rng: np.random.Generator, *, length: int, anchors: int
) -> dict[str, np.ndarray]:
  """One padded row with freshly drawn anchors.

  Args:
    record: see `features.encode_record`.
    rng: seeded by (seed, position of the row in the whole stream), so that neither resuming nor the number of
      processes changes the anchors.
    length: T. Longer rows are cut.
    anchors: A, the static number of anchor slots.

  Returns:
    tokens [T] int32; supervised [T] bool, the answers' tokens; anchors [A] int32, distinct and
    ascending; is_anchor [A] bool, False for slots that the row has no anchor for; and features [T, F]
    bfloat16 where the record has them.
  """
  record = features_lib.decode_record(record)
  tokens = record['tokens'][:length]
  n = len(tokens)
  row = {
      'tokens': np.zeros(length, np.int32),
      'supervised': np.zeros(length, bool),
      'anchors': np.zeros(anchors, np.int32),
      'is_anchor': np.zeros(anchors, bool),
  }
  row['tokens'][:n] = tokens
  row['supervised'][:n] = record['supervised'][:length]
  # An anchor is a token of an answer that has a token after it: when decoding, the first anchor is the
  # answer's first token.
  candidates = np.flatnonzero(row['supervised'][:-1] & row['supervised'][1:])
  chosen = np.sort(rng.permutation(candidates)[:anchors])
  row['anchors'][: len(chosen)] = chosen
  row['is_anchor'][: len(chosen)] = True
  if 'features' in record:
    features = record['features'][:length]
    row['features'] = np.zeros((length, features.shape[1]), features.dtype)
    row['features'][:n] = features
  return row


class _Share(grain.MapDataset):
  """Of every `batch_size` elements those at some places."""

  def __init__(self, parent: grain.MapDataset, batch_size: int, places: Sequence[int]):
    super().__init__(parent)
    self._batch_size, self._places = batch_size, places

  def __len__(self):
    return len(self._parent) // self._batch_size * len(self._places)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    batch, place = divmod(index, len(self._places))
    return self._parent[batch * self._batch_size + self._places[place]]


def batches(
    paths: Sequence[str], *, seed: int, batch_size: int, length: int, anchors: int, rows: Sequence[int] | None = None
) -> grain.IterDataset:
  """Endless batches `[B, ...]` of `make_row`; its iterator can be saved and restored.

  Args:
    paths: ArrayRecord files.
    seed: of the order and of the anchors.
    batch_size: B.
    length: T.
    anchors: A.
    rows: of each batch, those that are wanted, all that this process reads; None for all. What a row holds, and where
      an iterator is, does not depend on it.
  """
  source = grain.sources.ArrayRecordDataSource([str(path) for path in paths])
  stream = (
      grain.MapDataset.source(source)
      .seed(seed)
      .shuffle()
      .repeat(2**31)  # Endless; without a number Grain overflows at batch size 1.
      .random_map(functools.partial(_with_rng, length=length, anchors=anchors))
  )
  if rows is not None and len(rows) < batch_size:
    stream, batch_size = _Share(stream, batch_size, rows), len(rows)
  return stream.batch(batch_size).to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))


def _with_rng(record, rng, *, length, anchors):
  return make_row(record, rng, length=length, anchors=anchors)
