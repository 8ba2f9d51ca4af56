"""Lock that allows one process per run directory and ends with the process.

It is the kernel's lock (flock) on an open file. The file describes its holder;
a file left by a killed process does not lock. Reading a run needs no lock.
"""

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import socket
import sys
from collections.abc import Callable, Iterator

from grpojax.runtime.files import disk

LOCK = ".lock"  # in the run directory


def me() -> dict[str, str | int]:
  """Describes this process as the holder of a lock."""
  return {
    "pid": os.getpid(),
    "host": socket.gethostname(),
    "since": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
    "command": " ".join(sys.argv)[:200],
  }


def refusal(
  directory: str | os.PathLike,
  text: bytes,
  advice: str = "; wait for it, end it, or give another directory",
) -> ValueError:
  """Returns the error for a run directory that another process has locked.

  `text` is the content of the lock's file, the JSON of the holder's `me`.
  """
  try:
    held = json.loads(text)
    holder = f"process {held['pid']} on {held['host']} since {held['since']} "
    holder += f"({held['command']})"
  except (ValueError, KeyError, TypeError, RecursionError):
    holder = "another process"  # its description is not written yet
  return ValueError(f"{directory} is in use by {holder}{advice}")


def gone(directory: str | os.PathLike) -> str:
  """Returns the error message for a run directory that disappeared."""
  return f"{directory} is gone: it was removed, renamed or replaced meanwhile"


def _is_there(file: int, path: pathlib.Path) -> bool:
  """Returns True if an open file still has this path."""
  try:
    return os.path.samestat(os.fstat(file), os.stat(path))
  except (FileNotFoundError, NotADirectoryError):
    return False


@contextlib.contextmanager
def hold(directory: str | os.PathLike) -> Iterator[Callable[[], None]]:
  """Creates a run directory and locks it inside the context.

  Yields a function that raises `disk.WriteFailed` if the directory was
  replaced. ValueError if another process holds the lock. Programs that this
  process starts do not inherit the lock, but forked children do: if this
  process is killed, the lock ends with the last child.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  path = directory / LOCK

  def check() -> None:
    if not _is_there(file, path):
      raise disk.WriteFailed(gone(directory))

  while True:
    # Refuses links, because truncation would empty the target.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        raise refusal(directory, os.pread(file, 2**16, 0)) from None
      if not _is_there(file, path):  # its holder has just removed it
        continue
      os.ftruncate(file, 0)
      os.pwrite(file, (json.dumps(me()) + "\n").encode(), 0)
      try:
        yield check
      finally:
        if _is_there(file, path):
          path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
          fcntl.flock(file, fcntl.LOCK_UN)  # for forked children too
      return
    finally:
      os.close(file)
