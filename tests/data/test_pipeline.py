"""Training batches: anchors that have something to predict, and a stream that can be taken up anywhere."""

import functools

from array_record.python import array_record_module
import ml_dtypes
import numpy as np
import pytest

from dspec.data import features
from dspec.data import pipeline

LENGTH, ANCHORS = 16, 4
# (row's length, prompt length): usual, short, without an answer, with one answer token, of one token,
# exactly full, longer than the batch, and a prompt that fills it.
SHAPES = [(12, 3), (6, 2), (5, 5), (5, 4), (1, 1), (16, 1), (25, 10), (25, 17), (9, 2), (14, 6)]


def make_rows():
  rng = np.random.default_rng(0)
  return [
      (rng.integers(1, 99, n).tolist(), prompt, rng.normal(size=(n, 3)).astype(ml_dtypes.bfloat16))
      for n, prompt in SHAPES]


def after(prompt, tokens):
  return [t >= prompt for t in range(len(tokens))]


@pytest.fixture(scope='module')
def paths(tmp_path_factory):
  """Two files."""
  folder = tmp_path_factory.mktemp('rows')
  rows = make_rows()
  result = []
  for name, part in (('a', rows[:6]), ('b', rows[6:])):
    result.append(folder / f'{name}.array_record')
    writer = array_record_module.ArrayRecordWriter(str(result[-1]), 'group_size:1')
    for row in part:
      tokens, prompt, array = row
      writer.write(features.encode_record(tokens, after(prompt, tokens), array))
    writer.close()
  return result


PACKS = ((0, 4), (1, 2, 3), (5,), (6,), (7,), (8, ), (9,))  # Two rows of several documents, and one of each other.


def iterator(paths, batch_size=2, seed=0, packs=None):
  return iter(pipeline.batches(
      paths, seed=seed, batch_size=batch_size, length=LENGTH, anchors=ANCHORS, packs=packs))


def stream(paths, count, **options):
  """The first rows of the stream, whatever the batches."""
  batch_size = options.get('batch_size', 2)
  it = iterator(paths, **options)
  rows = []
  for _ in range(-(-count // batch_size)):
    batch = next(it)
    rows += [{k: v[r] for k, v in batch.items()} for r in range(batch_size)]
  return rows[:count]


def equal(a, b):
  return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize('case', range(len(SHAPES)))
@pytest.mark.parametrize('with_features', [True, False])
def test_make_row(case, with_features):
  tokens, prompt, array = make_rows()[case]
  record = features.encode_record(tokens, after(prompt, tokens), array if with_features else None)
  kept = min(len(tokens), LENGTH)
  for seed in range(20):
    row = pipeline.make_row([record], np.random.default_rng(seed), length=LENGTH, anchors=ANCHORS)
    assert row['tokens'].dtype == row['anchors'].dtype == np.int32
    assert row['tokens'].tolist() == tokens[:LENGTH] + [0] * (LENGTH - kept)
    assert row['supervised'].tolist() == [prompt <= t < kept for t in range(LENGTH)]
    # Anchors: all that there are room and positions for, in the answer, with a label after them.
    possible = [t for t in range(kept) if t >= prompt and t + 1 < kept]
    found = row['anchors'][row['is_anchor']].tolist()
    # As drawn ever since: a run that is resumed goes on with the same anchors.
    assert found == sorted(np.random.default_rng(seed).permutation(np.array(possible, int))[:ANCHORS].tolist())
    assert len(found) == min(ANCHORS, len(possible))
    assert 'starts' not in row
    assert row['anchors'].shape == row['is_anchor'].shape == (ANCHORS,)
    assert not row['is_anchor'][len(found):].any() and not row['anchors'][len(found):].any()
    assert ('features' in row) == with_features
    if with_features:
      assert row['features'].dtype == ml_dtypes.bfloat16
      np.testing.assert_array_equal(row['features'][:kept], array[:LENGTH])
      assert not row['features'][kept:].astype(np.float32).any()


def test_anchors_lie_in_answers_with_their_labels():
  # Two answers, one of them a single token, and a third that the row's end cuts off.
  supervised = [False, True, True, True, False, True, False, False, *[True] * 9]
  record = features.encode_record(list(range(1, 18)), supervised, None)
  row = pipeline.make_row([record], np.random.default_rng(0), length=12, anchors=8)
  assert row['anchors'][row['is_anchor']].tolist() == [1, 2, 8, 9, 10]
  assert row['supervised'].tolist() == supervised[:12]


def test_every_anchor_is_drawn_as_often():
  tokens, prompt, _ = make_rows()[0]  # Eight positions for four slots.
  record = features.encode_record(tokens, after(prompt, tokens), None)
  rng = np.random.default_rng(0)
  counts = np.zeros(LENGTH)
  for _ in range(4000):
    np.add.at(counts, pipeline.make_row([record], rng, length=LENGTH, anchors=4)['anchors'], 1)
  np.testing.assert_allclose(counts[3:11], 2000, atol=160)  # Five standard deviations.
  assert counts.sum() == counts[3:11].sum()


def test_epochs_hold_every_row_in_another_order(paths):
  n = len(SHAPES)
  rows = stream(paths, 3 * n)
  epochs = [rows[i * n : (i + 1) * n] for i in range(3)]
  wanted = sorted(tuple(tokens[:LENGTH]) for tokens, *_ in make_rows())
  text = lambda row: tuple(row['tokens'][row['tokens'] > 0].tolist())
  orders = [[text(row) for row in epoch] for epoch in epochs]
  for order in orders:
    assert sorted(order) == wanted
  assert orders[0] != orders[1] != orders[2]
  # Rows with more positions than slots get other anchors each time.
  anchors = [{text(row): tuple(row['anchors']) for row in epoch} for epoch in epochs]
  cut = [(tuple(tokens[:LENGTH]), prompt) for tokens, prompt, _ in make_rows()]
  roomy = [tokens for tokens, prompt in cut if len(tokens) - 1 - prompt > ANCHORS + 1]
  assert len(roomy) == 4
  assert sum(anchors[0][t] != anchors[1][t] for t in roomy) >= 3


def test_the_stream_does_not_depend_on_the_batch_size(paths):
  wanted = stream(paths, 24, batch_size=2)
  for batch_size in (3, 8):
    assert all(map(equal, stream(paths, 24, batch_size=batch_size), wanted))


def test_one_row_a_batch(paths):
  assert all(map(equal, stream(paths, 12, batch_size=1), stream(paths, 12, batch_size=2)))


def test_seed(paths):
  assert all(map(equal, stream(paths, 10, seed=3), stream(paths, 10, seed=3)))
  assert not all(map(equal, stream(paths, 10, seed=3), stream(paths, 10, seed=4)))


@pytest.mark.parametrize('packs', [None, PACKS])
@pytest.mark.parametrize('taken', [0, 1, 7])  # Seven batches of two: in the second epoch.
def test_a_restored_iterator_goes_on_where_it_was(paths, taken, packs):
  it = iterator(paths, packs=packs)
  for _ in range(taken):
    next(it)
  state = it.get_state()
  wanted = [next(it) for _ in range(8)]
  new = iterator(paths, packs=packs)
  next(new)  # Restored from anywhere.
  new.set_state(state)
  assert all(map(equal, [next(new) for _ in range(8)], wanted))


def test_rows_without_any_anchor(tmp_path):
  path = features.write(tmp_path, None, None, [([1, 2, 3], [False] * 3)] * 2, ())
  batch = next(iterator(path))
  assert not batch['is_anchor'].any() and not batch['supervised'].any()
  assert batch['tokens'].tolist() == [[1, 2, 3] + [0] * 13] * 2


# ---- Rows of several documents ---------------------------------------------------------------------


@pytest.mark.parametrize('seed', range(5))
def test_pack(seed):
  rng = np.random.default_rng(seed)
  capacity = 64
  lengths = np.concatenate([rng.integers(1, 90, 40), rng.integers(1, 12, 60), [64, 65, 1]])
  packs = pipeline.pack(lengths, capacity, seed)
  assert packs == pipeline.pack(lengths.tolist(), capacity, seed) != pipeline.pack(lengths, capacity, seed + 1)
  assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
  lengths = np.minimum(lengths, capacity)
  sums = [lengths[list(pack)].sum() for pack in packs]
  assert max(sums) <= capacity
  # By another way: every document, in the order in which they came, to the row that it leaves least room in.
  rows = []
  for i in np.random.default_rng(seed).permutation(len(lengths)):
    left = [capacity - lengths[row].sum() - lengths[i] for row in rows]
    best = min((room for room in left if room >= 0), default=None)
    if best is None:
      rows.append([i])
    else:
      rows[left.index(best)].append(i)
  assert sums == [lengths[row].sum() for row in rows]
  assert sum(sums) / (capacity * len(packs)) > 0.93


def test_a_row_of_several_documents():
  rows = make_rows()
  for indices in PACKS:
    records = [features.encode_record(rows[i][0], after(rows[i][1], rows[i][0]), rows[i][2]) for i in indices]
    row = pipeline.make_row(records, np.random.default_rng(0), length=LENGTH, anchors=20, packed=True)
    assert row['starts'].dtype == np.int32 and row['starts'].shape == (LENGTH,)
    tokens, supervised, starts, possible = [], [], [], []
    for i in indices:
      ids, prompt, _ = rows[i]
      start = len(tokens)
      tokens += ids
      supervised += after(prompt, ids)
      starts += [start] * len(ids)
      possible += [start + t for t in range(prompt, len(ids) - 1) if start + t + 1 < LENGTH]
    used = min(len(tokens), LENGTH)
    pad = lambda values, padding: (values + [padding] * LENGTH)[:LENGTH]
    assert row['tokens'].tolist() == pad(tokens, 0) and row['supervised'].tolist() == pad(supervised, False)
    assert row['starts'].tolist() == pad(starts, used)  # Padding is a document of its own.
    assert row['anchors'][row['is_anchor']].tolist() == possible  # There is room for all.
    array = np.concatenate([rows[i][2] for i in indices])[:LENGTH]
    np.testing.assert_array_equal(row['features'][:used], array)
    assert not row['features'][used:].astype(np.float32).any()


@pytest.mark.parametrize('anchors', [1, 5, 12, 30])
def test_anchors_are_dealt_by_document(anchors):
  """Every candidate as often as any other, and each document, in every row, its share to within one."""
  said = [13, 1, 4, 2, 7]  # Tokens of each answer; its last is no candidate.
  records = [features.encode_record([1] * (n + 2), [False] * 2 + [True] * n, None) for n in said]
  counts, candidates = np.zeros(48), np.array(said) - 1
  quota = candidates * min(1, anchors / candidates.sum())
  rng = np.random.default_rng(1)
  draws = 2000
  for _ in range(draws):
    row = pipeline.make_row(records, rng, length=48, anchors=anchors, packed=True)
    found = row['anchors'][row['is_anchor']]
    assert len(found) == min(anchors, candidates.sum()) and (np.diff(found) > 0).all()
    counts[found] += 1
    starts = np.unique(row['starts'])[: len(said)]
    dealt = [(row['starts'][found] == start).sum() for start in starts]
    assert (np.floor(quota) <= dealt).all() and (dealt <= np.ceil(quota)).all()
  following = {name: np.roll(row[name], -1) for name in ('supervised', 'starts')}
  possible = np.flatnonzero(row['supervised'] & following['supervised'] & (row['starts'] == following['starts']))
  assert len(possible) == candidates.sum() and not np.delete(counts, possible).any()
  chance = min(1, anchors / candidates.sum())
  # Five standard deviations.
  np.testing.assert_allclose(counts[possible] / draws, chance, atol=5 * np.sqrt(chance * (1 - chance) / draws))


def test_epochs_hold_every_document_once(paths):
  rows = stream(paths, 2 * len(PACKS), packs=PACKS)
  wanted = sorted(tuple(tokens[:LENGTH]) for tokens, *_ in make_rows())
  for epoch in (rows[: len(PACKS)], rows[len(PACKS) :]):
    found = []
    for row in epoch:
      used = row['tokens'] > 0
      starts = np.unique(row['starts'][used])
      found += [tuple(row['tokens'][used & (row['starts'] == start)].tolist()) for start in starts]
    assert sorted(found) == wanted


# ---- Rows by process -------------------------------------------------------------------------------


@pytest.mark.parametrize('packs', [None, PACKS])
@pytest.mark.parametrize('shares', [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]], [[0, 1, 2, 3, 4, 5]] * 2])
def test_processes_read_the_batch_of_one_in_parts(paths, shares, packs):
  """Contiguous, interleaved as the devices of a pod may lie, and the same rows twice; in the second epoch, too."""
  wanted = iterator(paths, batch_size=6, packs=packs)
  share = functools.partial(
      pipeline.batches, paths, seed=0, batch_size=6, length=LENGTH, anchors=ANCHORS, packs=packs)
  parts = [iter(share(rows=rows)) for rows in shares]
  for _ in range(4):
    batch = next(wanted)
    for part, rows in zip(parts, shares):
      assert equal(next(part), {name: array[rows] for name, array in batch.items()})
  # All are at the same place, from where any goes on.
  states = [part.get_state() for part in parts]
  assert all(state == wanted.get_state() for state in states)
  wanted.set_state(states[0])
  again = iter(share(rows=shares[-1]))
  again.set_state(states[0])
  batch = next(wanted)
  assert equal(next(again), {name: array[shares[-1]] for name, array in batch.items()})
