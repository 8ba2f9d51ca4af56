"""Place of a run directory: on a disk, or in a bucket with a copy on a disk."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator

from etils import epath

from grpojax.runtime.files import bucket, gguf_directory
from grpojax.runtime.processes import distributed, interrupts

REFERENCE = "reference_params"  # the reference policy, saved once
CHECKPOINTS = "checkpoints"  # STEP/, a `TrainState` each, the newest few
_BY_ORBAX = (REFERENCE, CHECKPOINTS)  # what Orbax reads and writes


@contextlib.contextmanager
def opened(
  path: str | os.PathLike,
) -> Iterator[tuple[pathlib.Path, Callable[..., None]]]:
  """Opens a run directory to write to: of a disk itself, of a bucket a copy.

  Yields:
    The directory, and a function to call when something in it should be seen by
    others: it copies to the bucket (at most now and then, with `lazily=True`).

  Raises:
    ValueError: in all processes, where one cannot use it.
    interrupts.Left: SIGTERM came meanwhile, to a process alone.
  """
  if not bucket.is_url(path):
    yield pathlib.Path(path), lambda lazily=False: None
    return
  distributed.gather(None)  # connects now: in a minute it would be too late
  with contextlib.ExitStack() as stack:
    # In several processes JAX listens to SIGTERM, to which it is passed on.
    leaving = (
      contextlib.nullcontext()
      if distributed.several()
      else interrupts.raising_sigterm()
    )
    with distributed.agreed(), leaving:
      copy = stack.enter_context(bucket.opened(os.fspath(path), _BY_ORBAX))
    yield copy


def local(path: str | os.PathLike) -> pathlib.Path:
  """Returns the directory of a model or a run to read.

  It is itself where it is on a disk, a copy of one in a bucket, and made of a
  .gguf file.
  """
  if gguf_directory.is_named(path):
    return gguf_directory.local(path)
  if not bucket.is_url(path):
    return pathlib.Path(path)
  return bucket.local(os.fspath(path), _BY_ORBAX)


def checkpoints(path: str | os.PathLike) -> epath.Path:
  """Returns the place of a run's checkpoints: in it, or in its bucket."""
  return bucket.origin(path) / CHECKPOINTS


def reference(path: str | os.PathLike) -> epath.Path:
  """Returns the place of a run's reference policy."""
  return bucket.origin(path) / REFERENCE
