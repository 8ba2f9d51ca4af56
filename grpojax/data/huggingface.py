"""Data sets of the Hugging Face Hub, by the `datasets` library.

It keeps files without code (`_KINDS`) in its own cache, HF_HOME, as a table on
the disk. Scripts and pickles are never run or read.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from grpojax.data import parquet, rows
from grpojax.data.examples import Examples, check_split

_KINDS = ("arrow", "csv", "json", "parquet", "text")
_ROWS = 1024  # read at once
_CACHED = "cache"  # kind of a table that the library made of files before


@contextlib.contextmanager
def _errors(datasets: Any, path: str, revision: str) -> Iterator[None]:
  """Turns the library's errors into a remedy, and keeps it quiet."""
  from huggingface_hub.utils import logging as hub_logging

  for log in (datasets.utils.logging, hub_logging):
    log.set_verbosity_error()
  datasets.disable_progress_bars()
  try:
    yield
  except datasets.exceptions.DatasetNotFoundError as error:
    raise ValueError(
      f"no data set {path!r} with a revision {revision or 'main'!r} that you "
      "may read on the Hub, or none with data: if it is private or gated, "
      "accept its terms there, and give your token by `hf auth login` or "
      "HF_TOKEN"
    ) from error
  except (ConnectionError, FileNotFoundError) as error:
    raise ValueError(
      f"the data set {path} is not in the cache, and the Hub cannot be reached "
      "(HF_HUB_OFFLINE, HTTPS_PROXY, HF_ENDPOINT?): download its files "
      "elsewhere, and use --config.data.name = 'parquet'"
    ) from error
  except OSError as error:
    raise ValueError(
      f"the data set {path} cannot be stored ({error.strerror or error}): set "
      "HF_HOME to another disk"
    ) from error


def _of_revision(builder: Any, path: str, revision: str) -> Any:
  """Finds a commit in the cache, which gives its newest one by itself."""
  if not revision or builder.hash == revision:
    return builder
  cached = type(builder)(
    dataset_name=builder.dataset_name,
    repo_id=path,
    config_name=builder.config.name,
    version=str(builder.config.version),
    hash=revision,
  )
  if not os.path.isdir(cached.cache_dir):
    raise FileNotFoundError(cached.cache_dir)
  return cached


def _table(path: str, configuration: str, revision: str, name: str) -> Any:
  """Loads a split of the Hub as the library's table: rows by number."""
  try:
    import datasets
  except ImportError as error:
    raise ValueError(
      "--config.data.name = 'huggingface' needs the library datasets: pip "
      "install 'grpojax[datasets]'; or download the files and use "
      "--config.data.name = 'parquet'"
    ) from error
  with _errors(datasets, path, revision):
    try:
      builder = datasets.load_dataset_builder(
        path, configuration or None, revision=revision or None
      )
    except (RuntimeError, ValueError) as error:  # a script, or a configuration
      raise ValueError(
        f"the data set {path}: {' '.join(str(error).split())} "
        "(data.options.configuration names one of several)"
      ) from error
    kind = type(builder).__module__.removeprefix("datasets.packaged_modules.")
    kind = kind.partition(".")[0]  # "datasets" for a module of other code
    if kind == _CACHED:  # without a network
      builder = _of_revision(builder, path, revision)
    elif kind not in _KINDS:
      raise ValueError(
        f"the data set {path} has files of the kind {kind}, and only "
        f"{', '.join(_KINDS)} are read: others may hold code"
      )
    builder.download_and_prepare()
    known = sorted(builder.info.splits or {})
    if name not in known:
      raise ValueError(
        f"the data set {path} has no split {name!r}, but {known}: "
        "data.options.train_split and test_split name them, or "
        "data.options.test holds out a share of train_split"
      )
    return builder.as_dataset(split=name)


def load(
  split: str,
  *,
  path: str | os.PathLike = "",
  size: int | None = None,
  configuration: str = "",
  revision: str = "",
  train_split: str = "train",
  test_split: str = "test",
  prompt: str = "prompt",
  answer: str = "answer",
  messages: str = "messages",
  answer_after: str = "",
  columns: Sequence[str] = (),
  test: int | float = 0.0,
) -> Examples:
  """Reads the rows of one split in their order; other options as `rows.load`.

  - `path`: ORG/NAME of the data set on the Hub.
  - `configuration`: name of one, if the data set has several ("main").
  - `revision`: a branch, a tag or a commit; "" is main.
  - `train_split`, `test_split`: the Hub's names; with `test` only the former.
  """
  check_split(split)
  rows.check_share(test)
  path = os.fspath(path)
  if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path, re.ASCII):
    raise ValueError(
      "--config.data.name = 'huggingface' needs data.path = ORG/NAME of the "
      f"Hub ('openai/gsm8k'), not {path!r}"
    )
  if os.path.exists(path):
    raise ValueError(
      f"--config.data.path = {path!r} is here: read it by data.name = "
      "'parquet' or 'jsonl', or start elsewhere to mean that of the Hub"
    )
  name = train_split if test or split == "train" else test_split
  table = _table(path, configuration, revision, name)
  rows.check_columns(columns, table.column_names, path)
  table = table.select_columns(list(columns)) if columns else table
  table = table.with_format("arrow")
  reader = rows.reader(prompt, answer, messages, answer_after, columns)
  label = f"{path}, {name} split"
  batches = map(parquet.plain_rows, table.iter(_ROWS))
  numbered = enumerate(itertools.chain.from_iterable(batches))
  keyed = ((f"{label}, row {i + 1}", i, row) for i, row in numbered)
  chosen = rows.chosen(keyed, reader, split, test, size)
  numbers = np.fromiter((i for i, _ in chosen), np.int64)
  if not len(numbers):
    raise ValueError(f"{label} holds no example of the split {split!r}")

  def read(index: int) -> rows.Row:
    (row,) = parquet.plain_rows(table[int(numbers[index])])
    return reader(row)

  return Examples(len(numbers), read)
