"""Trains, evaluates and reports one experiment.

  python -m dspec.main --config=experiments/chain_loss.py

Another budget by `--config=experiments/chain_loss.py:smoke` (or `:long`), another folder by
`--workdir=...`, any option by `--config.a.b=value`. A trained drafter answers by `--mode=generate`, and is written for
serving engines by `--mode=export --format=dflash --out=FOLDER`. Finished runs are put side by side by
`--mode=compare --runs=FOLDER,FOLDER --out=FOLDER`, without a `--config`. Whether a run fits a TPU slice is told by
`--mode=compile --topology=v5e:2x4`, on any machine.
"""

import logging as python_logging
import pathlib
import re
import shlex
import sys
from typing import Sequence

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_flags

from dspec import config as config_lib
from dspec.errors import UserError

_CONFIG = config_flags.DEFINE_config_file(
    'config', help_string='Experiment file; file.py:smoke or file.py:long for another budget.',
    lock_config=True)
_WORKDIR = flags.DEFINE_string(
    'workdir', '', 'Folder of checkpoints and report. Default: runs/EXPERIMENT[-BUDGET][-seedN].')


_MODE = flags.DEFINE_enum(
    'mode', 'train', ['train', 'generate', 'export', 'compare', 'compile'],
    'Train, evaluate and report; or answer prompts with what was trained; or write it for serving engines; or compare '
    'finished runs; or compile the programs of a run for machines that need not be there, to see whether it fits.')
_PROMPT = flags.DEFINE_string('prompt', '', 'Of --mode=generate; without it, and without a file, a chat.')
_PROMPTS_FILE = flags.DEFINE_string('prompts_file', '', 'Of --mode=generate: JSON lines of {"prompt": ...}.')
_FORMAT = flags.DEFINE_enum(
    'format', 'dflash', ['dflash', 'speculators'], 'Of --mode=export: for vLLM and SGLang; or for vLLM, with the draft '
    'vocabulary.')
_MULTIHOST = flags.DEFINE_bool(
    'multihost', False, 'Of --mode=train: this is one of several processes of one run. TPU, Slurm and GKE tell where '
    'the others are; elsewhere the next three do.')
_COORDINATOR = flags.DEFINE_string('coordinator', '', 'Of --multihost: HOST:PORT of process 0.')
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', None, 'Of --multihost: how many there are.')
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'Of --multihost: which this is, from 0.')
_OUT = flags.DEFINE_string('out', '', 'Of --mode=export: a new or empty folder. Of --mode=compare: a folder.')
_RUNS = flags.DEFINE_list('runs', [], 'Of --mode=compare: folders of finished runs.')
_TOPOLOGY = flags.DEFINE_string('topology', '', 'Of --mode=compile: such as v5e:2x4, v5p:2x2x2 or cpu:8.')


def fail(error: Exception) -> None:
  """Ends the program: the message without a traceback, and the status of a wrong command."""
  print('error: ' + str(error).replace('\n', '\n       '), file=sys.stderr)
  sys.exit(2)


def parse_flags(argv: Sequence[str]) -> list[str]:
  """`flags.FLAGS(argv)`, but a wrong word ends in one line that says what is wrong with it."""
  try:
    words = flags.FLAGS.read_flags_from_files(argv[1:], force_gnu=False)
    if not any(re.match(r'--?(help|mode=compare$)', word) for word in words):
      config_lib.check_command_line(words)
    left = flags.FLAGS(argv)
    if left[1:]:
      raise UserError(f'unexpected {left[1]!r}; options read --name=value')
    return left
  except (UserError, flags.Error) as error:
    fail(error)


def default_workdir() -> str:
  """runs/EXPERIMENT[-BUDGET][-seedN]: runs that differ in these do not meet."""
  config = _CONFIG.value
  budget = config_flags.get_config_filename(flags.FLAGS['config']).partition(':')[2]
  parts = [config.experiment, budget, f'seed{config.seed}' if config.seed else '']
  return str(pathlib.Path('runs', '-'.join(filter(None, parts))))


def set_up_logging() -> None:
  """Time and message on stderr; of other packages only warnings and errors."""
  handler = logging.get_absl_handler()
  handler.setFormatter(python_logging.Formatter('%(asctime)s %(message)s', '%H:%M:%S'))
  own = str(pathlib.Path(__file__).parent)
  handler.addFilter(
      lambda record: record.levelno >= python_logging.WARNING or record.pathname.startswith(own))


def check_multihost() -> None:
  """Refuses flags that do not go together."""
  given = [f'--{flag.name}' for flag in (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID) if flag.present]
  if given and not _MULTIHOST.value:
    raise UserError(f'{", ".join(given)}: add --multihost')
  if _MULTIHOST.value and _MODE.value != 'train':
    raise UserError(f'--mode={_MODE.value} is for one process; leave --multihost out')


def main(argv: Sequence[str]) -> None:
  del argv
  set_up_logging()
  try:
    check_multihost()
    if _MODE.value == 'compare':
      from dspec import compare
      compare.run(_RUNS.value, _OUT.value)
      return
    config = _CONFIG.value
    workdir = _WORKDIR.value or default_workdir()
    config_lib.validate(config, workdir)
    if _MODE.value == 'compile':
      from dspec import compile as compile_lib
      compile_lib.run(config, _TOPOLOGY.value)
      return
    jax.config.update('jax_compilation_cache_dir', str(config_lib.cache_dir(config) / 'xla'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 1.0)
    # Late: they load everything, and a wrong option is answered first.
    from dspec import multihost
    from dspec import sharding
    if _MULTIHOST.value:
      multihost.initialize(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
      logging.set_verbosity(logging.INFO if multihost.is_first() else logging.WARNING)
    with jax.set_mesh(sharding.make_mesh(config)):
      if _MODE.value == 'generate':
        from dspec import generate
        generate.run(config, workdir, _PROMPT.value, _PROMPTS_FILE.value)
      elif _MODE.value == 'export':
        from dspec import export
        export.run(config, workdir, _FORMAT.value, _OUT.value)
      else:
        from dspec import experiment
        experiment.run(config, workdir)
  except UserError as error:
    fail(error)
  except KeyboardInterrupt:
    if _MODE.value != 'train' or jax.process_index():
      sys.exit(130)
    print('\nStopped. The same command resumes from the last checkpoint:\n  python -m dspec.main '
          + shlex.join(sys.argv[1:]), file=sys.stderr)
    sys.exit(130)


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
