"""Options as the fields of frozen dataclasses: default, meaning and range.

    @frozen_options
    class Decoding:
      stages: int = option(4, "stages of the cache", within="[1, inf)")

One declaration is the source of the default, of the check that a value passes
when the dataclass is made, and of what --help and docs/settings.md say.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import re
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

ONE_OR_MORE = "[1, inf)"
NOT_NEGATIVE = "[0, inf)"
POSITIVE = "(0, inf)"
DECAY = "[0, 1)"


@dataclasses.dataclass(frozen=True)
class Option:
  """Declaration of one option, setting or flag.

  Attributes:
    default: Value that it has where none is set; the option has its type.
    text: Phrase without a full stop that says what it is, with the unit and
      what 0 or "" mean.
    choices: Names that it may have; () is any.
    within: Interval that a number must be in, as "[0, 1)" or "(0, inf)"; "" is
      any. An upper bound may be a power, "2**31".
    words: Texts that may stand in the place of a number.
  """

  default: Any
  text: str
  choices: Collection[str] = ()
  within: str = ""
  words: tuple[str, ...] = ()


def option(default: Any, text: str, *args: Any, **kwargs: Any) -> Any:
  """Declares a dataclass's field as an `Option` of these arguments."""
  declared = Option(default, text, *args, **kwargs)
  return dataclasses.field(default=default, metadata={"option": declared})


def declared_options(options: type | Any) -> dict[str, Option]:
  """Returns the declarations of a dataclass's options by field name."""
  return {
    field.name: field.metadata["option"]
    for field in dataclasses.fields(options)
    if "option" in field.metadata
  }


def _interval(within: str) -> tuple[str, str, str, str]:
  """Splits "[0, 1)" into its brackets and bounds."""
  match = re.fullmatch(r"([\[(])([^, ]+), ([^, ]+)([\])])", within)
  if not match:
    raise ValueError(f"{within!r} is no interval like '[0, 1)'")
  return match.groups()


def in_interval(within: str, value: float | int) -> bool:
  """Returns True for a number in an interval like "[0, 1)"; NaN is in none."""
  left, low, high, right = _interval(within)
  base, power, exponent = high.partition("**")
  low, high = float(low), float(base) ** float(exponent if power else 1)
  above = value >= low if left == "[" else value > low
  below = value <= high if right == "]" else value < high
  return above and below


def interval_text(within: str) -> str:
  """Returns an interval in words: "0 or more", "more than 0", "in [0, 1)"."""
  left, low, high, _ = _interval(within)
  if "**" in high:
    return f"{low} or more, and less than {high}"
  if high != "inf":
    return f"in {within}"
  return f"{low} or more" if left == "[" else f"more than {low}"


def _other_type(default: Any, value: Any) -> str:
  """Returns the kind of value that an option needs; "" if `value` is one."""
  truth = isinstance(value, (bool, np.bool_))
  if isinstance(default, bool):
    return "" if truth else "True or False"
  if isinstance(default, int):
    kind, name = numbers.Integral, "a whole number"
  elif isinstance(default, float):
    kind, name = numbers.Real, "a number"
  else:
    return ""
  return "" if isinstance(value, kind) and not truth else name


def refusal(declared: Option, value: Any) -> str | None:
  """Returns what an option's value must be, with its text; None where it is.

  A function in the place of a name is never refused.
  """
  functions = getattr(declared.choices, "values", tuple)()
  if callable(value) and any(map(callable, functions)):
    return None
  if isinstance(value, str) and value in declared.words:
    return None
  if kind := _other_type(declared.default, value):
    return f"must be {kind} ({declared.text})"
  values = value if isinstance(declared.default, tuple) else (value,)
  unknown = [
    x for x in values if not isinstance(x, str) or x not in declared.choices
  ]
  if declared.choices and unknown:
    near = difflib.get_close_matches(str(unknown[0]), declared.choices, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}use one of {', '.join(declared.choices)} ({declared.text})"
  if declared.within and not in_interval(declared.within, value):
    open_end = declared.within.endswith("inf)")
    infinite = value != value or value in (math.inf, -math.inf)
    finite = ", and finite" if open_end and infinite else ""
    words = "".join(f", or {word}" for word in declared.words)
    allowed = interval_text(declared.within)
    return f"must be {allowed}{words}{finite} ({declared.text})"
  return None


def option_errors(options: Any) -> list[str]:
  """Returns a line "NAME = VALUE: reason" for each value that cannot be."""
  return [
    f"{name} = {value!r}: {reason}"
    for name, declared in declared_options(options).items()
    if (reason := refusal(declared, value := getattr(options, name)))
  ]


def refuse(errors: Sequence[str]) -> None:
  """Raises ValueError with all errors, a line each, if there are any."""
  if errors:
    raise ValueError("\n  ".join(errors))


def near_names(function: Callable[..., Any]) -> Callable[..., Any]:
  """Makes a function's TypeError for an unknown argument name the near ones.

  A name may also be that of an option of a default: `beta` of `objective`.
  """
  parameters = inspect.signature(function).parameters
  title = function.__qualname__.removesuffix(".__init__")

  @functools.wraps(function)
  def call(*args, **kwargs):
    for name in kwargs.keys() - parameters.keys():
      hint = "use one of " + ", ".join(x for x in parameters if x != "self")
      if near := difflib.get_close_matches(name, parameters, n=1, cutoff=0.5):
        hint = f"did you mean {near[0]}?"
      for owner, parameter in parameters.items():
        if name in getattr(parameter.default, "__dataclass_fields__", ()):
          kind = type(parameter.default).__name__
          hint = f"give {owner}={kind}({name}=...)"
      raise TypeError(f"{title} has no argument {name}: {hint}")
    return function(*args, **kwargs)

  return call


@typing.dataclass_transform(frozen_default=True)
def frozen_options(kind: type) -> type:
  """Makes a class of options a frozen dataclass that checks its values.

  A class with a `__post_init__` of its own calls `option_errors` there.

  Raises:
    ValueError: By the dataclass, where a value is out of its range or none of
      its choices; the message has a line for each.
  """
  if "__post_init__" not in vars(kind):
    kind.__post_init__ = lambda self: refuse(option_errors(self))
  kind = dataclasses.dataclass(frozen=True)(kind)
  kind.__init__ = near_names(kind.__init__)
  return kind
