"""Files of a split, and several files as one data set."""

import glob
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from grpojax.data.examples import check_split, concatenate
from grpojax.data.fields import Row, check_share, chosen

_NAMES = {"train": ("train",), "test": ("test", "validation", "valid", "val")}
"""Names of files of a split; the first of these that there is."""


def load(
  kind: str,
  rows: Callable[[pathlib.Path], Iterable[tuple[str, Any, Row]]],
  example: Callable[[Row], Row],
  keep: Callable[[pathlib.Path, Iterator[tuple[Any, Row]]], Any],
  split: str,
  path: str | os.PathLike,
  share: int | float | str,
  size: int | None,
) -> Any:
  """Random access to a split; files after the first `size` examples stay shut.

  Args:
    kind: "jsonl" or "parquet", `data.name` and the files' suffix.
    rows: `(file) -> rows` of a file, as of `fields.chosen`.
    example: `(row) -> example`.
    keep: `(file, chosen) -> random access` to the chosen examples of a file.
    split: "train" or "test".
    path: a file, a directory with files of each split, or a pattern.
    share: share of one set of files that is held out, else 0; or the files of
      the test split, as a path or a pattern.
    size: examples at most; None is all.
  """
  check_split(split)
  files_of = split
  if isinstance(share, str):
    path = share if split == "test" else path
    share = 0
    files_of = "train"  # all rows of the files
  check_share(share)
  parts: list[Any] = []
  files = _files(path, files_of, share, kind)
  for file in files:
    left = None if size is None else size - sum(map(len, parts))
    if left == 0:
      break
    parts.append(keep(file, chosen(rows(file), example, split, share, left)))
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
      f"--config.data.path: {place} is no file, and matches none"
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
