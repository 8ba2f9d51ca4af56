"""Loads and calls user code, which may raise, fork, or hang."""

import contextlib
import difflib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
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


def split(path: str) -> tuple[str, str]:
  """Splits "PLACE:NAME", "file.py" (no name) or "NAME" into (place, name)."""
  place, _, name = path.rpartition(":")
  # Directory names may contain a colon.
  return (path, "") if path.endswith(".py") else (place, name)


def load(subject: str, path: str, built_in: Mapping[str, Any]) -> Any:
  """Loads an object (package.module:NAME or file.py:NAME) or a file (file.py).

  `built_in` maps short names to paths. ValueErrors begin with `subject`.
  """
  place, name = split(built_in.get(path, path))
  if not place and path not in built_in:
    choices = f"choose one of {list(built_in)}, or " if built_in else ""
    raise ValueError(
      f"unknown {subject}: {choices}give your own as package.module:NAME or "
      f"path/to/file.py:NAME{nearest(path, list(built_in))}"
    )
  module = _load_module(subject, place or name)
  if not place or not name:
    return module
  if not hasattr(module, name):
    hint = nearest(name, [n for n in vars(module) if n[0] != "_"])
    raise ValueError(f"{subject}: {place} has no {name!r}{hint}")
  return getattr(module, name)


def nearest(name: str, candidates: Collection[str]) -> str:
  """Returns "; did you mean ...?" for the closest name, or ""."""
  close = difflib.get_close_matches(name, candidates, 1)
  return f"; did you mean {close[0]!r}?" if close else ""


def _load_module(subject: str, place: str) -> ModuleType:
  """Imports "package.module" or "path/to/file.py"; ValueError if that fails."""
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
