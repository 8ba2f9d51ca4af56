"""The place of a run directory: on a disk, or on gs:// with a copy on a disk.

Orbax writes checkpoints to gs:// itself, from all processes. A bucket cannot
append to files: a run works on a local copy, and uploads changed files, each of
which is whole or absent. Files that make others count are uploaded after them,
and removed before them (`_rank`).
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
from grpojax.runtime.files.run_lock import LOCK
from grpojax.runtime.processes import distributed, interrupts

Sync = Callable[..., None]  # `(lazily=False)`; see `opened`

REFERENCE = "reference_params"  # the reference policy, saved once
CHECKPOINTS = "checkpoints"  # STEP/, a `TrainState` each, the newest few
ORIGIN = ".origin"  # in a copy: the URL of its original
PUSH = 60  # seconds between two uploads of records for people to read

_BY_ORBAX = (REFERENCE, CHECKPOINTS)  # read and written by Orbax alone
_BEGUN = "config.json"  # of a run or of a model
_LAST = ("config.json", "summary.json")
_NOT_COPIED = re.compile(r"(^|/)\.|/$")
# Weights in other formats than safetensors; some are programs (pickle).
_NOT_READ = (".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth")

# gcsfs logs errors that it raises as well.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def is_url(path: str | os.PathLike) -> bool:
  """Returns True for gs://BUCKET/DIR; ValueError for any other URL."""
  scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path))
  if scheme and scheme[0] != "gs://":  # the rest may hold a password
    raise ValueError(
      f"{scheme[0]}... cannot be used, only gs:// can: mount the bucket "
      "(mount-s3, gcsfuse, ...) and give the path; docs/hosts.md says how"
    )
  return scheme is not None


def checkpoints(path: str | os.PathLike) -> epath.Path:
  """Returns the place of a run's checkpoints, on gs:// for a copy."""
  return origin(path) / CHECKPOINTS


def reference(path: str | os.PathLike) -> epath.Path:
  """Returns the place of a run's reference policy, on gs:// for a copy."""
  return origin(path) / REFERENCE


def origin(local: str | os.PathLike) -> epath.Path:
  """Returns the original of a copied directory, else the directory itself."""
  file = pathlib.Path(local) / ORIGIN
  return epath.Path(file.read_text() if file.is_file() else local)


@contextlib.contextmanager
def naming(local: pathlib.Path, url: str) -> Iterator[None]:
  """Replaces the path of a copy in error messages by the original's URL."""
  try:
    yield
  except (ValueError, SystemExit, disk.WriteFailed) as error:
    if len(error.args) != 1 or str(local) not in str(error):
      raise
    raise type(error)(str(error).replace(str(local), url)) from error


# Files on gs://.


@contextlib.contextmanager
def _errors(url: str, verb: str, kind: type[Exception]) -> Iterator[None]:
  """Turns any error of gs:// into one sentence."""
  try:
    yield
  except (kind, interrupts.Left):
    raise
  except Exception as error:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    raise kind(f"{url} cannot be {verb}: {text}") from error


def _file_system(url: str) -> tuple[Any, str]:
  """Returns the file system of gs://, and the path of a directory in it."""
  try:
    fs, root = fsspec.core.url_to_fs(url)
  except ImportError as error:
    raise ValueError(f"{url} needs pip install 'grpojax[gcs]'") from error
  root = root.rstrip("/")
  if "/" not in root.strip("/"):
    raise ValueError(f"{url}: give gs://BUCKET/DIR")
  return fs, root


def _rank(name: str) -> int:
  """Returns a file's place in the order of uploads; removal is in reverse."""
  if name == _BEGUN:
    return -1
  last = name.rpartition("/")[2]
  return _LAST.index(last) + 1 if last in _LAST else 0


def _list_remote(fs: Any, root: str, url: str) -> list[str]:
  """Lists the files of a run or a model but Orbax's; ValueError without."""
  fs.invalidate_cache()
  try:
    names = [path[len(root) + 1 :] for path in fs.find(root)]
  except FileNotFoundError:
    return []
  names = [name for name in names if name and not _NOT_COPIED.search(name)]
  if names and _BEGUN not in names:  # it may be terabytes
    raise ValueError(
      f"{url} is not empty, and no model and no run: there is no {_BEGUN} in it"
    )
  return [name for name in names if name.split("/")[0] not in _BY_ORBAX]


def _list_local(local: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Returns the size and mtime of each file of a copy that is uploaded."""
  states = {}
  for folder, _, files in os.walk(local):
    for path in (pathlib.Path(folder, file) for file in files):
      name = path.relative_to(local).as_posix()
      if not _NOT_COPIED.search(name):
        about = path.stat()
        states[name] = about.st_size, about.st_mtime_ns
  return states


def _download(fs, root: str, local: pathlib.Path, names: Iterable[str]) -> None:
  """Copies files from gs://, each whole or not at all.

  A copy gets the modification time of its original; one with that time is kept.
  """
  for name in names:
    target = local / name
    if local.resolve() not in target.resolve().parents:
      raise ValueError(f"{root} has a file of the name {name!r}")
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
  """Makes gs:// equal to the copy; returns the copy's state, for `before`."""
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
  """Holds the lock of a run directory, an object that only one can create.

  A killed process leaves it for a person to remove. The ValueError names its
  holder.
  """
  path, mine = f"{root}/{LOCK}", json.dumps(run_lock.me()).encode()

  def unlock() -> None:
    with contextlib.suppress(Exception):  # the next run says how to remove it
      fs.invalidate_cache()
      if fs.cat_file(path) == mine:  # else it was removed by hand
        fs.rm_file(path)

  with contextlib.ExitStack() as stack:
    # A signal amid the request would leave an object that nobody removes.
    stopped = interrupts.deferred(*interrupts.BOTH)
    with stopped, _errors(url, "locked", ValueError):
      try:
        fs.pipe_file(path, mine, mode="create")
      except FileExistsError as error:
        fs.invalidate_cache()
        raise run_lock.refusal(
          url,
          fs.cat_file(path),
          "; wait for it or end it. If it is dead (it was killed, or its "
          f"machine is gone), remove its lock: gcloud storage rm {url}/{LOCK}",
        ) from error
      stack.callback(unlock)
    yield


# Run directories to write to, and to read.


def _make_sync(fs: Any, root: str, local: pathlib.Path, url: str) -> Sync:
  """Returns the function of `opened` that uploads changes."""
  uploaded, last = _list_local(local), time.monotonic()

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
  """Makes a copy of a run on gs:// for the duration of the context."""
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
            f"{url} to go on from there",
            file=sys.stderr,
          )
          raise


@contextlib.contextmanager
def opened(path: str | os.PathLike) -> Iterator[tuple[pathlib.Path, Sync]]:
  """Opens a run directory to write to: the directory, or a copy of gs://.

  Yields the directory, and a function that uploads its changes; with
  `lazily=True` at most every `PUSH` seconds, and failures are tried again.

  Raises:
    ValueError: in all processes, if one of them cannot use it.
    interrupts.Left: SIGTERM came to a single process, on gs://.
    disk.WriteFailed: the last changes could not be uploaded; a line says where
      they are on the disk.
  """
  if not is_url(path):
    yield pathlib.Path(path), lambda lazily=False: None
    return
  distributed.gather(None)  # connects now: in a minute it would be too late
  with contextlib.ExitStack() as stack:
    # In several processes JAX listens to SIGTERM, to which it is passed on.
    if not distributed.several():
      stack.enter_context(interrupts.raising_sigterm())
    with distributed.agreed():
      url = os.fspath(path).rstrip("/")
      copy = stack.enter_context(_working_copy(url))
    yield copy


def local(path: str | os.PathLike) -> pathlib.Path:
  """Returns the directory of a model or a run to read.

  For gs:// and for a .gguf file it is a copy in ~/.cache/grpojax.
  """
  if gguf_directory.is_named(path):
    return gguf_directory.local(path)
  if not is_url(path):
    return pathlib.Path(path)
  return _cached_copy(os.fspath(path).rstrip("/"))


@functools.cache
def _cached_copy(url: str) -> pathlib.Path:
  """Downloads changed files of a model or a run; ValueError without any."""
  fs, root = _file_system(url)
  mark = fsspec.utils.tokenize(url)[:12]
  path = disk.user_cache() / f"{url.rpartition('/')[2]}-{mark}"
  with _errors(url, "read", ValueError):
    names = _list_remote(fs, root, url)
    names = [name for name in names if not name.endswith(_NOT_READ)]
    if not names:
      raise ValueError(f"there is no model and no run at {url}")
    for name in _list_local(path).keys() - set(names):
      (path / name).unlink(missing_ok=True)
    _download(fs, root, path, names)
  (path / ORIGIN).write_text(url)
  return path
