"""Signals: Ctrl-C where an exception would do harm, SIGTERM before a run.

Orbax joins its threads, and Python takes a thread for dead whose `join` was
interrupted (bpo-45274): it would be left to fail while the interpreter ends.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


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
    left = (None, signal.SIG_IGN)
    ours = {s: old for s, old in both.items() if old not in left}
  for number in ours:
    signal.signal(number, lambda number, _: came.append(number))
  try:
    yield came
  finally:
    for number, old in ours.items():
      signal.signal(number, old)
    for number in dict.fromkeys(came):
      signal.raise_signal(number)
