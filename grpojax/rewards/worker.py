"""One reward worker: python -m grpojax.rewards.worker, started by `pool`.

Its first line names the reward functions; other lines are tasks: the numbers of
functions and the completions of one prompt that they judge. It answers an
`Outcome` for each function and completion.
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
"""Largest absolute value of a reward: sums of squares fit into float32."""

_MOST_EXTRAS, _LONGEST_NAME = 32, 64
_REWARD = "score"  # the key of the reward where a function returns a dict


class Outcome(NamedTuple):
  """Result of one function for one completion."""

  value: float | None  # the reward; None where the function abstains, or failed
  error: str | None = None  # the failure, in words; None where nothing failed
  # Other numbers that the function returned, by name, for logs.
  extras: Mapping[str, float] = {}


def evaluate(
  reward: functions.Reward,
  items: Sequence[conventions.Item],
  sources: Collection[str] | None = None,
) -> list[Outcome]:
  """Calls a function on completions of one prompt.

  It abstains from data sets other than `sources`. Children that the function
  forks do not return, and its changes to an example are lost.
  """
  if sources is not None and items[0][2].get(SOURCE) not in sources:
    return [Outcome(None)] * len(items)
  items = [(*texts, copy.deepcopy(example)) for *texts, example in items]
  if isinstance(reward, conventions.Trl):
    return _call(lambda: reward(items), len(items))
  return [_call(lambda: [reward(*item)], 1)[0] for item in items]  # noqa: B023


def _call(function: Callable[[], Sequence[Any]], count: int) -> list[Outcome]:
  """Outcomes of a call that is to return `count` values."""

  def outcomes() -> list[Outcome]:
    values = list(function())
    if len(values) != count:
      wrong = f"returned {len(values)} rewards for {count} completions"
      raise user_calls.WrongAnswer(wrong)
    return [_outcome(value) for value in values]

  result, error = user_calls.call(outcomes)
  return [Outcome(None, error)] * count if result is None else result


def _outcome(value: Any) -> Outcome:
  """Reads a returned value: None, a number, an array of one, or verl's dict.

  A dict has the reward as "score"; its first 32 other finite numbers are
  extras.
  """
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
  """Returns a number as a reward, and None as None.

  WrongAnswer, which begins with `returned`, if it is no number or too large.
  """
  value = _scalar(value)
  if value is None:
    return None
  number = to_float(value)
  if number is None:
    wrong = f"{type(value).__name__}, which is not a number"
  elif abs(number) <= LARGEST:
    return number
  else:
    more = f", more than {LARGEST:g}" if math.isfinite(number) else ""
    wrong = f"{number:g}{more}"
  raise user_calls.WrongAnswer(f"{returned} {wrong}")


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
  """The element of an array of one, of any library; else the value itself."""
  shape = getattr(value, "shape", None)
  one = isinstance(shape, tuple) and math.prod(shape) == 1
  return value.item() if one else value


def to_float(value: Any) -> float | None:
  """Returns any number as a float, also Decimal, Fraction and arrays of one.

  None for other values; an infinity if it is too large.
  """
  value = _scalar(value)
  if isinstance(value, str | bytes | bytearray):
    return None  # which float() would read
  try:
    return float(value)
  except OverflowError:  # an integer or a fraction without bounds
    return math.inf
  except (TypeError, ValueError):
    return None


def parse(outcome: Any) -> Outcome:
  """Reads an Outcome of JSON; raises an error if it is none."""
  value, error, extras = outcome
  typed = isinstance(value, float | None) and isinstance(error, str | None)
  if typed and all(isinstance(x, float) for x in extras.values()):
    return Outcome(value, error, extras)
  raise TypeError


def prepare(setup: dict[str, Any]) -> workers.Answer:
  """Returns the function that computes a task's outcomes, one after another."""
  rewards = functions.resolve_all(setup["names"], setup["options"])
  if functions.workers_for(setup["names"], 0):  # not in an answer's time
    importlib.import_module("grpojax.rewards.symbolic")

  def answer(task: Sequence[Any]) -> Iterator[Outcome]:
    indices, items = task
    for i in indices:
      yield from evaluate(rewards[i], items, setup["sources"][i])

  return answer


if __name__ == "__main__":
  workers.run(prepare)
