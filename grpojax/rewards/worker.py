"""One reward worker: python -m grpojax.rewards.worker, started by `pool`.

It reads lines `ID JSON` from its standard input. The first one names the reward
functions; every other one is a task, completions and the functions that judge
them. For each function and completion it answers [ID, value, error, extras].
The ID is random, so that no answer passes for one to another line.

A function that forks, reads, prints, closes files or writes to all that are
open does no harm to other completions, but one that looks for the present ID in
this process can answer in its own favour: code that a model wrote needs a
sandbox of its own. The worker ends when its input does. Where its parent was
killed, Linux ends it whatever a function is doing; elsewhere the alarm does.
"""

import contextlib
import copy
import ctypes
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.data.examples import SOURCE
from grpojax.rewards import conventions, functions
from grpojax.runtime.files import user_code

LARGEST = 1e15
"""Largest absolute value of a reward: sums of squares fit into float32."""

LEEWAY = 2.0
"""Seconds beyond a task's limit, at which the parent kills a worker, after
which the system does where the parent has died."""

FOREVER = 1e9
"""Seconds; the system's timers take little more."""

_MEMORY = 2**33  # bytes of data that a worker may allocate
_MOST_EXTRAS, _LONGEST_NAME = 32, 64
_REWARD = "score"  # the key of the reward where a function returns a dict


class Outcome(NamedTuple):
  """Result of one function for one completion.

  Attributes:
    value: the reward; None where the function abstains, or failed.
    error: the failure, in words; None where nothing failed.
    extras: other numbers that the function returned, by name, for logs.
  """

  value: float | None
  error: str | None = None
  extras: Mapping[str, float] = {}


class OutOfTime(BaseException):
  """Raised in a function that takes too long, and not caught as its failure."""


def evaluate(
  reward: functions.Reward,
  items: Sequence[conventions.Item],
  sources: Collection[str] | None = None,
) -> list[Outcome]:
  """Calls a function on completions of one prompt, whatever it does.

  It abstains from data sets other than `sources`. Only this process returns,
  not one that the function has forked; and changes that it makes in an example
  stay its own.
  """
  if sources is not None and items[0][2].get(SOURCE) not in sources:
    return [Outcome(None)] * len(items)
  items = [(*texts, copy.deepcopy(example)) for *texts, example in items]
  if isinstance(reward, conventions.Trl):
    return _call(lambda: reward(items), len(items))
  return [_call(lambda: [reward(*item)], 1)[0] for item in items]  # noqa: B023


def _call(function: Callable[[], Sequence[Any]], count: int) -> list[Outcome]:
  """Outcomes of a call that is to return `count` values."""
  try:
    with functions.one_process(), user_code.own_directory():
      values = list(function())
    if len(values) == count:
      return [_outcome(value) for value in values]
    error = f"returned {len(values)} rewards for {count} completions"
  except (KeyboardInterrupt, OutOfTime):
    raise
  except BaseException as exception:  # asyncio's and pytest's, and SystemExit
    error = f"raised {functions.describe(exception)}"
  return [Outcome(None, error)] * count


def _outcome(value: Any) -> Outcome:
  """Reads a returned value: None, a number, an array of one, or verl's dict.

  A dict has the reward as "score"; its other finite numbers are extras (the
  first 32), and anything else in it is ignored.
  """
  extras: dict[str, float] = {}
  if isinstance(value, Mapping):
    if _REWARD not in value:
      return Outcome(None, f"returned a dict without {_REWARD!r}")
    for key, other in value.items():
      number = _float(_scalar(other))
      fits = number is not None and abs(number) <= LARGEST
      if key != _REWARD and fits and len(extras) < _MOST_EXTRAS:
        extras[str(key)[:_LONGEST_NAME]] = number
    value = value[_REWARD]
  value = _scalar(value)
  if value is None:
    return Outcome(None, None, extras)
  number = _float(value)
  if number is None:
    error = f"returned {type(value).__name__}, which is not a number"
  elif not abs(number) <= LARGEST:
    error = f"returned {number:g}"
    if math.isfinite(number):
      error += f", more than {LARGEST:g}"
  else:
    return Outcome(number, None, extras)
  return Outcome(None, error, extras)


def _scalar(value: Any) -> Any:
  """The element of an array, of whatever library, that has one."""
  shape = getattr(value, "shape", None)
  one = isinstance(shape, tuple) and math.prod(shape) == 1
  return value.item() if one else value


def _float(value: Any) -> float | None:
  """Any number as a float, Decimal and Fraction too; None of what is none."""
  if isinstance(value, str | bytes | bytearray):
    return None  # which float() would read
  try:
    return float(value)
  except OverflowError:  # an integer or a fraction without bounds
    return math.inf
  except (TypeError, ValueError):
    return None


def _limit_memory() -> None:
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  _, most = resource.getrlimit(resource.RLIMIT_DATA)
  if most == resource.RLIM_INFINITY or most > _MEMORY:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))


def _end_with_parent() -> None:
  """Has Linux kill this process when the thread that started it has ended."""
  with contextlib.suppress(AttributeError, OSError):  # another system
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
  """Answers until the input ends."""
  _end_with_parent()
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
  requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
  # A function that reads or prints must not disturb the exchange.
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  sys.stdout.reconfigure(line_buffering=True)  # seen also if it is killed

  def reply(name: bytes, outcome: Outcome) -> None:
    # Begins a line, in case that something else wrote half of one.
    answer = json.dumps([name.decode(), *outcome])
    os.write(replies, f"\n{answer}\n".encode())

  name, _, line = requests.readline().partition(b" ")
  setup = json.loads(line)
  try:
    _limit_memory()
    rewards = functions.resolve_all(setup["names"], setup["options"])
  except BaseException as error:
    plain = isinstance(error, ValueError)
    reason = str(error) if plain else functions.describe(error)
    reply(name, Outcome(None, reason))
    return
  reply(name, Outcome(0.0))  # ready
  for line in requests:
    # The default action ends the process whatever a function is doing; set
    # again each time, because a function may have set it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    name, _, task = line.partition(b" ")
    numbers_of_functions, items = json.loads(task)
    limit = setup["timeout"] * len(items) + LEEWAY
    signal.setitimer(signal.ITIMER_REAL, min(limit, FOREVER))
    for i in numbers_of_functions:
      for outcome in evaluate(rewards[i], items, setup["sources"][i]):
        reply(name, outcome)
    signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
  with contextlib.suppress(BrokenPipeError):
    main()
  # At once: not waiting for threads that a function has started.
  with contextlib.suppress(OSError, ValueError):  # it may have closed it
    sys.stderr.flush()
  os._exit(0)
