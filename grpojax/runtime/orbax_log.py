"""What Orbax logs: told once, by what it raises.

It warns at length of that, and logs the traceback as well, from each thread.
What fails in one of several processes it raises only when all of them have come
to a barrier, to which the others do not come while they wait for the part that
has failed: for twenty minutes. The log says it at once.
"""

import logging
import time
from typing import Any

from grpojax.runtime import distributed

_EVERY = 1.0  # seconds between two looks
_failures: list[BaseException] = []


def _told(record: logging.LogRecord) -> bool:
  if "orbax/checkpoint" not in record.pathname:
    return True
  if record.levelno >= logging.ERROR and record.exc_info:
    _failures.append(record.exc_info[1])
    return False
  return record.levelno >= logging.ERROR


logging.getLogger("absl").addFilter(_told)


def forget() -> None:
  """A new save begins."""
  _failures.clear()


def failed_alone() -> BaseException | None:
  """What the part of a save has raised that is one of several processes'."""
  return _failures[0] if _failures and distributed.several() else None


def result(save: Any, timeout: float | None) -> Any:
  """Waits for a save, or until this process's own part of it has failed.

  Args:
    save: Orbax's response.
    timeout: seconds; None is until it ends.

  Raises:
    TimeoutError: it goes on.
    Exception: what went wrong.
  """
  while True:
    if error := failed_alone():
      raise error
    if timeout is not None or not distributed.several():
      return save.result(timeout)
    began = time.monotonic()
    try:
      return save.result(_EVERY)
    except TimeoutError:
      if time.monotonic() - began < _EVERY / 2:  # Orbax's own
        raise
