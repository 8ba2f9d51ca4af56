"""Directories in buckets (gs://, s3://, what fsspec knows): copies on a disk.

A bucket has no appending, no renaming and no locks, and is far away; records,
models and their checks need all four. So a program works on a copy on a local
disk, and what changes there is copied to the bucket. Checkpoints on gs:// go
there straight, from all processes. Orbax knows no other kind of bucket: there
checkpoints are copied too, and only a run of one process can be.

A file in a bucket is whole or not there. A file that makes others count is
copied after them and removed before them (`_rank`), so a directory of which
only a part has been copied is never taken for a whole one. (fsspec's own `put`
and `rsync` know no order.)

The lock is a lease: an object that is made only where there is none, and
written again every `BEAT` seconds. One that stays the same for `LEASE` seconds
is of a process that is gone, and is taken over. Two that do so within the same
moment, or one that slept for longer and wakes up, are not kept apart for a
beat: then the loser is told.
"""

import contextlib
import fcntl
import functools
import json
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import fsspec
from etils import epath

from grpojax.runtime.files import disk, records, run_lock
from grpojax.runtime.files.run_lock import LOCK
from grpojax.runtime.processes import interrupts

PUSH = 60  # seconds between two copies of what is only read by people
BEAT = 15  # seconds after which a lock that is held is written again
LEASE = 60  # seconds after which a lock that nobody writes again is nobody's

ORIGIN = ".origin"  # in a copy: the URL of what has stayed in the bucket
_BEGUN = "config.json"  # in the directory itself: of a run, or of a model
_WHOLE = "_CHECKPOINT_METADATA"  # the last file of a checkpoint
_LAST = ("config.json", _WHOLE, "summary.json")
_NOT_COPIED = re.compile(r"(^|/)\.|\.orbax-checkpoint-tmp(/|$)|/$")
# Beside the weights of models, in other formats; some are programs (pickle).
_NOT_READ = (".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth")
_WENT_WELL = (None, 0, interrupts.EXIT_PREEMPTED)  # exit codes

# It warns of each request, and logs what it then raises.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


class _Bucket(NamedTuple):
  """A directory in a bucket, and its copy.

  Attributes:
    url: URL of the directory.
    fs: fsspec's file system.
    root: path of the directory in `fs`.
    by_orbax: names in it of what Orbax writes.
    straight: True on gs://, where Orbax writes them there itself.
    local: path of the copy on a disk.
    copied: size and mtime of each file of the copy when both were the same.
  """

  url: str
  fs: Any
  root: str
  by_orbax: tuple[str, ...]
  straight: bool
  local: pathlib.Path
  copied: dict[str, tuple[int, int]]


def is_url(path: str | os.PathLike) -> bool:
  """Returns True where a path names a directory in a bucket."""
  return re.match(r"[a-z][a-z0-9]+://", os.fspath(path)) is not None


def origin(local: str | os.PathLike) -> epath.Path:
  """Returns the place of a directory's checkpoints: itself, or its bucket."""
  file = pathlib.Path(local) / ORIGIN
  return epath.Path(file.read_text() if file.is_file() else local)


@contextlib.contextmanager
def naming(local: pathlib.Path, url: str) -> Iterator[None]:
  """Names in errors about a copy what it is a copy of."""
  try:
    yield
  except (ValueError, SystemExit, disk.WriteFailed) as error:
    if len(error.args) != 1 or str(local) not in str(error):
      raise
    raise type(error)(str(error).replace(str(local), url)) from error


@contextlib.contextmanager
def _errors(url: str, verb: str, kind: type[Exception]) -> Iterator[None]:
  """Turns whatever a bucket answers that is no file into a sentence."""
  try:
    yield
  except (kind, FileExistsError):
    raise
  except Exception as error:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    raise kind(f"{url} cannot be {verb}: {text}") from error


def _connect(
  url: str, by_orbax: tuple[str, ...], local: pathlib.Path
) -> _Bucket:
  """Finds the file system of a URL; reads nothing yet."""
  scheme = url.partition(":")[0]
  instead = {"file": "a path", "local": "a path", "gcs": "gs://"}.get(scheme)
  if instead:
    raise ValueError(f"{url}: give {instead} instead of {scheme}://")
  try:
    fs, root = fsspec.core.url_to_fs(url)
  except ImportError as error:
    extra = {"gs": "gcs", "s3": "s3"}.get(scheme)
    remedy = f"pip install 'grpojax[{extra}]'" if extra else str(error)
    raise ValueError(f"{url} needs another package: {remedy}") from error
  except ValueError as error:
    raise ValueError(f"{url}: {error}") from error
  if "/" not in root.strip("/"):
    raise ValueError(f"{url} is a whole bucket: give a directory in it")
  straight = scheme == "gs"
  return _Bucket(url, fs, root.rstrip("/"), by_orbax, straight, local, {})


# Files in the bucket and in the copy.


def _rank(name: str) -> int:
  """Returns a file's place in the order of copying; removing is the reverse."""
  if name == _BEGUN:
    return -1
  last = name.rpartition("/")[2]
  return _LAST.index(last) + 1 if last in _LAST else 0


def _whole(names: Iterable[str]) -> tuple[str, ...]:
  """Returns the directories, each with a / at its end, of whole checkpoints."""
  return tuple(
    name.removesuffix(_WHOLE) for name in names if name.endswith(f"/{_WHOLE}")
  )


def _remote_files(bucket: _Bucket) -> dict[str, Any]:
  """Lists the files in the bucket, with fsspec's information on each."""
  bucket.fs.invalidate_cache()
  with _errors(bucket.url, "read", ValueError):
    try:
      infos = bucket.fs.find(bucket.root, detail=True)
    except FileNotFoundError:
      return {}
  names = {path[len(bucket.root) + 1 :]: info for path, info in infos.items()}
  return {n: i for n, i in names.items() if n and not _NOT_COPIED.search(n)}


def _to_copy(bucket: _Bucket, remote: dict[str, Any]) -> dict[str, Any]:
  """Leaves out what Orbax has not finished, or writes there itself."""
  whole = () if bucket.straight else _whole(remote)
  return {
    name: info
    for name, info in remote.items()
    if name.split("/")[0] not in bucket.by_orbax or name.startswith(whole)
  }


def _state(path: pathlib.Path) -> tuple[int, int]:
  about = path.stat()
  return about.st_size, about.st_mtime_ns


def _local_files(bucket: _Bucket) -> dict[str, tuple[int, int]]:
  """Lists the files of the copy that belong into the bucket."""
  states = {}
  for folder, _, files in os.walk(bucket.local):
    for file in files:
      path = pathlib.Path(folder, file)
      name = path.relative_to(bucket.local).as_posix()
      if not _NOT_COPIED.search(name):
        with contextlib.suppress(FileNotFoundError):  # a checkpoint's end
          states[name] = _state(path)
  return states


def _pull(bucket: _Bucket, names: Iterable[str]) -> None:
  """Copies files from the bucket, each whole or not at all."""
  for name in names:
    target = bucket.local / name
    if bucket.local.resolve() not in target.resolve().parents:
      raise ValueError(f"{bucket.url} has a file of the name {name!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    bucket.fs.get_file(f"{bucket.root}/{name}", str(partial))
    os.replace(partial, target)
    bucket.copied[name] = _state(target)


def _remove(bucket: _Bucket, names: Iterable[str]) -> None:
  for name in sorted(names, key=_rank, reverse=True):
    with contextlib.suppress(FileNotFoundError):
      bucket.fs.rm_file(f"{bucket.root}/{name}")
    del bucket.copied[name]


def _push(bucket: _Bucket, check: Callable[[], None]) -> None:
  """Makes the bucket what the copy is.

  Old checkpoints go when new ones have come: there is always one. `check` is
  called before each file, and may raise.
  """
  files, old = _local_files(bucket), _whole(bucket.copied)
  # A checkpoint that is being removed may still have its last file: it is none.
  gone = bucket.copied.keys() - files.keys()
  ruins = tuple(x for x in old if any(name.startswith(x) for name in gone))
  files = {n: state for n, state in files.items() if not n.startswith(ruins)}
  gone = bucket.copied.keys() - files.keys()
  old_checkpoints = {name for name in gone if name.startswith(old)}
  with _errors(bucket.url, "written", disk.WriteFailed):
    _remove(bucket, gone - old_checkpoints)
    for name in sorted(files, key=lambda name: (_rank(name), name)):
      if bucket.copied.get(name) != files[name]:
        check()
        try:
          bucket.fs.put_file(str(bucket.local / name), f"{bucket.root}/{name}")
        except FileNotFoundError:
          if (bucket.local / name).exists():
            raise
          continue  # it has just been removed
        bucket.copied[name] = files[name]
    _remove(bucket, old_checkpoints)


# The lock.


class _LockLost(disk.WriteFailed):
  """Another process has taken the lock over, which thought this one gone."""


def _read_lock(bucket: _Bucket) -> bytes | None:
  bucket.fs.invalidate_cache()
  try:
    return bucket.fs.cat_file(f"{bucket.root}/{LOCK}")
  except FileNotFoundError:
    return None


def _wait_until_left(bucket: _Bucket) -> None:
  """Returns when nobody writes the lock any more, else raises ValueError."""
  end, first = time.monotonic() + LEASE, _read_lock(bucket)
  if first is None:
    return  # it has just ended
  print(
    f"{bucket.url} is, or was, in use by {run_lock.holder(first)}: "
    f"waiting {LEASE} s to see which",
    file=sys.stderr,
    flush=True,
  )
  while time.monotonic() < end:
    time.sleep(min(BEAT / 4, 3))
    text = _read_lock(bucket)
    if text is None:
      return
    if text != first:
      raise run_lock.refusal(bucket.url, first)
  with contextlib.suppress(FileNotFoundError):
    bucket.fs.rm_file(f"{bucket.root}/{LOCK}")


@contextlib.contextmanager
def _locked(bucket: _Bucket) -> Iterator[Callable[[], None]]:
  """Holds a directory's lock; ValueError where another process does.

  Yields a function that raises `_LockLost` where it is not held any more.
  """
  path, ended, lost = f"{bucket.root}/{LOCK}", threading.Event(), False
  me = run_lock.me() | {"token": uuid.uuid4().hex, "beat": 0}

  def write(**mode) -> None:
    bucket.fs.pipe_file(path, json.dumps(me).encode(), **mode)

  def is_mine() -> bool:
    text = _read_lock(bucket)  # None: whoever took it has ended since
    return text is not None and json.loads(text).get("token") == me["token"]

  def beat() -> None:
    nonlocal lost
    while not lost and not ended.wait(BEAT):
      with contextlib.suppress(Exception):  # the network: the next one tells
        lost = not is_mine()
        if not lost:
          me["beat"] += 1
          write()

  def check() -> None:
    if lost:
      raise _LockLost(
        f"{bucket.url} was taken over by another process, or its {LOCK} was "
        "removed"
      )

  while True:
    try:
      with _errors(bucket.url, "written", disk.WriteFailed):
        write(mode="create")
      break
    except FileExistsError:
      with _errors(bucket.url, "read", ValueError):
        _wait_until_left(bucket)
  thread = threading.Thread(target=beat, daemon=True)
  thread.start()
  try:
    yield check
  finally:
    ended.set()
    thread.join()
    with contextlib.suppress(Exception):
      if is_mine():
        bucket.fs.rm_file(path)


# A copy to work on.


def _find_run(bucket: _Bucket) -> dict[str, Any]:
  """Lists the files of the run that is there; ValueError if it is no run."""
  remote = _remote_files(bucket)
  if remote and _BEGUN not in remote:  # it may be terabytes
    raise ValueError(
      f"{bucket.url} is not empty and has no {_BEGUN} of a run, so "
      "it is not a run: give a new or an empty directory as --run_dir"
    )
  files = _to_copy(bucket, remote)
  if not bucket.straight:  # uploads that were cut short are removed
    cut_short = remote.keys() - files.keys()
    bucket.copied.update(dict.fromkeys(cut_short, (0, 0)))
  return files


@contextlib.contextmanager
def opened(
  url: str, by_orbax: tuple[str, ...], is_main: bool, several: bool
) -> Iterator[tuple[pathlib.Path, Callable[..., None]]]:
  """Makes a working copy of a run directory in a bucket, a context manager.

  Args:
    url: URL of the directory, which may not exist.
    by_orbax: names in it of what Orbax writes.
    is_main: True in the process that writes.
    several: True where there are other processes.

  Yields:
    The copy, and a function that copies what has changed to the bucket; with
    `lazily`, only if that has not been done for `PUSH` seconds, and then it
    prints a line where the bucket does not take it.

  Raises:
    ValueError: it cannot be read or written, is in use, or is not gs:// while
      there are several processes.
    disk.WriteFailed: on leaving, if what is new cannot be copied. It then stays
      on the disk, and a line says where.
  """
  local = pathlib.Path(tempfile.mkdtemp(prefix="grpojax-run-"))
  with contextlib.ExitStack() as stack:
    removal = stack.enter_context(contextlib.ExitStack())
    removal.callback(shutil.rmtree, local, ignore_errors=True)
    stack.enter_context(naming(local, url))
    bucket = _connect(url, by_orbax, local)
    if several and not bucket.straight:
      raise ValueError(
        f"{url}: Orbax writes checkpoints of several processes to disks and "
        "gs:// only; mount the bucket (mount-s3) and give the path in it"
      )
    check = stack.enter_context(_locked(bucket)) if is_main else None
    with _errors(url, "read", ValueError):
      _pull(bucket, _find_run(bucket))
    if bucket.straight:
      (local / ORIGIN).write_text(url)
    if not is_main:
      yield local, lambda lazily=False: None
      return
    sync = functools.partial(_sync, bucket, check, [time.monotonic()])
    stack.enter_context(_last_copy(bucket, sync, removal))
    yield local, sync


def _sync(
  bucket: _Bucket,
  check: Callable[[], None],
  last: list[float],
  lazily: bool = False,
) -> None:
  """Copies what has changed; `last` holds the time of the copy before."""
  if lazily and time.monotonic() - last[0] < PUSH:
    return
  check()
  last[0] = time.monotonic()
  try:
    _push(bucket, check)
  except disk.WriteFailed as error:
    if not lazily or isinstance(error, _LockLost):
      raise
    print(f"{error}; trying again", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _last_copy(
  bucket: _Bucket, sync: Callable[[], None], removal: contextlib.ExitStack
) -> Iterator[None]:
  """Copies on leaving; keeps the copy where the bucket does not take it."""
  went_well = False
  try:
    yield
    went_well = True
  except SystemExit as error:
    went_well = error.code in _WENT_WELL
    raise
  finally:
    try:
      sync()
    except disk.WriteFailed as error:
      if not isinstance(error, _LockLost):
        removal.pop_all()
        print(
          f"what could not be copied is in {bucket.local}: copy it to "
          f"{bucket.url} to go on from there",
          file=sys.stderr,
        )
      if went_well:
        raise
      print(f"error: {error}", file=sys.stderr)  # after a worse one


# A copy to read.


def _refresh(bucket: _Bucket, versions_file: pathlib.Path) -> None:
  """Makes a copy what the bucket is; the file says what of it is there."""
  remote = _to_copy(bucket, _remote_files(bucket))
  if _BEGUN not in remote:
    raise ValueError(f"there is no model and no run at {bucket.url}")
  versions = {
    name: fsspec.utils.tokenize(info)
    for name, info in remote.items()
    if not name.endswith(_NOT_READ)
  }
  try:
    known = json.loads(versions_file.read_text())
  except (OSError, ValueError):
    known = {}
  present = _local_files(bucket)
  for name in present.keys() - versions.keys():
    (bucket.local / name).unlink()
  same = {n for n in present if known.get(n) == versions.get(n)}
  _pull(bucket, [name for name in versions if name not in same])
  records.write_json(versions_file, versions)


@functools.cache
def local(url: str, by_orbax: tuple[str, ...] = ()) -> pathlib.Path:
  """Returns a copy of a model or a run in a bucket, to be read only.

  Copies stay in ~/.cache/grpojax (XDG_CACHE_HOME); what has not changed in the
  bucket is not copied again. `by_orbax` names what Orbax writes there.

  Raises:
    ValueError: there is nothing, or it cannot be read.
  """
  cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  mark = fsspec.utils.tokenize(url)[:12]
  name = f"{url.rstrip('/').rpartition('/')[2]}-{mark}"
  copy = pathlib.Path(cache) / "grpojax" / name
  bucket = _connect(url, by_orbax, copy)
  copy.parent.mkdir(parents=True, exist_ok=True)
  with open(copy.with_name(f"{name}.lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # gone with the file
    with _errors(url, "read", ValueError):
      for attempt in range(3):
        try:
          _refresh(bucket, copy.with_name(f"{name}.json"))
          break
        except FileNotFoundError:  # a run that trains removes checkpoints
          if attempt == 2:
            raise
    if bucket.straight:
      (copy / ORIGIN).write_text(url)
  return copy
