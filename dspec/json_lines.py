"""Files of one JSON object a line that a run appends to, and that a kill may have cut in the middle of a line."""

import json
import pathlib
from typing import Any


def read_whole(path: pathlib.Path) -> list[dict[str, Any]]:
  """The records of a file, none if it is not there; a cut last line is removed from it."""
  if not path.exists():
    return []
  lines = path.read_text().splitlines(keepends=True)
  # Only a line that was written to its end has its newline.
  whole = [line for line in lines if line.endswith('\n')]
  if len(whole) < len(lines):
    path.write_text(''.join(whole))
  return [json.loads(line) for line in whole]


def append(path: pathlib.Path, *records: dict[str, Any]) -> None:
  """Adds records to a file, which is made, with its folder, when it is not there."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('a') as file:
    file.write(''.join(json.dumps(record) + '\n' for record in records))
