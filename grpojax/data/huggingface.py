"""Data sets of the Hugging Face Hub, loaded by the `datasets` library.

The library converts files to tables in its cache on the disk, HF_HOME, from
which `rows` copies the examples. Only kinds of files that cannot hold code
(`_KINDS`) are read; scripts are never run.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from grpojax.data import parquet, rows
from grpojax.data.examples import Examples, check_split

_KINDS = ("arrow", "csv", "json", "parquet", "text")
_ROWS = 1024  # per batch
_CACHED = "cache"  # kind of a data set that is already in the cache


@contextlib.contextmanager
def _errors(datasets: Any, path: str, revision: str) -> Iterator[None]:
  """Silences the library, and turns its errors into ValueError with advice."""
  from huggingface_hub.utils import logging as hub_logging

  for log in (datasets.utils.logging, hub_logging):
    log.set_verbosity_error()
  datasets.disable_progress_bars()
  try:
    yield
  except datasets.exceptions.DatasetNotFoundError as error:
    raise ValueError(
      f"no data set {path!r} with a revision {revision or 'main'!r} on the Hub,"
      " or no access: check the name or, for a private or gated set, accept "
      "its terms there, and set your token with `hf auth login` or HF_TOKEN"
    ) from error
  except (ConnectionError, FileNotFoundError) as error:
    raise ValueError(
      f"the data set {path} is not in the cache, and the Hub is out of reach: "
      "check HF_HUB_OFFLINE, HTTPS_PROXY and HF_ENDPOINT, or get the files on "
      "another machine and use --config.data.name = 'parquet'"
    ) from error
  except OSError as error:
    raise ValueError(
      f"the data set {path} cannot be stored ({error.strerror or error}): set "
      "HF_HOME to another disk"
    ) from error


def _table(path: str, configuration: str, revision: str, name: str) -> Any:
  try:
    import datasets
  except ImportError as error:
    raise ValueError(
      "--config.data.name = 'huggingface' needs the library datasets: pip "
      "install 'grpojax[datasets]', or download the files and use "
      "--config.data.name = 'parquet'"
    ) from error
  with _errors(datasets, path, revision):
    try:
      builder = datasets.load_dataset_builder(
        path, configuration or None, revision=revision or None
      )
    except (RuntimeError, ValueError) as error:  # script, wrong configuration
      raise ValueError(
        f"the data set {path}: {' '.join(str(error).split())} "
        "(data.options.configuration selects one of several)"
      ) from error
    kind = type(builder).__module__.removeprefix("datasets.packaged_modules.")
    kind = kind.partition(".")[0]  # "datasets" outside of packaged_modules
    if kind not in (*_KINDS, _CACHED):
      raise ValueError(
        f"the data set {path} has files of kind {kind!r}, which may hold "
        f"code: convert it to one of {', '.join(_KINDS)}"
      )
    if kind == _CACHED and revision not in ("", builder.hash):
      # Without a network the library returns the newest cached revision.
      builder = type(builder)(
        dataset_name=builder.dataset_name,
        repo_id=path,
        config_name=builder.config.name,
        version=str(builder.config.version),
        hash=revision,
      )
      if not os.path.isdir(builder.cache_dir):
        raise FileNotFoundError(builder.cache_dir)
    builder.download_and_prepare()
    known = sorted(builder.info.splits or {})
    if name not in known:
      raise ValueError(
        f"the data set {path} has no split {name!r}, only {known}: set "
        "data.options.train_split and test_split, or hold out a share of "
        "train_split with data.options.test"
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
  """Opens a split of a Hub data set; `rows.load` explains the other options.

  - `path`: ORG/NAME of the data set on the Hub.
  - `configuration`: name ("main"), required if the data set has several.
  - `revision`: branch, tag or commit; "" is main.
  - `train_split`, `test_split`: names on the Hub; `test` divides `train_split`.
  """
  check_split(split)
  rows.check_share(test)
  path = os.fspath(path)
  if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path, re.ASCII):
    raise ValueError(
      f"--config.data.path = {path!r}: data.name = 'huggingface' needs the "
      "ORG/NAME of a data set on the Hub, such as 'openai/gsm8k'"
    )
  if os.path.exists(path):
    raise ValueError(
      f"--config.data.path = {path!r} is a local path: set data.name to "
      "'parquet' or 'jsonl' or, to use the Hub, start in another directory"
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
  labelled = ((f"{label}, row {i + 1}", row) for i, row in numbered)
  return rows.examples(labelled, reader, split, test, size, label)
