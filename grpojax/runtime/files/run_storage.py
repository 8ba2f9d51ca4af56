"""Storage of a run directory: a disk, or gs:// with a local copy.

Orbax writes checkpoints directly to gs://, from all processes. Buckets cannot
append to files, so a run works on a local copy and uploads changed files, each
whole or not at all. A file that marks other files as valid is uploaded
after them and removed before them (`_rank`).
"""

import contextlib
import functools
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import fsspec
from etils import epath

from grpojax.runtime.files import disk, gguf_directory, records, run_lock
from grpojax.runtime.processes import distributed, interrupts

Sync = Callable[..., None]  # `(lazily=False)`; see `opened`

REFERENCE = "reference_params"  # the reference policy, saved once
CHECKPOINTS = "checkpoints"  # STEP/ with a `TrainState`
ORIGIN = ".origin"  # file in a copy: the original's URL
PUSH = 60  # seconds between uploads of records

_BY_ORBAX = (REFERENCE, CHECKPOINTS)  # only Orbax reads and writes these
_BEGUN = "config.json"  # marks a run or a model
_LAST = ("config.json", "summary.json")  # uploaded last, also in folders
_NOT_COPIED = re.compile(r"(^|/)\.|/$")
# Weights in formats other than safetensors; some contain code (pickle).
_NOT_READ = (".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth")

# The log of gcsfs only repeats errors that it raises.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def is_url(path: str | os.PathLike) -> bool:
  """Returns True for gs://BUCKET/DIR; ValueError for any other URL."""
  scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path))
  if scheme and scheme[0] != "gs://":  # the full URL may contain a password
    raise ValueError(
      f"{scheme[0]}... cannot be used, only gs://: mount the bucket (mount-s3, "
      "gcsfuse, ...) and give its path (see docs/hosts.md)"
    )
  return scheme is not None


def checkpoints(path: str | os.PathLike) -> epath.Path:
  """Returns the path of a run's checkpoints, on gs:// for a local copy."""
  return origin(path) / CHECKPOINTS


def reference(path: str | os.PathLike) -> epath.Path:
  """Returns the path of the reference policy, on gs:// for a local copy."""
  return origin(path) / REFERENCE


def origin(local: str | os.PathLike) -> epath.Path:
  """Returns the URL of a local copy; other directories stay the same."""
  file = pathlib.Path(local) / ORIGIN
  return epath.Path(file.read_text() if file.is_file() else local)


@contextlib.contextmanager
def naming(local: pathlib.Path, url: str) -> Iterator[None]:
  """Replaces a local copy's path in error messages by the original URL."""
  try:
    yield
  except (ValueError, SystemExit, disk.WriteFailed) as error:
    if len(error.args) != 1 or str(local) not in str(error):
      raise
    raise type(error)(str(error).replace(str(local), url)) from error


# Files on gs://.


@contextlib.contextmanager
def _errors(url: str, verb: str, kind: type[Exception]) -> Iterator[None]:
  """Converts errors of gs:// to type `kind`, with a message of one sentence."""
  try:
    yield
  except (kind, interrupts.Left):
    raise
  except Exception as error:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    raise kind(f"{url} cannot be {verb}: {text}") from error


def _file_system(url: str) -> tuple[Any, str]:
  """Returns the file system of gs:// and the path of a directory in it."""
  try:
    fs, root = fsspec.core.url_to_fs(url)
  except ImportError as error:
    raise ValueError(f"{url} needs pip install 'grpojax[gcs]'") from error
  root = root.rstrip("/")
  if "/" not in root.strip("/"):
    raise ValueError(f"{url} has no directory: give gs://BUCKET/DIR")
  return fs, root


def _rank(name: str) -> int:
  """Returns a file's place in the order of uploads; removal is in reverse."""
  if name == _BEGUN:
    return -1
  last = name.rpartition("/")[2]
  return _LAST.index(last) + 1 if last in _LAST else 0


def _list_remote(fs: Any, root: str, url: str) -> list[str]:
  """Lists files except Orbax's; ValueError if they include no config.json."""
  fs.invalidate_cache()
  try:
    names = [path[len(root) + 1 :] for path in fs.find(root)]
  except FileNotFoundError:
    return []
  names = [name for name in names if name and not _NOT_COPIED.search(name)]
  if names and _BEGUN not in names:  # the directory may hold terabytes
    raise ValueError(
      f"{url} has files but no {_BEGUN}: give a run, a model or a new directory"
    )
  return [name for name in names if name.split("/")[0] not in _BY_ORBAX]


def _list_local(local: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Returns the size and modification time of each file of a copy."""
  states = {}
  for folder, _, files in os.walk(local):
    for path in (pathlib.Path(folder, file) for file in files):
      name = path.relative_to(local).as_posix()
      if not _NOT_COPIED.search(name):
        stat = path.stat()
        states[name] = stat.st_size, stat.st_mtime_ns
  return states


def _download(fs, root: str, local: pathlib.Path, names: Iterable[str]) -> None:
  """Copies files from gs://, each whole or not at all.

  A copy gets the modification time of its original, and is made again only if
  these times differ.
  """
  for name in names:
    target = local / name
    if local.resolve() not in target.resolve().parents:
      raise ValueError(f"{root} has an invalid file name: {name!r}")
    seconds = fs.modified(f"{root}/{name}").timestamp()
    modified = int(seconds * 1e6) * 1000
    if target.is_file() and target.stat().st_mtime_ns == modified:
      continue
    target.parent.mkdir(parents=True, exist_ok=True)
    with records.replacing(target) as temporary:
      fs.get_file(f"{root}/{name}", str(temporary))
      os.utime(temporary, ns=(modified, modified))


def _upload(
  fs: Any, root: str, local: pathlib.Path, before: dict[str, Any]
) -> dict[str, Any]:
  """Uploads changes since `before`; returns the next call's `before`."""
  now = _list_local(local)
  for name in sorted(before.keys() - now.keys(), key=_rank, reverse=True):
    with contextlib.suppress(FileNotFoundError):
      fs.rm_file(f"{root}/{name}")
  for name in sorted(now, key=lambda name: (_rank(name), name)):
    if before.get(name) != now[name]:
      fs.put_file(str(local / name), f"{root}/{name}")
  return now


@contextlib.contextmanager
def _locked(fs: Any, root: str, url: str) -> Iterator[None]:
  """Holds the lock of a run on gs://, which only one process can create.

  If the lock exists, the ValueError names its holder. Only the user can remove
  the lock of a killed process.
  """
  path = f"{root}/{run_lock.LOCK}"
  mine = json.dumps(run_lock.me()).encode()

  def unlock() -> None:
    with contextlib.suppress(Exception):  # the next run reports the lock
      fs.invalidate_cache()
      if fs.cat_file(path) == mine:  # not if the user removed it meanwhile
        fs.rm_file(path)

  with contextlib.ExitStack() as stack:
    # A signal during the request could leave the lock behind.
    stopped = interrupts.deferred(*interrupts.BOTH)
    with stopped, _errors(url, "locked", ValueError):
      try:
        fs.pipe_file(path, mine, mode="create")
      except FileExistsError as error:
        fs.invalidate_cache()
        raise run_lock.refusal(
          url,
          fs.cat_file(path),
          "; wait for it or end it. If it was killed or its machine is gone, "
          f"remove its lock: gcloud storage rm {url}/{run_lock.LOCK}",
        ) from error
      stack.callback(unlock)
    yield


# Local copies.


def _make_sync(fs: Any, root: str, local: pathlib.Path, url: str) -> Sync:
  """Returns `sync(lazily=False)`, which uploads changes (see `opened`)."""
  uploaded = _list_local(local)
  last = time.monotonic()

  def sync(lazily: bool = False) -> None:
    nonlocal uploaded, last
    if lazily and time.monotonic() - last < PUSH:
      return
    last = time.monotonic()
    try:
      with _errors(url, "written", disk.WriteFailed):
        uploaded = _upload(fs, root, local, uploaded)
    except disk.WriteFailed as error:
      if not lazily:
        raise
      print(f"{error}; trying again", file=sys.stderr, flush=True)

  return sync


@contextlib.contextmanager
def _working_copy(url: str) -> Iterator[tuple[pathlib.Path, Sync]]:
  """Locks a run on gs://; yields a local copy, which it uploads at the end."""
  fs, root = _file_system(url)
  local = pathlib.Path(tempfile.mkdtemp(prefix="grpojax-run-"))
  with contextlib.ExitStack() as removal, contextlib.ExitStack() as stack:
    removal.callback(shutil.rmtree, local, ignore_errors=True)
    stack.enter_context(naming(local, url))
    if distributed.is_main():
      stack.enter_context(_locked(fs, root, url))
    with _errors(url, "read", ValueError):
      _download(fs, root, local, _list_remote(fs, root, url))
    (local / ORIGIN).write_text(url)
    if not distributed.is_main():
      yield local, lambda lazily=False: None
      return
    sync = _make_sync(fs, root, local, url)
    try:
      yield local, sync
    finally:
      with interrupts.deferred(signal.SIGTERM):
        try:
          sync()
        except disk.WriteFailed:
          removal.pop_all()
          print(
            f"files that could not be uploaded are in {local}: copy them to "
            f"{url} to resume from there",
            file=sys.stderr,
          )
          raise


@contextlib.contextmanager
def opened(path: str | os.PathLike) -> Iterator[tuple[pathlib.Path, Sync]]:
  """Opens a run directory for writing; on gs:// a local copy of it.

  Yields the directory and a function that uploads its changes. With
  `lazily=True` it uploads at most every `PUSH` seconds and retries failures.

  Raises:
    ValueError: in all processes, if a process cannot use the directory.
    interrupts.Left: SIGTERM arrived (only gs:// with a single process).
    disk.WriteFailed: the last changes could not be uploaded; a printed line
      names the local copy, which stays.
  """
  if not is_url(path):
    yield pathlib.Path(path), lambda lazily=False: None
    return
  distributed.gather(None)  # connect now: after the download it could time out
  with contextlib.ExitStack() as stack:
    # With several processes JAX handles SIGTERM.
    if not distributed.several():
      stack.enter_context(interrupts.raising_sigterm())
    with distributed.agreed():
      url = os.fspath(path).rstrip("/")
      copy = stack.enter_context(_working_copy(url))
    yield copy


def local(path: str | os.PathLike) -> pathlib.Path:
  """Returns a local path; gs:// and .gguf are copied to ~/.cache/grpojax."""
  if gguf_directory.is_named(path):
    return gguf_directory.local(path)
  if not is_url(path):
    return pathlib.Path(path)
  return _cached_copy(os.fspath(path).rstrip("/"))


@functools.cache
def _cached_copy(url: str) -> pathlib.Path:
  """Downloads changed files of a model or run; ValueError if none exist."""
  fs, root = _file_system(url)
  mark = fsspec.utils.tokenize(url)[:12]
  path = disk.user_cache() / f"{url.rpartition('/')[2]}-{mark}"
  with _errors(url, "read", ValueError):
    names = _list_remote(fs, root, url)
    names = [name for name in names if not name.endswith(_NOT_READ)]
    if not names:
      raise ValueError(f"no model and no run at {url}: check the URL")
    for name in _list_local(path).keys() - set(names):
      (path / name).unlink(missing_ok=True)
    _download(fs, root, path, names)
  (path / ORIGIN).write_text(url)
  return path
