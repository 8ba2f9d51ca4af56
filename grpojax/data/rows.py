"""Converts rows of any data set to examples, and finds the files of a split.

Opening a data set checks every row and copies the examples of a split, as JSON,
to an unnamed temporary file in TMPDIR, which the system frees when the program
ends. So data may be larger than memory, and files may change during a run.

A field name with dots refers to a nested field. A missing field "answer" is
replaced by reward_model["ground_truth"], as in files for verl.
"""

import array
import datetime
import decimal
import glob
import hashlib
import itertools
import json
import mmap
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from grpojax.data.examples import Example, Examples, check_split, prompt_key

Row = dict[str, Any]
Labelled = tuple[str, Row]  # label for errors, row

# File names of each split; the first existing name is used.
_NAMES = {"train": ("train",), "test": ("test", "validation", "valid", "val")}


# Examples from rows


def reader(
  prompt: str = "prompt",
  answer: str = "answer",
  messages: str = "messages",
  answer_after: str = "",
  columns: Sequence[str] = (),
) -> Callable[[Row], Example]:
  """Returns a function that checks a row and converts it to an example.

  - `prompt`: field with the prompt, a text or a list of chat messages.
  - `answer`: field with the answer, a text or a number; "" for no answer.
  - `messages`: field that replaces a missing field `prompt`.
  - `answer_after`: mark ("####") before the answer in its field; the field then
    becomes the "solution" if the row has none.
  - `columns`: fields to read; () reads all.
  """

  def read(row: Row) -> Example:
    names = [name for name in row if not columns or name in columns]
    row = {name: _plain(row[name], name) for name in names}
    example = row | {"prompt": _prompt(row, prompt, messages)}
    if not answer:
      return example
    value = _answer(row, answer)
    if not answer_after:
      return example | {"answer": value}
    solution = str(value)
    _, mark, end = solution.rpartition(answer_after)
    if not mark:
      raise ValueError(
        f"the answer has no {answer_after!r} (its end: {solution[-80:]!r}):"
        " change data.options.answer_after"
      )
    return {"solution": solution} | example | {"answer": end.strip()}

  return read


def _value(row: Row, name: str) -> Any:
  """Returns a field, which may be nested; None if it is missing."""
  if name in row:
    return row[name]
  for part in name.split("."):
    row = row.get(part) if isinstance(row, dict) else None
  return row


def _check_text(value: Any, name: str, empty: bool = False) -> None:
  if not isinstance(value, str) or not (value.strip() or empty):
    raise ValueError(f"{name} must be a nonempty text, not {value!r}")
  if half := re.search("[\ud800-\udfff]", value):  # tokenizers fail on it
    raise ValueError(
      f"{name} is not valid Unicode: character {half.start()}, {half[0]!r}, is "
      "half of a surrogate pair; write the whole character, or remove it"
    )


def _prompt(row: Row, name: str, messages: str) -> str | list[Row]:
  value = _value(row, name)
  if value is None and _value(row, messages) is not None:
    value = _value(row, messages)
    name = messages
  if value is None and not {name, messages} & row.keys():
    raise ValueError(
      f"no field {name!r} and no field {messages!r}: set data.options.prompt "
      f"or data.options.messages to one of {sorted(row)}"
    )
  if isinstance(value, str):
    _check_text(value, name)
    return value
  if not isinstance(value, list) or not value:
    raise ValueError(
      f"{name} must be a text or a list of messages, not {value!r}"
    )
  for message in value:
    if not isinstance(message, dict):
      raise ValueError(f"{name}: a message must be an object, not {message!r}")
    for key in ("role", "content"):
      _check_text(message.get(key), f"{name}: a message's {key}")
  if value[-1]["role"] == "assistant":
    raise ValueError(
      f"{name} ends with an assistant's message, which the model should write: "
      "remove it, or move it to another field"
    )
  return value


def _answer(row: Row, name: str) -> str | int | float:
  answer = _value(row, name)
  if answer is None and name == "answer":
    answer = _value(row, "reward_model.ground_truth")
  if isinstance(answer, (int, float)) and not isinstance(answer, bool):
    if not abs(answer) < float("inf"):
      raise ValueError(f"the answer {name!r} is {answer}: must be finite")
    return answer
  if not isinstance(answer, str):
    raise ValueError(
      f"the answer {name!r} must be a text or a number, not {answer!r}: set "
      "data.options.answer to its field, or to '' for no answer"
    )
  _check_text(answer, f"the answer {name!r}", empty=True)
  return answer


def _plain(item: Any, column: str) -> Any:
  if isinstance(item, dict):
    return {str(k): _plain(v, column) for k, v in item.items()}
  if isinstance(item, (list, tuple)):
    return [_plain(v, column) for v in item]
  if item is None or isinstance(item, (str, int, float)):
    return item
  if isinstance(item, decimal.Decimal | datetime.timedelta):
    return str(item)
  if isinstance(item, datetime.date | datetime.time):
    return item.isoformat()
  raise ValueError(
    f"the column {column!r} holds {type(item).__name__}, not text or numbers: "
    "list the columns to read in data.options.columns"
  )


def examples(
  rows: Iterable[Labelled],
  read: Callable[[Row], Example],
  split: str,
  share: int | float,
  most: int | None,
  source: str,
) -> Examples:
  """Copies up to `most` examples of a split (None: all) to a temporary file.

  A hash puts a `share` of the prompts into the test split, so that the splits
  have no prompt in common. With share 0 all rows are in `split`. ValueError,
  which names the `source` of the rows, if the split is empty.
  """
  seen = 0

  def in_split() -> Iterator[Example]:
    nonlocal seen
    for label, row in rows:
      seen += 1
      try:
        example = read(row)
      except (RecursionError, ValueError) as error:
        raise ValueError(f"{label}: {error}") from error
      text = prompt_key(example["prompt"]).encode()
      digest = hashlib.blake2b(text, digest_size=8).digest()
      held_out = int.from_bytes(digest, "big") < share * 2**64
      if not share or held_out == (split == "test"):
        yield example

  ends = array.array("q", [0])
  try:
    with tempfile.TemporaryFile(prefix="grpojax-") as copy:
      for example in itertools.islice(in_split(), most):
        line = json.dumps(example).encode() + b"\n"
        ends.append(ends[-1] + copy.write(line))
      if len(ends) == 1:
        raise ValueError(
          f"no {split!r} row among the {seen} of {source}: change "
          "data.options.test, or add rows"
        )
      copy.flush()
      mapped = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
  except OSError as error:
    raise ValueError(
      f"{source} cannot be read, or copied to a temporary file ({error}): "
      "check the data, or set TMPDIR to a disk with more space"
    ) from error
  read_copy = lambda i: json.loads(mapped[ends[i] : ends[i + 1]])
  return Examples(len(ends) - 1, read_copy)


def check_share(share: int | float) -> None:
  """Raises ValueError if data.options.test is outside [0, 1]."""
  if not 0 <= share <= 1:
    raise ValueError(f"--config.data.options.test = {share}: must be 0 to 1")


def check_columns(
  columns: Iterable[str], known: Sequence[str], table: str
) -> None:
  """Raises ValueError if `table` lacks a column of data.options.columns."""
  unknown = sorted({*columns} - {*known})
  if unknown:
    raise ValueError(
      f"--config.data.options.columns: {table} has no column {unknown[0]!r}; "
      f"its columns are {known}"
    )


# Files of a split


def load(
  kind: str,
  rows: Callable[[pathlib.Path, Sequence[str]], Iterator[Labelled]],
  split: str,
  *,
  path: str | os.PathLike = "",
  size: int | None = None,
  prompt: str = "prompt",
  answer: str = "answer",
  messages: str = "messages",
  answer_after: str = "",
  columns: Sequence[str] = (),
  test: int | float | str = 0.0,
) -> Examples:
  """Reads the examples of a split, in the order of the files.

  Examples keep the fields of their row; `reader` explains the other options.
  ValueError for a missing file, a malformed row or an empty split.

  - `kind`: "jsonl" or "parquet", the value of data.name and the file suffix.
  - `rows`: `(file, columns) -> iterator of Labelled`.
  - `path`: a file, a pattern of files ("part-*.jsonl"), or a directory with
    files of each split: train.jsonl, train-*.jsonl or train/*.jsonl.
  - `test`: share held out as the test split, or this split's file or pattern.
  """
  check_split(split)
  file_split = split
  share = test
  if isinstance(test, str):  # both splits have their own files
    path = test if split == "test" else path
    file_split = "train"
    share = 0
  check_share(share)
  read = reader(prompt, answer, messages, answer_after, columns)
  files = _files(path, file_split, share, kind)
  labelled = itertools.chain.from_iterable(rows(x, columns) for x in files)
  source = (
    str(files[0]) if len(files) == 1 else f"{len(files)} files of data.path"
  )
  return examples(labelled, read, split, share, size, source)


def _files(
  path: str | os.PathLike, split: str, share: int | float, kind: str
) -> Sequence[pathlib.Path]:
  if not str(path):
    raise ValueError(
      f"the data set {kind} needs data.path (data.mixture.NAME.path in a "
      "mixture): set it to a file, a pattern of files, or a directory with "
      f"train.{kind} and test.{kind}"
    )
  place = pathlib.Path(path)
  if place.is_dir():
    if share:
      raise ValueError(
        f"--config.data.options.test = {share} is for a file or a pattern of "
        f"files, but {place} is a directory with files of each split: remove "
        f"data.options.test, or set data.path to '{place}/*.{kind}' (a pattern)"
      )
    return _in_directory(place, split, f".{kind}")
  files = [place] if place.is_file() else []
  if glob.has_magic(str(path)) and not files:
    matches = map(pathlib.Path, glob.glob(str(path), recursive=True))
    files = sorted(filter(pathlib.Path.is_file, matches))
  if not files:
    raise ValueError(f"--config.data.path: {place} matches no file: correct it")
  if not share and split == "test":
    raise ValueError(
      f"--config.data.path = {str(path)!r} has no test split: use a directory "
      f"with train.{kind} and test.{kind}, or hold out a share with "
      "data.options.test (such as 0.05; 1 holds out all)"
    )
  return files


def _in_directory(
  path: pathlib.Path, split: str, suffix: str
) -> list[pathlib.Path]:
  """Finds SPLIT.jsonl, SPLIT-*.jsonl, SPLIT/*.jsonl in `path` or path/data."""
  for name in _NAMES[split]:
    sets = [
      sorted(filter(pathlib.Path.is_file, folder.glob(name + ending + suffix)))
      for folder in (path, path / "data")
      for ending in ("", "[-_.]*", "/*")
    ]
    first, *others = [files for files in sets if files] or [[]]
    if others:
      raise ValueError(
        f"--config.data.path: {path} has {first[0]} and {others[0][0]} for the "
        f"split {split!r}: remove one, or set data.path to a pattern, "
        f"'{path}/PART*{suffix}', and data.options.test"
      )
    for file in first:
      if shard := re.search(r"-\d+-of-(\d+)\.", file.name):
        name = glob.escape(file.name[: shard.start()])
        count = len([*file.parent.glob(f"{name}-*-of-{shard[1]}.*")])
        if count != int(shard[1]):
          raise ValueError(
            f"--config.data.path: {file} is one of {int(shard[1])} files, but "
            f"{count} exist: add the missing files, or set it to a pattern"
          )
    if first:
      return first
  raise ValueError(
    f"--config.data.path: {path} has no {split}{suffix}, {split}-*{suffix} or "
    f"{split}/*{suffix}: add one, or set data.path to a pattern, "
    f"'{path}/*{suffix}', and data.options.test"
  )
