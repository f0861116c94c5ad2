"""Benchmarks as TFDS data sets of worded problems, prepared and read without TensorFlow."""

import hashlib
import json
import pathlib
from typing import Any

from google.protobuf import json_format
import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import checksums
from tensorflow_datasets.core.download import download_manager
from tensorflow_datasets.core.download import resource
from tensorflow_datasets.core.download import util

from dspec.data import benchmarks
from dspec.errors import UserError

_SPLIT = 'test'
_TIMEOUT = 15  # Seconds, until a server answers.


class BenchmarkBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """One benchmark from one source, in `data_dir/FINGERPRINT/NAME/VERSION`.

  The fingerprint is that of all that the problems depend on, so that another source, other bytes or another wording
  make another data set. Only what reads the files is left to VERSION.
  """

  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES = {'1.0.0': 'First.'}

  def __init__(
      self, name: str, spec: benchmarks.Spec, source: benchmarks.Source, data_dir: pathlib.Path
  ) -> None:
    self.name = name  # Of the instance: one class serves all benchmarks.
    self._spec, self._source, self._downloads = spec, source, data_dir / 'downloads'
    # Of the file formats, only array_record can be read without TensorFlow.
    super().__init__(data_dir=_folder(spec, source, data_dir), file_format='array_record')

  @property
  def url_infos(self) -> dict[str, checksums.UrlInfo]:
    """The registered checksums, which TFDS otherwise looks for in a file beside this one."""
    return {file.url: checksums.UrlInfo(tfds.core.utils.Size(file.size), file.sha256, None)
            for file in self._spec.files}

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
        builder=self,
        description=self._spec.description,
        features=tfds.features.FeaturesDict(
            {'id': tfds.features.Text(), 'turns': tfds.features.Sequence(tfds.features.Text())}),
        homepage=self._spec.homepage,
        citation=self._spec.citation,
        license=self._spec.licence,
        metadata=tfds.core.MetadataDict(source=self._source.name, files=dict(self._source.checksums)),
        disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
    def download(urls: list[str]) -> list[Any]:
      for url in urls:
        name = resource.get_dl_fname(url, self._source.checksums[url])
        if not (self._downloads / self.name / name).exists():
          # TFDS tries ten times, without a limit of time: minutes where there is no network.
          requests.head(url, timeout=_TIMEOUT)
      return dl_manager.download(urls)

    problems = benchmarks.parse(self._spec, self._source, self._source.fetch(download))
    self.info.metadata['num_problems'] = len(problems)
    return {_SPLIT: self._generate_examples(problems)}

  def _generate_examples(self, problems):
    for i, problem in enumerate(problems):
      yield i, {'id': problem.id, 'turns': list(problem.turns)}


def is_prepared(name: str, spec: benchmarks.Spec, source: benchmarks.Source, data_dir: pathlib.Path) -> bool:
  """Whether the data set of that source is there."""
  return (_folder(spec, source, data_dir) / name / str(BenchmarkBuilder.VERSION)).exists()


def read(
    name: str, spec: benchmarks.Spec, source: benchmarks.Source, data_dir: pathlib.Path
) -> benchmarks.Benchmark:
  """The problems of one source, prepared if they are not yet.

  Raises:
    UserError: if the source cannot be had or holds a bad line, or the data set cannot be written or is damaged.
  """
  try:
    builder = BenchmarkBuilder(name, spec, source, data_dir)
    builder.download_and_prepare(
        download_dir=data_dir / 'downloads',
        download_config=tfds.download.DownloadConfig(try_download_gcs=False, force_checksums_validation=True))
    problems = tuple(
        benchmarks.Problem(row['id'].decode(), tuple(turn.decode() for turn in row['turns']))
        for row in builder.as_data_source(_SPLIT))
    metadata = {'source': source.name, 'files': dict(source.checksums), 'num_problems': len(problems)}
    if dict(builder.info.metadata) != metadata:
      raise ValueError(f'its metadata are not {metadata}')
  except UserError:
    raise
  except (requests.RequestException, util.DownloadError, download_manager.NonMatchingChecksumError) as error:
    raise UserError(' '.join(str(error).partition('To debug')[0].split())) from error
  except OSError as error:
    raise UserError(f'cannot write to {data_dir}: {error}; choose another folder with --config.cache_dir=') from error
  except (RuntimeError, ValueError, KeyError, json_format.ParseError) as error:
    raise UserError(
        f'{_folder(spec, source, data_dir)}: a prepared data set that is damaged ({error}); delete that folder'
    ) from error
  return benchmarks.Benchmark(name, problems, metadata)


def _folder(spec: benchmarks.Spec, source: benchmarks.Source, data_dir: pathlib.Path) -> pathlib.Path:
  depends_on = json.dumps([source.name, list(source.checksums.items()), spec.wording])
  return data_dir / hashlib.sha256(depends_on.encode()).hexdigest()[:16]
