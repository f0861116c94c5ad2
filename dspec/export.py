"""Writes a trained drafter for serving engines.

  python -m dspec.main --config=experiments/chain_loss.py --mode=export --format=dflash --out=my_drafter

The config is that of the run; of its arms the last one is written. See `dspec.checkpoints.dflash` for the formats.
"""

from collections.abc import Mapping
import json
import os
import pathlib
import tempfile
from typing import Any

import ml_collections
import tabulate

from dspec import config as config_lib
from dspec import experiment
from dspec import imported
from dspec import report
from dspec import train
from dspec.checkpoints import dflash
from dspec.checkpoints import package
from dspec.checkpoints import targets
from dspec.checkpoints import training as checkpoints
from dspec.errors import UserError
from dspec.models import drafter as drafter_lib
from dspec.models import target as target_lib


def run(config: ml_collections.ConfigDict, workdir: str, format: str, out: str) -> None:
  """Writes config.json, model.safetensors and README.md, the model card.

  Args:
    config: validated; that of the run.
    workdir: of a finished run.
    format: one of `dflash.FORMATS`.
    out: a new or empty folder; it appears when everything is in it.

  Raises:
    UserError: what is wrong and what to do.
  """
  # ---- Everything that can be refused, before anything that takes time ----------------------------
  workdir, out = pathlib.Path(workdir), _check_out(out)
  name, arm = experiment.arms(config)[-1]
  dflash.check_window(arm.drafter.window)
  if arm.train.steps:
    if not (workdir / 'config.json').exists():
      raise UserError(f'--workdir={workdir}: no run here; train first: the same command without --mode=export')
    experiment.check_workdir(config, workdir)
    step = checkpoints.latest_step(workdir / name / 'checkpoints') or 0
    if step < arm.train.steps:
      raise UserError(f'--workdir={workdir}: {name} was trained for {step} of {arm.train.steps} steps; finish it '
                      'first: the same command without --mode=export')
  path = targets.locate(config, config_lib.cache_dir(config))
  target, target_params, tokenizer = targets.load(config, path)
  imported.check(arm, target, target_params, tokenizer)
  drafter = train.make_drafter_config(arm, target)
  dflash.check_export(drafter, format)

  # ---- The folder, beside its place until it is whole ---------------------------------------------
  params = train.trained_params(arm, workdir / name)
  target_name = config.target.path or config.target.package
  try:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f'{out.name}-') as scratch:
      folder = pathlib.Path(scratch, 'drafter')
      folder.mkdir()
      if format == 'dflash':
        dflash.save_dflash(folder, drafter, params, target)
      else:
        dflash.save_speculators(folder, drafter, params, target, target_params, target_name)
      measured = _measured(workdir / 'report.json', name, config.evaluate.checkpoint)
      (folder / 'README.md').write_text(model_card(arm, drafter, target, format, target_name, measured), 'utf-8')
      os.replace(folder, out)
  except OSError as error:
    raise UserError(f'--out={out}: cannot be written: {error.strerror}') from error
  print(f'{out}: {name} in the format {format}. {out / "README.md"} says how to serve it.')


def _check_out(out: str) -> pathlib.Path:
  if not out:
    raise UserError('--out is missing: a new folder for the drafter')
  path = pathlib.Path(out).expanduser().absolute()
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise UserError(f'--out={out}: exists and is not an empty folder; nothing is overwritten, so give another')
  return path


def _measured(path: pathlib.Path, arm_name: str, checkpoint: str) -> dict[str, Any] | None:
  """The arm's part of a report; None if there is none, or it is of another checkpoint."""
  if not path.exists():
    return None
  report = json.loads(path.read_text())
  if report['config']['evaluate'].get('checkpoint', 'last') != checkpoint:
    return None
  return next((arm for arm in report['arms'] if arm['name'] == arm_name), None)


def model_card(
    config: ml_collections.ConfigDict, drafter: drafter_lib.DrafterConfig, target: target_lib.TargetConfig, format: str,
    target_name: str, measured: Mapping[str, Any] | None,
) -> str:
  """The text of README.md.

  Args:
    config: of the arm.
    drafter: its shape.
    target: the target's.
    format: one of `dflash.FORMATS`.
    target_name: as the config names the target.
    measured: the arm's part of a report; None if there is none.
  """
  drafts, known = drafter.block_size - 1, package.PACKAGES.get(config.target.package)
  licence = known.licence if known and not config.target.path else ''
  layers = ', '.join(map(str, drafter.target_layers))
  speculative = json.dumps({'method': 'dflash', 'model': 'DIR', 'num_speculative_tokens': drafts})
  header = ['---', *([f'license: {licence.lower()}'] if licence else []), 'tags:', '- speculative-decoding', '- dflash',
            '---']
  parts = [
      '\n'.join(header),
      f'# A DFlash drafter for {target_name}',
      f'It proposes {drafts} tokens in one pass, from the outputs of layers {layers} (from 0) of a {target.family} '
      f'target of {target.num_layers} layers, '
      f'width {target.width} and {target.vocab_size} tokens. The target verifies them: what it says does not change. '
      f'{drafter.num_layers} layers, mask token {drafter.mask_token_id}, bfloat16, written by dspec.',
      '## Serving',
      'DIR is this folder, TARGET the folder or hub name of the target in the format of Hugging Face.',
      f"    vllm serve TARGET --speculative-config '{speculative}'",
  ]
  if format == 'dflash':
    parts += [
        '    python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH \\\n'
        f'      --speculative-draft-model-path DIR --speculative-num-draft-tokens {drafter.block_size}'
    ]
  else:
    parts += [f'vLLM alone reads this format. `config.json` names the target as `{target_name}`: put there what vLLM '
              'knows it by.']
  parts += ['## Accepted length', *_accepted(drafter, target, format, measured)]
  parts += [
      '## Training',
      '\n'.join('    ' + line for line in config_lib.to_json(config).splitlines()),
      '## Licence and references',
      (f'The target is under {licence}; so is what was learned from it. ' if licence else
       'The licence of the target holds for what was learned from it. ')
      + 'DFlash: arXiv 2602.06036. Losses for left-to-right verification: arXiv 2606.11552.',
  ]
  return '\n\n'.join(parts) + '\n'


def _accepted(drafter, target, format, measured) -> list[str]:
  """Paragraphs with what was measured, and what of it the format changes."""
  if measured is None or not measured['sets']:
    return ['It was not measured.']
  columns = ('set', 'accepted length', 'macro', 'waste', 'exact')
  rows = [{key: row[key] for key in columns if key in row} for row in report.comparison_rows([measured])]
  parts = [
      tabulate.tabulate(rows, headers='keys', tablefmt='github', disable_numparse=True),
      'Tokens a round with the target\'s own one, at temperature 0 in float32, one draft a round: over all rounds, and '
      'as the mean over prompts (macro), with 95 % bootstrap intervals. Lengths of other harnesses are not comparable.',
  ]
  if drafter.vocab_size and format == 'dflash':
    parts.append(f'This was with a draft vocabulary of {drafter.vocab_size} of the {target.vocab_size} tokens, which '
                 'this format cannot express: served, it drafts from all of them. The format speculators keeps it.')
  return parts
