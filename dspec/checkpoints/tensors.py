"""From the named tensors of a checkpoint to a target's parameters, whatever the file format.

A format says what a parameter is called in its files and how it is stored there; the shapes come from the model itself.
Tensors are read, converted and handed on one by one: no second copy of a model is ever held.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dspec.errors import UserError
from dspec.models import target as target_lib

Path = tuple[str, ...]  # Of a parameter in the nested dict, outer name first.
Placement = Callable[[Path, np.ndarray], Any]
_SHOWN = 20  # Problems that one message lists.


@dataclasses.dataclass(frozen=True)
class Rule:
  """Where one tensor of a file goes.

  Attributes:
    path: its place in the parameters.
    shape: its shape in the file: (out, in) for a matrix.
    convert: array as stored -> array as the model wants it.
  """

  path: Path
  shape: tuple[int, ...]
  convert: Callable[[np.ndarray], np.ndarray]


def shapes(config: target_lib.TargetConfig) -> dict[Path, tuple[int, ...]]:
  """The shape of every parameter of a target."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  module = target_lib.Target(config)
  tree = jax.eval_shape(
      lambda: module.init(jax.random.key(0), tokens, tokens, target_lib.init_cache(config, 1, 1))['params']
  )
  return {tuple(key.key for key in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def as_stored(array: np.ndarray) -> np.ndarray:
  return array


def kernel(array_OxI: np.ndarray) -> np.ndarray:
  return array_OxI.T


def rules(
    config: target_lib.TargetConfig, names: Mapping[Path, str], layer_names: Mapping[Path, str],
    convert: Callable[[Path], Callable[[np.ndarray], np.ndarray] | None] = lambda path: None,
) -> dict[str, Rule]:
  """A rule for each tensor that the files of a target must have, by its name there.

  Args:
    config: the target's.
    names: {path: name} outside the layers.
    layer_names: {path inside a layer: name with {} for the layer's number}.
    convert: path (inside its layer) -> how it is stored, None for the usual way: kernels as (out, in).
  """
  found = {}
  for path, shape in shapes(config).items():
    layer, _, number = path[0].partition('_')
    inner, name = (path[1:], layer_names[path[1:]].format(number)) if layer == 'layers' else (path, names[path])
    usual = kernel if path[-1] == 'kernel' else as_stored
    found[name] = Rule(path, shape[::-1] if path[-1] == 'kernel' else shape, convert(inner) or usual)
  return found


def load(
    source: str,
    stored: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    wanted: Mapping[str, Rule],
    *,
    dtype: Any = np.float32,
    place: Placement | None = None,
    known_spare: Callable[[str], bool] = lambda name: False,
) -> dict[str, Any]:
  """Reads, converts and places every tensor.

  Args:
    source: what messages call the checkpoint.
    stored: the shape of each of its tensors.
    read: name -> the tensor; may raise NotImplementedError with a reason.
    wanted: see `rules`.
    dtype: of matrices; everything else is float32.
    place: what becomes of each array, so that it may go to its devices before the next is read. None: it stays.
    known_spare: names that may be there and are not needed.

  Returns:
    The parameters, a nested dict.

  Raises:
    UserError: with all unknown, missing and misshapen tensors in one message; or those that cannot be read, or hold
      values that are not finite.
  """
  problems = [f'unknown tensor {name}' for name in stored if name not in wanted and not known_spare(name)]
  for name, rule in wanted.items():
    if name not in stored:
      problems.append(f'missing tensor {name}')
    elif tuple(stored[name]) != rule.shape:
      problems.append(f'tensor {name} has shape {tuple(stored[name])}, expected {rule.shape}')
  _refuse(source, problems)

  params: dict[str, Any] = {}
  for name, rule in wanted.items():
    try:
      array = read(name)
    except NotImplementedError as error:
      problems.append(f'tensor {name} {error}')
      continue
    if not _is_finite(array):
      problems.append(f'tensor {name} holds values that are not finite')
    if problems:  # Nothing will be returned: only look for further problems.
      continue
    # A copy of its own: neither a view of the file nor of the untransposed array.
    array = np.array(rule.convert(array), dtype if len(rule.shape) > 1 else np.float32, order='C')
    node = params
    for part in rule.path[:-1]:
      node = node.setdefault(part, {})
    node[rule.path[-1]] = place(rule.path, array) if place else array
  _refuse(source, problems)
  return params


def _is_finite(array: np.ndarray) -> bool:
  if array.dtype == ml_dtypes.bfloat16:  # Its own isfinite is slow: an exponent of ones is what is not finite.
    return bool(((array.view(np.uint16) & 0x7F80) != 0x7F80).all())
  return bool(np.isfinite(array).all())


def _refuse(source: str, problems: list[str]) -> None:
  if problems:
    listed = '\n  '.join(problems[:_SHOWN])
    rest = f'\n  and {len(problems) - _SHOWN} more' if len(problems) > _SHOWN else ''
    raise UserError(f'{source} does not fit its architecture:\n  {listed}{rest}')


def check_heads(source: Any, heads: int, kv_heads: int, head_dim: int) -> None:
  """Refuses heads that attention cannot work with."""
  if head_dim < 2 or head_dim % 2 or heads % kv_heads:
    raise UserError(f'{source}: {heads} heads of size {head_dim} with {kv_heads} key heads cannot work')


def eos_of(*values: Any) -> tuple[int, ...]:
  """Ids that end a sequence, in order and each once, of numbers, lists of numbers and None."""
  ids: list[int] = []
  for value in values:
    ids.extend(value if isinstance(value, Iterable) else [] if value is None else [value])
  return tuple(dict.fromkeys(ids))
