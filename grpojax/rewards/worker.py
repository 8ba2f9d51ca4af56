"""A process that computes rewards: python -m grpojax.rewards.worker.

It reads lines `ID JSON` from its standard input: the first says which
functions, each other one is a completion to score. For each function it answers
with a line [ID, value, error]; the ID is random, so no reply can be taken for
one to another line. What the functions print goes to standard error.

Functions are trusted not to attack: one that forks, reads, prints, closes files
or writes to all that are open does no harm to other completions, but one that
looks for the present ID in this process can answer in its own favour. Who runs
code that a model wrote must do it in a sandbox of its own.

It ends when its input does, that is, also when the other process was killed;
and if a function hangs then, the system's alarm ends it (see `LEEWAY`).
"""

import contextlib
import json
import math
import numbers
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from grpojax.rewards import functions

LARGEST = 1e30
"""Largest absolute value of a reward: sums of them fit into float32."""

LEEWAY = 2.0
"""Seconds beyond a completion's limit after which the system ends a worker. The
parent kills it at the limit; this is for a worker whose parent has died."""


def evaluate(
  function: Callable[[str, str, dict[str, Any]], float | None],
  prompt: str,
  completion: str,
  example: dict[str, Any],
) -> tuple[float | None, str | None]:
  """The reward, or what went wrong: (value, None) or (None, error).

  An error is an exception, also SystemExit, and a value that is neither None
  nor a finite number. (None, None) abstains. Only this process returns, not one
  that the function has forked.
  """
  try:
    with functions.one_process():
      value = function(prompt, completion, example)
    if value is None:
      return None, None
    if getattr(value, "shape", None) == ():  # a scalar array
      value = value.item()
    if not isinstance(value, numbers.Real):
      return None, f"returned {type(value).__name__}, which is not a number"
    value = float(value)
  except (Exception, SystemExit) as error:
    return None, f"raised {functions.describe(error)}"
  if not math.isfinite(value) or abs(value) > LARGEST:
    return None, f"returned {value}"
  return value, None


def _limit_memory(size: int) -> None:
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  _, most = resource.getrlimit(resource.RLIMIT_DATA)
  if most != resource.RLIM_INFINITY:
    size = min(size, most)
  resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def main() -> None:
  """Answers until the input ends."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
  requests = os.fdopen(os.dup(0), "rb")
  replies = os.dup(1)
  # A function that reads or prints must not disturb the exchange.
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  sys.stdout.reconfigure(line_buffering=True)  # seen also if it is killed

  def reply(name: bytes, value: Any, error: str | None) -> None:
    # Begins a line, in case that something else wrote half of one.
    answer = json.dumps([name.decode(), value, error])
    os.write(replies, f"\n{answer}\n".encode())

  name, _, line = requests.readline().partition(b" ")
  setup = json.loads(line)
  try:
    _limit_memory(setup["memory"])
    what = [setup[key] for key in ("names", "options", "sources")]
    rewards = functions.resolve_all(*what)
  except ValueError as error:
    reply(name, None, str(error))
    return
  except BaseException as error:
    reply(name, None, functions.describe(error))
    return
  reply(name, "ready", None)
  for line in requests:
    # The default action ends the process whatever a function is doing; set
    # again each time, because a function may have set it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, setup["timeout"] + LEEWAY)
    name, _, job = line.partition(b" ")
    job = json.loads(job)
    for function in rewards:
      reply(name, *evaluate(function, *job))
    signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
  try:
    main()
  except BrokenPipeError:
    pass
  # At once: not waiting for threads that a function has started.
  with contextlib.suppress(OSError, ValueError):  # it may have closed it
    sys.stderr.flush()
  os._exit(0)
