"""A lock for a directory in a bucket: an object, written again and again.

The object is made only if it does not exist, and written anew every `BEAT`
seconds while it is held. One that has stayed the same for `LEASE` seconds is of
a process that is gone, and is taken over. Two that do so within the same
moment, or one that slept for longer (suspended) and wakes up, are not kept
apart for a beat: then the loser is told.
"""

import contextlib
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

from grpojax.runtime import run_lock
from grpojax.runtime.bucket_files import Bucket, reading, writing
from grpojax.runtime.run_lock import LOCK

BEAT = 15
"""Seconds after which a lock that is held is written again."""
LEASE = 60
"""Seconds after which a lock that nobody writes again is nobody's."""


def _read(bucket: Bucket) -> bytes | None:
  """What the lock says; None where there is none."""
  bucket.fs.invalidate_cache()
  with reading(bucket.url):
    try:
      return bucket.fs.cat_file(f"{bucket.root}/{LOCK}")
    except FileNotFoundError:
      return None


def _wait_until_left(bucket: Bucket) -> None:
  """Returns when nobody writes the lock any more.

  Raises:
    ValueError: somebody does.
  """
  end, first = time.monotonic() + LEASE, _read(bucket)
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
    now = _read(bucket)
    if now is None:
      return
    if now != first:
      raise run_lock.refusal(bucket.url, first)
  with writing(bucket.url), contextlib.suppress(FileNotFoundError):
    bucket.fs.rm_file(f"{bucket.root}/{LOCK}")


def _take(bucket: Bucket, me: dict[str, str | int]) -> None:
  while True:
    try:
      with writing(bucket.url):
        text = json.dumps(me).encode()
        bucket.fs.pipe_file(f"{bucket.root}/{LOCK}", text, mode="create")
      return
    except FileExistsError:
      _wait_until_left(bucket)


@contextlib.contextmanager
def hold(bucket: Bucket) -> Iterator[Callable[[], bool]]:
  """Holds a directory's lock while the context lasts.

  Yields:
    A function that says whether it is held still: not so if another process has
    taken it over, which thought that this one was gone.

  Raises:
    ValueError: another process holds it; says which.
    disk.WriteFailed: the bucket cannot be written.
  """
  path, ended, lost = f"{bucket.root}/{LOCK}", threading.Event(), []
  me = run_lock.me() | {"token": uuid.uuid4().hex, "beat": 0}

  def is_mine() -> bool:
    bucket.fs.invalidate_cache()
    try:
      text = bucket.fs.cat_file(path)
    except FileNotFoundError:  # whoever took it has ended since
      return False
    return json.loads(text).get("token") == me["token"]

  def beat() -> None:
    while not ended.wait(BEAT):
      with contextlib.suppress(Exception):  # the network: the next one tells
        if not is_mine():
          lost.append(True)
          return
        me["beat"] += 1
        bucket.fs.pipe_file(path, json.dumps(me).encode())

  _take(bucket, me)
  thread = threading.Thread(target=beat, daemon=True)
  thread.start()
  try:
    yield lambda: not lost
  finally:
    ended.set()
    thread.join()
    with contextlib.suppress(Exception):
      if is_mine():
        bucket.fs.rm_file(path)
