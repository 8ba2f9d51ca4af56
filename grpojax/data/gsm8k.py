"""GSM8K: grade-school word problems with worked solutions (arXiv 2110.14168).

7,473 training and 1,319 test problems, each {"question": ..., "answer":
"... #### 72"}. They come from TensorFlow Datasets, which downloads them (it
needs no TensorFlow), or from a local copy of either of two kinds: a directory
that TensorFlow Datasets prepared, or the original train.jsonl and test.jsonl.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

from grpojax.data import fields, jsonl
from grpojax.data.examples import MARK, Examples, check_split

_SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math"
_EXAMPLE = fields.reader("question", answer_after=MARK)
_LOCAL = (
  "give a local copy as data.path: the directory of GSM8K's train.jsonl and "
  "test.jsonl, or one that tensorflow-datasets prepared"
)


def _tfds() -> Any:
  """TensorFlow Datasets with its text builders; TensorFlow stays away."""
  try:
    # tfds.builder("gsm8k") finds nothing before this import.
    import tensorflow_datasets.text
  except ImportError as error:
    raise ValueError(
      f"GSM8K is downloaded by tensorflow-datasets ({error}): "
      f"pip install tensorflow-datasets importlib_resources, or {_LOCAL}"
    ) from error
  return tensorflow_datasets


def _prepared() -> Any:
  """The builder of TensorFlow Datasets' own copy, made where there is none."""
  import fcntl

  tfds = _tfds()
  # Parquet, another choice, loses rows; TFRecord needs TensorFlow.
  form = {"file_format": "array_record"}
  builder = tfds.builder("gsm8k", **form)
  if builder.is_prepared():
    return builder
  directory = pathlib.Path(builder.data_dir).parents[1]
  directory.mkdir(parents=True, exist_ok=True)
  with open(directory / "gsm8k.lock", "w") as lock:
    # Lets in one of the processes that share a directory; the others wait, and
    # find what it has prepared. The lock is released with the process, too.
    fcntl.flock(lock, fcntl.LOCK_EX)
    builder = tfds.builder("gsm8k", **form)
    if not builder.is_prepared():
      _download(builder)
  return builder


def _download(builder: Any) -> None:
  import requests

  print(f"preparing GSM8K in {builder.data_dir}", flush=True)
  try:
    # Without a network the download would try again for minutes.
    requests.head(_SOURCE, timeout=30)
    builder.download_and_prepare()
  except OSError as error:  # requests' errors are of this kind
    raise ValueError(
      f"GSM8K cannot be downloaded ({type(error).__name__}: {error}): {_LOCAL}"
    ) from error


def _directory(path: pathlib.Path) -> Any:
  """The builder of a prepared directory: `path`, or a version below it."""
  prepared = [
    file.parent
    for pattern in (".", "*", "gsm8k/*")
    for file in sorted(path.glob(f"{pattern}/dataset_info.json"))
  ]
  if not prepared:
    raise ValueError(
      f"no GSM8K in {str(path)!r}: neither train.jsonl and test.jsonl nor a "
      f"directory of tensorflow-datasets (dataset_info.json); {_LOCAL}"
    )
  builder = _tfds().builder_from_directory(prepared[-1])
  form = builder.info.file_format.value
  if form != "array_record":
    raise ValueError(
      f"{prepared[-1]} was prepared in the format {form}; prepare it again "
      "with file_format='array_record'"
    )
  return builder


def _records(
  builder: Any, split: str
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
  for number, row in enumerate(builder.as_data_source(split)):
    texts = {name: row[name].decode() for name in ("question", "answer")}
    yield f"{builder.data_dir}, {split} problem {number}", None, texts


def load(
  split: str,
  *,
  path: str | os.PathLike = "",
  size: int | None = None,
) -> Examples:
  """Reads {"prompt": the question, "answer": "72", "solution": ..., ...}.

  Args:
    split: "train" or "test".
    path: directory with train.jsonl and test.jsonl; or a directory that
      TensorFlow Datasets prepared, or its parent. "" is TensorFlow Datasets'
      default directory, where the data are downloaded if they are not there.
    size: the first so many problems; None is all.

  Raises:
    ValueError: an unknown split, data that are missing and cannot be
      downloaded, or what is no problem.
  """
  check_split(split)
  file = pathlib.Path(path) / f"{split}.jsonl"
  if str(path) and file.is_file():
    rows = jsonl.rows(file)
  else:
    builder = _directory(pathlib.Path(path)) if str(path) else _prepared()
    rows = _records(builder, split)
  chosen = fields.chosen(rows, _EXAMPLE, split, 0, size)
  problems = [problem for _, problem in chosen]
  return Examples(len(problems), lambda index: dict(problems[index]))
