"""Calls of user code, which may raise, fork, change directory or hang."""

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

FOREVER = 1e9  # seconds, near the limit of the system's timers
_LONGEST_ERROR = 500  # characters


class OutOfTime(BaseException):
  """Raised inside a function after its time limit."""


class WrongAnswer(ValueError):
  """Raised when a user function returns an invalid value.

  Its message is shown without the exception's type and line.
  """


def load_module(subject: str, place: str) -> ModuleType:
  """Imports "package.module" or "path/to/file.py"; ValueError if that fails.

  The error message starts with `subject`, such as "reward 'my.py:brief'".
  """
  try:
    with one_process():
      if place.endswith(".py"):
        return user_code.load(place)
      with user_code.own_directory():
        return importlib.import_module(place)
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # includes SystemExit and pytest's skip
    plain = isinstance(error, (ImportError, OSError, SyntaxError))
    reason = f": {error}" if plain else f" cannot be loaded: {describe(error)}"
    raise ValueError(f"{subject}{reason}") from error


def call(
  function: Callable[[], Any],
  to_text: Callable[[BaseException], str] | None = None,
) -> tuple[Any, str | None]:
  """Calls a function; returns (result, None) or (None, text of the error)."""
  try:
    with one_process(), user_code.own_directory():
      return function(), None
  except (KeyboardInterrupt, OutOfTime):
    raise
  except WrongAnswer as error:
    return None, str(error)
  except BaseException as error:  # includes SystemExit, and pytest's skip
    return None, to_text(error) if to_text else f"raised {describe(error)}"


def in_time(
  seconds: int | float,
  function: Callable[[], None],
  timer: int = signal.ITIMER_REAL,
) -> bool:
  """Calls a function; returns False if it was interrupted after `seconds`.

  `ITIMER_VIRTUAL` counts CPU time. There is no limit under a debugger, nor
  outside the main thread, because other threads receive no signals.
  """
  if threading.current_thread() is not threading.main_thread():
    function()
    return True

  def interrupt(number, frame):
    if sys.gettrace() is None:
      raise OutOfTime

  is_real = timer == signal.ITIMER_REAL
  alarm = signal.SIGALRM if is_real else signal.SIGVTALRM
  old_timer = [0.0, 0.0]
  old_handler = signal.signal(alarm, interrupt)
  try:
    try:
      # Repeats each second, because the function may catch the exception.
      old_timer = signal.setitimer(timer, min(seconds, FOREVER), 1.0)
      function()
    finally:
      signal.setitimer(timer, 0)  # the outer `finally` restores it
    return True
  except OutOfTime:
    return False
  finally:
    signal.signal(alarm, old_handler or signal.SIG_DFL)
    signal.setitimer(timer, *old_timer)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
  """Ends processes forked inside the context when they leave the context."""
  process = os.getpid()
  try:
    yield
  finally:
    if os.getpid() != process:
      os._exit(0)


def message(error: BaseException) -> str:
  """Returns an exception's type and message, even if `str` fails."""
  try:
    text = str(error)[:_LONGEST_ERROR]
  except KeyboardInterrupt:
    raise
  except BaseException:
    text = "(its message cannot be shown)"
  return f"{type(error).__name__}: {text}"


def describe(error: BaseException) -> str:
  """Returns an exception's type, message and place, as "FILE:LINE"."""
  trace = error.__traceback__
  while trace.tb_next:
    trace = trace.tb_next
  file = os.path.basename(trace.tb_frame.f_code.co_filename)
  return f"{message(error)} ({file}:{trace.tb_lineno})"
