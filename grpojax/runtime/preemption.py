"""SIGTERM: save and leave, so that the same command resumes later.

Schedulers (SLURM, Kubernetes, spot machines) send SIGTERM some seconds before
they kill a job. A program polls between the parts of a step, saves a
checkpoint, and exits with `EXIT_PREEMPTED`. (Orbax's own policy asks
jax.distributed, which a run of one process does not start.)
"""

import os
import signal

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

  def __call__(self) -> bool:
    """True once SIGTERM has arrived."""
    return self._requested

  def uninstall(self) -> None:
    """Restores the handler from before `install`."""
    # None: it was not set from Python, and cannot be put back from there.
    signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.uninstall()


def install() -> Preemption:
  """Starts listening for SIGTERM.

      with preemption.install() as requested:
        for step in range(steps):
          ...
          if requested():
            save(...)
            sys.exit(preemption.EXIT_PREEMPTED)

  Returns:
    `requested() -> bool`, also a context manager, with `uninstall()`.

  Raises:
    ValueError: not called from the main thread.
  """
  return Preemption()
