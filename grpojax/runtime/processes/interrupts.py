"""Start of programs, and signals: SIGTERM saves a run, Ctrl-C ends it at once.

Schedulers (SLURM, Kubernetes, spot machines) send SIGTERM some seconds before
they kill a job. A run checks for it between the parts of a step, saves a
checkpoint, and exits with code `EXIT_PREEMPTED`.

Ctrl-C raises KeyboardInterrupt, but is delayed while Orbax joins its threads:
Python treats a thread as dead if its `join` was interrupted (bpo-45274).

This module imports only the standard library, because the package calls `begin`
before a program's other imports.
"""

import contextlib
import io
import itertools
import os
import select
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

BOTH = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130  # exit code after Ctrl-C
EXIT_PREEMPTED = 75  # exit code of a run saved after SIGTERM: EX_TEMPFAIL


class _Output(io.FileIO):
  """Output that is discarded once its reader is gone or its disk is full."""

  def write(self, data: Any) -> int:
    try:
      # `write` returns None if a program made the terminal non-blocking.
      while (written := super().write(data)) is None:
        select.select([], [self], [])
      return written
    except OSError as error:
      devnull = os.open(os.devnull, os.O_WRONLY)
      os.dup2(devnull, self.fileno())
      os.close(devnull)
      if self.fileno() == 1:
        reason = f"cannot be written ({error.strerror}): continuing without it"
        print(f"the standard output {reason}", file=sys.stderr)
      return memoryview(data).nbytes


class _Buffer(io.BufferedWriter):
  """Buffer that stays open if user code wraps it and drops the wrapper."""

  def close(self) -> None:
    self.flush()


def _open_outputs() -> None:
  """Opens the standard streams so that a failed print never ends a program."""
  # The next opened file would get the number of a closed stream.
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
  sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)
  for number, name in ((1, "stdout"), (2, "stderr")):
    file = _Buffer(_Output(number, "w", closefd=False))
    encoding = getattr(getattr(sys, name), "encoding", "utf-8")
    text = io.TextIOWrapper(
      file, encoding, "backslashreplace", line_buffering=True
    )
    setattr(sys, name, text)
    setattr(sys, f"__{name}__", text)


def _end_interrupted() -> NoReturn:
  print("interrupted", file=sys.stderr)
  end(INTERRUPTED)


def _on_ctrl_c(number: int, frame: types.FrameType | None) -> None:
  """Handles Ctrl-C: raises KeyboardInterrupt in `main`; during imports, exits.

  C extensions crash, or raise other errors, if their import is interrupted.
  """
  while frame:
    file = os.path.basename(frame.f_code.co_filename)
    # The main of __main__.py still imports the program.
    if frame.f_code.co_name == "main" and file != "__main__.py":
      raise KeyboardInterrupt
    frame = frame.f_back
  _end_interrupted()


def _show_error(kind: type, error: BaseException, traceback: Any) -> None:
  if issubclass(kind, KeyboardInterrupt):
    _end_interrupted()
  sys.__excepthook__(kind, error, traceback)


def _show_ignored(ignored: Any) -> None:
  """Reports ignored errors, except of tasks a failed checkpoint load left."""
  text = f"{ignored.object} {ignored.exc_value}"
  if "Event loop is closed" not in text and "_read_array" not in text:
    sys.__unraisablehook__(ignored)


def begin() -> None:
  """Prepares the outputs and signals of a grpojax program."""
  _open_outputs()
  sys.excepthook = _show_error
  sys.unraisablehook = _show_ignored
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _on_ctrl_c)


class Left(Exception):
  """Raised if a signal ends a program before its run begins."""


def end(code: int) -> NoReturn:
  """Ends this process without Python's cleanup."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def skip_cleanup_at_exit(code: int) -> None:
  """Makes a program exit with `code` and without Python's cleanup.

  Cleanup would wait minutes for Orbax's threads after a failed save, and free
  objects that they use.
  """
  if sys.excepthook is _show_error:  # a grpojax program
    # Runs before Python waits for threads, unlike `atexit`.
    threading._register_atexit(end, code)


def exit_program() -> NoReturn:
  """Exits after Ctrl-C without cleanup, which crashes while XLA compiles."""
  skip_cleanup_at_exit(INTERRUPTED)
  raise SystemExit(INTERRUPTED)


def _after_fork() -> None:
  """Restores the default action of SIGTERM in a forked process."""
  if getattr(signal.getsignal(signal.SIGTERM), "__module__", "") == __name__:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
  _mask(signal.SIG_UNBLOCK)


_mask = lambda action: signal.pthread_sigmask(action, {signal.SIGTERM})
# Python loses a signal that arrives just after a fork, so forks block it.
os.register_at_fork(
  before=lambda: _mask(signal.SIG_BLOCK),
  after_in_parent=lambda: _mask(signal.SIG_UNBLOCK),
  after_in_child=_after_fork,
)


@contextlib.contextmanager
def handled(handler: Any, *numbers: int) -> Iterator[None]:
  """Sets a signal handler inside the context, if this is the main thread."""
  if threading.current_thread() is not threading.main_thread():
    numbers = ()
  before = {number: signal.signal(number, handler) for number in numbers}
  try:
    yield
  finally:
    for number, old in before.items():
      # Python cannot restore a handler set in C (None).
      signal.signal(number, old or signal.SIG_DFL)


@contextlib.contextmanager
def _noted(numbers: Iterable[int], error=None) -> Iterator[list[int]]:
  """Yields a list that records signals; each signal raises `error`, if any."""
  arrived: list[int] = []

  def note(number: int, _: Any) -> None:
    arrived.append(number)
    if error:
      raise error

  # Leaves out signals that JAX handles in C or a background job ignores.
  keep = (None, signal.SIG_IGN)
  numbers = [n for n in numbers if signal.getsignal(n) not in keep]
  with handled(note, *numbers):
    yield arrived


@contextlib.contextmanager
def deferred(*numbers: int) -> Iterator[list[int]]:
  """Delays signals to the end of the context; yields a list of them."""
  arrived: list[int] = []
  try:
    with _noted(numbers) as arrived:
      yield arrived
  finally:
    for number in dict.fromkeys(arrived):
      signal.raise_signal(number)


def raising_ctrl_c() -> contextlib.AbstractContextManager[list[int]]:
  """Raises KeyboardInterrupt at Ctrl-C; yields a list of the signals.

  The list includes signals whose exception Python ignored in a destructor.
  """
  return _noted([signal.SIGINT], KeyboardInterrupt)


@contextlib.contextmanager
def raising_sigterm() -> Iterator[None]:
  """Raises `Left` at SIGTERM, or at the end if Python ignored the exception."""
  left = Left("ended by SIGTERM")
  with _noted([signal.SIGTERM], left) as arrived:
    yield
  if arrived:
    raise left


@contextlib.contextmanager
def sigterm_requests(several: bool) -> Iterator[Callable[..., bool]]:
  """Yields `requested(together=False)`, which tells if SIGTERM has arrived.

  Several processes must save the same step: all call `requested(True)` at the
  same points, and JAX chooses a point that no process has reached yet. If there
  are several processes, `requested(False)` returns False.
  """
  if several:
    from jax.experimental import multihost_utils

    points = itertools.count(1)
    reached = multihost_utils.reached_preemption_sync_point
    yield lambda together=False: together and reached(next(points))
    return
  arrived: list[int] = []

  def note(number: int, _: Any) -> None:
    arrived.append(number)
    # The default action, not a Python handler, so that a second SIGTERM kills
    # even while the main thread is deep inside a compiled call.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    message = b"SIGTERM: ends after saving; a second SIGTERM kills at once\n"
    with contextlib.suppress(OSError):  # a closed output
      os.write(2, message)  # print is not reentrant

  with handled(note, signal.SIGTERM):
    yield lambda together=False: bool(arrived)
