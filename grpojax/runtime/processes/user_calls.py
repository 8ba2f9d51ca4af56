"""Calls of a user's code, which hold whatever it does.

A function of the user's may raise anything, fork, change the directory or never
return. `call` makes of that a result or an error in words, and `in_time` ends
what takes too long; only a process of its own survives what crashes.
"""

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from grpojax.runtime.files import user_code

FOREVER = 1e9
"""Seconds; the system's timers take little more."""

_LONGEST_ERROR = 500  # characters


class OutOfTime(BaseException):
  """Raised in a function that takes too long, and not caught as its failure."""


class WrongAnswer(ValueError):
  """A user's answer that is none; the message is all that is to be said."""


def load_module(subject: str, place: str) -> ModuleType:
  """Imports "package.module" or "path/to/file.py".

  `subject` begins the error's sentence, as "reward 'my.py:brief'".

  Raises:
    ValueError: it cannot be loaded.
  """
  try:
    with one_process():
      if place.endswith(".py"):
        return user_code.load(place)
      with user_code.own_directory():
        return importlib.import_module(place)
  except (ImportError, OSError, SyntaxError) as error:
    raise ValueError(f"{subject}: {error}") from error
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # pytest's skip, and SystemExit
    raise ValueError(
      f"{subject} cannot be loaded: {describe(error)}"
    ) from error


def call(
  function: Callable[[], Any],
  words: Callable[[BaseException], str] = lambda error: (
    f"raised {describe(error)}"
  ),
) -> tuple[Any, str | None]:
  """Calls a function, and returns its result and None, or None and the error.

  Only this process returns, not one that the function has forked.
  """
  try:
    with one_process(), user_code.own_directory():
      return function(), None
  except (KeyboardInterrupt, OutOfTime):
    raise
  except WrongAnswer as error:
    return None, str(error)
  except BaseException as error:  # asyncio's and pytest's, and SystemExit
    return None, words(error)


def in_time(
  seconds: int | float,
  function: Callable[[], None],
  timer: int = signal.ITIMER_REAL,
) -> bool:
  """Calls a function, and interrupts it after so many seconds.

  False where it was interrupted. With `ITIMER_VIRTUAL` the seconds are of this
  process's work and not of the clock. There is no limit in threads but the main
  one, which get no signals, nor while a debugger is at work.
  """
  if threading.current_thread() is not threading.main_thread():
    function()
    return True

  def interrupt(number, frame):
    if sys.gettrace() is None:
      raise OutOfTime

  real = timer == signal.ITIMER_REAL
  alarm, left = signal.SIGALRM if real else signal.SIGVTALRM, (0.0, 0.0)
  others = signal.signal(alarm, interrupt)
  try:
    try:
      # And again each second, for a function that catches it.
      left = signal.setitimer(timer, min(seconds, FOREVER), 1.0)
      function()
    finally:
      signal.setitimer(timer, 0)  # interrupted here, it is set below
    return True
  except OutOfTime:
    return False
  finally:
    signal.signal(alarm, others or signal.SIG_DFL)
    signal.setitimer(timer, *left)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
  """Ends a child at once that was forked inside and would go on after it."""
  process = os.getpid()
  try:
    yield
  finally:
    if os.getpid() != process:
      os._exit(0)


def message(error: BaseException) -> str:
  """Returns the type and the message of an exception, whatever that is."""
  try:
    text = str(error)[:_LONGEST_ERROR]
  except KeyboardInterrupt:
    raise
  except BaseException:
    text = "(its message cannot be shown)"
  return f"{type(error).__name__}: {text}"


def describe(error: BaseException) -> str:
  """Describes an exception in one line, with the place where it was raised."""
  trace = error.__traceback__
  while trace.tb_next:
    trace = trace.tb_next
  file = os.path.basename(trace.tb_frame.f_code.co_filename)
  return f"{message(error)} ({file}:{trace.tb_lineno})"
