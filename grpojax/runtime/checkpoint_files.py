"""Where checkpoints lie, and which of them are whole."""

import os
import pathlib

from etils import epath

from grpojax.runtime import disk

_TORN = "*.orbax-checkpoint-tmp"  # what Orbax has not finished


def _is_gcs(path: epath.Path) -> bool:
  return os.fspath(path).startswith("gs://")


def absolute(path: str | os.PathLike) -> epath.Path:
  """A path as Orbax wants it, of a disk or gs://."""
  path = epath.Path(path)
  return path if _is_gcs(path) else path.absolute()


def remove_torn(folder: epath.Path) -> None:
  """Removes what Orbax has not finished; on gs:// it does so itself."""
  if not _is_gcs(folder):
    disk.remove_all(pathlib.Path(folder), _TORN)


def complete(folder: str | os.PathLike) -> list[int]:
  """Steps of the checkpoints in a folder that are whole, ascending.

  Args:
    folder: may be missing, and may hold other things.
  """
  folder = epath.Path(folder)
  # Where nothing can be renamed, Orbax says so by a file when it is done.
  last = "commit_success.txt" if _is_gcs(folder) else "_CHECKPOINT_METADATA"
  names = (path.parent.name for path in folder.glob(f"*/{last}"))
  return sorted(int(name) for name in names if name.isdecimal())


def last_good(folder: str | os.PathLike) -> str:
  """Where a run goes on from, in words.

  Args:
    folder: of its checkpoints, which may not exist.
  """
  done = complete(folder)
  if not done:
    return "there is no checkpoint yet"
  return f"the last good checkpoint is {epath.Path(folder) / str(done[-1])}"
