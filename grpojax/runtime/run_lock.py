"""One process a run directory: a lock that dies with its process.

The lock is the kernel's (flock) on an open file, not the file: it is gone the
moment its process is, however that ended, and the file that stays behind says
only who held it last. Reading a run needs no lock.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import pathlib
import socket
import sys
from collections.abc import Iterator

LOCK = ".lock"  # in the run directory


def _holder(file: int) -> str:
  """Who wrote the file, in words."""
  try:
    held = json.loads(os.pread(file, 2**16, 0).decode())
    return (
      f"process {held['pid']} on {held['host']} since {held['since']} "
      f"({held['command']})"
    )
  except (OSError, ValueError, KeyError, TypeError):
    return "another process"  # it has not written who it is yet


def _write(file: int) -> None:
  now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
  me = {
    "pid": os.getpid(),
    "host": socket.gethostname(),
    "since": now,
    "command": " ".join(sys.argv)[:200],
  }
  os.ftruncate(file, 0)
  os.pwrite(file, (json.dumps(me) + "\n").encode(), 0)


@contextlib.contextmanager
def hold(directory: str | os.PathLike) -> Iterator[None]:
  """Holds a run directory's lock while the context lasts.

  The file descriptor is not inherited by programs that are started meanwhile. A
  child that is forked without starting a program shares the lock, as flock has
  it: the lock is let go of when the context ends here, or where this process is
  killed, when the last such child has ended too.

  On a file system that has no locks (some network mounts), a line says so and
  nothing is locked.

  Args:
    directory: of the run; made where it does not exist.

  Raises:
    ValueError: another process holds it; says which.
    OSError: the directory or the file cannot be made.
  """
  path = pathlib.Path(directory)
  path.mkdir(parents=True, exist_ok=True)
  file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
  try:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      _write(file)
    except BlockingIOError:
      raise ValueError(
        f"{directory} is in use by {_holder(file)}; wait for it, end it, or "
        "give another directory"
      ) from None
    except OSError as error:
      if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        raise
      print(
        f"{directory} is on a file system without locks: nothing keeps another "
        "process from writing there too"
      )
    yield
  finally:
    with contextlib.suppress(OSError):
      fcntl.flock(file, fcntl.LOCK_UN)  # also for children that were forked
    os.close(file)
