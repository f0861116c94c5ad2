"""Trains one drafter: read it from top to bottom."""

from collections.abc import Callable
import contextlib
import functools
import pathlib
import signal
import time
from typing import Any

from absl import logging
import flax.struct
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import tqdm

from dspec import accumulation
from dspec import metrics as metrics_lib
from dspec import multihost
from dspec import sharding
from dspec.checkpoints import dflash
from dspec.checkpoints import training as checkpoints
from dspec.data import dataset as dataset_lib
from dspec.data import features as features_lib
from dspec.data import pipeline
from dspec.errors import UserError
from dspec.losses import Objective, SlotScores, objective, score_slots_chunked
from dspec.models import drafter as drafter_lib
from dspec.models import masks
from dspec.models import target as target_lib


@flax.struct.dataclass
class TrainState:
  """What a checkpoint holds, with the data iterator.

  Attributes:
    step: int32 scalar; optimizer steps taken.
    params: float32 parameters of the drafter.
    opt_state: of the optimizer.
  """

  step: jax.Array
  params: Any
  opt_state: Any

  @property
  def result(self) -> Any:
    """The parameters that a run is for."""
    return self.params


@flax.struct.dataclass
class AveragedState(TrainState):
  """What it holds with `train.ema` = d.

  Attributes:
    ema: the running mean of the parameters that are trained: e_t = d * e_(t-1) + (1-d) * p_t from e_0 = p_0, the
      initial ones; it is not debiased.
  """

  ema: Any

  @property
  def result(self) -> Any:
    return {**self.params, **self.ema}


def make_optimizer(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """AdamW with linear warm-up, cosine decay to zero and clipping by the global norm; norm scales do not decay."""
  t = config.train
  warmup = min(max(1, round(t.warmup_fraction * t.steps)), t.steps - 1)
  schedule = optax.warmup_cosine_decay_schedule(0.0, t.learning_rate, warmup, t.steps)
  return optax.chain(
      optax.clip_by_global_norm(t.clip_norm),
      optax.adamw(
          schedule, b1=0.9, b2=0.95, weight_decay=t.weight_decay,
          mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
      ),
  )


def loss_fn(params: Any, batch: dict[str, jax.Array], *, spec: Objective, **models):
  """The objective of a batch, see `score`.

  All sums run over the whole batch, whatever devices hold it, before anything is divided.

  Returns:
    (loss, ObjectiveAux).
  """
  return objective(*score(params, batch, **models), spec)


def score(
    params: Any,
    batch: dict[str, jax.Array],
    *,
    drafter: drafter_lib.Drafter,
    target_params: Any,
    head_chunk: int,
) -> tuple[SlotScores, jax.Array]:
  """What the objective sees of a batch from `pipeline.batches` that has its features.

  Returns:
    (scores, which slots are valid), [B, A, S].
  """
  k = drafter.config.block_size
  anchors_BxA, tokens_BxT = batch['anchors'], batch['tokens']
  anchor_tokens = jnp.take_along_axis(tokens_BxT, anchors_BxA, 1)
  blocks = drafter_lib.block_tokens(anchor_tokens, drafter.config)
  embeddings = drafter_lib.embed(drafter.config, target_params, blocks)
  starts_BxT = batch.get('starts')  # Of packed rows only.
  hidden = drafter.apply({'params': params}, batch['features'], embeddings, anchors_BxA, starts_BxT)

  valid = masks.valid_labels(anchors_BxA, batch['is_anchor'], batch['supervised'], k, starts_BxT)
  positions = anchors_BxA[:, :, None] + jnp.arange(1, k)[None, None, :]
  positions = jnp.minimum(positions, tokens_BxT.shape[1] - 1)
  labels = tokens_BxT[jnp.arange(tokens_BxT.shape[0])[:, None, None], positions]
  head_VxD = target_lib.head_VxD(target_params)
  labels = drafter_lib.draft_rows(params, labels, head_VxD.shape[0])
  valid &= labels >= 0  # What cannot be drafted ends a block, and so does not count, nor what follows it.
  # Gathered over `fsdp` here, once, and not in every chunk.
  head = sharding.constrain(drafter_lib.draft_head(params, head_VxD), sharding.VOCABULARY)
  scores = score_slots_chunked(
      drafter_lib.draft_slots(hidden, drafter.config), head, labels, valid, chunk_size=head_chunk,
      compute_dtype=drafter.dtype,
  )
  return scores, valid


def init_state(
    key: jax.Array, batch: dict[str, jax.Array], target_params, draft_ids, given=None, *, optimizer, target, drafter,
    ema: float = 0.0
) -> TrainState:
  """Fresh parameters and optimizer state; a pure function, to be jitted with the keyword arguments bound.

  The residual stream of a language model grows with depth, and a few of its dimensions are far larger than the
  others: left alone, the last tapped layer drowns the first ones. So the drafter's `feature_scale` is measured here,
  and every feature reaches it with a mean square of 1.

  Args:
    key: of the parameters.
    batch: the first one of training.
    target_params: the target's.
    draft_ids: the draft vocabulary, int32, ascending; None for that of the target.
    given: parameters to start from, all of them; None for fresh ones.
    optimizer: see `make_optimizer`.
    target: the target.
    drafter: the drafter.
    ema: as `train.ema`.
  """
  def state(params):
    trained = _split(params)[0]
    parts = jnp.zeros((), jnp.int32), params, optimizer.init(trained)
    # A copy, for the step gives both buffers away.
    return AveragedState(*parts, jax.tree.map(jnp.copy, trained)) if ema else TrainState(*parts)

  if given is not None:
    return state(given)
  params = init_params(drafter, key)
  batch = _with_features(batch, target, target_params, drafter.config)
  # Of the answers only: the first tokens of a prompt often carry activations like no other token's.
  of_answer = batch['supervised'][:, :, None]
  squares = jnp.sum(jnp.square(batch['features'].astype(jnp.float32)), axis=(0, 1), where=of_answer)
  mean_square = squares / jnp.maximum(jnp.sum(of_answer), 1)
  params['feature_scale'] = jnp.where(mean_square > 0, jax.lax.rsqrt(mean_square), 1.0)
  if draft_ids is not None:
    params['draft_ids'] = draft_ids
  return state(params)


def _split(params):
  """What is trained, and what is not."""
  measured = {name: params[name] for name in drafter_lib.MEASURED if name in params}
  return {name: value for name, value in params.items() if name not in measured}, measured


def _with_features(batch, target, target_params, drafter_config):
  """The batch with the target's features, computed here if they are not read from disk."""
  if 'features' in batch:
    return batch
  features = features_lib.compute(
      target, target_params, batch['tokens'], drafter_config.target_layers, batch.get('starts'))
  return {**batch, 'features': jax.lax.stop_gradient(features)}


def train_step(
    state: TrainState, batch, target_params, *, optimizer, target, drafter, spec, head_chunk, accumulate=1, ema=0.0
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One step; a pure function, to be jitted with the keyword arguments bound."""
  trained, measured = _split(state.params)
  models = {'drafter': drafter, 'target_params': target_params, 'head_chunk': head_chunk}
  prepare = lambda batch: _with_features(batch, target, target_params, drafter.config)
  if accumulate > 1:
    # A part may have fewer slots than a chunk, which would be filled up.
    models['head_chunk'] = min(head_chunk, batch['anchors'].size // accumulate * (drafter.config.block_size - 1))
    (value, aux), gradients = accumulation.value_and_grad(
        prepare, lambda trained, batch: score({**trained, **measured}, batch, **models),
        lambda scores, valid: objective(scores, valid, spec), trained, batch, accumulate)
  else:
    loss = functools.partial(loss_fn, batch=prepare(batch), spec=spec, **models)
    value_and_grad = jax.value_and_grad(lambda trained: loss({**trained, **measured}), has_aux=True)
    (value, aux), gradients = value_and_grad(trained)
  updates, opt_state = optimizer.update(gradients, state.opt_state, trained)
  trained = optax.apply_updates(trained, updates)
  state = state.replace(step=state.step + 1, params={**trained, **measured}, opt_state=opt_state)
  if ema:
    state = state.replace(ema=optax.incremental_update(trained, state.ema, 1 - ema))
  metrics = {'loss': value, 'gradient_norm': optax.global_norm(gradients), **vars(aux)}
  return state, metrics


@contextlib.contextmanager
def stop_signals():
  """Turns SIGINT and SIGTERM into a flag that is looked at between steps; a second SIGINT stops at once.

  Of several processes, see `multihost.reached_stop`, SIGTERM is left to the service that tells the others.
  """
  received = []

  def note(number, frame):
    if received and number == signal.SIGINT:
      raise KeyboardInterrupt
    received.append(number)

  numbers = (signal.SIGINT, signal.SIGTERM) if jax.process_count() == 1 else (signal.SIGINT,)
  old = {number: signal.signal(number, note) for number in numbers}
  try:
    yield received
  finally:
    for number, handler in old.items():
      signal.signal(number, handler)


def run(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    data: dataset_lib.Dataset,
    target: target_lib.Target,
    target_params: Any,
    validate: Callable[[Any], float] | None = None,
) -> tuple[Any, dict[str, Any]]:
  """Trains to the end of the schedule, from the newest checkpoint if there is one.

  Args:
    config: the whole config of this arm.
    folder: of its checkpoints and metrics.jsonl.
    data: see `dspec.data.dataset`.
    target: the target in the compute dtype.
    target_params: its parameters, already in that dtype.
    validate: parameters on their devices -> accepted length on held-out prompts, see `evaluate.validator`; called in
      all processes, every `train.evaluate_every` steps and after the last one, where that is not 0.

  Returns:
    (drafter parameters as float32 numpy arrays, a summary for the report). The parameters are those of
    `evaluate.checkpoint`, and with `train.ema` their running mean.

  Raises:
    FloatingPointError: on a loss or gradient that is not finite, with its step.
    KeyboardInterrupt: after a stop signal, once the state is saved.
    UserError: a checkpoint that does not match, or a full disk.
  """
  # ---- What is trained, on what -----------------------------------------------------------------
  t = config.train
  given = dflash.load_drafter(config.drafter.init)[1] if config.drafter.init else None
  if not t.steps:
    return given, _summary(t, 0.0, 0, 0, [], given, data)
  mesh = sharding.make_mesh(config)
  sharding.check_batch(mesh, t.batch_size, t.accumulate)
  drafter = drafter_lib.Drafter(
      make_drafter_config(config, target.config), jnp.dtype(t.compute_dtype), t.remat, choose_attention(config, mesh))
  spec = Objective(config.loss.gamma, config.loss.first_error, config.loss.chain, config.loss.reduction)
  optimizer = make_optimizer(config)
  batches = pipeline.batches(
      data.paths, seed=config.seed, batch_size=t.batch_size, length=data.length, anchors=t.anchors, packs=data.packs,
      rows=sharding.rows(mesh, t.batch_size),
  )
  iterator = iter(batches)
  models = {'optimizer': optimizer, 'target': target, 'drafter': drafter}

  # ---- From the beginning, or where it left off ---------------------------------------------------
  manager = checkpoints.open_manager(folder / 'checkpoints', t.keep, writes=True)
  draft_ids = None
  if drafter.config.vocab_size:
    draft_ids = drafter_lib.draft_vocabulary(data.answer_counts, drafter.config.vocab_size)
  with jax.set_mesh(mesh):
    target_params = sharding.put(target_params)
    key, batch, *others = jax.random.key(config.seed), next(iter(batches)), target_params, draft_ids, given
    init = functools.partial(init_state, **models, ema=t.ema)
    shapes = jax.eval_shape(init, key, batch, *others)
    shardings = sharding.of(mesh, shapes)
    shapes = jax.tree.map(lambda x, where: x.update(sharding=where), shapes, shardings)
    if manager.latest_step() is None:
      # out_shardings here too: without them the optimizer's moments may land elsewhere.
      state = jax.jit(init, out_shardings=shardings)(key, sharding.put_batch(mesh, batch), *others)
    else:
      state = checkpoints.restore(manager, shapes, iterator)
      logging.info('resuming %s at step %d of %d', folder, state.step, t.steps)
  step_fn = jax.jit(
      functools.partial(
          train_step, **models, spec=spec, head_chunk=t.head_chunk, accumulate=t.accumulate, ema=t.ema),
      donate_argnums=0,
      out_shardings=(shardings, sharding.replicated(mesh)),
  )
  start = int(state.step)

  # ---- The loop: metrics are fetched one step late, so that the device never waits ----------------
  def log(step, metrics):
    nonlocal last
    metrics = jax.tree.map(lambda x: np.asarray(x).tolist(), metrics)
    # Taken after the fetch, which is where the loop waits for the device.
    now = time.perf_counter()
    seconds, last = now - last, now
    if not (np.isfinite(metrics['loss']) and np.isfinite(metrics['gradient_norm'])):
      raise FloatingPointError(
          f'step {step}: loss {metrics["loss"]}, gradient norm {metrics["gradient_norm"]}. The last checkpoint '
          f'in {folder / "checkpoints"} is whole; lower --config.train.learning_rate and use a new --workdir.'
      )
    bar.set_postfix(loss=f'{metrics["loss"]:.3f}', accepted=f'{metrics["accepted_length"]:.2f}', refresh=False)
    bar.update()
    if step % t.log_every == 0 or step == t.steps:
      checkpoints.check(manager)
      writer.write(
          {'step': step, **metrics, 'seconds': seconds, 'slots_per_second': metrics['num_slots'] / seconds})

  def evaluate(step, state):
    begin = time.perf_counter()
    length = validate(state.result)
    logging.info('step %d: accepted length %.3f on held-out prompts', step, length)
    writer.write({'step': step, 'validation_accepted_length': length, 'seconds': time.perf_counter() - begin})
    return length

  begin = last = time.perf_counter()
  pending = None
  with (
      jax.set_mesh(mesh), stop_signals() as stopped, checkpoints.explained(manager),
      contextlib.closing(metrics_lib.Writer(folder, start)) as writer,
      metrics_lib.profile(folder / 'profile', t.profile_steps) as before_step,
      tqdm.tqdm(
          total=t.steps, initial=start, desc=f'training {folder.name}', unit='step', smoothing=0.05,
          disable=not multihost.is_first()) as bar,
  ):
    for step in range(start + 1, t.steps + 1):
      before_step(step, state)
      state, metrics = step_fn(state, sharding.put_batch(mesh, next(iterator)), target_params)
      if pending:
        log(*pending)
      pending = step, metrics
      stop = multihost.reached_stop(bool(stopped))
      due = t.evaluate_every and (step % t.evaluate_every == 0 or step == t.steps)
      if step % t.checkpoint_every == 0 or step == t.steps or due or stop:
        log(*pending)
        pending = None
        checkpoints.save(manager, step, state, iterator, evaluate(step, state) if due else None)
        last = time.perf_counter()
      if stop:
        manager.close()
        logging.info('stopped; saved step %d', step)
        raise KeyboardInterrupt
    manager.wait_until_finished()
  seconds = time.perf_counter() - begin

  # ---- What is evaluated --------------------------------------------------------------------------
  evaluated = checkpoints.best_step(manager) if config.evaluate.checkpoint == 'best' else t.steps
  if evaluated != t.steps:
    del state  # Its memory is needed.
    with jax.set_mesh(mesh):
      state = checkpoints.restore(manager, shapes, step=evaluated)
  manager.close()
  params = sharding.to_host(state.result)
  return params, _summary(t, seconds, t.steps - start, evaluated, writer.curve, params, data)


def _summary(
    t, seconds, steps_this_run, evaluated_step, curve, params, data: dataset_lib.Dataset
) -> dict[str, Any]:
  speeds = [record['slots_per_second'] for record in curve if 'slots_per_second' in record]
  return {
      'steps': t.steps,
      'seconds': seconds,
      'steps_this_run': steps_this_run,
      'evaluated_step': evaluated_step,
      'ema': t.ema,
      'slots_per_second': float(np.median(speeds)) if speeds else 0.0,
      'drafter_parameters': sum(x.size for x in jax.tree.leaves(_split(params)[0])),
      'draft_vocabulary_coverage': data.coverage(params['draft_ids']) if 'draft_ids' in params else 1.0,
      'curve': curve,
  }


def trained_params(config: ml_collections.ConfigDict, folder: pathlib.Path) -> Any:
  """What `run` has left in the folder of an arm, or the drafter that it was given where nothing is trained."""
  if config.train.steps:
    return checkpoints.restore_params(folder / 'checkpoints', best=config.evaluate.checkpoint == 'best')
  return dflash.load_drafter(config.drafter.init)[1]


def make_drafter_config(
    config: ml_collections.ConfigDict, target: target_lib.TargetConfig
) -> drafter_lib.DrafterConfig:
  """The drafter that the config asks for, on this target."""
  d = config.drafter
  if d.init:
    return dflash.load_config(d.init)[0]
  return drafter_lib.from_target(
      target, num_layers=d.num_layers, block_size=d.block_size, target_layers=tuple(d.target_layers),
      mask_token_id=d.mask_token_id, window=d.window, vocab_size=d.vocab_size,
  )


def choose_attention(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> str:
  """The drafter's, in training: 'splash' on TPUs, and 'xla' on what has no kernel that is measured to be better.

  Raises:
    UserError: where splash is asked for and the devices are no TPUs.
  """
  asked, platform = config.train.attention, mesh.devices.flat[0].platform
  if asked == 'splash' and platform != 'tpu':
    raise UserError(f'--config.train.attention=splash: a kernel for TPUs, and the devices are {platform}s; take auto')
  return {'auto': 'splash' if platform == 'tpu' else 'xla'}.get(asked, asked)


def init_params(drafter: drafter_lib.Drafter, key: jax.Array) -> Any:
  """Fresh float32 parameters."""
  c = drafter.config
  features = jnp.zeros((1, 1, len(c.target_layers) * c.width))
  embeddings = jnp.zeros((1, 1, c.block_size, c.width))
  return drafter.init(key, features, embeddings, jnp.zeros((1, 1), jnp.int32))['params']
