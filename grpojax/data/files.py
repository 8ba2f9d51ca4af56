"""Which files a split is in, and several files as one data set."""

import glob
import operator
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np

_NAMES = {"train": ("train",), "test": ("test", "validation", "valid", "val")}
"""What files of a split are called; the first of these that there is."""


class Joined(Sequence):
  """Random access to the examples of several parts, one after another."""

  def __init__(self, parts: Sequence[Any]):
    self._parts = list(parts)
    self._starts = np.cumsum([0, *map(len, self._parts)])

  def __len__(self) -> int:
    return int(self._starts[-1])

  def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
    index = operator.index(index)
    if not 0 <= index < len(self):
      raise IndexError(f"example {index} of {len(self)}")
    i = int(np.searchsorted(self._starts, index, side="right")) - 1
    return self._parts[i][index - int(self._starts[i])]


def joined(
  files: Sequence[pathlib.Path],
  opened: Callable[[pathlib.Path, int | None], Any],
  split: str,
  size: int | None,
) -> Any:
  """The examples of several files; files after the first `size` stay closed.

  Args:
    files: in their order.
    opened: `(file, most) -> random access to its examples`, `most` of them.
    split: for the error.
    size: examples at most; None is all.

  Raises:
    ValueError: there is none.
  """
  parts: list[Any] = []
  for file in files:
    left = None if size is None else size - sum(map(len, parts))
    if left == 0:
      break
    parts.append(opened(file, left))
  if not sum(map(len, parts)):
    names = files[0] if len(files) == 1 else f"{len(files)} files of data.path"
    raise ValueError(f"{names} holds no example of the split {split!r}")
  return parts[0] if len(parts) == 1 else Joined(parts)


def _in_directory(
  path: pathlib.Path, split: str, suffix: str
) -> list[pathlib.Path]:
  """SPLIT.jsonl, SPLIT-00-of-02.jsonl, SPLIT/*.jsonl, or such in data/."""
  for name in _NAMES[split]:
    for folder in (path, path / "data"):
      found = [folder / f"{name}{suffix}"]
      found = [x for x in found if x.is_file()] or [
        *folder.glob(f"{name}[-_.]*{suffix}"),
        *folder.glob(f"{name}/*{suffix}"),
      ]
      if found:
        return sorted(found)
  raise ValueError(
    f"--config.data.path: {path / split}{suffix} does not exist, nor "
    f"{split}-*{suffix} "
    f"or {split}/*{suffix} (of one set of files, give a pattern: "
    f"'{path}/*{suffix}', and data.options.test)"
  )


def of_split(
  path: str | os.PathLike,
  split: str,
  share: int | float,
  kind: str,
  suffix: str,
) -> list[pathlib.Path]:
  """The files that hold a split, alone or with the other one.

  Args:
    path: a file, a directory with files of each split, or a pattern of files
      ("part-*.jsonl"; "**" is any depth of directories).
    split: "train" or "test".
    share: of one set of files that is held out, else 0.
    kind: `data.name`, for errors.
    suffix: of such files, ".jsonl".

  Raises:
    ValueError: there are none, or the set of files has no such split.
  """
  if not str(path):
    raise ValueError(
      f"--config.data.name = {kind!r} needs data.path: a file, a pattern of "
      "files, or a "
      f"directory with train{suffix} and test{suffix}"
    )
  one = pathlib.Path(path)
  if one.is_dir():
    if share:
      raise ValueError(
        f"--config.data.options.test = {share} is for a single file or a "
        "pattern of "
        f"files, and {one} is a directory with files of each split: leave it "
        f"out, or write '{one}/*{suffix}'"
      )
    return _in_directory(one, split, suffix)
  found = [one] if one.is_file() else []
  if not found and glob.has_magic(str(path)):
    found = [pathlib.Path(p) for p in glob.glob(str(path), recursive=True)]
    found = sorted(p for p in found if p.is_file())
    if not found:
      raise ValueError(
        f"--config.data.path = {str(path)!r}: no file matches it"
      )
  if not found:
    what = "is no file" if os.path.lexists(one) else "does not exist"
    raise ValueError(f"--config.data.path: {one} {what}")
  if not share and split == "test":
    what = "a single file" if len(found) == 1 else "one set of files"
    raise ValueError(
      f"--config.data.path = {str(path)!r} is {what} without held-out "
      "problems: "
      f"give a directory with train{suffix} and test{suffix}, or hold out a "
      "share of its problems by data.options.test (0.05, say; 1 is all)"
    )
  return found
