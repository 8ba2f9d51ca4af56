"""Options: fields of frozen dataclasses with a default, a text and a range.

    @frozen_options
    class Sampling:
      top_k: int = option(0, "likeliest tokens to draw from", within="[0, inf)")

The declaration gives the default, the check at construction, and the text in
--help and docs/settings.md.
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
  """Declaration of an option, setting or flag."""

  default: Any  # also sets the type
  text: str  # phrase without a full stop, with unit and meaning of 0 or ""
  choices: Collection[str] = ()  # allowed names; () allows any
  within: str = ""  # allowed interval: "[0, 1)", "(0, inf)" or "[0, 2**31)"
  words: tuple[str, ...] = ()  # texts allowed instead of a number


def option(default: Any, text: str, *args: Any, **kwargs: Any) -> Any:
  """Declares a dataclass field; the arguments are those of `Option`."""
  metadata = {"option": Option(default, text, *args, **kwargs)}
  return dataclasses.field(default=default, metadata=metadata)


one_or_more = functools.partial(option, within=ONE_OR_MORE)
not_negative = functools.partial(option, within=NOT_NEGATIVE)
positive = functools.partial(option, within=POSITIVE)


def declared_options(options: type | Any) -> dict[str, Option]:
  """Returns a dataclass's `Option`s by field name."""
  return {
    field.name: field.metadata["option"]
    for field in dataclasses.fields(options)
    if "option" in field.metadata
  }


def _interval(within: str) -> tuple[str, str, str, str]:
  """Splits "[0, 1)" into its brackets and bounds."""
  match = re.fullmatch(r"([\[(])([^, ]+), ([^, ]+)([\])])", within)
  if not match:
    raise ValueError(f"{within!r} is not an interval like '[0, 1)'")
  return match.groups()


def in_interval(within: str, value: float | int) -> bool:
  """Returns True if `value` is in an interval like "[0, 1)"; NaN never is."""
  left, low, high, right = _interval(within)
  base, power, exponent = high.partition("**")
  low = float(low)
  high = float(base) ** float(exponent if power else 1)
  above = value >= low if left == "[" else value > low
  below = value <= high if right == "]" else value < high
  return above and below


def interval_text(within: str) -> str:
  """Describes an interval: "0 or more", "more than 0", "in [0, 1)"."""
  left, low, high, _ = _interval(within)
  if "**" in high:
    return f"{low} or more, and less than {high}"
  if high != "inf":
    return f"in {within}"
  return f"{low} or more" if left == "[" else f"more than {low}"


def _required_type(default: Any, value: Any) -> str:
  """Names the required type; "" if `value` has it."""
  is_bool = isinstance(value, (bool, np.bool_))
  if isinstance(default, bool):
    return "" if is_bool else "True or False"
  if isinstance(default, int):
    fits = isinstance(value, numbers.Integral) and not is_bool
    return "" if fits else "a whole number"
  if isinstance(default, float):
    fits = isinstance(value, numbers.Real) and not is_bool
    return "" if fits else "a number"
  return ""


def refusal(declared: Option, value: Any) -> str | None:
  """Describes the requirement violated by `value`, or returns None.

  A function is always accepted in place of the name of a function.
  """
  functions = getattr(declared.choices, "values", tuple)()
  if callable(value) and any(map(callable, functions)):
    return None
  if isinstance(value, str) and value in declared.words:
    return None
  if required := _required_type(declared.default, value):
    return f"must be {required} ({declared.text})"
  values = value if isinstance(declared.default, tuple) else (value,)
  choices = declared.choices
  unknown = [x for x in values if not isinstance(x, str) or x not in choices]
  if choices and unknown:
    near = difflib.get_close_matches(str(unknown[0]), choices, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}use one of {', '.join(choices)} ({declared.text})"
  if declared.within and not in_interval(declared.within, value):
    open_end = declared.within.endswith("inf)")
    infinite = value != value or value in (math.inf, -math.inf)
    finite = ", and finite" if open_end and infinite else ""
    words = "".join(f", or {word}" for word in declared.words)
    allowed = interval_text(declared.within)
    return f"must be {allowed}{words}{finite} ({declared.text})"
  return None


def option_errors(options: Any) -> list[str]:
  """Returns a line "NAME = VALUE: reason" per invalid value."""
  return [
    f"{name} = {value!r}: {reason}"
    for name, declared in declared_options(options).items()
    if (reason := refusal(declared, value := getattr(options, name)))
  ]


def refuse(errors: Sequence[str]) -> None:
  """Raises ValueError if there are errors, with a line for each."""
  if errors:
    raise ValueError("\n  ".join(errors))


def near_names(function: Callable[..., Any]) -> Callable[..., Any]:
  """Suggests a name in the TypeError for an unknown keyword argument.

  If a parameter's default value has such a field, it suggests the parameter.
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
  """Makes a class a frozen dataclass with checked options.

  The ValueError has a line per invalid value. If the class has a
  `__post_init__`, it must call `option_errors` itself.
  """
  if "__post_init__" not in vars(kind):
    kind.__post_init__ = lambda self: refuse(option_errors(self))
  kind = dataclasses.dataclass(frozen=True)(kind)
  kind.__init__ = near_names(kind.__init__)
  return kind
