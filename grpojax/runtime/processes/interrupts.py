"""Start of a program, and signals: SIGTERM saves a run, Ctrl-C ends it at once.

Schedulers (SLURM, Kubernetes, spot machines) send SIGTERM some seconds before
they kill a job. A run checks for it between the parts of a step, saves a
checkpoint, and exits with code `EXIT_PREEMPTED`.

Ctrl-C raises KeyboardInterrupt, but is delayed while Orbax joins its threads:
Python takes a thread for dead if its `join` was interrupted (bpo-45274).

The package calls `begin` before a program imports anything, so only Python's
own modules are imported here.
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

BOTH = (signal.SIGINT, signal.SIGTERM)  # signals that end a run
INTERRUPTED = 130  # exit code after Ctrl-C
EXIT_PREEMPTED = 75  # exit code of a run that SIGTERM has saved: EX_TEMPFAIL


# Start.


class _Output(io.FileIO):
  """Output that leads nowhere once its reader has gone or its disk is full."""

  def write(self, data: Any) -> int:
    try:
      # None: another program has left the terminal so that it does not block.
      while (written := super().write(data)) is None:
        select.select([], [self], [])
      return written
    except OSError as error:
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, self.fileno())
      os.close(nowhere)
      if self.fileno() == 1:
        reason = f"cannot be written ({error.strerror}): going on without it"
        print(f"the standard output {reason}", file=sys.stderr)
      return memoryview(data).nbytes


class _Buffer(io.BufferedWriter):
  """Buffer that stays open if user code wraps it anew and drops the wrapper."""

  def close(self) -> None:
    self.flush()


def _open_outputs() -> None:
  """Opens the standard streams so that no printed line ends a program."""
  # The next file would get the number of a closed stream, and its lines.
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
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
  """Raises KeyboardInterrupt in a program's `main`, and ends it before that.

  Modules in C crash, or raise something else, if one comes in their import.
  """
  while frame:
    file = os.path.basename(frame.f_code.co_filename)
    # That of __main__.py imports a program before it calls its main.
    if frame.f_code.co_name == "main" and file != "__main__.py":
      raise KeyboardInterrupt
    frame = frame.f_back
  _end_interrupted()


def _show_error(kind: type, error: BaseException, traceback: Any) -> None:
  if issubclass(kind, KeyboardInterrupt):
    _end_interrupted()
  sys.__excepthook__(kind, error, traceback)


def _show_ignored(ignored: Any) -> None:
  """Reports exceptions that Python ignores, except those of a failed load."""
  # TensorStore's threads and Orbax's tasks end after the error was reported.
  text = f"{ignored.object} {ignored.exc_value}"
  if "Event loop is closed" not in text and "_read_array" not in text:
    sys.__unraisablehook__(ignored)


def begin() -> None:
  """Makes this process one of our programs."""
  _open_outputs()
  sys.excepthook, sys.unraisablehook = _show_error, _show_ignored
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _on_ctrl_c)


# End.


class Left(Exception):
  """The end of a run before it began, with nothing to save."""


def end(code: int) -> NoReturn:
  """Ends this process without Python's work at the end."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def skip_end(code: int) -> None:
  """Makes a program exit with `code` and without Python's work at the end.

  There it waits for threads (Orbax's, after a failed save, wait for each other
  for minutes), and frees objects that they still use.
  """
  if sys.excepthook is _show_error:  # one of our programs
    # Callbacks of `atexit` come after the threads; of these the last is first.
    threading._register_atexit(end, code)


def exit_program() -> NoReturn:
  """Exits after Ctrl-C; XLA's threads, compiling still, would crash Python."""
  skip_end(INTERRUPTED)
  raise SystemExit(INTERRUPTED)


# Signals.


def _after_fork() -> None:
  """Leaves SIGTERM to the system in a fork, as of a `multiprocessing.Pool`."""
  if getattr(signal.getsignal(signal.SIGTERM), "__module__", "") == __name__:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
  _mask(signal.SIG_UNBLOCK)


_mask = lambda action: signal.pthread_sigmask(action, {signal.SIGTERM})
# Python forgets a signal that comes just after a fork: it is held back.
os.register_at_fork(
  before=lambda: _mask(signal.SIG_BLOCK),
  after_in_parent=lambda: _mask(signal.SIG_UNBLOCK),
  after_in_child=_after_fork,
)


@contextlib.contextmanager
def handled(handler: Any, *numbers: int) -> Iterator[None]:
  """Sets a signal handler during the context, if in the main thread."""
  if threading.current_thread() is not threading.main_thread():
    numbers = ()
  before = {number: signal.signal(number, handler) for number in numbers}
  try:
    yield
  finally:
    for number, old in before.items():
      # None: it was not set from Python, and cannot be put back from there.
      signal.signal(number, old or signal.SIG_DFL)


@contextlib.contextmanager
def _noted(
  numbers: Iterable[int],
  error: BaseException | type[BaseException] | None = None,
) -> Iterator[list[int]]:
  """Yields a list of the signals so far; each raises `error`, if any."""
  came: list[int] = []

  def note(number: int, _: Any) -> None:
    came.append(number)
    if error:
      raise error

  # JAX's handler, in C, stays, and so does that of a background job.
  others = (None, signal.SIG_IGN)
  numbers = [n for n in numbers if signal.getsignal(n) not in others]
  with handled(note, *numbers):
    yield came


@contextlib.contextmanager
def deferred(*numbers: int) -> Iterator[list[int]]:
  """Delays signals to the end of the context; yields those so far."""
  came: list[int] = []
  try:
    with _noted(numbers) as came:
      yield came
  finally:
    for number in dict.fromkeys(came):
      signal.raise_signal(number)


def raising_ctrl_c() -> contextlib.AbstractContextManager[list[int]]:
  """Raises KeyboardInterrupt at Ctrl-C; yields the signals so far.

  The list shows those whose exception Python ignored, in a destructor.
  """
  return _noted([signal.SIGINT], KeyboardInterrupt)


@contextlib.contextmanager
def raising_sigterm() -> Iterator[None]:
  """Raises `Left` at SIGTERM, or at the end if Python ignored the exception."""
  left = Left("ended by SIGTERM")
  with _noted([signal.SIGTERM], left) as came:
    yield
  if came:
    raise left


@contextlib.contextmanager
def sigterm_requests(several: bool) -> Iterator[Callable[..., bool]]:
  """Yields `requested(together=False)`, which tells if SIGTERM has arrived.

  Several processes must all save the same step, whichever gets the signal. JAX
  passes it on, and names a point of the program that none has reached. So they
  ask `together` at the same points; other answers are False.
  """
  if several:
    # Imported here: this module is needed where Ctrl-C comes during imports.
    from jax.experimental import multihost_utils

    points = itertools.count(1)
    reached = multihost_utils.reached_preemption_sync_point
    yield lambda together=False: together and reached(next(points))
    return
  came: list[int] = []

  def note(number: int, _: Any) -> None:
    came.append(number)
    # The default action, not a Python handler, so that a second SIGTERM kills
    # even while the main thread is deep inside a compiled call.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    message = b"SIGTERM: ends when all is saved; a second one kills at once\n"
    with contextlib.suppress(OSError):  # nobody may read it
      os.write(2, message)  # print is not safe to re-enter

  with handled(note, signal.SIGTERM):
    yield lambda together=False: bool(came)
