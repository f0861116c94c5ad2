"""A drafter that others have trained, as `drafter.init` names it: whether it fits the config and the target."""

from typing import Any

import ml_collections

from dspec.checkpoints import dflash
from dspec.errors import UserError
from dspec.models import target as target_lib


def check(
    config: ml_collections.ConfigDict, target: target_lib.TargetConfig, target_params: Any, tokenizer: Any
) -> None:
  """Refuses a `drafter.init` that could not be run, or not be trained if that is wanted.

  The config must say in its own words what the checkpoint says: data and features are made from the config.

  Args:
    config: of one arm.
    target: the target's shape.
    target_params: its parameters.
    tokenizer: a `dspec.data.chat.Tokenizer`.

  Raises:
    UserError: with the options that would be right, or what does not fit.
  """
  d = config.drafter
  if not d.init:
    return
  drafter, params, info = dflash.load_drafter(d.init)
  wanted = {key: getattr(drafter, key) for key in d if key != 'init'}
  differing = {key: value for key, value in wanted.items() if value != d[key]}
  if differing:
    text = lambda value: ','.join(map(str, value)) if isinstance(value, tuple) else value
    options = ' '.join(f'--config.drafter.{key}={text(value)}' for key, value in differing.items())
    raise UserError(f'--config.drafter.init={d.init}: the config describes another drafter; add {options}')
  if config.train.steps and not drafter.is_trainable:
    raise UserError(
        f'--config.drafter.init={d.init}: scaled or capped logits, and the parts of DFlash 2, cannot be trained; '
        '--config.train.steps=0 evaluates it as it is'
    )
  dflash.check_target(drafter, info, target, tokenizer)
  dflash.check_copies(params, info, target_params)
