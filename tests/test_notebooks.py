"""Every notebook runs from top to bottom, and is kept without outputs."""

import os
import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / 'experiments' / 'notebooks').glob('*.ipynb'))


def test_there_are_notebooks():
  assert NOTEBOOKS


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, monkeypatch):
  # The kernel is another process: it finds the package of this checkout, and a CPU is enough.
  paths = [str(ROOT), os.environ.get('PYTHONPATH', '')]
  monkeypatch.setenv('PYTHONPATH', os.pathsep.join(filter(None, paths)))
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  notebook = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(
      notebook, timeout=300, kernel_name='python3',
      resources={'metadata': {'path': str(path.parent)}}).execute()
  images = [
      output for cell in notebook.cells if cell.cell_type == 'code' for output in cell.outputs
      if 'image/png' in output.get('data', {})]
  assert images or 'matplotlib' not in path.read_text()


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_without_outputs(path):
  for cell in nbformat.read(path, as_version=4).cells:
    assert not cell.get('outputs') and not cell.get('execution_count')
