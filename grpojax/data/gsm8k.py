"""GSM8K: grade-school word problems with worked solutions (arXiv 2110.14168).

7,473 training and 1,319 test problems, each {"question": ..., "answer":
"... #### 72"}, from TensorFlow Datasets (without TensorFlow), a directory that
it prepared, or OpenAI's train.jsonl and test.jsonl.
"""

import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from grpojax.data import jsonl, rows
from grpojax.data.examples import MARK, Examples, check_split

_SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math"
# Parquet, another choice, loses rows; TFRecord needs TensorFlow.
_FORMAT = "array_record"
_LOCAL = (
  "give a local copy as data.path: the directory of GSM8K's train.jsonl and "
  "test.jsonl, or one that tensorflow-datasets prepared"
)


def _tfds() -> Any:
  """Returns TensorFlow Datasets with its text builders."""
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
  """Returns the builder of TensorFlow Datasets' own copy, made if needed."""
  tfds = _tfds()
  builder = tfds.builder("gsm8k", file_format=_FORMAT)
  if builder.is_prepared():
    return builder
  directory = pathlib.Path(builder.data_dir).parents[1]
  directory.mkdir(parents=True, exist_ok=True)
  with open(directory / "gsm8k.lock", "w") as lock:
    # One of the processes that share a directory prepares it; others wait.
    fcntl.flock(lock, fcntl.LOCK_EX)
    builder = tfds.builder("gsm8k", file_format=_FORMAT)
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
  """Returns the builder of a prepared directory, or of a version below it."""
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
  if form != _FORMAT:
    raise ValueError(
      f"{prepared[-1]} was prepared in the format {form}; prepare it again "
      f"with file_format={_FORMAT!r}"
    )
  return builder


def _records(builder: Any, split: str) -> Iterator[rows.Keyed]:
  for number, row in enumerate(builder.as_data_source(split)):
    texts = {name: row[name].decode() for name in ("question", "answer")}
    yield f"{builder.data_dir}, {split} problem {number}", None, texts


def load(
  split: str, *, path: str | os.PathLike = "", size: int | None = None
) -> Examples:
  """Reads {"prompt": the question, "answer": "72", "solution": ..., ...}.

  `path` is the directory of a local copy, or its parent; "" is the default one
  of TensorFlow Datasets, to which missing data are downloaded. `size` None is
  all problems, else the first ones.
  """
  check_split(split)
  file = pathlib.Path(path) / f"{split}.jsonl"
  if str(path) and file.is_file():
    keyed = jsonl.rows(file)
  else:
    builder = _directory(pathlib.Path(path)) if str(path) else _prepared()
    keyed = _records(builder, split)
  reader = rows.reader("question", answer_after=MARK)
  chosen = rows.chosen(keyed, reader, split, 0, size)
  problems = [problem for _, problem in chosen]
  return Examples(len(problems), lambda index: dict(problems[index]))
