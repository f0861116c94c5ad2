"""Where arrays live: one mesh over all devices, batches split along it, everything else replicated."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dspec.errors import UserError


def make_mesh(batch_size: int) -> Mesh:
  """A mesh of all devices with the axis 'data'.

  Raises:
    UserError: when the batch does not divide evenly.
  """
  devices = jax.device_count()
  if batch_size % devices:
    raise UserError(
        f'--config.train.batch_size={batch_size} is not a multiple of the {devices} devices'
    )
  # Auto: shardings propagate from inputs and outputs; Explicit, the default, would need annotations in every layer.
  return jax.make_mesh((devices,), ('data',), axis_types=(AxisType.Auto,))


def batch(mesh: Mesh) -> NamedSharding:
  """Leading axis split over the devices."""
  return NamedSharding(mesh, PartitionSpec('data'))


def replicated(mesh: Mesh) -> NamedSharding:
  """A whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())
