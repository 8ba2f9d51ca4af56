"""A reward worker process, `python -m grpojax.rewards.worker`.

The first line of its input names the reward functions. Each further line is a
task: indices of functions, and completions of a prompt. The worker answers with
an `Outcome` per function and completion.
"""

import copy
import importlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.data.examples import SOURCE
from grpojax.rewards import conventions, functions
from grpojax.runtime.processes import user_calls, workers

LARGEST = 1e15
"""Largest absolute value of a reward, whose square float32 can sum."""

_MOST_EXTRAS = 32
_LONGEST_NAME = 64
_REWARD = "score"  # key of the reward in a returned dict


class Outcome(NamedTuple):
  """Result of a function for a completion."""

  value: float | None  # reward; None if the function abstained or failed
  error: str | None = None  # reason of a failure
  extras: Mapping[str, float] = {}  # further returned numbers, for logs


def evaluate(
  reward: functions.Reward,
  items: Sequence[conventions.Item],
  sources: Collection[str] | None = None,
) -> list[Outcome]:
  """Calls a function on completions of a prompt, with copies of the examples.

  Examples of data sets outside `sources` get None. A process that the function
  forks ends here.
  """
  if sources is not None and items[0][2].get(SOURCE) not in sources:
    return [Outcome(None)] * len(items)
  items = [(*texts, copy.deepcopy(example)) for *texts, example in items]
  if isinstance(reward, conventions.Trl):
    return _call(lambda: reward(items), len(items))
  return [_call(lambda: [reward(*item)], 1)[0] for item in items]  # noqa: B023


def _call(function: Callable[[], Sequence[Any]], count: int) -> list[Outcome]:
  """Calls a function that should return `count` values; returns outcomes."""

  def outcomes() -> list[Outcome]:
    values = list(function())
    if len(values) != count:
      reason = f"returned {len(values)} rewards for {count} completions"
      raise user_calls.WrongAnswer(reason)
    return [_outcome(value) for value in values]

  result, error = user_calls.call(outcomes)
  return [Outcome(None, error)] * count if result is None else result


def _outcome(value: Any) -> Outcome:
  """Converts a number, or a dict with "score" and more numbers, to Outcome."""
  extras: dict[str, float] = {}
  if isinstance(value, Mapping):
    if _REWARD not in value:
      return Outcome(None, f"returned a dict without {_REWARD!r}")
    extras = numbers({k: v for k, v in value.items() if k != _REWARD})
    value = value[_REWARD]
  try:
    return Outcome(to_reward(value), None, extras)
  except user_calls.WrongAnswer as error:
    return Outcome(None, str(error), extras)


def to_reward(value: Any, returned: str = "returned") -> float | None:
  """Converts a number or None to a reward.

  Raises WrongAnswer ("`returned` nan") for other types, nan and large values.
  """
  value = _scalar(value)
  if value is None:
    return None
  number = to_float(value)
  if number is None:
    problem = f"{type(value).__name__}, which is not a number"
  elif abs(number) <= LARGEST:
    return number
  else:
    limit = f", more than {LARGEST:g}" if math.isfinite(number) else ""
    problem = f"{number:g}{limit}"
  raise user_calls.WrongAnswer(f"{returned} {problem}")


def numbers(values: Mapping[Any, Any]) -> dict[str, float]:
  """Returns the first 32 finite numbers of a dict, for logs."""
  finite: dict[str, float] = {}
  for key, value in values.items():
    number = to_float(value)
    fits = number is not None and abs(number) <= LARGEST
    if fits and len(finite) < _MOST_EXTRAS:
      finite[str(key)[:_LONGEST_NAME]] = number
  return finite


def _scalar(value: Any) -> Any:
  """Returns the element of an array of size 1; other values unchanged."""
  shape = getattr(value, "shape", None)
  is_single = isinstance(shape, tuple) and math.prod(shape) == 1
  return value.item() if is_single else value


def to_float(value: Any) -> float | None:
  """Converts a number or an array of size 1 to a float; None for others."""
  value = _scalar(value)
  if isinstance(value, str | bytes | bytearray):
    return None  # float() would parse it
  try:
    return float(value)
  except OverflowError:  # of a large integer or fraction
    return math.inf
  except (TypeError, ValueError):
    return None


def parse(outcome: Any) -> Outcome:
  """Converts parsed JSON to an Outcome; raises an error if it is malformed."""
  value, error, extras = outcome
  typed = isinstance(value, float | None) and isinstance(error, str | None)
  if typed and all(isinstance(x, float) for x in extras.values()):
    return Outcome(value, error, extras)
  raise TypeError


def prepare(setup: dict[str, Any]) -> workers.Answer:
  """Returns a function that yields the outcomes of a task."""
  rewards = functions.resolve_all(setup["names"], setup["options"])
  if functions.workers_for(setup["names"], 0):
    # Slow: a later import would count against the first completion's limit.
    importlib.import_module("grpojax.rewards.symbolic")

  def answer(task: Sequence[Any]) -> Iterator[Outcome]:
    indices, items = task
    for i in indices:
      yield from evaluate(rewards[i], items, setup["sources"][i])

  return answer


if __name__ == "__main__":
  workers.run(prepare)
