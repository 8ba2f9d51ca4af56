"""SIGTERM: save and leave, so that the same command resumes later.

Schedulers (SLURM, Kubernetes, spot machines) send SIGTERM some seconds before
they kill a job. A program polls between the parts of a step, saves a
checkpoint, and exits with `EXIT_PREEMPTED`.

Several processes must all save the same step, whichever of them is told. JAX's
preemption service listens for SIGTERM in each of them then, passes it on, and
names a point that none of them has reached yet.
"""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator

from jax.experimental import multihost_utils

from grpojax.runtime import distributed

EXIT_PREEMPTED = 75
"""Exit code of a preempted run: EX_TEMPFAIL of sysexits.h. The run is saved and
not finished; run the same command again to resume it."""


class Preemption:
  """Whether SIGTERM has arrived; made by `install`.

  Calling it answers. As a context manager it restores the handler that was
  there before. A class because it has to remember that handler.
  """

  def __init__(self):
    self._requested = False
    self._previous = signal.signal(signal.SIGTERM, self._handle)

  def _handle(self, signum, frame):
    self._requested = True
    # The default action, not a Python handler, so that a second SIGTERM kills
    # even while the main thread is deep inside a compiled call.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    message = b"SIGTERM: saving, then exiting; a second one kills at once\n"
    os.write(2, message)  # print is not safe to re-enter

  def __call__(self, together: bool = False) -> bool:
    """True once SIGTERM has arrived."""
    del together
    return self._requested

  def uninstall(self) -> None:
    """Restores the handler from before `install`."""
    # None: it was not set from Python, and cannot be put back from there.
    signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.uninstall()


@contextlib.contextmanager
def _of_several() -> Iterator[Callable[..., bool]]:
  """The same for several processes."""
  points = itertools.count(1)

  def requested(together: bool = False) -> bool:
    if not together:
      return False
    return multihost_utils.reached_preemption_sync_point(next(points))

  yield requested


def install():
  """Starts listening for SIGTERM.

      with preemption.install() as requested:
        for step in range(steps):
          ...
          if requested(together=True):
            save(...)
            sys.exit(preemption.EXIT_PREEMPTED)

  Returns:
    `requested(together=False) -> bool`, as a context manager; of one process
    also with `uninstall()`. Several processes answer alike where they ask
    `together`, at the same points of the program; elsewhere nobody is told.

  Raises:
    ValueError: not called from the main thread.
  """
  return _of_several() if distributed.several() else Preemption()
