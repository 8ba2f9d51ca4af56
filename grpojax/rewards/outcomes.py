"""What a reward function makes of a completion: a number, nothing, an error."""

import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpojax.rewards import functions

LARGEST = 1e30
"""Largest absolute value of a reward: sums of them fit into float32."""

SCORE = "score"
"""The key of the reward where a function returns a dict, as verl's do."""

_EXTRAS, _LONGEST_NAME = 32, 64


class Outcome(NamedTuple):
  """What became of one completion in one function.

  Attributes:
    value: the reward; None where the function abstains, or failed.
    error: what went wrong; None where nothing did.
    extras: other numbers that the function gave, by name: to be logged.
  """

  value: float | None
  error: str | None = None
  extras: Mapping[str, float] = {}


def of_value(value: Any) -> Outcome:
  """What a function has returned for a completion.

  Args:
    value: None abstains. A number, or a scalar array, is the reward. A dict has
      it as "score"; its other finite numbers are extras (the first 32), and
      what else it has is left out.

  Raises:
    Exception: what the value raises where it is looked at.
  """
  extras = {}
  if isinstance(value, Mapping):
    if SCORE not in value:
      return Outcome(None, f"returned a dict without {SCORE!r}")
    others = {key: _scalar(x) for key, x in value.items() if key != SCORE}
    found = [(key, x) for key, x in others.items() if _is_finite(x)]
    extras = {str(k)[:_LONGEST_NAME]: float(x) for k, x in found[:_EXTRAS]}
    value = value[SCORE]
  value = _scalar(value)
  if value is None:
    return Outcome(None, None, extras)
  if not isinstance(value, numbers.Real):
    error = f"returned {type(value).__name__}, which is not a number"
    return Outcome(None, error, extras)
  value = float(value)
  if not _is_finite(value):
    return Outcome(None, f"returned {value}", extras)
  return Outcome(value, None, extras)


def _scalar(value: Any) -> Any:
  return value.item() if getattr(value, "shape", None) == () else value


def _is_finite(value: Any) -> bool:
  if not isinstance(value, numbers.Real):
    return False
  return math.isfinite(value) and abs(value) <= LARGEST


def raised(error: BaseException) -> Outcome:
  """A function did not return."""
  return Outcome(None, f"raised {functions.describe(error)}")
