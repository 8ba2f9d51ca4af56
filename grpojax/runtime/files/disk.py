"""Checks that paths can be written, and turns disk errors into messages."""

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator

from grpojax.runtime.files import records

# Errors of a disk that is full, over a limit, broken, or mounted read-only.
_REFUSALS = [vars(errno)[x] for x in "ENOSPC EDQUOT EFBIG EIO EROFS".split()]


class WriteFailed(Exception):
  """Raised if a write failed; the message names the file and the reason."""


def refuses(error: BaseException) -> bool:
  """Returns True if the disk, not the program, caused the error."""
  return isinstance(error, WriteFailed) or (
    isinstance(error, OSError) and error.errno in _REFUSALS
  )


@contextlib.contextmanager
def errors() -> Iterator[None]:
  """Turns errors of the disk into a message and exit code 1."""
  try:
    yield
  except (WriteFailed, OSError) as error:
    if not refuses(error):
      raise
    raise SystemExit(f"error: {error}") from None


def remove_all(folder: pathlib.Path, pattern: str, seconds: float = 5.0):
  """Removes matching directories from `folder`; gives up after `seconds`.

  Repeats this, because threads of a failed write may recreate directories.
  """
  until = time.monotonic() + seconds
  while paths := list(folder.glob(pattern)):
    for path in paths:
      shutil.rmtree(path, ignore_errors=True)
    if time.monotonic() > until:
      return
    time.sleep(0.05)


def check_no_url(path: str | os.PathLike, flag: str) -> None:
  """Raises ValueError if the value of a flag, such as "--out", is a URL."""
  if re.match(r"[A-Za-z0-9]+:/", str(path)):  # pathlib drops the second /
    raise ValueError(
      f"{flag}={path} is not a path of the file system: give one (only models "
      "and train's --run_dir may be on gs://)"
    )


def user_cache() -> pathlib.Path:
  """Returns grpojax's directory in $XDG_CACHE_HOME or ~/.cache."""
  root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(root) / "grpojax"


def _existing(path: pathlib.Path) -> pathlib.Path:
  return next(x for x in (path, *path.parents) if os.path.lexists(x))


def check_keeps_runs(path: str | os.PathLike, flag: str) -> None:
  """Raises ValueError if the file system of a directory cannot keep a run.

  Many mounted buckets cannot append, rename or lock. Trial files are removed.
  """
  check_writable(path, flag)
  parent = _existing(pathlib.Path(path).absolute())
  with tempfile.TemporaryDirectory(prefix=".probe-", dir=parent) as probe:
    folder = pathlib.Path(probe, "folder")
    folder.mkdir()
    file, other = folder / "file", folder / "other"
    file.write_bytes(b"0")
    other.write_bytes(b"0")
    try:
      operation = "append to files"
      with open(file, "ab") as opened:
        opened.write(b"1")
      operation = "lock files"
      with open(file, "r+b") as opened:  # NFS locks only files open for writing
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
      operation = "replace files"
      os.replace(other, file)
      operation = "rename directories"
      folder.rename(f"{folder}.new")
    except OSError as error:
      raise ValueError(
        f"{flag}={path} cannot keep a run: its file system cannot {operation} "
        f"({error.strerror}). Use a local disk or a mount listed in "
        "docs/hosts.md"
      ) from error


def check_writable(path: str | os.PathLike, flag: str) -> None:
  """Raises ValueError if a directory cannot be made or written."""
  check_no_url(path, flag)
  path = pathlib.Path(path).absolute()
  try:
    str(path).encode()
  except UnicodeEncodeError as error:  # C++ libraries cannot open it
    reason = "it is no UTF-8 text: give another name"
    raise ValueError(f"{flag}={path} cannot be written: {reason}") from error
  parent = _existing(path)
  try:
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=parent) as probe:
      for name in path.relative_to(parent).parts:
        # Names must leave room for the longest temporary name, sft's.
        pathlib.Path(probe, f".{name}.{'0' * 8}.tmp.partial").mkdir()
      pathlib.Path(probe, "file").write_bytes(b"0")
  except OSError as error:
    part = "" if parent == path else f" ({parent} exists)"
    reason = f"{error.strerror}{part}"
    raise ValueError(f"{flag}={path} cannot be written: {reason}") from error


def check_file(path: str | os.PathLike, flag: str) -> None:
  """Raises ValueError if `path` is not a regular file that can be written."""
  check_no_url(path, flag)
  path = pathlib.Path(os.path.realpath(path))
  problem = None
  if path.parent.is_file():
    problem = f"{path.parent} is a file, not a directory"
  elif not path.parent.is_dir():
    problem = "its directory does not exist"
  elif path.is_dir():
    problem = "it is a directory: give the name of a file"
  elif path.exists() and not path.is_file():
    problem = "it is no regular file: give another name"
  else:
    try:
      with records.temporary(path) as file:
        file.touch()
    except OSError as error:
      problem = error.strerror
  if problem:
    raise ValueError(f"{flag}={path} cannot be written: {problem}")
