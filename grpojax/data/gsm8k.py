"""GSM8K: grade-school word problems with worked solutions (arXiv 2110.14168).

7,473 training and 1,319 test problems, each {"question": ..., "answer":
"... #### 72"}, from TensorFlow Datasets (without TensorFlow), a directory
prepared by it, or OpenAI's train.jsonl and test.jsonl.
"""

import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from grpojax.data import jsonl, rows
from grpojax.data.examples import MARK, Examples, check_split

_SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math"
# tfds' Parquet files lose rows; TFRecord needs TensorFlow.
_FORMAT = "array_record"
_LOCAL = (
  "set data.path to a local copy: a directory with GSM8K's train.jsonl and "
  "test.jsonl, or one prepared by tensorflow-datasets"
)


def _tfds() -> Any:
  """Imports TensorFlow Datasets with its text builders."""
  try:
    import tensorflow_datasets.text  # registers the builder "gsm8k"
  except ImportError as error:
    raise ValueError(
      f"downloading GSM8K needs tensorflow-datasets ({error}): "
      f"pip install tensorflow-datasets importlib_resources, or {_LOCAL}"
    ) from error
  return tensorflow_datasets


def _prepared() -> Any:
  """Returns TensorFlow Datasets' builder; downloads GSM8K at the first use."""
  tfds = _tfds()
  builder = tfds.builder("gsm8k", file_format=_FORMAT)
  if builder.is_prepared():
    return builder
  directory = pathlib.Path(builder.data_dir).parents[1]
  directory.mkdir(parents=True, exist_ok=True)
  with open(directory / "gsm8k.lock", "w") as lock:
    # Processes that share the directory wait for the first to prepare it.
    fcntl.flock(lock, fcntl.LOCK_EX)
    builder = tfds.builder("gsm8k", file_format=_FORMAT)
    if builder.is_prepared():
      return builder
    import requests

    print(f"preparing GSM8K in {builder.data_dir}", flush=True)
    try:
      # Without a network the download would retry for minutes.
      requests.head(_SOURCE, timeout=30)
      builder.download_and_prepare()
    except OSError as error:  # includes all errors of requests
      reason = f"{type(error).__name__}: {error}"
      raise ValueError(
        f"GSM8K cannot be downloaded ({reason}): {_LOCAL}"
      ) from error
  return builder


def _directory(path: pathlib.Path) -> Any:
  """Returns the builder of the latest prepared version in a directory."""
  prepared = [
    file.parent
    for pattern in (".", "*", "gsm8k/*")
    for file in sorted(path.glob(f"{pattern}/dataset_info.json"))
  ]
  if not prepared:
    raise ValueError(
      f"no GSM8K in {str(path)!r}: it has neither train.jsonl and test.jsonl "
      f"nor a dataset_info.json of tensorflow-datasets; {_LOCAL}"
    )
  builder = _tfds().builder_from_directory(prepared[-1])
  form = builder.info.file_format.value
  if form != _FORMAT:
    raise ValueError(
      f"{prepared[-1]} has files of format {form}: prepare it again with "
      f"file_format={_FORMAT!r}"
    )
  return builder


def _records(builder: Any, split: str) -> Iterator[rows.Labelled]:
  for number, row in enumerate(builder.as_data_source(split)):
    texts = {name: row[name].decode() for name in ("question", "answer")}
    yield f"{builder.data_dir}, {split} problem {number}", texts


def load(
  split: str, *, path: str | os.PathLike = "", size: int | None = None
) -> Examples:
  """Returns problems {"prompt": question, "answer": "72", "solution": ...}.

  `path` is the directory of a local copy, or its parent; "" is the default
  directory of TensorFlow Datasets, downloaded if needed.
  """
  check_split(split)
  file = pathlib.Path(path) / f"{split}.jsonl"
  if str(path) and file.is_file():
    labelled = jsonl.rows(file)
  else:
    builder = _directory(pathlib.Path(path)) if str(path) else _prepared()
    labelled = _records(builder, split)
  reader = rows.reader("question", answer_after=MARK)
  return rows.examples(labelled, reader, split, 0, size, "GSM8K")
