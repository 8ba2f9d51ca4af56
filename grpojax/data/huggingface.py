"""Data sets of the Hugging Face Hub, by the `datasets` library.

It downloads files of a kind that holds no code (`_KINDS`) into its own cache,
HF_HOME, and keeps them there as a table that is read from the disk. Scripts and
pickles are never run or read.
"""

import contextlib
import itertools
import operator
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np

from grpojax.data import fields as fields_lib
from grpojax.data.examples import check_split
from grpojax.data.fields import Row

_KINDS = ("arrow", "csv", "json", "parquet", "text")
_CACHED = "cache"  # a table that the library made of files before


class Examples(Sequence):
  """Random access to rows of a table; see `load`."""

  def __init__(self, table: Any, rows: np.ndarray, fields: fields_lib.Fields):
    self._table, self._rows, self._fields = table, rows, fields

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: SupportsIndex) -> Row:
    index = operator.index(index)
    if not 0 <= index < len(self):
      raise IndexError(f"example {index} of {len(self)}")
    row = self._table[int(self._rows[index])]
    return fields_lib.example(fields_lib.plain_row(row), self._fields)


def _library() -> Any:
  try:
    import datasets
  except ImportError as error:
    raise ValueError(
      "data.name = 'huggingface' needs the library datasets: pip install "
      "'grpojax[datasets]'; or download the files and use data.name = "
      "'parquet'"
    ) from error
  return datasets


@contextlib.contextmanager
def _errors(datasets: Any, path: str, revision: str) -> Iterator[None]:
  """What the library raises, in a sentence with what to do; no bars."""
  from huggingface_hub.utils import logging as hub_logging

  logs = datasets.utils.logging, hub_logging
  levels = [log.get_verbosity() for log in logs]
  hidden = not datasets.is_progress_bar_enabled()
  for log in logs:
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
      "elsewhere, and use data.name = 'parquet'"
    ) from error
  except OSError as error:
    raise ValueError(
      f"the data set {path} cannot be stored ({error.strerror or error}): set "
      "HF_HOME to another disk"
    ) from error
  finally:
    for log, level in zip(logs, levels, strict=True):
      log.set_verbosity(level)
    if not hidden:
      datasets.enable_progress_bars()


def _of_revision(builder: Any, path: str, revision: str) -> Any:
  """What the cache has of a commit, where it has given its newest commit."""
  if not revision or builder.hash == revision:
    return builder
  found = type(builder)(
    dataset_name=builder.dataset_name,
    repo_id=path,
    config_name=builder.config.name,
    version=str(builder.config.version),
    hash=revision,
  )
  if not os.path.isdir(found.cache_dir):
    raise FileNotFoundError(found.cache_dir)
  return found


def _table(path: str, configuration: str, revision: str, name: str) -> Any:
  """A split of the Hub's, as the library has it: rows by their number."""
  datasets = _library()
  with _errors(datasets, path, revision):
    try:
      builder = datasets.load_dataset_builder(
        path, configuration or None, revision=revision or None
      )
    except (RuntimeError, ValueError) as error:  # a script, or a configuration
      said = " ".join(str(error).split())
      todo = "data.options.configuration names one of several"
      raise ValueError(f"the data set {path}: {said} ({todo})") from error
    kind = type(builder).__module__.split(".")
    if kind[-1] == _CACHED:  # without a network: the newest that it has
      builder = _of_revision(builder, path, revision)
    if kind[:2] != ["datasets", "packaged_modules"] or kind[2] not in (
      _CACHED,
      *_KINDS,
    ):
      raise ValueError(
        f"the data set {path} has files of the kind {kind[-1]}, and only "
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
  seed: int = 0,
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
  """The examples of one split, in their order.

  Args:
    split: "train" or "test".
    path: ORG/NAME of the data set on the Hub.
    seed: not used; the order of training is that of the prompt pipeline.
    size: the first so many examples; None is all. Later rows are not checked.
    configuration: of the data set, where it has several ("main").
    revision: a branch, a tag or a commit; "" is main.
    train_split: what the Hub calls the training split.
    test_split: what it calls the test split; not used with `test`.
    prompt: as answer, messages and answer_after see `fields.Fields`.
    answer: the column with the answer.
    messages: the column with the prompt where there is no column `prompt`.
    answer_after: what the answer follows.
    columns: to read; () is all. Those with bytes (images) cannot be read.
    test: the share of train_split that is held out, see `jsonl.load`.

  Returns:
    A sequence of rows as `jsonl.load` gives them; dates are texts.

  Raises:
    ValueError: the data set cannot be had, has no such split or no example, or
      a row is malformed.
  """
  del seed
  check_split(split)
  fields_lib.check_share(test)
  path = os.fspath(path)
  if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path, re.ASCII):
    raise ValueError(
      f"data.name = 'huggingface' needs data.path = ORG/NAME of the Hub "
      f"('openai/gsm8k'), not {path!r}"
    )
  if os.path.exists(path):
    raise ValueError(
      f"data.path = {path!r} is here: read it by data.name = 'parquet' or "
      "'jsonl', or start elsewhere to mean that of the Hub"
    )
  name = train_split if test or split == "train" else test_split
  table = _table(path, configuration, revision, name)
  unknown = sorted({*columns} - {*table.column_names})
  if unknown:
    raise ValueError(
      f"data.options.columns: {path} has no column {unknown[0]!r}; its columns "
      f"are {table.column_names}"
    )
  table = table.select_columns(list(columns)) if columns else table
  fields = fields_lib.Fields(prompt, answer, messages, answer_after)
  where = f"{path}, {name} split"
  rows = fields_lib.numbered(enumerate(table), where)
  chosen = fields_lib.chosen(rows, fields, split, test)
  kept = np.fromiter(itertools.islice(chosen, size), np.int64)
  if not len(kept):
    raise ValueError(f"{where} holds no example of the split {split!r}")
  return Examples(table, kept, fields)
