"""One experiment from an empty folder to its report: target, data, training of each arm, decoding, tables and plots."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import platform
import resource
import shlex
import sys
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from dspec import config as config_lib
from dspec import evaluate
from dspec import imported
from dspec import mechanisms
from dspec import multihost
from dspec import report
from dspec import sharding
from dspec import train
from dspec.checkpoints import targets
from dspec.data import dataset as dataset_lib
from dspec.data import evaluation_sets
from dspec.data.evaluation_sets import PromptSet
from dspec.decoding import costs as costs_lib
from dspec.decoding import sampling
from dspec.decoding import speculative
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib

# Options that a finished or interrupted run may change: they touch nothing that it has made.
_FREE = ('evaluate.', *config_lib.INERT)


def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Runs, or resumes, an experiment on the mesh of `jax.set_mesh` and prints its table.

  Args:
    config: validated, see `dspec.config.validate`.
    workdir: folder of config.json, one folder an arm, and the report.

  Returns:
    The results, as in report.json.

  Raises:
    UserError: what is wrong and what to do.
    KeyboardInterrupt: when stopped; the same call resumes.
  """
  times = {}

  @contextlib.contextmanager
  def stage(name):
    begin = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - begin

  # ---- Everything that can be refused, before anything that takes time ----------------------------
  workdir = pathlib.Path(workdir)
  check_workdir(config, workdir)
  mechanisms.check(config)
  for _, arm in arms(config):
    sharding.check_batch(jax.sharding.get_mesh(), arm.train.batch_size, arm.train.accumulate)
    train.choose_attention(arm, jax.sharding.get_mesh())
  cache_dir = config_lib.cache_dir(config)
  multihost.check_shared('--workdir', workdir)
  multihost.check_shared('--config.cache_dir', cache_dir)
  with multihost.first_goes_first('the benchmarks'):
    benchmarks = evaluation_sets.load_benchmarks(config, cache_dir / 'tfds')
  with stage('target'):
    with multihost.first_goes_first('the target'):
      path = targets.locate(config, cache_dir)
    target_config, params, tokenizer = targets.load(config, path, place=sharding.place)
    config_lib.validate_against_target(config, target_config, tokenizer)
    for _, arm in arms(config):
      imported.check(arm, target_config, params, tokenizer)
    fingerprint = targets.fingerprint(path)
  if multihost.is_first():
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / 'config.json').write_text(config_lib.to_json(config) + '\n')
  logging.info('compiled programs: %s', jax.config.jax_compilation_cache_dir)

  # ---- Data: once, in the compute dtype ----------------------------------------------------------
  compute_dtype = jnp.dtype(config.train.compute_dtype)
  target = target_lib.Target(target_config, compute_dtype)
  compute_params = target_lib.cast(params, compute_dtype)
  with stage('data'):
    data = dataset_lib.prepare(config, cache_dir, target, compute_params, tokenizer, fingerprint)

  # ---- Training ----------------------------------------------------------------------------------
  prompts = {
      name: evaluation_sets.validation(config, data, target_config, arm.train.evaluate_prompts)
      for name, arm in arms(config) if arm.train.evaluate_every}
  trained = []
  for name, arm in arms(config):
    with stage('training'):
      validate = validator(arm, target_config, params, prompts[name]) if name in prompts else None
      arm_params, summary = train.run(arm, workdir / name, data, target, compute_params, validate)
    trained.append((name, arm, arm_params, summary))
  del compute_params

  # ---- Evaluation: in float32, if nothing else is said, for there exactness is promised -----------
  with stage('evaluation'):
    e = config.evaluate
    sets = evaluation_sets.make(config, data, benchmarks, tokenizer, target_config)
    sizes = {name: e.block_size or arm.drafter.block_size for name, arm, *_ in trained}
    evaluations = evaluate_arms(
        config, workdir, fingerprint, target_config, params, trained, sets, dtype=jnp.dtype(e.dtype),
        batch_size=e.batch_size, block_sizes=sizes, replay=e.replay,
    )
    # One user waits for one answer: the speed that accepted length is for, above all where compute is scarce.
    alone = {name: prompts.first(e.latency_prompts) for name, prompts in sets.items() if e.latency_prompts}
    sizes, costs_of_arms = latency_block_sizes(
        config, fingerprint, target_config, params, trained, evaluations if alone else {}
    )
    latencies = evaluate_arms(
        config, workdir, fingerprint, target_config, params, trained, alone, dtype=jnp.dtype(e.latency_dtype),
        batch_size=1, block_sizes=sizes, trees=(0, *e.latency_trees),
    )

  with stage('mechanisms'):
    study = mechanisms.run(config, workdir, target_config, params, trained, sets) if config.mechanisms.of else []

  # ---- Report ------------------------------------------------------------------------------------
  results = {
      'experiment': config.experiment,
      'seed': config.seed,
      'command': 'python -m dspec.main ' + shlex.join(sys.argv[1:]),
      'times': times,
      'target': {
          'name': path.name if not config.target.path.startswith('hub:') else config.target.path,
          'sha256': fingerprint,
          'published': next((key for key, of in config_lib.TARGETS.items() if of.path == config.target.path), ''),
          'parameters': sum(x.size for x in jax.tree.leaves(params)),
          **dataclasses.asdict(target_config),
      },
      'data': data.stats,
      'sets': {name: dict(prompts.source) for name, prompts in sets.items()},
      'missing_sets': [name for name in e.sets if name not in sets],
      'machine': machine(config),
      'costs': costs_of_arms,
      'mechanisms': mechanisms.summarise(study, samples=config.evaluate.bootstrap_samples, seed=config.seed),
      'config': config_lib.to_dict(config),
      'arms': [
          {
              'name': name,
              'loss': {k: arm.loss[k] for k in ('gamma', 'first_error', 'chain')},
              'train': {k: v for k, v in summary.items() if k != 'curve'},
              'curve': summary['curve'],
              'sets': evaluations[name],
              'mean': mean_of_benchmarks(config, evaluations, name),
              'latency': latencies[name],
          }
          for name, arm, _, summary in trained
      ],
  }
  if multihost.is_first():
    print(report.write(workdir, results))
    print(f'\nReport: {workdir / "report.md"}')
  return results


def arms(config: ml_collections.ConfigDict) -> list[tuple[str, ml_collections.ConfigDict]]:
  """(name, config) of every drafter that is trained; one of the experiment's own name without `config.arms`."""
  if not config.arms:
    return [(config.experiment, config)]
  return [(name, config_lib.apply_overrides(config, overrides)) for name, overrides in config.arms]


def validator(
    config: ml_collections.ConfigDict, target_config: target_lib.TargetConfig, params: Any,
    prompts: Sequence[evaluate.Prompt]
) -> Callable[[Any], float]:
  """What `train.run` measures an arm's drafter with: decoding as in the evaluation, at temperature 0.

  Args:
    config: of the arm.
    target_config: the target's.
    params: its parameters, as they are held.
    prompts: see `evaluation_sets.validation`.
  """
  e, dtype = config.evaluate, jnp.dtype(config.evaluate.dtype)
  shape = train.make_drafter_config(config, target_config)
  shape = dataclasses.replace(shape, block_size=e.block_size or shape.block_size)
  target, drafter = target_lib.Target(target_config, dtype), drafter_lib.Drafter(shape, dtype)
  return evaluate.validator(
      target, target_lib.cast(params, dtype), drafter, prompts, max_new_tokens=e.max_new_tokens)


def check_workdir(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Refuses a folder that holds another experiment's run, which this one would overwrite.

  An option that a run of an earlier version did not know has its default, which changes nothing.

  Raises:
    UserError: with the options that differ, and both their values.
  """
  path = workdir / 'config.json'
  if workdir.exists() and not workdir.is_dir():
    raise UserError(f'--workdir={workdir} is a file; give a folder')
  if not path.exists():
    return
  try:
    old = json.loads(path.read_text())
  except ValueError as error:
    raise UserError(f'{path} is damaged ({error}); give another --workdir') from error
  flat = lambda of: config_lib.flatten(config_lib.to_dict(of))
  new, old = _of_arms(flat(config)), _of_arms(flat(config_lib.default()) | flat(old))
  differing = [k for k in config_lib.differences(new, old) if not k.startswith(_FREE)]
  if differing:
    value = lambda of, key: of.get(key, 'not set')
    listed = '; '.join(f'{key}: {value(old, key)} there, {value(new, key)} here' for key in differing)
    raise UserError(
        f'--workdir={workdir} holds a run with another configuration, which differs in {listed}. '
        'Give another --workdir, or the options of that run to resume it.'
    )


def _of_arms(flat: Mapping[str, Any]) -> dict[str, Any]:
  """A flat config whose arms are names, and their options keys of their own."""
  options = {f'arms.{name}.{key}': value for name, changes in flat['arms'] for key, value in changes.items()}
  return {**flat, 'arms': [name for name, _ in flat['arms']], **options}


def evaluate_arms(
    config, workdir: pathlib.Path, fingerprint: str, target_config, params, trained, sets: Mapping[str, PromptSet], *,
    dtype, batch_size: int, block_sizes: Mapping[str, int], trees: Sequence[int] = (0,), replay: bool = False
) -> dict[str, dict[str, Any]]:
  """{arm: {set: measures}}; plain decoding is run once a set, and every arm is compared with the first.

  With draft trees, keys read `SET, tree of N`. What was decoded is kept in the workdir, prompt by prompt, and not
  decoded again.

  Args:
    config: the whole config.
    workdir: of `evaluation/`.
    fingerprint: of the target.
    target_config: the target's.
    params: the target's parameters, as they are held.
    trained: (name, config, drafter parameters, summary) of each arm.
    sets: prompts of each set, see `dspec.data.evaluation_sets`.
    dtype: of the matrix products.
    batch_size: prompts decoded at once.
    block_sizes: of decoding, by arm.
    trees: sizes of the draft trees that everything is decoded with; 0 for one draft a round.
    replay: whether rounds are found by `dspec.decoding.replay`; without trees.
  """
  if not sets:
    return {name: {} for name, *_ in trained}
  e = config.evaluate
  target = target_lib.Target(target_config, dtype)
  held_params, params = params, target_lib.cast(params, dtype)
  options = {
      'batch_size': min(batch_size, max(len(prompts.ids) * e.samples for prompts in sets.values())),
      'max_new_tokens': e.max_new_tokens,
      'how': sampling.Sampling(e.temperature), 'key': jax.random.key(config.seed),
  }
  bootstrap = {'samples': e.bootstrap_samples, 'seed': config.seed}

  def path(name: str, prompts: PromptSet, dtype, **what) -> pathlib.Path:
    """A file that holds what this was said to, with these parameters, and nothing else."""
    told = [
        fingerprint, prompts.ids, jnp.dtype(dtype).name, options['batch_size'], e.max_new_tokens, e.samples,
        e.temperature, config.seed if e.temperature else 0, what]
    name = name.replace(', ', '-').replace(' ', '_')
    return workdir / 'evaluation' / f'{name}-{_hash(json.dumps(told).encode())}.jsonl'

  references = _references(e, target, params, sets, options, path)
  speeds = {name: reference.tokens_per_second for name, reference in references.items()}
  if dtype.name != config.target.dtype:
    # Plain decoding may be faster as the target is held, and no drafter should be praised for a slow rival.
    held = target_lib.Target(target_config, jnp.dtype(config.target.dtype))
    others = _references(e, held, held_params, sets, options, path)
    speeds = {name: max(speed, others[name].tokens_per_second) for name, speed in speeds.items()}
  measures, first, compiled = {}, {}, {}
  for arm_name, arm, arm_params, _ in trained:
    drafter_hash = _hash(*(np.asarray(x).tobytes() for x in jax.tree.leaves(arm_params)))
    arm_params = target_lib.cast(arm_params, dtype)
    shape = train.make_drafter_config(arm, target_config)
    shape = dataclasses.replace(shape, block_size=block_sizes[arm_name])
    measures[arm_name] = {}
    for (set_name, reference), size in itertools.product(references.items(), trees):
      name = f'{set_name}, tree of {size}' if size else set_name
      if (shape, size) not in compiled:
        models = target, params, drafter_lib.Drafter(shape, dtype), arm_params
        if replay:
          compiled[shape, size] = evaluate.compile_replay(
              *models, **{key: options[key] for key in ('batch_size', 'max_new_tokens')})
        else:
          compiled[shape, size] = evaluate.compile_speculative(
              *models, drafting=speculative.Drafting(tree_size=size), **options)
      evaluation = evaluate.decode_speculatively(
          compiled[shape, size], arm_params, reference, f'speculative, {arm_name}, {name}',
          path=path(f'{arm_name}, {name}', sets[set_name], dtype, drafter=drafter_hash, shape=repr(shape), tree=size,
                    **({'replay': True} if replay else {})),
      )
      result = evaluate.result(evaluation, speeds[set_name], **bootstrap)
      if name in first:
        result['gain'] = {
            'over': trained[0][0],
            **evaluate.gain(evaluation.records, first[name].records, **bootstrap),
        }
      else:
        first[name] = evaluation
      measures[arm_name][name] = {
          **result, 'tree_size': size, 'prompts': _hash(json.dumps(reference.prompts).encode())}
  return measures


def _references(e, target, params, sets: Mapping[str, PromptSet], options, path) -> dict[str, evaluate.Reference]:
  plain = evaluate.compile_autoregressive(target, params, **options)
  dtype = jnp.dtype(target.dtype).name
  references = {}
  for name, prompts in sets.items():
    # Samples of a question stand together; their seeds are their places.
    ids = [ids for ids in prompts.ids for _ in range(e.samples)]
    follow_up = prompts.follow_up and (lambda i, answers, of=prompts.follow_up: of(i // e.samples, answers))
    references[name] = evaluate.decode_reference(
        plain, ids, f'autoregressive, {dtype}, {name}', questions=[i // e.samples for i in range(len(ids))],
        follow_up=follow_up, path=path(f'plain, {name}', prompts, dtype))
  return references


def _hash(*parts: bytes) -> str:
  digest = hashlib.sha256()
  for part in parts:
    digest.update(part)
  return digest.hexdigest()[:16]


def mean_of_benchmarks(config, evaluations: Mapping[str, Mapping[str, Any]], arm: str) -> dict[str, Any] | None:
  """`evaluate.mean_of_sets` of an arm over its benchmarks; None where they are fewer than two."""
  e = config.evaluate
  benchmarks = [key for key in evaluations[arm] if key not in evaluation_sets.OF_DATA]
  if len(benchmarks) < 2:
    return None
  sums = lambda name: {key: np.array(evaluations[name][key]['sums'], np.float64) for key in benchmarks}
  first = next(iter(evaluations))
  baseline = None if arm == first else sums(first)
  found = evaluate.mean_of_sets(sums(arm), baseline, samples=e.bootstrap_samples, seed=config.seed)
  return found if baseline is None else {**found, 'gain': {'over': first, **found['gain']}}


def costs(
    config, fingerprint: str, target, target_params, drafter, drafter_params, held_params
) -> costs_lib.Costs:
  """What a round costs here, measured at first use and kept in the cache folder.

  Args:
    config: the whole config.
    fingerprint: of the target.
    target: in the dtype of decoding.
    target_params: its parameters in that dtype.
    drafter: of the trained block size, in the dtype of decoding.
    drafter_params: its parameters in that dtype.
    held_params: the target's as they are held, for plain decoding that may be faster.
  """
  return costs_lib.measured(
      config_lib.cache_dir(config) / 'costs', fingerprint, target, target_params, drafter, drafter_params,
      (target_lib.Target(target.config, jnp.dtype(config.target.dtype)), held_params),
  )


def latency_block_sizes(
    config, fingerprint, target_config, params, trained, evaluations
) -> tuple[dict[str, int], dict[str, Any]]:
  """Of each arm the block size that is fastest for one prompt, and the costs that say so.

  Args:
    config: the whole config.
    fingerprint: of the target.
    target_config: the target's.
    params: the target's parameters, as they are held.
    trained: as in `evaluate_arms`.
    evaluations: {arm: {set: measures}}; the first set's acceptance counts. Empty if nothing is to be decoded.

  Returns:
    {arm: block size} and {arm: the costs, see `report.write`}; the latter is empty where the config fixes the size.
  """
  e = config.evaluate
  if e.latency_block_size or not evaluations:
    return {name: e.latency_block_size for name, *_ in trained}, {}
  dtype = jnp.dtype(e.latency_dtype)
  target, target_params = target_lib.Target(target_config, dtype), target_lib.cast(params, dtype)
  sizes, found = {}, {}
  for name, arm, arm_params, _ in trained:
    drafter = drafter_lib.Drafter(train.make_drafter_config(arm, target_config), dtype)
    of_arm = costs(config, fingerprint, target, target_params, drafter, target_lib.cast(arm_params, dtype), params)
    acceptance = next(iter(evaluations[name].values()))['acceptance_by_slot']
    sizes[name], found[name] = of_arm.best_block_size(acceptance), of_arm.to_json()
  return sizes, found


def machine(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """What the speeds depend on."""
  return {
      'device': jax.devices()[0].device_kind,
      'devices': jax.device_count(),
      'cpu': costs_lib.processor(),
      'cpu_cores': os.cpu_count(),
      'platform': platform.platform(),
      'python': platform.python_version(),
      'jax': jax.__version__,
      'compute_dtype': config.train.compute_dtype,
      'peak_memory_gib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
  }
