"""Where arrays live: one mesh, and one table that says how every parameter is split over it.

The mesh has three axes. The rows of a batch are split over `data` and `fsdp`. Matrices, of target and drafter, and what
the optimizer keeps of them, are split over `fsdp`, which gathers each as it is used, and over `tensor`, which computes
heads, columns of the MLP and the vocabulary apart. With fsdp = tensor = 1 every device holds all parameters.

The compiler carries these placements through a program. `constrain` says what it would not find by itself.
"""

from collections.abc import Sequence
import re
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import ml_collections
import numpy as np

from dspec.errors import UserError

AXES = ('data', 'fsdp', 'tensor')
BATCH = PartitionSpec(('data', 'fsdp'))
CACHE = PartitionSpec(('data', 'fsdp'), 'tensor')  # Of keys and values, [B, Hkv, ...].
VOCABULARY = PartitionSpec('tensor', None)  # Of the head, [V, D].

# By the end of a parameter's path; a kernel is [in, out]. What no line names is whole on every device.
_RULES: tuple[tuple[str, PartitionSpec], ...] = (
    ('embed/embedding', PartitionSpec('tensor', 'fsdp')),
    ('lm_head/kernel', PartitionSpec('fsdp', 'tensor')),
    ('(q|k|v|gate|up)_proj/kernel', PartitionSpec('fsdp', 'tensor')),
    ('(q|k|v)_proj/bias', PartitionSpec('tensor')),
    ('(o|down)_proj/kernel', PartitionSpec('tensor', 'fsdp')),
    ('fc/kernel', PartitionSpec('tensor', 'fsdp')),
)


def make_mesh(config: ml_collections.ConfigDict, devices: Sequence[Any] | None = None) -> Mesh:
  """The mesh that `config.mesh` asks for, of all devices, or of these.

  Raises:
    UserError: when its sizes do not make up the devices.
  """
  count, m = jax.device_count() if devices is None else len(devices), config.mesh
  data = m.data or max(count // (m.fsdp * m.tensor), 1)
  if data * m.fsdp * m.tensor != count:
    raise UserError(
        f'--config.mesh.data={m.data} --config.mesh.fsdp={m.fsdp} --config.mesh.tensor={m.tensor}: there are {count} '
        'devices, and the product must be as many; data=0 takes what the others leave')
  # Auto: shardings propagate from inputs and outputs; Explicit, the default, would need annotations in every layer.
  return jax.make_mesh(
      (data, m.fsdp, m.tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def check_batch(mesh: Mesh, size: int, parts: int = 1) -> None:
  """Refuses a training batch that the mesh does not divide, or, of an accumulated one, its parts.

  Raises:
    UserError: with the numbers.
  """
  data, fsdp = mesh.shape['data'], mesh.shape['fsdp']
  if size % (data * fsdp * parts):
    raise UserError(
        f'--config.train.batch_size={size} is not a multiple of {data * fsdp * parts}, the groups of devices that '
        f'share a batch{" times its parts" if parts > 1 else ""}: mesh.data={data} times mesh.fsdp={fsdp}'
        + (f' times train.accumulate={parts}' if parts > 1 else ''))


def spec(path: Sequence[str]) -> PartitionSpec:
  """What the table says of a parameter, or of what an optimizer keeps under the same path behind a prefix."""
  name = '/'.join(path)
  return next((found for pattern, found in _RULES if re.search(f'(^|/){pattern}$', name)), PartitionSpec())


def of(mesh: Mesh, tree: Any) -> Any:
  """The shardings of a tree of parameters, or of a training state; see `spec`.

  An axis of an array that the mesh does not divide stays whole: drafters of others come in all sizes.
  """
  return jax.tree_util.tree_map_with_path(lambda path, x: _sharding(mesh, list(map(_name, path)), x.shape), tree)


def place(path: Sequence[str], array: np.ndarray) -> jax.Array:
  """One parameter on the mesh of `jax.set_mesh`, each device taking its part; on the default device without one."""
  mesh = jax.sharding.get_mesh()
  return jax.device_put(array) if mesh.empty else _put(array, _sharding(mesh, path, array.shape))


def put(tree: Any) -> Any:
  """`place`, of a tree of parameters."""
  mesh = jax.sharding.get_mesh()
  return jax.device_put(tree) if mesh.empty else jax.tree.map(_put, tree, of(mesh, tree))


def shapes(tree: Any) -> Any:
  """Of a tree of parameters, with the shardings that `put` gives them: what a program is compiled for."""
  mesh = jax.sharding.get_mesh()
  where = jax.tree.map(lambda _: None, tree) if mesh.empty else of(mesh, tree)
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, where)


def to_host(tree: Any) -> Any:
  """Numpy arrays, each whole, in every process."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)


def rows(mesh: Mesh, batch_size: int) -> list[int]:
  """Of a batch, those that this process' devices hold, ascending."""
  parts = NamedSharding(mesh, BATCH).addressable_devices_indices_map((batch_size,)).values()
  return sorted({row for (part,) in parts for row in range(batch_size)[part]})


def put_batch(mesh: Mesh, batch: Any) -> Any:
  """A batch on its devices: a tree of arrays with the `rows` of this process, as arrays of all rows."""
  return jax.make_array_from_process_local_data(NamedSharding(mesh, BATCH), batch)


def replicated(mesh: Mesh) -> NamedSharding:
  """A whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, spec: PartitionSpec) -> jax.Array:
  """`x`, placed so on the mesh of `jax.set_mesh`; as it is where there is none, or only one device.

  An axis that the mesh does not divide stays whole.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size <= 1:
    return x
  return jax.lax.with_sharding_constraint(x, dividing(mesh, spec, x.shape))


def constrain_embedded(x: jax.Array) -> jax.Array:
  """Rows of an embedding, `[B, ..., D]`, looked up: from its channels over `fsdp` to the batch over `fsdp`."""
  # Said in two steps, each of which is one exchange; in one, the compiler copies everything everywhere.
  x = constrain(x, PartitionSpec('data', *[None] * (x.ndim - 2), 'fsdp'))
  return constrain(x, BATCH)


def _put(array: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
  if isinstance(array, jax.Array):
    return jax.device_put(array, sharding)
  # No process looks at what others have: device_put would compare all of it.
  return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _sharding(mesh: Mesh, path: Sequence[str], shape: Sequence[int]) -> NamedSharding:
  return NamedSharding(mesh, dividing(mesh, spec(path), shape))


def dividing(mesh: Mesh, spec: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
  """The spec without the axes whose number of parts does not divide the array's."""
  parts = lambda axes: int(np.prod([mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ())]))
  return PartitionSpec(*(None if size % parts(axes) else axes for axes, size in zip(spec, shape)))


def _name(entry: Any) -> str:
  """Of a key in a path of `jax.tree_util`."""
  return str(next(getattr(entry, field) for field in ('key', 'name', 'idx') if hasattr(entry, field)))
