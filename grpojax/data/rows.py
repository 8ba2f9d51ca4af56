"""Rows of any data set as examples, and the files of a split.

A name with dots is a field of a field. The answer of a row without a field
"answer" is verl's: reward_model = {"ground_truth": ...}.
"""

import datetime
import decimal
import glob
import hashlib
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from grpojax.data import examples as examples_lib
from grpojax.data.examples import Example, Examples

Row = dict[str, Any]
Keyed = tuple[str, Any, Row]  # label for errors, key to read it again, row

_GROUND_TRUTH = "reward_model.ground_truth"
# Names of files of a split; the first of these that there is.
_NAMES = {"train": ("train",), "test": ("test", "validation", "valid", "val")}


# Rows.


def reader(
  prompt: str = "prompt",
  answer: str = "answer",
  messages: str = "messages",
  answer_after: str = "",
  columns: Sequence[str] = (),
) -> Callable[[Row], Example]:
  """Returns a function that checks a row and makes an example of it.

  Args:
    prompt: field with the prompt, a text or a list of chat messages.
    answer: field with the answer, a text or a number; "" if there is none.
    messages: field with the prompt of a row that has no field `prompt`.
    answer_after: mark ("####") whose last occurrence the answer follows; the
      whole field is the example's "solution" then.
    columns: fields of the row that are read; () is all.
  """

  def example(row: Row) -> Example:
    names = [name for name in row if not columns or name in columns]
    row = {name: _plain(row[name], name) for name in names}
    one = row | {"prompt": _prompt(row, prompt, messages)}
    if not answer:
      return one
    value = _answer(row, answer)
    if not answer_after:
      return one | {"answer": value}
    solution = str(value)
    _, mark, end = solution.rpartition(answer_after)
    if not mark:
      raise ValueError(
        f"the answer has no {answer_after!r}, which data.options.answer_after "
        f"says comes before it: {solution[-80:]!r}"
      )
    # A field "solution" of the row comes before the answer as a solution.
    return {"solution": solution} | one | {"answer": end.strip()}

  return example


def _value(row: Row, name: str) -> Any:
  """Returns a field, or a field of a field; None if there is none."""
  if name in row:
    return row[name]
  for part in name.split("."):
    row = row.get(part) if isinstance(row, dict) else None
  return row


def _check_text(value: Any, name: str, empty: bool = False) -> None:
  if not isinstance(value, str) or not (value.strip() or empty):
    raise ValueError(f"{name} must be a text that is not empty, not {value!r}")
  if half := re.search("[\ud800-\udfff]", value):  # no tokenizer reads it
    raise ValueError(
      f"{name} is no text: its character {half.start()}, {half[0]!r}, is half "
      "of a surrogate pair: write the whole character, or remove it"
    )


def _prompt(row: Row, name: str, messages: str) -> str | list[Row]:
  value = _value(row, name)
  if value is None and _value(row, messages) is not None:
    value, name = _value(row, messages), messages
  if value is None and not {name, messages} & row.keys():
    raise ValueError(
      f"no field {name!r} and no field {messages!r}: data.options.prompt and "
      f"data.options.messages name them; the fields are {sorted(row)}"
    )
  if isinstance(value, str):
    _check_text(value, name)
    return value
  if not isinstance(value, list) or not value:
    raise ValueError(f"{name} must be a text or a list of messages: {value!r}")
  for message in value:
    if not isinstance(message, dict):
      raise ValueError(f"{name}: a message is an object, not {message!r}")
    for key in ("role", "content"):
      _check_text(message.get(key), f"{name}: a message's {key}")
  if value[-1]["role"] == "assistant":
    raise ValueError(
      f"{name} ends with an assistant's message, but the model writes that: "
      "leave it out, or move it to another field"
    )
  return value


def _answer(row: Row, name: str) -> str | int | float:
  answer = _value(row, name)
  if answer is None and name == "answer":
    answer = _value(row, _GROUND_TRUTH)
  if isinstance(answer, (int, float)) and not isinstance(answer, bool):
    if not abs(answer) < float("inf"):
      raise ValueError(f"the answer {name!r} is {answer}: not a number")
    return answer
  if not isinstance(answer, str):
    raise ValueError(
      f"the answer {name!r} must be a text or a number, not {answer!r}; "
      "data.options.answer names its field, '' if there is none"
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
    "name the columns to read in data.options.columns"
  )


def chosen(
  rows: Iterable[Keyed],
  read: Callable[[Row], Example],
  split: str,
  share: int | float,
  most: int | None,
) -> Iterator[tuple[Any, Example]]:
  """Yields (key, example) of the first `most` rows of a split; None is all.

  The test split has a `share` of the prompts, chosen by their texts alone, so
  no prompt is in both; 0: all rows are of the split. All rows are checked.
  """

  def of_split() -> Iterator[tuple[Any, Example]]:
    for label, key, row in rows:
      try:
        one = read(row)
      except (RecursionError, ValueError) as error:
        raise ValueError(f"{label}: {error}") from error
      # A hash, so that similar texts are drawn independently.
      text = examples_lib.prompt_key(one["prompt"]).encode()
      drawn = hashlib.blake2b(text, digest_size=8).digest()
      held_out = int.from_bytes(drawn, "big") < share * 2**64
      if not share or held_out == (split == "test"):
        yield key, one

  return itertools.islice(of_split(), most)


def check_share(share: int | float) -> None:
  """Raises ValueError if data.options.test is no share."""
  if not 0 <= share <= 1:
    raise ValueError(f"--config.data.options.test = {share}: a share in 0..1")


def check_columns(
  columns: Iterable[str], known: Sequence[str], table: str
) -> None:
  """Raises ValueError for a missing column in data.options.columns."""
  unknown = sorted({*columns} - {*known})
  if unknown:
    raise ValueError(
      f"--config.data.options.columns: {table} has no column {unknown[0]!r}; "
      f"its columns are {known}"
    )


# Files.


def load(
  kind: str,
  rows: Callable[[pathlib.Path, Sequence[str]], Iterator[Keyed]],
  keep: Callable[..., Examples],
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
  """Reads the examples of one split, in the order of the files.

  An example has all fields of its row, with "prompt" and "answer" of `reader`,
  which has the other options. ValueError for a missing file, a malformed row or
  no example.

  - `kind`: "jsonl" or "parquet", `data.name` and the files' suffix.
  - `rows`: `(file, columns) -> rows` of a file.
  - `keep`: `(file, chosen, reader) -> random access` to the chosen examples.
  - `path`: a file, a pattern of files ("part-*.jsonl"), or a directory with
    files of each split: train.jsonl, train-*.jsonl or train/*.jsonl.
  - `size`: number of examples, the first ones; None is all.
  - `test`: share held out as the test split, or a file or pattern with it.
  """
  examples_lib.check_split(split)
  files_of, share = split, test
  if isinstance(test, str):
    path = test if split == "test" else path
    files_of, share = "train", 0  # all rows of the files
  check_share(share)
  example = reader(prompt, answer, messages, answer_after, columns)
  parts: list[Examples] = []
  files = _files(path, files_of, share, kind)
  for file in files:
    left = None if size is None else size - sum(map(len, parts))
    if left == 0:
      break
    examples = chosen(rows(file, columns), example, split, share, left)
    parts.append(keep(file, examples, example))
  if not any(map(len, parts)):
    names = files[0] if len(files) == 1 else f"{len(files)} files of data.path"
    raise ValueError(f"{names} holds no example of the split {split!r}")
  sizes = [*map(len, parts)]
  return examples_lib.concatenate(sizes, lambda i, j: parts[i][j])


def _files(
  path: str | os.PathLike, split: str, share: int | float, kind: str
) -> Sequence[pathlib.Path]:
  """Returns the files that hold a split, alone or with the other one."""
  if not str(path):
    raise ValueError(
      f"--config.data.name = {kind!r} needs data.path: a file, a pattern of "
      f"files, or a directory with train.{kind} and test.{kind}"
    )
  place = pathlib.Path(path)
  if place.is_dir():
    if share:
      raise ValueError(
        f"--config.data.options.test = {share} is for a single file or a "
        f"pattern of files, and {place} is a directory with files of each "
        f"split: leave it out, or write '{place}/*.{kind}'"
      )
    return _in_directory(place, split, f".{kind}")
  files = [place] if place.is_file() else []
  if glob.has_magic(str(path)) and not files:
    matches = map(pathlib.Path, glob.glob(str(path), recursive=True))
    files = sorted(filter(pathlib.Path.is_file, matches))
  if not files:
    raise ValueError(
      f"--config.data.path: {place} is not a file, and matches none"
    )
  if not share and split == "test":
    raise ValueError(
      f"--config.data.path = {str(path)!r} is one set of files without "
      f"held-out problems: give a directory with train.{kind} and test.{kind}, "
      "or hold out a share by data.options.test (0.05, say; 1 is all)"
    )
  return files


def _in_directory(
  path: pathlib.Path, split: str, suffix: str
) -> list[pathlib.Path]:
  """Returns SPLIT.jsonl, SPLIT-00-of-02.jsonl, SPLIT/*.jsonl, or of data/."""
  for name in _NAMES[split]:
    sets = [
      sorted(filter(pathlib.Path.is_file, folder.glob(name + rest + suffix)))
      for folder in (path, path / "data")
      for rest in ("", "[-_.]*", "/*")
    ]
    first, *others = [files for files in sets if files] or [[]]
    if others:
      raise ValueError(
        f"--config.data.path: {path} has {first[0]} and {others[0][0]}: which "
        f"are of the split {split!r}? Move the others elsewhere, or give a "
        f"pattern: '{path}/PART*{suffix}', and data.options.test"
      )
    if first:
      _check_shards(first)
      return first
  raise ValueError(
    f"--config.data.path: {path / split}{suffix} does not exist, nor "
    f"{split}-*{suffix} or {split}/*{suffix} (of one set of files, give a "
    f"pattern: '{path}/*{suffix}', and data.options.test)"
  )


def _check_shards(files: Sequence[pathlib.Path]) -> None:
  """Refuses NAME-00000-of-00003 if one of its three files is missing."""
  for file in files:
    if match := re.search(r"-\d+-of-(\d+)\.", file.name):
      begin, end = file.name[: match.start()], match[0].partition("-of-")[2]
      ones = file.parent.glob(f"{glob.escape(begin)}-*-of-{end}*")
      if (count := len([*ones])) != int(match[1]):
        raise ValueError(
          f"--config.data.path: {file} is one of {int(match[1])} files, and "
          f"{count} are there: fetch the others, or give a pattern"
        )
