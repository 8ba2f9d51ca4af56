"""Directories in buckets (gs://, s3://, what fsspec knows): copies on a disk.

A bucket has no appending, no renaming and no locks, and is far away; records,
models and their checks want all four. So a program works on a copy of its own
on a local disk, and what changes there is copied to the bucket
(`bucket_files.push`).
Checkpoints on gs:// go there straight, from all processes: Orbax knows it.
Orbax knows no other kind of bucket: there checkpoints are copied too, and only
a run of one process can be.

What stands in place of a disk's promises:

- A file in a bucket is whole or not there. What depends on other files comes
  after them, and goes before them: a directory of which only a part
  has been copied is never taken for a whole one.
- The lock is a lease, see `bucket_lock`: a process that was killed keeps others
  out for a minute.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath

from grpojax.runtime import (
  bucket_files,
  bucket_lock,
  disk,
  interrupts,
  run_lock,
)
from grpojax.runtime.bucket_files import Bucket

PUSH = 60
"""Seconds between two copies of what is only read by people."""

# Beside the weights of models, in other formats; some are programs (pickle).
_NOT_READ = (".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth")
_WENT_WELL = (None, 0, interrupts.EXIT_PREEMPTED)  # exit codes
ORIGIN = ".origin"  # in a copy: the URL of what has stayed in the bucket


def is_url(path: str | os.PathLike) -> bool:
  """Whether it names a directory in a bucket."""
  return re.match(r"[a-z][a-z0-9]+://", os.fspath(path)) is not None


def origin(local: str | os.PathLike) -> epath.Path:
  """Where a directory's checkpoints are: there, or in the bucket it is of."""
  file = pathlib.Path(local) / ORIGIN
  return epath.Path(file.read_text() if file.is_file() else local)


@contextlib.contextmanager
def naming(local: pathlib.Path, url: str) -> Iterator[None]:
  """What goes wrong with a copy is said of what it is a copy of."""
  try:
    yield
  except (ValueError, SystemExit, disk.WriteFailed) as error:
    if len(error.args) != 1 or str(local) not in str(error):
      raise
    raise type(error)(str(error).replace(str(local), url)) from error


def _whole(listed: dict[str, Any], stays: Sequence[str]) -> dict[str, Any]:
  """Files without those of checkpoints that were not copied to their end."""
  whole = bucket_files.whole(listed)
  return {
    name: info
    for name, info in listed.items()
    if name.split("/")[0] not in stays or name.startswith(whole)
  }


def _find_run(bucket: Bucket, stays: Sequence[str]) -> dict[str, Any]:
  """Files of the run that is there, or none.

  Raises:
    ValueError: there is something else.
  """
  there = bucket_files.listed(bucket._replace(stays=()))
  if there and bucket_files.BEGUN not in there:  # it may be terabytes
    raise ValueError(
      f"{bucket.url} is not empty and has no {bucket_files.BEGUN} of a run, so "
      "it is not a run: give a new or an empty directory as --run_dir"
    )
  whole = _whole(there, stays)
  if not bucket.stays:  # uploads that were cut short; else they are Orbax's
    bucket.known.update(dict.fromkeys(there.keys() - whole.keys(), (0, 0)))
  return {n: i for n, i in whole.items() if n.split("/")[0] not in bucket.stays}


@contextlib.contextmanager
def opened(
  url: str, stays: Sequence[str], is_main: bool, several: bool
) -> Iterator[tuple[pathlib.Path, Callable[..., None]]]:
  """A working copy of a run directory in a bucket, as long as this lasts.

  Args:
    url: of the directory, which may not exist.
    stays: names in it that Orbax itself reads and writes; not on gs:// they
      are copied too.
    is_main: whether this process is the one that writes.
    several: whether there are others.

  Yields:
    The copy; and a function that copies what has changed to the bucket: all,
    or with `lazily` only if that has not been done for `PUSH` seconds, and then
    saying no more than a line where the bucket does not take it.

  Raises:
    ValueError: it cannot be read or written, is in use, or is not gs:// while
      there are several processes.
    disk.WriteFailed: on leaving, if what is new cannot be copied.
  """
  fs, root = bucket_files.find(url)
  straight = url.startswith("gs://")
  if several and not straight:
    raise ValueError(
      f"{url}: Orbax writes checkpoints of several processes to disks and "
      "gs:// only; mount the bucket (mount-s3) and give the path in it"
    )
  with contextlib.ExitStack() as stack:
    local = pathlib.Path(tempfile.mkdtemp(prefix="grpojax-run-"))
    kept = []
    stack.callback(lambda: kept or shutil.rmtree(local, ignore_errors=True))
    stack.enter_context(naming(local, url))
    bucket = Bucket(url, fs, root, local, tuple(stays) * straight, {})
    is_held = lambda: False
    if is_main:
      is_held = stack.enter_context(bucket_lock.hold(bucket))
    with bucket_files.reading(url):
      bucket_files.pull(bucket, _find_run(bucket, stays))
    if straight:
      (local / ORIGIN).write_text(url)
    sync = _publisher(bucket, is_held)
    if is_main:
      stack.push(_leaver(bucket, is_held, sync, kept))
    yield local, sync if is_main else lambda lazily=False: None


def _publisher(
  bucket: Bucket, is_held: Callable[[], bool]
) -> Callable[..., None]:
  """What `opened` yields."""
  last = [time.monotonic()]

  def check() -> None:
    if not is_held():
      raise disk.WriteFailed(
        f"{bucket.url} was taken over by another process, or its "
        f"{run_lock.LOCK} was removed"
      )

  def sync(lazily: bool = False) -> None:
    if lazily and time.monotonic() - last[0] < PUSH:
      return
    check()
    last[0] = time.monotonic()
    try:
      bucket_files.push(bucket, check)
    except disk.WriteFailed as error:
      if not lazily or not is_held():
        raise
      print(f"{error}; trying again", file=sys.stderr, flush=True)

  return sync


def _leaver(bucket, is_held, sync, kept: list[bool]):
  """The last copy, as an exit callback; keeps what the bucket does not take."""

  def leave(kind, error, traceback) -> None:
    try:
      sync()
    except disk.WriteFailed as refused:
      if is_held():
        kept.append(True)
        print(
          f"what could not be copied is in {bucket.local}: copy it to "
          f"{bucket.url} to go on from there",
          file=sys.stderr,
        )
      if error is None or getattr(error, "code", 1) in _WENT_WELL:
        raise  # or it is less than what has happened already
      print(f"error: {refused}", file=sys.stderr)

  return leave


def _version(info: dict[str, Any]) -> str:
  """What changes when a file in a bucket does."""
  names = ("size", "generation", "etag", "ETag", "LastModified", "mtime")
  return json.dumps([str(info.get(name)) for name in names])


def _cache() -> pathlib.Path:
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(base) / "grpojax"


def _refresh(bucket: Bucket, stays: Sequence[str], file: pathlib.Path) -> None:
  """Makes a copy what the bucket is; `file` says what it was."""
  listed = _whole(bucket_files.listed(bucket), stays)
  if bucket_files.BEGUN not in listed:
    raise ValueError(f"there is no model and no run at {bucket.url}")
  listed = {n: i for n, i in listed.items() if not n.endswith(_NOT_READ)}
  versions = {name: _version(info) for name, info in listed.items()}
  try:
    known = json.loads(file.read_text())
  except (OSError, ValueError):
    known = {}
  have = bucket_files.files(bucket)
  for name in have.keys() - listed.keys():
    (bucket.local / name).unlink()
  same = {n for n in have if known.get(n) == versions.get(n)}
  bucket_files.pull(bucket, {n: i for n, i in listed.items() if n not in same})
  partial = file.with_suffix(".partial")
  partial.write_text(json.dumps(versions))
  os.replace(partial, file)


@functools.cache
def local(url: str, stays: tuple[str, ...] = ()) -> pathlib.Path:
  """A copy of a model or a run in a bucket, to be read only.

  Copies stay in ~/.cache/grpojax (XDG_CACHE_HOME); what has not changed in the
  bucket is not copied again.

  Args:
    url: of the directory.
    stays: as in `opened`.

  Raises:
    ValueError: there is nothing, or it cannot be read.
  """
  fs, root = bucket_files.find(url)
  straight = url.startswith("gs://")
  mark = hashlib.sha256(url.encode()).hexdigest()[:12]
  copy = _cache() / f"{url.rstrip('/').rpartition('/')[2]}-{mark}"
  copy.parent.mkdir(parents=True, exist_ok=True)
  bucket = Bucket(url, fs, root, copy, tuple(stays) * straight, {})
  with open(copy.with_name(f"{copy.name}.lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # gone with the file
    with bucket_files.reading(url):
      for attempt in range(3):
        try:
          _refresh(bucket, stays, copy.with_name(f"{copy.name}.json"))
          break
        except FileNotFoundError:  # a run that trains removes checkpoints
          if attempt == 2:
            raise
    if straight:
      (copy / ORIGIN).write_text(url)
  return copy
