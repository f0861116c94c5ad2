"""Batches for training: Grain reads rows in a shuffled, endless, checkpointable order and draws their anchors."""

import bisect
import functools
from collections.abc import Sequence

import grain
import numpy as np

from dspec.data import features as features_lib


def pack(lengths: Sequence[int], capacity: int, seed: int) -> tuple[tuple[int, ...], ...]:
  """Which documents make up each row: every one goes, in a random order, to the fullest row that has room for it.

  Args:
    lengths: of the documents, in tokens; one beyond the capacity counts as that many.
    capacity: tokens of a row.
    seed: of the order.

  Returns:
    For each row the indices of its documents, as they lie there.
  """
  rows: list[list[int]] = []
  room: list[tuple[int, int]] = []  # (tokens, row) where any are left, ascending.
  for i in np.random.default_rng(seed).permutation(len(lengths)).tolist():
    length = min(int(lengths[i]), capacity)
    place = bisect.bisect_left(room, (length, 0))
    if place < len(room):
      left, row = room.pop(place)
      rows[row].append(i)
    else:
      left, row = capacity, len(rows)
      rows.append([i])
    if left > length:
      bisect.insort(room, (left - length, row))
  return tuple(map(tuple, rows))


def make_row(
    records: Sequence[bytes], rng: np.random.Generator, *, length: int, anchors: int, packed: bool = False
) -> dict[str, np.ndarray]:
  """One padded row with freshly drawn anchors.

  An anchor is a token of an answer that has a token after it in its document. Each of these is drawn as often as any
  other, so that a document's share of the blocks is its share of such tokens; to within one block, it has that share
  in every row. Padding is one more document.

  Args:
    records: the row's documents, which lie side by side; see `features.encode_record`.
    rng: seeded by (seed, position of the row in the whole stream), so that neither resuming nor the number of
      processes changes the anchors.
    length: T. What is longer is cut.
    anchors: A, the static number of anchor slots.
    packed: whether rows may hold several documents.

  Returns:
    tokens [T] int32; supervised [T] bool, the answers' tokens; anchors [A] int32, distinct and
    ascending; is_anchor [A] bool, False for slots that the row has no anchor for; features [T, F]
    bfloat16 where the records have them; and, if packed, starts [T] int32, the first slot of each token's document.
  """
  documents = [features_lib.decode_record(record) for record in records]
  row = {
      'tokens': np.zeros(length, np.int32),
      'supervised': np.zeros(length, bool),
      'anchors': np.zeros(anchors, np.int32),
      'is_anchor': np.zeros(anchors, bool),
  }
  if 'features' in documents[0]:
    features = documents[0]['features']
    row['features'] = np.zeros((length, features.shape[1]), features.dtype)
  starts, start, candidates = np.zeros(length, np.int32), 0, []
  for document in documents:
    # When decoding, the first anchor is the answer's first token.
    supervised = document['supervised'][: length - start]
    candidates.append(start + np.flatnonzero(supervised[:-1] & supervised[1:]))
    end = start + len(supervised)
    for name in document:
      row[name][start:end] = document[name][: end - start]
    starts[start:end] = start
    start = end
  starts[start:] = start
  chosen = np.sort(np.concatenate(_deal(candidates, anchors, rng)))
  row['anchors'][: len(chosen)] = chosen
  row['is_anchor'][: len(chosen)] = True
  if packed:
    row['starts'] = starts
  return row


def _deal(candidates: Sequence[np.ndarray], anchors: int, rng: np.random.Generator) -> list[np.ndarray]:
  """Of each document's candidates some, at most `anchors` in all, in proportion to their numbers.

  What is not a whole number of anchors is rounded by one random offset for the row, to either side, and right in the
  mean (systematic sampling).
  """
  shuffled = [rng.permutation(of_document) for of_document in candidates]
  counts = np.array([len(of_document) for of_document in candidates])
  total = max(counts.sum(), 1)
  bounds = (np.cumsum(counts) * min(anchors, total) + rng.integers(total)) // total
  counts = np.diff(bounds, prepend=0)
  return [of_document[:count] for of_document, count in zip(shuffled, counts)]


class _Rows:
  """A source of Grain: of each row, its records."""

  def __init__(self, paths: Sequence[str], packs: Sequence[Sequence[int]] | None):
    self._records = grain.sources.ArrayRecordDataSource([str(path) for path in paths])
    self._packs = [(i,) for i in range(len(self._records))] if packs is None else packs

  def __len__(self):
    return len(self._packs)

  def __getitem__(self, index):
    return [self._records[i] for i in self._packs[index]]


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
    paths: Sequence[str], *, seed: int, batch_size: int, length: int, anchors: int,
    packs: Sequence[Sequence[int]] | None = None, rows: Sequence[int] | None = None
) -> grain.IterDataset:
  """Endless batches `[B, ...]` of `make_row`; its iterator can be saved and restored.

  Args:
    paths: ArrayRecord files.
    seed: of the order and of the anchors.
    batch_size: B.
    length: T.
    anchors: A.
    packs: of each row the records that it holds, see `pack`; None: every record is a row.
    rows: of each batch, those that are wanted, all that this process reads; None for all. What a row holds, and where
      an iterator is, does not depend on it.
  """
  stream = (
      grain.MapDataset.source(_Rows(paths, packs))
      .seed(seed)
      .shuffle()
      .repeat(2**31)  # Endless; without a number Grain overflows at batch size 1.
      .random_map(functools.partial(_with_rng, length=length, anchors=anchors, packed=packs is not None))
  )
  if rows is not None and len(rows) < batch_size:
    stream, batch_size = _Share(stream, batch_size, rows), len(rows)
  return stream.batch(batch_size).to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))


def _with_rng(records, rng, **options):
  return make_row(records, rng, **options)
