"""Files of a split, and several files as one data set."""

import glob
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpojax.data import fields
from grpojax.data.examples import Examples, check_split, concatenate
from grpojax.data.fields import Row

_NAMES = {"train": ("train",), "test": ("test", "validation", "valid", "val")}
"""Names of files of a split; the first of these that there is."""


def load(
  kind: str,
  rows: Callable[[pathlib.Path, Sequence[str]], Iterator[tuple[str, Any, Row]]],
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

  Args:
    kind: "jsonl" or "parquet", `data.name` and the files' suffix.
    rows: `(file, columns) -> rows` of a file, as of `fields.chosen`.
    keep: `(file, chosen, example) -> random access` to the chosen examples of
      a file; `example` makes one of a row.
    split: "train" or "test".
    path: a file, a pattern of files ("part-*.jsonl"), or a directory with
      files of each split: train.jsonl, train-*.jsonl or train/*.jsonl.
    size: number of examples, the first ones; None is all. Others are not read.
    prompt: the field with the prompt (`fields.reader` has all five).
    answer: the field with the answer.
    messages: the field with the prompt where there is no `prompt`.
    answer_after: mark before the answer.
    columns: fields that are read; () is all. Bytes (images) cannot be read.
    test: share of one set of files' examples that is held out as the test
      split, about; which examples depends on their prompts alone. Or the
      file, or pattern of files, of the test split.

  Returns:
    The rows, with "prompt" and "answer" set from the fields above; all other
    fields are as they are, but for dates, which are texts.

  Raises:
    ValueError: an unknown split, a missing file, no example, or a row that is
      malformed.
  """
  check_split(split)
  files_of, share = split, test
  if isinstance(test, str):
    path = test if split == "test" else path
    files_of, share = "train", 0  # all rows of the files
  fields.check_share(share)
  example = fields.reader(prompt, answer, messages, answer_after, columns)
  parts: list[Examples] = []
  files = _files(path, files_of, share, kind)
  for file in files:
    left = None if size is None else size - sum(map(len, parts))
    if left == 0:
      break
    rows_of_file = rows(file, columns)
    chosen = fields.chosen(rows_of_file, example, split, share, left)
    parts.append(keep(file, chosen, example))
  if not any(map(len, parts)):
    names = files[0] if len(files) == 1 else f"{len(files)} files of data.path"
    raise ValueError(f"{names} holds no example of the split {split!r}")
  return concatenate([*map(len, parts)], lambda i, j: parts[i][j])


def _files(
  path: str | os.PathLike, split: str, share: int | float, kind: str
) -> Sequence[pathlib.Path]:
  """Files that hold a split, alone or with the other one."""
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
  """SPLIT.jsonl, SPLIT-00-of-02.jsonl, SPLIT/*.jsonl, or such in data/."""
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
  """Refuses NAME-00000-of-00003 where one of its three files is missing."""
  for file in files:
    if match := re.search(r"-\d+-of-(\d+)\.", file.name):
      begin, end = file.name[: match.start()], match[0].partition("-of-")[2]
      ones = file.parent.glob(f"{glob.escape(begin)}-*-of-{end}*")
      if (count := len([*ones])) != int(match[1]):
        raise ValueError(
          f"--config.data.path: {file} is one of {int(match[1])} files, and "
          f"{count} are there: fetch the others, or give a pattern"
        )
