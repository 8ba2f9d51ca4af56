"""Calls of user code, which may raise anything, fork, move or never return."""

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

FOREVER = 1e9  # seconds; the system's timers take little more
_LONGEST_ERROR = 500  # characters


class OutOfTime(BaseException):
  """Interruption of a function that takes too long."""


class WrongAnswer(ValueError):
  """Invalid result of a user's function; its message is shown alone."""


def load_module(subject: str, place: str) -> ModuleType:
  """Imports "package.module" or "path/to/file.py"; ValueError if that fails.

  `subject` begins the error message, as "reward 'my.py:brief'".
  """
  try:
    with one_process():
      if place.endswith(".py"):
        return user_code.load(place)
      with user_code.own_directory():
        return importlib.import_module(place)
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # pytest's skip and SystemExit, too
    plain = isinstance(error, (ImportError, OSError, SyntaxError))
    reason = f": {error}" if plain else f" cannot be loaded: {describe(error)}"
    raise ValueError(f"{subject}{reason}") from error


def call(
  function: Callable[[], Any],
  words: Callable[[BaseException], str] = lambda error: (
    f"raised {describe(error)}"
  ),
) -> tuple[Any, str | None]:
  """Calls a function; returns (its result, None) or (None, the error)."""
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
  """Calls a function; returns False if it was interrupted after `seconds`.

  `ITIMER_VIRTUAL` counts CPU time. There is no limit in a debugger, nor in
  threads other than the main one, which get no signals.
  """
  if threading.current_thread() is not threading.main_thread():
    function()
    return True

  def interrupt(number, frame):
    if sys.gettrace() is None:
      raise OutOfTime

  real = timer == signal.ITIMER_REAL
  alarm = signal.SIGALRM if real else signal.SIGVTALRM
  left = [0.0, 0.0]
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
  """Returns the type and the message of an exception, even if `str` fails."""
  try:
    text = str(error)[:_LONGEST_ERROR]
  except KeyboardInterrupt:
    raise
  except BaseException:
    text = "(its message cannot be shown)"
  return f"{type(error).__name__}: {text}"


def describe(error: BaseException) -> str:
  """Describes an exception in one line, with the place that raised it."""
  trace = error.__traceback__
  while trace.tb_next:
    trace = trace.tb_next
  file = os.path.basename(trace.tb_frame.f_code.co_filename)
  return f"{message(error)} ({file}:{trace.tb_lineno})"
