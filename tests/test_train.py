"""The training loop: one step by another way, resuming to the bit, and what ends a run."""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import time
import types

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from dspec import config as config_lib
from dspec import sharding
from dspec import train
from dspec.checkpoints import training as checkpoints
from dspec.data import dataset
from dspec.data import features
from dspec.data import pipeline
from dspec.errors import UserError
from dspec.losses import Objective, objective_from_logits
from dspec.models import drafter as drafter_lib

TAPS, K, LENGTH, ANCHORS, BATCH = (0, 1), 4, 24, 3, 4
# (row's length, prompt length); the third has one label only, the fourth no anchor.
SHAPES = [(24, 5), (15, 4), (9, 7), (6, 6), (20, 10), (24, 2), (18, 3)]


@pytest.fixture(scope='module', autouse=True)
def compiled_once(tmp_path_factory):
  """Runs that differ in nothing but when they stop share their compiled step."""
  names = ('jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs',
           'jax_persistent_cache_min_entry_size_bytes')
  old = [getattr(jax.config, name) for name in names]
  for name, value in zip(names, (str(tmp_path_factory.mktemp('xla')), 0.0, -1)):
    jax.config.update(name, value)
  yield
  for name, value in zip(names, old):
    jax.config.update(name, value)


@pytest.fixture(scope='module')
def target(untrained_target):
  return untrained_target(vocab_size=29, head_dim=4, max_length=64)


def make_rows():
  rng = np.random.default_rng(0)
  return [(rng.integers(3, 29, n).tolist(), [t >= prompt for t in range(n)]) for n, prompt in SHAPES]


@pytest.fixture(scope='module')
def data(target, tmp_path_factory):
  """{'cached', 'online': Dataset} of the same rows."""
  result = {}
  for name, model in (('cached', target[0]), ('online', None)):
    paths = features.write(tmp_path_factory.mktemp(name), model, target[1], make_rows(), TAPS)
    answered = [token for row, said in make_rows() for token, is_said in zip(row, said) if is_said]
    result[name] = dataset.Dataset(tuple(paths), (), LENGTH, np.bincount(answered, minlength=29), {})
  return result


def make_config():
  config = config_lib.default('smoke').copy_and_resolve_references()
  config.drafter.update(num_layers=1, block_size=K, target_layers=TAPS, mask_token_id=1, vocab_size=0)
  config.loss.update(gamma=3.0, first_error=0.3, chain=40.0)
  config.train.update(
      steps=8, batch_size=BATCH, anchors=ANCHORS, head_chunk=10, compute_dtype='float32',
      checkpoint_every=4, log_every=1)
  return config


@pytest.fixture
def config():
  return make_config()


@pytest.fixture
def run(config, data, target):
  """Trains in a folder."""
  return lambda folder, kind='cached': train.run(config, folder, data[kind], *target)


def records(folder, *left_out):
  """metrics.jsonl, without what measures time."""
  left_out = {'seconds', 'slots_per_second', *left_out}
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  return [{k: v for k, v in json.loads(line).items() if k not in left_out} for line in lines]


def assert_same(a, b):
  """Trees equal to the bit."""
  jax.tree.map(np.testing.assert_array_equal, a, b)


def saved(folder, step=None):
  """(step, state as a tree of numpy arrays, iterator state) of a checkpoint."""
  with checkpoints.open_manager(folder / 'checkpoints') as manager:
    step = manager.latest_step() if step is None else step
    state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
  position = folder / 'checkpoints' / str(step) / 'data' / 'metadata'
  return step, jax.tree.map(np.asarray, state['state']), json.loads(position.read_text())


# ---- One step --------------------------------------------------------------------------------------


@pytest.fixture
def step(config, data, target):
  """What `loss_fn` needs: a batch with every kind of row, and its other arguments."""
  batch = next(iter(pipeline.batches(
      data['cached'].paths, seed=0, batch_size=len(SHAPES), length=LENGTH, anchors=ANCHORS)))
  drafter = drafter_lib.Drafter(train.make_drafter_config(config, target[0].config))
  params = train.init_params(drafter, jax.random.key(7))
  options = dict(
      drafter=drafter, target_params=target[1], spec=Objective(3.0, 0.3, 40.0), head_chunk=10)
  return types.SimpleNamespace(params=params, batch=batch, options=options, drafter=drafter)


def loss_and_gradient(step, batch):
  f = lambda params, batch: train.loss_fn(params, batch, **step.options)
  (loss, aux), gradient = jax.jit(jax.value_and_grad(f, has_aux=True))(step.params, batch)
  return loss, aux, gradient


def test_loss_and_gradient_from_full_logits(step, target):
  loss, aux, gradient = loss_and_gradient(step, step.batch)

  # Labels and validity, slot by slot, from the rows as they were written.
  row_of = {tuple(tokens): (tokens, prompt) for tokens, prompt in make_rows()}
  b = len(SHAPES)
  labels, valid = np.zeros((b, ANCHORS, K - 1), int), np.zeros((b, ANCHORS, K - 1), bool)
  blocks = np.full((b, ANCHORS, K), 1)
  for r in range(b):
    tokens, prompt = row_of[tuple(t for t in step.batch['tokens'][r].tolist() if t)]
    for a, anchor in enumerate(step.batch['anchors'][r]):
      blocks[r, a, 0] = (tokens + [0] * LENGTH)[anchor]
      for k in range(1, K):
        if step.batch['is_anchor'][r, a] and anchor + k < len(tokens):
          labels[r, a, k - 1], valid[r, a, k - 1] = tokens[anchor + k], True
  assert 0 < valid.sum() < valid.size and not valid.any((1, 2)).all()

  embedding = target[1]['embed']['embedding']

  def other(params):
    hidden = step.drafter.apply(
        {'params': params}, step.batch['features'], embedding[blocks], step.batch['anchors'])
    logits = jnp.einsum('bakd,vd->bakv', hidden, embedding)[:, :, 1:]
    return objective_from_logits(logits, jnp.asarray(labels), jnp.asarray(valid), Objective(3.0, 0.3, 40.0))

  (wanted, wanted_aux), wanted_gradient = jax.jit(jax.value_and_grad(other, has_aux=True))(step.params)
  np.testing.assert_allclose(loss, wanted, rtol=1e-5)
  for name, value in vars(wanted_aux).items():
    np.testing.assert_allclose(getattr(aux, name), value, rtol=1e-5, atol=1e-7, err_msg=name)
  assert int(aux.num_slots) == valid.sum()
  scale = optax.global_norm(wanted_gradient)
  assert scale > 1e-2
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5 * scale), gradient, wanted_gradient)
  gradient.pop('feature_scale')  # Measured, not trained.
  assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient))


def test_loss_over_a_draft_vocabulary(step, target):
  """As over all tokens whose logits are put out of reach, in blocks that end before the first token outside."""
  ids = np.sort(np.random.default_rng(5).permutation(29)[:20])
  params = {**step.params, 'draft_ids': jnp.asarray(ids, jnp.int32)}
  loss, aux = jax.jit(lambda params, batch: train.loss_fn(params, batch, **step.options))(params, step.batch)

  tokens, anchors = (np.asarray(step.batch[name]) for name in ('tokens', 'anchors'))
  b, rows = len(SHAPES), np.arange(len(SHAPES))[:, None, None]
  positions = anchors[:, :, None] + np.arange(K)
  labels = tokens[rows, np.minimum(positions, LENGTH - 1)][:, :, 1:]
  of_row = {tuple(row): len(row) for row, _ in make_rows()}
  ends = np.array([of_row[tuple(t for t in row.tolist() if t)] for row in tokens])
  valid = (positions[:, :, 1:] < ends[:, None, None]) & np.asarray(step.batch['is_anchor'])[:, :, None]
  whole = valid.sum()
  valid &= np.isin(labels, ids)
  valid = np.cumprod(valid, -1).astype(bool)
  assert 0 < valid.sum() < whole

  blocks = np.full((b, ANCHORS, K), 1)
  blocks[:, :, 0] = np.take_along_axis(tokens, anchors, 1)
  embedding = target[1]['embed']['embedding']
  hidden = step.drafter.apply({'params': step.params}, step.batch['features'], embedding[blocks], anchors)
  logits = np.array(jnp.einsum('bakd,vd->bakv', hidden, embedding))[:, :, 1:]
  outside = np.setdiff1d(np.arange(29), ids)
  logits[..., outside] = -np.inf
  wanted, wanted_aux = objective_from_logits(
      jnp.asarray(logits), jnp.asarray(labels), jnp.asarray(valid), Objective(3.0, 0.3, 40.0))
  np.testing.assert_allclose(loss, wanted, rtol=1e-5)
  for name, value in vars(wanted_aux).items():
    np.testing.assert_allclose(getattr(aux, name), value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_slots_without_an_anchor_count_for_nothing(step):
  wanted = loss_and_gradient(step, step.batch)
  rng = np.random.default_rng(1)
  batch = {k: np.copy(v) for k, v in step.batch.items()}
  empty = ~batch['is_anchor']
  assert empty.any()
  batch['anchors'][empty] = rng.integers(0, LENGTH, empty.sum())
  without = empty.all(1)
  assert without.any()
  batch['features'][without] = 9
  # And a row more that has no anchor at all.
  noise = {
      'tokens': rng.integers(0, 29, (1, LENGTH), dtype=np.int32),
      'supervised': np.ones((1, LENGTH), bool),
      'anchors': rng.integers(0, LENGTH, (1, ANCHORS), dtype=np.int32),
      'is_anchor': np.zeros((1, ANCHORS), bool),
      'features': rng.normal(size=(1, *batch['features'].shape[1:])).astype(batch['features'].dtype),
  }
  batch = {k: np.concatenate([v, noise[k]]) for k, v in batch.items()}
  found = loss_and_gradient(step, batch)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, wanted)


def test_a_batch_without_any_anchor_is_no_step_into_nan(step):
  batch = {**step.batch, 'is_anchor': np.zeros_like(step.batch['is_anchor'])}
  loss, aux, gradient = loss_and_gradient(step, batch)
  assert float(loss) == 0 and int(aux.num_blocks) == 0
  assert not any(np.any(x) for x in jax.tree.leaves(gradient))


# ---- Rows of several documents ---------------------------------------------------------------------


PACKS, ROW, ALL = ((1, 2, 3), (0,), (4, 6), (5,)), 40, 30  # Slots for every anchor that there may be.


def packed_batches(data, target, kind):
  """The rows of `PACKS`, and the same documents with the same anchors in rows of their own.

  The second document of a row is all answer: the last blocks of the first one reach into it.
  """
  records = grain.sources.ArrayRecordDataSource([str(path) for path in data['cached'].paths])
  packed, alone = [], []
  for pack in PACKS:
    documents = [features.decode_record(records[i]) for i in pack]
    for document in documents[1:2]:
      document['supervised'] = np.ones_like(document['supervised'])
    row = pipeline.make_row(
        [features.encode_record(**document) for document in documents], np.random.default_rng(0), length=ROW, anchors=ALL,
        packed=True)
    packed.append(row)
    start = 0
    for document in documents:
      n = len(document['tokens'])
      anchors = row['anchors'][row['is_anchor'] & (start <= row['anchors']) & (row['anchors'] < start + n)] - start
      own = {name: np.zeros((ROW, *x.shape[1:]), x.dtype) for name, x in document.items()}
      for name, x in document.items():
        own[name][:n] = x
      own['anchors'] = np.pad(anchors, (0, ALL - len(anchors)))
      own['is_anchor'] = np.arange(ALL) < len(anchors)
      alone.append(own)
      start += n
  stack = lambda rows: {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}
  packed, alone = stack(packed), stack(alone)
  if kind == 'online':
    packed.pop('features'), alone.pop('features')
  return packed, alone


# Windows of 1 are cut out of the row, wider ones are not.
@pytest.mark.parametrize('kind, window', [('cached', 0), ('cached', 1), ('cached', 9), ('online', 0)])
def test_packed_rows_train_as_rows_of_their_own(step, data, target, kind, window):
  packed, alone = packed_batches(data, target, kind)
  shape = dataclasses.replace(step.drafter.config, window=window)
  step.options['drafter'] = drafter_lib.Drafter(shape)

  def f(params, batch):
    batch = train._with_features(batch, *target, shape)
    return train.loss_fn(params, batch, **step.options)

  both = jax.jit(lambda params: [jax.value_and_grad(f, has_aux=True)(params, batch) for batch in (packed, alone)])
  ((loss, aux), gradient), ((wanted, wanted_aux), wanted_gradient) = both(step.params)
  assert int(aux.num_slots) == int(wanted_aux.num_slots) < int(aux.num_blocks) * (K - 1)
  np.testing.assert_allclose(loss, wanted, rtol=1e-5)
  for name, value in vars(wanted_aux).items():
    np.testing.assert_allclose(getattr(aux, name), value, rtol=1e-5, atol=1e-7, err_msg=name)
  scale = optax.global_norm(wanted_gradient)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5 * scale), gradient, wanted_gradient)


@pytest.mark.parametrize('window', [0, 1])
def test_nothing_of_a_neighbour_reaches_a_block(step, data, target, window):
  """Neither its tokens, through the target or the drafter, nor its features, to the bit."""
  packed, _ = packed_batches(data, target, 'cached')
  drafter = drafter_lib.Drafter(dataclasses.replace(step.drafter.config, window=window))

  @jax.jit
  def hidden(tokens, added):
    online = features.compute(*target, tokens, TAPS, packed['starts'])
    blocks = drafter_lib.block_tokens(jnp.take_along_axis(tokens, packed['anchors'], 1), drafter.config)
    embeddings = drafter_lib.embed(drafter.config, target[1], blocks)
    return drafter.apply({'params': step.params}, online + added, embeddings, packed['anchors'], packed['starts'])

  nothing = jnp.zeros((len(PACKS), ROW, 1), jnp.bfloat16)
  wanted = np.asarray(hidden(packed['tokens'], nothing))
  of_anchor = np.take_along_axis(np.asarray(packed['starts']), np.asarray(packed['anchors']), 1)
  for border in (0, SHAPES[1][0], SHAPES[1][0] + SHAPES[2][0]):  # Of the first row's documents.
    inside = packed['starts'] == border
    changes = (jnp.where(inside, 28 - packed['tokens'], packed['tokens']), nothing), (
        packed['tokens'], jnp.where(inside[:, :, None], 2, nothing))
    for change in changes:
      changed = (np.asarray(hidden(*change)) != wanted).any((-1, -2))
      there = np.asarray(packed['is_anchor'])[0]
      assert not changed[0][of_anchor[0] != border].any()
      assert changed[0][there & (of_anchor[0] == border)].any() == bool((there & (of_anchor[0] == border)).any())


def test_a_run_on_packed_rows(config, data, target, tmp_path, monkeypatch):
  batches = record_batches(monkeypatch)
  packed = dataclasses.replace(data['cached'], packs=PACKS, length=ROW)
  config.train.update(steps=2, batch_size=len(PACKS))
  _, summary = train.run(config, tmp_path, packed, *target)
  assert all((batch['starts'] > 0).any() for batch in batches)
  for record, batch in zip(summary['curve'], batches[1:]):
    steps = batch['anchors'][:, :, None] + np.arange(K)
    rows = np.arange(len(PACKS))[:, None, None]
    document = batch['starts'][rows, np.minimum(steps, ROW - 1)]
    same = (document == document[:, :, :1]) & (steps < ROW) & batch['is_anchor'][:, :, None]
    assert record['num_slots'] == same[:, :, 1:].sum()


def test_splash_is_for_tpus(config, data, target, tmp_path):
  config.train.attention = 'splash'
  with pytest.raises(UserError, match='train.attention=splash: a kernel for TPUs, and the devices are cpus; take auto'):
    train.run(config, tmp_path, data['cached'], *target)
  assert not list(tmp_path.iterdir())
  mesh = sharding.make_mesh(config)
  of_tpu = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform='tpu')]))
  for asked, on_cpu, on_tpu in (('auto', 'xla', 'splash'), ('xla', 'xla', 'xla')):
    config.train.attention = asked
    assert (train.choose_attention(config, mesh), train.choose_attention(config, of_tpu)) == (on_cpu, on_tpu)


def test_features_of_answers_have_unit_scale(step, target, config):
  state = jax.jit(functools.partial(
      train.init_state, optimizer=train.make_optimizer(config), target=target[0], drafter=step.drafter))(
          jax.random.key(0), step.batch, target[1], None)
  features = np.asarray(step.batch['features'], np.float64)[np.asarray(step.batch['supervised'])]
  np.testing.assert_allclose(state.params['feature_scale'], 1 / np.sqrt((features**2).mean(0)), rtol=1e-4)
  # The product of kernel and scale is what a drafter without the scale would have.
  folded = {**state.params, 'feature_scale': jnp.ones_like(state.params['feature_scale']),
            'fc': {'kernel': state.params['feature_scale'][:, None] * state.params['fc']['kernel']}}
  args = step.batch['features'], jnp.ones((len(SHAPES), ANCHORS, K, 16)), step.batch['anchors']
  np.testing.assert_allclose(
      step.drafter.apply({'params': folded}, *args), step.drafter.apply({'params': state.params}, *args), atol=1e-5)


def test_optimizer(config):
  """The rate warms up and decays; the gradient is clipped; scales of norms do not decay."""
  config.train.update(steps=100, warmup_fraction=0.1, learning_rate=0.1, weight_decay=0.5, clip_norm=2.0)
  optimizer = train.make_optimizer(config)
  params = {'kernel': jnp.full((2, 2), 3.0), 'scale': jnp.full(2, 3.0)}
  gradient = {'kernel': jnp.full((2, 2), 40.0), 'scale': jnp.full(2, -30.0)}
  state = optimizer.init(params)
  # A gradient that never changes: Adam's direction is its sign, whatever the size.
  for step in range(100):
    updates, state = optimizer.update(gradient, state, params)
    rate = 0.1 * (step / 10 if step < 10 else 0.5 * (1 + np.cos(np.pi * (step - 10) / 90)))
    np.testing.assert_allclose(updates['kernel'], np.full((2, 2), -rate * (1 + 0.5 * 3)), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(updates['scale'], np.full(2, rate), rtol=1e-4, atol=1e-7)
  moment = state[1][0].mu
  norm = np.sqrt(4 * 40.0**2 + 2 * 30.0**2)
  np.testing.assert_allclose(moment['kernel'][0, 0], 40 * 2 / norm, rtol=1e-3)


# ---- Whole runs ------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def whole(tmp_path_factory, data, target):
  """(folder, parameters, summary, batches) of an uninterrupted run of eight steps, checkpoints at 4 and 8.

  Its first batch is looked at once before, for the initial state.
  """
  folder = tmp_path_factory.mktemp('whole')
  with pytest.MonkeyPatch.context() as patch:
    batches = record_batches(patch)
    params, summary = train.run(make_config(), folder, data['cached'], *target)
  assert_same(batches[0], batches[1])
  return folder, params, summary, batches[1:]


def record_batches(monkeypatch):
  """A list that every batch sent to the device is added to."""
  batches, original = [], sharding.put_batch

  def put_batch(mesh, batch):
    batches.append(copy.deepcopy(batch))
    return original(mesh, batch)

  monkeypatch.setattr(sharding, 'put_batch', put_batch)
  return batches


def interrupt(monkeypatch, at, number=signal.SIGTERM):
  """Sends this process a signal while it prepares step `at` of a new run; its initial state comes before."""
  original, calls = sharding.put_batch, []

  def put_batch(mesh, batch):
    calls.append(mesh)
    if len(calls) == at + 1:
      os.kill(os.getpid(), number)
    return original(mesh, batch)

  monkeypatch.setattr(sharding, 'put_batch', put_batch)


def test_whole_run(whole):
  folder, params, summary, batches = whole
  found = records(folder)
  assert [record['step'] for record in found] == list(range(1, 9))
  assert [record['loss'] for record in summary['curve']] == [record['loss'] for record in found]
  assert summary['steps'] == summary['steps_this_run'] == 8
  trained = {name: value for name, value in params.items() if name != 'feature_scale'}
  assert summary['drafter_parameters'] == sum(x.size for x in jax.tree.leaves(trained))
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))
  assert len(batches) == 8
  with checkpoints.open_manager(folder / 'checkpoints') as manager:
    assert sorted(manager.all_steps()) == [4, 8]
  # What is logged belongs to its step: the slots of its own batch.
  for record, batch in zip(found, batches):
    ends = [(batch['tokens'][r] > 0).sum() for r in range(BATCH)]
    slots = sum(
        min(K - 1, ends[r] - 1 - a)
        for r in range(BATCH) for a, real in zip(batch['anchors'][r], batch['is_anchor'][r]) if real)
    assert record['num_slots'] == slots


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_resumes_to_the_bit(whole, run, tmp_path, monkeypatch, number):
  folder, params, _, batches = whole
  handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
  seen = record_batches(monkeypatch)
  with monkeypatch.context() as patch:
    interrupt(patch, at=5, number=number)
    with pytest.raises(KeyboardInterrupt):
      run(tmp_path)
  assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
  assert saved(tmp_path)[0] == 5  # Not at a multiple of checkpoint_every: it is the stop's own.
  assert records(tmp_path) == records(folder)[:5]
  del seen[0]
  assert len(seen) == 5

  again, summary = run(tmp_path)
  assert len(seen) == 8
  for a, b in zip(seen, batches):
    assert_same(a, b)
  assert_same(again, params)
  assert records(tmp_path) == records(folder)
  assert [record['step'] for record in summary['curve']] == list(range(1, 9))
  assert summary['steps_this_run'] == 3
  (_, state, position), (_, wanted_state, wanted_position) = saved(tmp_path), saved(folder)
  assert_same(state, wanted_state)
  assert position == wanted_position


def test_a_killed_run_resumes_from_its_last_checkpoint(whole, run, tmp_path):
  """Metrics of the steps that are done again are not there twice."""
  folder, params, *_ = whole
  shutil.copytree(folder, tmp_path / 'killed')
  shutil.rmtree(tmp_path / 'killed' / 'checkpoints' / '8')
  again, summary = run(tmp_path / 'killed')
  assert summary['steps_this_run'] == 4
  assert_same(again, params)
  assert records(tmp_path / 'killed') == records(folder)


def test_a_line_that_a_kill_has_cut_is_no_obstacle(whole, run, tmp_path):
  folder, params, *_ = whole
  killed = tmp_path / 'killed'
  shutil.copytree(folder, killed)
  shutil.rmtree(killed / 'checkpoints' / '8')
  text = (killed / 'metrics.jsonl').read_text()
  (killed / 'metrics.jsonl').write_text(text[: len(text) - 40])
  again, _ = run(killed)
  assert_same(again, params)
  assert records(killed) == records(folder)


def test_a_finished_run_is_not_trained_again(whole, run, tmp_path, monkeypatch):
  folder, params, summary, _ = whole
  shutil.copytree(folder, tmp_path / 'copy')
  seen = record_batches(monkeypatch)
  again, second = run(tmp_path / 'copy')
  assert not seen
  assert_same(again, params)
  assert second['steps_this_run'] == 0
  assert second['curve'] == summary['curve']
  assert len(list((tmp_path / 'copy' / 'tensorboard').iterdir())) == 1
  assert_same(checkpoints.restore_params(folder / 'checkpoints'), params)


def test_a_stop_during_the_last_step_is_not_lost(run, tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    interrupt(patch, at=8)
    with pytest.raises(KeyboardInterrupt):
      run(tmp_path)
  assert run(tmp_path)[1]['steps_this_run'] == 0


def test_a_second_interrupt_stops_at_once():
  with pytest.raises(KeyboardInterrupt):
    with train.stop_signals() as stopped:
      os.kill(os.getpid(), signal.SIGINT)
      assert stopped == [signal.SIGINT]
      os.kill(os.getpid(), signal.SIGTERM)
      assert stopped == [signal.SIGINT, signal.SIGTERM]
      os.kill(os.getpid(), signal.SIGINT)


def test_another_seed_another_run(whole, run, config, tmp_path):
  config.seed = 1
  run(tmp_path)
  assert records(tmp_path)[0]['loss'] != records(whole[0])[0]['loss']


def test_arms_start_alike(whole, run, config, tmp_path):
  """Another loss on the same seed: same weights, same anchors, so the same first block accuracies."""
  config.loss.update(gamma=None, first_error=0.0, chain=0.0)
  run(tmp_path)
  of_loss = ('loss', 'gradient_norm', 'cross_entropy', 'first_error')  # The latter two are weighted.
  assert records(tmp_path, *of_loss)[0] == records(whole[0], *of_loss)[0]
  assert records(tmp_path)[0]['loss'] != records(whole[0])[0]['loss']
  slots = lambda folder: [(r['num_slots'], r['slot_count']) for r in records(folder)]
  assert slots(tmp_path) == slots(whole[0])


def test_online_features_give_the_same_losses(whole, run, tmp_path):
  run(tmp_path, 'online')
  for found, wanted in zip(records(tmp_path), records(whole[0])):
    for name in ('loss', 'gradient_norm', 'expected_accepted', 'num_slots'):
      # The same up to features that round to the other neighbour in bfloat16.
      np.testing.assert_allclose(found[name], wanted[name], rtol=1e-2, err_msg=name)


def test_bfloat16_is_near(whole, run, config, tmp_path):
  config.train.compute_dtype = 'bfloat16'
  params, _ = run(tmp_path)
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))
  for found, wanted in zip(records(tmp_path), records(whole[0])):
    np.testing.assert_allclose(found['loss'], wanted['loss'], rtol=0.05)
    assert found['num_slots'] == wanted['num_slots']


def test_one_step_is_a_whole_schedule(run, config, tmp_path):
  config.train.steps = 1
  assert run(tmp_path)[1]['steps_this_run'] == 1


def test_learns_a_row_by_heart(config, target, tmp_path):
  """One row over and over: whole blocks are right in the end."""
  (tmp_path / 'data').mkdir()
  paths = features.write(tmp_path / 'data', *target, [make_rows()[0]], TAPS)
  config.train.update(steps=150, batch_size=2, learning_rate=1e-2, log_every=10, checkpoint_every=150)
  _, summary = train.run(config, tmp_path, dataset.Dataset(tuple(paths), (), LENGTH, np.ones(29), {}), *target)
  first, last = summary['curve'][0], summary['curve'][-1]
  assert first['accepted_length'] < 2.2
  # Blocks near the row's end are shorter: four tokens a round are the most.
  assert last['accepted_length'] > 3
  assert min(last['slot_accuracy']) > 0.9


# ---- Long runs -------------------------------------------------------------------------------------


def of_params(config, folder, data, target, lengths):
  """Trains, with an evaluation that gives these lengths by step. Returns (parameters, summary, what was evaluated)."""
  seen, steps = [], iter(sorted(lengths))

  def validate(params):
    seen.append((next(steps), jax.tree.map(np.asarray, params)))
    return lengths[seen[-1][0]]

  return *train.run(config, folder, data['cached'], *target, validate), seen


LENGTHS = {2: 1.25, 4: 2.5, 6: 2.5, 8: 1.5}


@pytest.fixture(scope='module')
def measured(tmp_path_factory, data, target):
  """(folder, parameters, summary, what was evaluated) of a run with running means that is evaluated every two steps."""
  folder, config = tmp_path_factory.mktemp('measured'), make_config()
  config.train.update(ema=0.75, checkpoint_every=1, evaluate_every=2, keep=8)
  return folder, *of_params(config, folder, data, target, LENGTHS)


def test_running_mean(measured, whole):
  folder, params, summary, evaluated = measured
  states = {step: saved(folder, step)[1] for step in range(1, 9)}
  # The first step has a rate of 0: what it leaves is what it began with.
  mean = {name: x for name, x in states[1]['params'].items() if name != 'feature_scale'}
  for step in range(1, 9):
    mean = jax.tree.map(lambda e, p: np.float32(0.75) * e + np.float32(0.25) * p, mean, {
        name: states[step]['params'][name] for name in mean})
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), states[step]['ema'], mean)
  # The run itself does not see it.
  assert_same(states[8]['params'], whole[1])
  assert np.abs(states[8]['ema']['fc']['kernel'] - states[8]['params']['fc']['kernel']).max() > 1e-4
  # It is what is evaluated, returned and read.
  of = lambda step: {**states[step]['ema'], 'feature_scale': states[step]['params']['feature_scale']}
  assert [step for step, _ in evaluated] == [2, 4, 6, 8]
  for step, seen in evaluated:
    assert_same(seen, of(step))
  assert_same(params, of(8))
  assert_same(checkpoints.restore_params(folder / 'checkpoints'), of(8))
  assert (summary['ema'], summary['evaluated_step']) == (0.75, 8)


def test_a_stopped_run_has_the_same_mean_and_best(measured, config, data, target, tmp_path, monkeypatch):
  folder, *_ = measured
  config.train.update(ema=0.75, checkpoint_every=3, evaluate_every=2, keep=1)
  config.evaluate.checkpoint = 'best'
  with monkeypatch.context() as patch:
    interrupt(patch, at=5)
    with pytest.raises(KeyboardInterrupt):
      of_params(config, tmp_path, data, target, LENGTHS)
  on_disk = lambda: sorted(int(path.name) for path in (tmp_path / 'checkpoints').iterdir() if path.name.isdigit())
  assert on_disk() == [4, 5]  # The best, and the last.
  params, summary, evaluated = of_params(
      config, tmp_path, data, target, {step: length for step, length in LENGTHS.items() if step > 5})
  assert [step for step, _ in evaluated] == [6, 8]
  assert on_disk() == [6, 8]  # Of two that are alike the later one is the best.
  for step in (6, 8):
    assert_same(saved(tmp_path, step)[1:], saved(folder, step)[1:])
  wanted = saved(folder, 6)[1]
  wanted = {**wanted['params'], **wanted['ema']}
  assert summary['evaluated_step'] == 6
  assert_same(params, wanted)
  assert_same(train.trained_params(config, tmp_path), wanted)
  # A finished run that is given again returns the same, or the last one where that is asked for.
  assert_same(of_params(config, tmp_path, data, target, {})[0], wanted)
  config.evaluate.checkpoint = 'last'
  assert_same(of_params(config, tmp_path, data, target, {})[0], measured[1])

  lines = records(tmp_path)
  assert lines == records(folder)
  assert [line for line in lines if 'validation_accepted_length' in line] == [
      {'step': step, 'validation_accepted_length': length} for step, length in LENGTHS.items()]
  assert [line['step'] for line in lines] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8]
  assert summary['curve'][2]['validation_accepted_length'] == 1.25 and summary['slots_per_second'] > 0


def test_nothing_was_evaluated(whole, config, tmp_path):
  shutil.copytree(whole[0], tmp_path / 'copy')
  config.evaluate.checkpoint = 'best'
  with pytest.raises(UserError, match='no checkpoint here was evaluated'):
    train.trained_params(config, tmp_path / 'copy')


def test_a_trace_changes_nothing(whole, run, config, tmp_path):
  config.train.profile_steps = (3, 5)
  params, _ = run(tmp_path)
  assert_same(params, whole[1])
  assert records(tmp_path) == records(whole[0])
  [trace] = (tmp_path / 'profile').rglob('*.xplane.pb')
  planes = jax.profiler.ProfileData.from_file(str(trace)).planes
  names = [event.name for plane in planes for line in plane.lines for event in line.events]
  assert len([name for name in names if name.endswith(' put_batch')]) == 2  # Of steps 3 and 4.


@pytest.fixture
def small_disk(tmp_path):
  """A folder on a disk of its own, of three MiB."""
  folder = tmp_path / 'disk'
  folder.mkdir()
  mounted = subprocess.run(
      ['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', str(folder)], capture_output=True, text=True, check=False)
  if mounted.returncode:
    pytest.skip(f'no disk can be mounted here: {mounted.stderr.strip()}')
  yield folder
  subprocess.run(['umount', '-l', str(folder)], check=True)


def test_a_disk_that_fills_up(whole, run, small_disk, monkeypatch):
  """While the second checkpoint is written, in the background: the first one stays, and the run goes on from it."""
  save, filler = checkpoints.save, small_disk / 'filler'

  def save_to_a_full_disk(manager, step, *args):
    if step == 8:
      manager.wait_until_finished()
      with contextlib.suppress(OSError), filler.open('wb', buffering=0) as file:
        while True:
          file.write(bytes(4096))
      filler.write_bytes(bytes(filler.stat().st_size - 20480))  # Room for names and small files, but not for arrays.
    save(manager, step, *args)

  monkeypatch.setattr(checkpoints, 'save', save_to_a_full_disk)
  folder = small_disk / 'run'
  with pytest.raises(UserError) as error:
    run(folder)
  assert str(error.value).startswith(
      f'{folder / "checkpoints"}: the disk is full; the checkpoint of step 4 is whole. Make room')
  assert saved(folder)[0] == 4
  assert_same(saved(folder)[1], saved(whole[0], 4)[1])

  monkeypatch.setattr(checkpoints, 'save', save)
  filler.unlink()
  params, summary = run(folder)
  assert summary['steps_this_run'] == 4
  assert_same(params, whole[1])
  assert records(folder) == records(whole[0])
  # What the full disk has cut is gone.
  assert sorted(path.name for path in (folder / 'checkpoints').iterdir()) == ['4', '8']


# ---- What ends a run -------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_run(run, config, tmp_path):
  config.train.update(learning_rate=1e38, checkpoint_every=100)
  with pytest.raises(FloatingPointError, match=r'^step \d: loss (nan|inf)') as error:
    run(tmp_path)
  assert str(tmp_path / 'checkpoints') in str(error.value)
  found = records(tmp_path)
  # Up to the first update that has a rate all is well; the step named is the one after the last good.
  assert found and all(np.isfinite(record['loss']) for record in found)
  assert str(error.value).startswith(f'step {found[-1]["step"] + 1}:')


def test_nothing_that_is_not_finite_is_saved(config, data, target, tmp_path):
  config.train.checkpoint_every = 1
  params = {**target[1], 'embed': {'embedding': target[1]['embed']['embedding'] * jnp.nan}}
  with pytest.raises(FloatingPointError, match='step 1: '):
    train.run(config, tmp_path, data['cached'], target[0], params)
  with checkpoints.open_manager(tmp_path / 'checkpoints') as manager:
    assert manager.latest_step() is None


@pytest.mark.parametrize('change,names', [
    ({'num_layers': 2}, ['params/layers_1/']),
    ({'target_layers': (1,)}, ['params/fc/kernel']),
])
def test_a_checkpoint_of_another_drafter(whole, config, data, target, tmp_path, change, names):
  shutil.copytree(whole[0], tmp_path / 'copy')
  config.drafter.update(change)
  with pytest.raises(UserError) as error:
    train.run(config, tmp_path / 'copy', data['cached'], *target)
  for word in (str(tmp_path / 'copy' / 'checkpoints' / '8'), '--workdir', *names):
    assert word in str(error.value)
  assert saved(tmp_path / 'copy')[0] == 8


# ---- Speed -----------------------------------------------------------------------------------------


def test_seconds_include_the_wait_for_the_device(run, monkeypatch, tmp_path):
  """Fetching metrics is where the loop waits: time spent there is time of a step."""

  class SlowNumpy:

    def __getattr__(self, name):
      return getattr(np, name)

    def asarray(self, x):
      time.sleep(0.005)
      return np.asarray(x)

  monkeypatch.setattr(train, 'np', SlowNumpy())
  _, summary = run(tmp_path)
  metrics = len([name for name in summary['curve'][0] if name not in ('step', 'seconds', 'slots_per_second')])
  for record in summary['curve']:
    assert record['seconds'] > 0.005 * metrics
    np.testing.assert_allclose(record['slots_per_second'] * record['seconds'], record['num_slots'])
  assert sum(record['seconds'] for record in summary['curve']) <= summary['seconds']
