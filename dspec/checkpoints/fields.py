"""Typed access to the description that comes with a checkpoint: config.json, or a GGUF file's metadata."""

from collections.abc import Mapping
import math
from typing import Any

from dspec.errors import UserError


class Fields:
  """A JSON object, or several that may hold the same key. Errors name file and key; null is as good as absent."""

  def __init__(self, path: Any, *objects: Mapping[str, Any], prefix: str = ''):
    """Takes the values.

    Args:
      path: of the file.
      *objects: values by key.
      prefix: of every key in errors, where the objects lie inside another one.
    """
    self.path = path
    self._objects, self._prefix = objects, prefix

  def __contains__(self, key: str) -> bool:
    return self.raw(key) is not None

  def raw(self, key: str) -> Any:
    """The value of `key`, whatever it is; None without one.

    Raises:
      UserError: if it is there twice with two values.
    """
    values = [value for value in (o.get(key) for o in self._objects) if value is not None]
    if any(value != values[0] for value in values[1:]):
      raise self._error(key, f'is there twice, as {values[0]!r} and {values[1]!r}')
    return values[0] if values else None

  def get(self, key: str, kind: type, default: Any = ...) -> Any:
    """The value of `key`; without a default it must be there.

    Raises:
      UserError: if it is missing, is not a `kind`, or is there twice with two values.
    """
    value = self.raw(key)
    if value is None:
      if default is ...:
        raise self._error(key, 'is missing')
      return default
    if kind is float and type(value) is int:
      value = float(value)
    if type(value) is not kind:  # A bool is an int in Python, but not here.
      raise self._error(key, f'must be of type {kind.__name__}, not {value!r:.60}')
    return value

  def positive(self, key: str, kind: type, default: Any = ...) -> Any:
    """As `get`, for a finite number above zero."""
    value = self.get(key, kind, default)
    if value is not default and not 0 < value < math.inf:
      raise self._error(key, f'must be above 0, not {value}')
    return value

  def list_of(self, key: str, kind: type, default: Any = ...) -> Any:
    """As `get`, for a list that is not empty and whose elements are all of type `kind`."""
    values = self.get(key, list, default)
    if values is not default and not (values and all(type(value) is kind for value in values)):
      raise self._error(key, f'must hold elements of type {kind.__name__}, not {values!r:.60}')
    return values

  def inner(self, key: str) -> 'Fields':
    """The fields of a JSON object inside; none if it is not there."""
    return Fields(self.path, self.get(key, dict, {}), prefix=f'{self._prefix}{key}.')

  def refuse(self, key: str, what: str, *harmless: Any) -> None:
    """Raises a UserError if `key` asks for something that is not supported."""
    for o in self._objects:
      if o.get(key) is not None and o[key] not in harmless:
        raise UserError(f'{self.path}: {what} ({self._prefix}{key}={o[key]!r}) is not supported')

  def _error(self, key: str, text: str) -> UserError:
    return UserError(f'{self.path}: {self._prefix}{key} {text}')
