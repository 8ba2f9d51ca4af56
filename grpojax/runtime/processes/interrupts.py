"""Signals: SIGTERM saves a run and ends it, Ctrl-C ends it at once.

Schedulers (SLURM, Kubernetes, spot machines) send SIGTERM some seconds before
they kill a job. A run looks for it between the parts of a step, saves a
checkpoint, and exits with code `EXIT_PREEMPTED`.

Ctrl-C is an exception, except where that would do harm: Orbax joins its
threads, and Python takes a thread for dead whose `join` was interrupted
(bpo-45274), so that it fails while the interpreter ends.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

BOTH = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run: Ctrl-C, and a scheduler's."""

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

EXIT_PREEMPTED = 75
"""Exit code of a preempted run: EX_TEMPFAIL of sysexits.h. The run is saved and
not finished; run the same command again to resume it."""

_NOT_OURS = (None, signal.SIG_IGN)
"""Handlers that stay: one set in C (by JAX), and that of a background job."""


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


class Left(Exception):
  """The end of a run before it began; nothing is lost, or to be saved."""


def end(code: int) -> NoReturn:
  """Ends this process, without what Python does at its end."""
  for stream in (sys.stdout, sys.stderr):
    stream.flush()
  os._exit(code)


def skip_end(code: int) -> None:
  """Makes `code` the exit code, and leaves out what Python does at the end.

  Python waits for its threads there, and after a failed save those of Orbax
  wait for each other for minutes. It also frees objects that threads still use.
  """
  # The hook is set where Python was started as one of our programs.
  if getattr(sys.excepthook, "__module__", "") == f"{__package__}.program":
    # The last one is the first to run; those of `atexit` come after threads.
    threading._register_atexit(end, code)


def exit_program() -> NoReturn:
  """Exits after Ctrl-C, which may have come while XLA compiles in its threads.

  They go on, and crash when Python takes down what they need: a program leaves
  that out.
  """
  skip_end(INTERRUPTED)
  raise SystemExit(INTERRUPTED)


@contextlib.contextmanager
def handled(handler: Any, *numbers: int) -> Iterator[None]:
  """Sets a handler of signals while the context lasts.

  It has no effect in threads but the main one.
  """
  if threading.current_thread() is not threading.main_thread():
    numbers = ()
  before = {number: signal.signal(number, handler) for number in numbers}
  try:
    yield
  finally:
    for number, old in before.items():
      # None: it was not set from Python, and cannot be put back from there.
      signal.signal(number, old or signal.SIG_DFL)


def _ours(*numbers: int) -> list[int]:
  """Leaves out signals that JAX listens to, or that are ignored."""
  return [n for n in numbers if signal.getsignal(n) not in _NOT_OURS]


@contextlib.contextmanager
def deferred(*numbers: int) -> Iterator[list[int]]:
  """Delays signals, of `BOTH`, to the end of the context.

  Yields:
    Signals so far: work that finds one here can end early.
  """
  came: list[int] = []
  try:
    with handled(lambda number, _: came.append(number), *_ours(*numbers)):
      yield came
  finally:
    for number in dict.fromkeys(came):
      signal.raise_signal(number)


@contextlib.contextmanager
def raising_ctrl_c() -> Iterator[list[int]]:
  """Raises KeyboardInterrupt at Ctrl-C.

  Yields:
    Signals so far: work that finds one here can end. Python
    ignores exceptions in destructors and in callbacks of the garbage collector.
  """
  came: list[int] = []

  def interrupt(number: int, _: Any) -> None:
    came.append(number)
    raise KeyboardInterrupt

  with handled(interrupt, *_ours(signal.SIGINT)):
    yield came


@contextlib.contextmanager
def raising_sigterm() -> Iterator[None]:
  """Raises `Left` at SIGTERM, while the context lasts.

  Not for where JAX listens to it: its handler could not be put back. Where
  Python ignores the exception, it is raised again when the context ends.
  """
  came: list[Left] = []

  def leave(*_: Any) -> None:
    came.append(Left("ended by SIGTERM"))
    raise came[0]

  with handled(leave, signal.SIGTERM):
    yield
  if came:
    raise came[0]


@contextlib.contextmanager
def sigterm_requests(several: bool) -> Iterator[Callable[..., bool]]:
  """Listens for SIGTERM, while the context lasts.

  Several processes must all save the same step, whichever of them gets the
  signal. JAX listens for it in each of them then, passes it on, and names a
  point that none of them has reached yet.

  Yields:
    `requested(together=False) -> bool`, True once SIGTERM has arrived. Several
    processes answer alike where they ask `together`, at the same points of the
    program; elsewhere the answer is False.
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
