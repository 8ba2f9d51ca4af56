"""Signals: Ctrl-C where an exception would do harm, SIGTERM before a run.

Orbax joins its threads, and Python takes a thread for dead whose `join` was
interrupted (bpo-45274): it would be left to fail while the interpreter ends.
"""

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_LEFT = (None, signal.SIG_IGN)
"""Handlers that stay: not Python's, or of a job in the background."""


def end(code: int) -> NoReturn:
  """Ends this process, without what Python does at its end."""
  for stream in (sys.stdout, sys.stderr):
    stream.flush()
  os._exit(code)


def skip_end(code: int) -> None:
  """Leaves out what Python does at a program's end, whatever that will be.

  There it waits for threads, and those of Orbax wait for each other for minutes
  after a save that failed; and takes down what others still need.

  Args:
    code: the exit code, whichever the program ends with.
  """
  # The hook is set where Python was started as one of our programs.
  if getattr(sys.excepthook, "__module__", "") == "grpojax":
    # The last one is the first to run; those of `atexit` come after threads.
    threading._register_atexit(end, code)


def exit_program() -> NoReturn:
  """The exit after Ctrl-C; of a program, once what is open is closed.

  XLA compiles in threads of its own, and goes on where Ctrl-C came meanwhile.
  It crashes when Python takes down what it needs: a program leaves that out.

  Raises:
    SystemExit: always.
  """
  skip_end(INTERRUPTED)
  raise SystemExit(INTERRUPTED)


@contextlib.contextmanager
def become(action) -> Iterator[None]:
  """Ctrl-C has another effect than an exception, while the context lasts.

  Args:
    action: for `signal.signal`; threads but the main one have none.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  old = signal.signal(signal.SIGINT, action)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, old or signal.SIG_DFL)


_UNHEARD = ("__del__", "_xla_gc_callback")
"""Functions whose exceptions Python ignores: of JAX, when garbage is collected,
which is often while it compiles."""


def _is_unheard(frame: types.FrameType | None) -> bool:
  while frame:
    if frame.f_code.co_name in _UNHEARD:
      return True
    frame = frame.f_back
  return False


@contextlib.contextmanager
def heard() -> Iterator[list[int]]:
  """Ctrl-C raises KeyboardInterrupt, later where Python would ignore it.

  Yields:
    Signals that have come, for work that ends where there are any: one that was
    ignored all the same.
  """
  came: list[int] = []

  def interrupt(number: int, frame: types.FrameType | None) -> None:
    if _is_unheard(frame):  # comes again
      timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
      timer.daemon = True
      return timer.start()
    came.append(number)
    raise KeyboardInterrupt

  if signal.getsignal(signal.SIGINT) in _LEFT:
    yield came
    return
  with become(interrupt):
    yield came


class Left(Exception):
  """A run was ended before it began; nothing is lost, or to be saved."""


@contextlib.contextmanager
def leaving() -> Iterator[None]:
  """SIGTERM raises `Left`, while the context lasts.

  Not where JAX listens to it: its handler could not be put back. Where Python
  ignores exceptions (in destructors, and what runs when garbage is collected,
  as of JAX) it is raised when the context ends.
  """
  came = []

  def leave(*_: Any) -> None:
    came.append(Left("SIGTERM before the run began"))
    raise came[0]

  before = signal.signal(signal.SIGTERM, leave)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
  if came:
    raise came[0]


@contextlib.contextmanager
def wait() -> Iterator[None]:
  """Ctrl-C is heeded when the context ends."""
  came = []
  with become(lambda *_: came.append(True)):
    yield
  if came:
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
  """Ctrl-C and SIGTERM are heeded when the context ends.

  Not SIGTERM where JAX listens to it, nor what is ignored (Ctrl-C, of a job in
  the background), nor anything in threads but the main one.

  Yields:
    Signals that have come, for work that ends itself where there are any.
  """
  came: list[int] = []
  ours = {}
  if threading.current_thread() is threading.main_thread():
    both = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    ours = {s: old for s, old in both.items() if old not in _LEFT}
  for number in ours:
    signal.signal(number, lambda number, _: came.append(number))
  try:
    yield came
  finally:
    for number, old in ours.items():
      signal.signal(number, old)
    for number in dict.fromkeys(came):
      signal.raise_signal(number)
