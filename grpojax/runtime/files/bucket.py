"""Directories in buckets (gs://, s3://, what fsspec knows): copies on a disk.

A bucket has no appending, no renaming and no locks, and is far away; records,
models and their checks need all four. So a program works on a copy on a local
disk, and what changes there is copied to the bucket. Checkpoints on gs:// go
there straight, from all processes. Orbax knows no other kind of bucket: there
checkpoints are copied too, and only a run of one process can be.

A file in a bucket is whole or not there, and a file that makes others count is
copied after them and removed before them (`_rank`).
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
from typing import Any

import fsspec
from etils import epath

from grpojax.runtime.files import disk, records, run_lock
from grpojax.runtime.files.run_lock import LOCK
from grpojax.runtime.processes import distributed, interrupts
from grpojax.runtime.terminal.screen import printable

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

# It warns of each request, and logs what it then raises.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


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
  except kind:
    raise
  except Exception as error:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    raise kind(f"{url} cannot be {verb}: {text}") from error


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


class _Copy:
  """A directory in a bucket, and its copy on a disk.

  Attributes:
    url: URL of the directory.
    by_orbax: names in it of what Orbax writes.
    local: path of the copy.
    fs: fsspec's file system.
    root: path of the directory in `fs`.
    straight: True on gs://, where Orbax writes there itself.
    copied: size and mtime of each file of the copy when both were the same.
  """

  def __init__(self, url: str, by_orbax: tuple[str, ...], local: pathlib.Path):
    self.url, self.by_orbax, self.local = url, by_orbax, local
    if secret := re.search("://[^/@]*:[^/@]*@", url):
      raise ValueError(
        f"{url.replace(secret[0], '://...@')} has a password, which would get "
        "into config.json and logs: give it by what its library reads "
        "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ...)"
      )
    try:
      self.fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
      raise ValueError(
        f"{url} cannot be opened: {error} (gs:// needs pip install "
        "'grpojax[gcs]', s3:// 'grpojax[s3]')"
      ) from error
    scheme = url.partition(":")[0]
    if scheme in ("file", "local", "gcs") or "/" not in root.strip("/"):
      raise ValueError(
        f"{url}: give gs://BUCKET/DIR, s3://BUCKET/DIR or a path"
      )
    self.root, self.straight = root.rstrip("/"), scheme == "gs"
    self.copied: dict[str, tuple[int, int]] = {}

  def remote_files(self) -> dict[str, Any]:
    """Lists the files in the bucket, with fsspec's information on each.

    Raises:
      ValueError: there are files, but neither a model nor a run.
    """
    self.fs.invalidate_cache()
    try:
      infos = self.fs.find(self.root, detail=True)
    except FileNotFoundError:
      return {}
    names = {path[len(self.root) + 1 :]: info for path, info in infos.items()}
    names = {n: i for n, i in names.items() if n and not _NOT_COPIED.search(n)}
    if names and _BEGUN not in names:  # it may be terabytes
      raise ValueError(
        f"{self.url} is not empty, and no model and no run: there is no "
        f"{_BEGUN} in it"
      )
    return names

  def to_copy(self, remote: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what Orbax has not finished, or writes there itself."""
    whole = () if self.straight else _whole(remote)
    return {
      name: info
      for name, info in remote.items()
      if name.split("/")[0] not in self.by_orbax or name.startswith(whole)
    }

  def local_files(self) -> dict[str, tuple[int, int]]:
    """Lists the files of the copy that belong into the bucket.

    Orbax may be removing a checkpoint meanwhile: what is gone is left out.
    """
    states = {}
    for folder, _, files in os.walk(self.local):
      for file in files:
        path = pathlib.Path(folder, file)
        name = path.relative_to(self.local).as_posix()
        if not _NOT_COPIED.search(name):
          with contextlib.suppress(FileNotFoundError):
            about = path.stat()
            states[name] = about.st_size, about.st_mtime_ns
    return states

  def pull(self, names: Iterable[str]) -> None:
    """Copies files from the bucket, each whole or not at all."""
    for name in names:
      target = self.local / name
      if self.local.resolve() not in target.resolve().parents:
        raise ValueError(f"{self.url} has a file of the name {name!r}")
      target.parent.mkdir(parents=True, exist_ok=True)
      with records.replacing(target) as temporary:
        self.fs.get_file(f"{self.root}/{name}", str(temporary))
    if self.straight:
      (self.local / ORIGIN).write_text(self.url)

  def _remove(self, names: Iterable[str]) -> None:
    for name in sorted(names, key=_rank, reverse=True):
      with contextlib.suppress(FileNotFoundError):
        self.fs.rm_file(f"{self.root}/{name}")
      del self.copied[name]

  def push(self) -> None:
    """Makes the bucket what the copy is.

    Old checkpoints go when new ones have come: there is always one. One that is
    just being removed stays for as long as its last file is there.
    """
    files = self.local_files()
    gone = self.copied.keys() - files.keys()
    old = {name for name in gone if name.startswith(_whole(self.copied))}
    self._remove(gone - old)
    for name in sorted(files, key=lambda name: (_rank(name), name)):
      if self.copied.get(name) == files[name]:
        continue
      try:
        self.fs.put_file(str(self.local / name), f"{self.root}/{name}")
        self.copied[name] = files[name]
      except FileNotFoundError:  # it has just been removed
        if (self.local / name).exists():
          raise
    self._remove({name for name in old if not name.startswith(_whole(files))})


@contextlib.contextmanager
def _locked(copy: _Copy) -> Iterator[None]:
  """Holds a directory's lock; ValueError where another process does.

  The lock is a lease: an object that is made only where there is none, and
  written again every `BEAT` seconds. One that has stayed the same for `LEASE`
  seconds is of a process that is gone, and is removed. Two processes that do so
  within the same moment, or one that slept for longer and wakes up, are not
  kept apart for a beat: then the one whose lock is not there any more ends.
  """
  path, ended = f"{copy.root}/{LOCK}", threading.Event()
  me = run_lock.me() | {"token": uuid.uuid4().hex, "beat": 0}

  def write(**mode) -> None:
    copy.fs.pipe_file(path, json.dumps(me).encode(), **mode)

  def read() -> bytes:
    copy.fs.invalidate_cache()
    try:
      return copy.fs.cat_file(path)
    except FileNotFoundError:
      return b"{}"  # nobody's

  def is_mine() -> bool:
    return json.loads(read()).get("token") == me["token"]

  def take() -> None:
    before = read()
    if before != b"{}":
      print(
        f"{copy.url} is, or was, in use by "
        f"{printable(run_lock.holder(before))}: waiting {LEASE} s to see which",
        file=sys.stderr,
        flush=True,
      )
      time.sleep(LEASE)
      if read() == before:
        with contextlib.suppress(FileNotFoundError):
          copy.fs.rm_file(path)
    try:
      write(mode="create")
    except FileExistsError as error:
      raise run_lock.refusal(copy.url, read()) from error

  def beat() -> None:
    while not ended.wait(BEAT):
      with contextlib.suppress(Exception):  # the network: the next one tells
        if not is_mine():
          print(
            f"error: {copy.url} was taken over by another process, or its "
            f"{LOCK} was removed; what is new is in {copy.local}",
            file=sys.stderr,
          )
          interrupts.end(1)
        me["beat"] += 1
        write()

  with _errors(copy.url, "locked", ValueError):
    take()
  thread = threading.Thread(target=beat, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
    with contextlib.suppress(Exception):
      if is_mine():
        copy.fs.rm_file(path)


@contextlib.contextmanager
def opened(
  url: str, by_orbax: tuple[str, ...]
) -> Iterator[tuple[pathlib.Path, Callable[..., None]]]:
  """Makes a working copy of a run directory in a bucket, a context manager.

  Yields:
    The copy, and a function that copies what has changed to the bucket; with
    `lazily`, only if that has not been done for `PUSH` seconds, and then it
    prints a line where the bucket does not take it.

  Raises:
    ValueError: it cannot be used, or is in use.
    disk.WriteFailed: on leaving, if what is new cannot be copied. It then stays
      on the disk, and a line says where.
  """
  local = pathlib.Path(tempfile.mkdtemp(prefix="grpojax-run-"))
  with contextlib.ExitStack() as removal, contextlib.ExitStack() as stack:
    removal.callback(shutil.rmtree, local, ignore_errors=True)
    stack.enter_context(naming(local, url))
    copy = _Copy(url, by_orbax, local)
    if distributed.several() and not copy.straight:
      raise ValueError(
        f"{url}: Orbax writes checkpoints of several processes to disks and "
        "gs:// only; mount the bucket (mount-s3) and give the path in it"
      )
    if distributed.is_main():
      stack.enter_context(_locked(copy))
    with _errors(url, "read", ValueError):
      remote = copy.remote_files()
      files = copy.to_copy(remote)
      copy.pull(files)
    copy.copied = copy.local_files()
    if not copy.straight:  # the first push removes uploads that were cut short
      copy.copied |= dict.fromkeys(remote.keys() - files.keys(), (0, 0))
    if not distributed.is_main():
      yield local, lambda lazily=False: None
      return
    last = time.monotonic()

    def sync(lazily: bool = False) -> None:
      nonlocal last
      if lazily and time.monotonic() - last < PUSH:
        return
      last = time.monotonic()
      try:
        with _errors(url, "written", disk.WriteFailed):
          copy.push()
      except disk.WriteFailed as error:
        if not lazily:
          raise
        print(f"{error}; trying again", file=sys.stderr, flush=True)

    try:
      yield local, sync
    finally:
      try:
        sync()
      except disk.WriteFailed:
        removal.pop_all()
        print(
          f"what could not be copied is in {local}: copy it to {url} to go on "
          "from there",
          file=sys.stderr,
        )
        raise


@functools.cache
def local(url: str, by_orbax: tuple[str, ...] = ()) -> pathlib.Path:
  """Returns a copy of a model or a run in a bucket, to be read only.

  Copies stay in ~/.cache/grpojax (XDG_CACHE_HOME), with a file that says which
  versions they are of; what has not changed in the bucket is not copied again.
  `by_orbax` names what Orbax writes there.

  Raises:
    ValueError: there is nothing, or it cannot be read.
  """
  mark = fsspec.utils.tokenize(url)[:12]
  name = f"{url.rstrip('/').rpartition('/')[2]}-{mark}"
  path = disk.user_cache() / name
  copy, versions_file = _Copy(url, by_orbax, path), path.parent / f"{name}.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path.parent / f"{name}.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # gone with the file
    with _errors(url, "read", ValueError):
      versions = {
        name: fsspec.utils.tokenize(info)
        for name, info in copy.to_copy(copy.remote_files()).items()
        if not name.endswith(_NOT_READ)
      }
      if not versions:
        raise ValueError(f"there is no model and no run at {url}")
      known = {}
      with contextlib.suppress(OSError, ValueError):
        known = json.loads(versions_file.read_text())
      present = copy.local_files()
      for name in present.keys() - versions.keys():
        (path / name).unlink()
      copy.pull(
        name
        for name, version in versions.items()
        if name not in present or known.get(name) != version
      )
      records.write_json(versions_file, versions)
  return path
