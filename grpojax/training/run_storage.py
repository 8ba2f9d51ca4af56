"""Where a run directory is: on a disk, or in a bucket with a copy on a disk."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator

from etils import epath

from grpojax.runtime import bucket, distributed, interrupts

REFERENCE = "reference_params"  # the reference policy, saved once
CHECKPOINTS = "checkpoints"  # STEP/, a `TrainState` each, the newest few
IN_BUCKET = (REFERENCE, CHECKPOINTS)
"""What Orbax reads and writes in a bucket itself, where it can."""


@contextlib.contextmanager
def opened(
  path: str | os.PathLike,
) -> Iterator[tuple[pathlib.Path, Callable[..., None]]]:
  """A run directory to write to: of a disk itself, of a bucket a copy.

  Yields:
    The directory; and a function to call when something in it should be seen by
    others, see `bucket.opened`.

  Raises:
    ValueError: in all processes, where one cannot use it.
    interrupts.Left: SIGTERM came meanwhile, to a process alone.
  """
  if not bucket.is_url(path):
    yield pathlib.Path(path), lambda lazily=False: None
    return
  is_main, several = distributed.is_main(), distributed.several()
  distributed.gather(None)  # connects now: in a minute it would be too late
  with contextlib.ExitStack() as stack:
    # In several processes JAX listens to SIGTERM, to which it is passed on.
    leaving = (
      contextlib.nullcontext() if several else interrupts.raising_sigterm()
    )
    with distributed.agreed(), leaving:
      copy = bucket.opened(os.fspath(path), IN_BUCKET, is_main, several)
      copy = stack.enter_context(copy)
    yield copy


def local(path: str | os.PathLike) -> pathlib.Path:
  """A model or a run to read: on a disk itself, in a bucket a copy.

  Raises:
    ValueError: the bucket cannot be read.
  """
  if not bucket.is_url(path):
    return pathlib.Path(path)
  return bucket.local(os.fspath(path), IN_BUCKET)


def checkpoints(path: str | os.PathLike) -> epath.Path:
  """Where a run's checkpoints are, in it or in the bucket that it is of."""
  return bucket.origin(path) / CHECKPOINTS


def reference(path: str | os.PathLike) -> epath.Path:
  """Where a run's reference policy is."""
  return bucket.origin(path) / REFERENCE
