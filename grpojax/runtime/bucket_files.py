"""Files of a directory in a bucket, and their copies on a disk."""

import contextlib
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import fsspec

from grpojax.runtime import disk

BEGUN = "config.json"  # in the directory itself: of a run, or of a model
_LAST = ("config.json", "_CHECKPOINT_METADATA", "summary.json")
_NOT_COPIED = re.compile(r"(^|/)\.|\.orbax-checkpoint-tmp(/|$)|/$")

# It warns of each request, and logs what it then raises.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


class Bucket(NamedTuple):
  """A directory in a bucket, and its copy.

  Attributes:
    url: as it was given.
    fs: fsspec's file system.
    root: the directory, as `fs` names it.
    local: its copy on a disk.
    stays: names in it that are not copied.
    known: name -> what the copy was when both were the same.
  """

  url: str
  fs: Any
  root: str
  local: pathlib.Path
  stays: tuple[str, ...]
  known: dict[str, tuple[int, int]]


def find(url: str) -> tuple[Any, str]:
  """The file system and the path in it."""
  scheme = url.partition(":")[0]
  instead = {"file": "a path", "local": "a path", "gcs": "gs://"}.get(scheme)
  if instead:
    raise ValueError(f"{url}: give {instead} instead of {scheme}://")
  try:
    fs, root = fsspec.core.url_to_fs(url)
  except ImportError as error:
    extra = {"gs": "gcs", "s3": "s3"}.get(scheme)
    todo = f"pip install 'grpojax[{extra}]'" if extra else str(error)
    raise ValueError(f"{url} needs another package: {todo}") from error
  except ValueError as error:
    raise ValueError(f"{url}: {error}") from error
  if "/" not in root.strip("/"):
    raise ValueError(f"{url} is a whole bucket: give a directory in it")
  return fs, root.rstrip("/")


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
  """What a bucket answers that is no file, in a sentence."""
  try:
    yield
  except ValueError:
    raise
  except Exception as error:
    raise ValueError(f"{url} cannot be read: {_words(error)}") from error


@contextlib.contextmanager
def writing(url: str) -> Iterator[None]:
  """What a bucket does not take, as `disk.WriteFailed`."""
  try:
    yield
  except (disk.WriteFailed, FileExistsError):
    raise
  except Exception as error:
    raise disk.WriteFailed(
      f"{url} cannot be written: {_words(error)}"
    ) from error


def _words(error: BaseException) -> str:
  text = " ".join(str(error).split())
  return f"{type(error).__name__}: {text[:300]}"


def _rank(name: str) -> int:
  """In which order files are copied; they are removed the other way round."""
  if name == BEGUN:
    return -1
  last = name.rpartition("/")[2]
  return _LAST.index(last) + 1 if last in _LAST else 0


def _is_copied(name: str, stays: Sequence[str]) -> bool:
  return name.split("/")[0] not in stays and not _NOT_COPIED.search(name)


def _state(path: pathlib.Path) -> tuple[int, int]:
  about = path.stat()
  return about.st_size, about.st_mtime_ns


def files(bucket: Bucket) -> dict[str, tuple[int, int]]:
  """Files of the copy that belong into the bucket."""
  found = {}
  for folder, _, files in os.walk(bucket.local):
    for file in files:
      path = pathlib.Path(folder, file)
      name = path.relative_to(bucket.local).as_posix()
      if _is_copied(name, bucket.stays):
        with contextlib.suppress(FileNotFoundError):  # a checkpoint's end
          found[name] = _state(path)
  return found


def pull(bucket: Bucket, wanted: dict[str, Any]) -> None:
  """Copies files from the bucket, each whole or not at all."""
  for name in wanted:
    target = bucket.local / name
    if bucket.local.resolve() not in target.resolve().parents:
      raise ValueError(f"{bucket.url} has a file of the name {name!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    bucket.fs.get_file(f"{bucket.root}/{name}", str(partial))
    os.replace(partial, target)
    bucket.known[name] = _state(target)


def listed(bucket: Bucket) -> dict[str, Any]:
  """Files in the bucket that are copied, with what is said of them."""
  bucket.fs.invalidate_cache()
  with reading(bucket.url):
    try:
      found = bucket.fs.find(bucket.root, detail=True)
    except FileNotFoundError:
      return {}
  names = {path[len(bucket.root) + 1 :]: info for path, info in found.items()}
  return {n: i for n, i in names.items() if n and _is_copied(n, bucket.stays)}


def whole(names: Iterable[str]) -> tuple[str, ...]:
  """Directories, each with a / at its end, of whole checkpoints."""
  ends = (name for name in names if name.endswith("/_CHECKPOINT_METADATA"))
  return tuple(name.rpartition("/")[0] + "/" for name in ends)


def _remove(bucket: Bucket, names: Iterable[str]) -> None:
  for name in sorted(names, key=_rank, reverse=True):
    with contextlib.suppress(FileNotFoundError):
      bucket.fs.rm_file(f"{bucket.root}/{name}")
    del bucket.known[name]


def _put(bucket: Bucket, name: str, state: tuple[int, int]) -> None:
  try:
    bucket.fs.put_file(str(bucket.local / name), f"{bucket.root}/{name}")
    bucket.known[name] = state
  except FileNotFoundError:
    if (bucket.local / name).exists():  # or it has just been removed
      raise


def push(bucket: Bucket, check: Callable[[], None] = lambda: None) -> None:
  """Makes the bucket what the copy is.

  Old checkpoints go when new ones have come: there is always one.

  Args:
    bucket: from `bucket.opened`.
    check: called before each file; may raise.

  Raises:
    disk.WriteFailed: the bucket does not take it.
  """
  now = files(bucket)
  gone = bucket.known.keys() - now.keys()
  old = whole(bucket.known)
  # One that is being removed may still have its account.
  ruins = tuple(x for x in old if any(name.startswith(x) for name in gone))
  now = {n: state for n, state in now.items() if not n.startswith(ruins)}
  gone = bucket.known.keys() - now.keys()
  later = {name for name in gone if name.startswith(old)}
  with writing(bucket.url):
    _remove(bucket, gone - later)
    for name in sorted(now, key=lambda name: (_rank(name), name)):
      if bucket.known.get(name) != now[name]:
        check()
        _put(bucket, name, now[name])
    _remove(bucket, later)
