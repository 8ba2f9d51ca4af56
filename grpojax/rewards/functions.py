"""Reward functions by name, and several of them as one number.

A reward is a function `(prompt, completion, example) -> float | None`: prompt
and completion are texts, the example is a dict, None abstains. A name is one of
`BUILT_IN`, or "package.module:function", or "path/to/file.py:function".
Functions of TRL's and verl's users are known by the names of their parameters:
`conventions`.

This module and those of the built-in rewards load without JAX, so that workers
start quickly.
"""

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from grpojax.rewards import conventions
from grpojax.rewards.conventions import nearest
from grpojax.runtime.files import user_code

BUILT_IN = {
  "exact_answer": "exact",
  "math_answer": "math",
  "math_verify": "symbolic",
  "format": "format",
  "length": "length",
  "overlong": "length",
  "unfinished": "length",
}
"""Built-in rewards, and the module of `grpojax.rewards` that has each."""

_TRIAL = {
  "answer": "1",
  "completion_length": 1,
  "max_completion_length": 1,
  "finished": True,
}

_LONGEST_ERROR = 500  # characters


def label(name: str) -> str:
  """Returns the short name, for metrics and options: after the colon."""
  return name.rpartition(":")[2]


Reward = Callable[[str, str, dict[str, Any]], Any] | conventions.Trl
"""`(prompt, completion, example) -> float | None`, or a dict with numbers to be
logged; or one of TRL's convention, of all completions of a prompt at once."""


def resolve(name: str, options: Mapping[str, Any] | None = None) -> Reward:
  """Finds the reward function of a name, and binds its options.

  Args:
    name: a built-in one, "package.module:function" or "file.py:function".
    options: keyword arguments.

  Raises:
    ValueError: there is no such function, its file cannot be loaded,
      `conventions.follow` refuses it, or a built-in one an option's value.
  """
  module, attribute = _module(name), label(name)
  function = getattr(module, attribute, None)
  if function is None:
    hint = nearest(attribute, [n for n in vars(module) if n[0] != "_"])
    raise ValueError(f"reward {name!r}: no such function{hint}")
  if not callable(function):
    raise ValueError(f"reward {name!r} is no function, but {function!r:.80}")
  reward = conventions.follow(name, function, dict(options or {}))
  if name in BUILT_IN:
    try:
      reward("", "", dict(_TRIAL))  # refuses values of options
    except (TypeError, ValueError) as error:
      raise ValueError(f"reward {name!r}: {error}") from error
  return reward


def resolve_all(
  names: Sequence[str], options: Mapping[str, Any] | None = None
) -> list[Reward]:
  """Finds the functions of several names, each with options by its `label`.

  Raises:
    ValueError: no names, the same label twice, options of a function that is
      not among them, or a function that `resolve` refuses.
  """
  labels = [label(name) for name in names]
  if not names or len(set(labels)) < len(labels):
    raise ValueError(
      f"reward functions {list(names)}: give at least one, each name once"
    )
  options = options or {}
  for name, keywords in options.items():
    if not isinstance(keywords, Mapping):
      raise ValueError(
        f"--config.reward.options.{name} = {keywords!r}: give the function's "
        f"keywords, reward.options.{name}.KEYWORD = ..."
      )
    if name not in labels:
      raise ValueError(
        f"options of {name!r}, which is none of the reward functions {labels}"
        f"{nearest(name, labels)}"
      )
  return [resolve(name, options.get(label(name))) for name in names]


def combine(
  values: Sequence[int | float | None], weights: Sequence[int | float]
) -> float | None:
  """Computes the weighted sum of the rewards of one completion.

  A function that abstains (None) adds nothing, and the weights of the others
  stay as they are. None where all abstain.
  """
  pairs = zip(values, weights, strict=True)
  terms = [weight * value for value, weight in pairs if value is not None]
  return math.fsum(terms) if terms else None


def _module(name: str) -> ModuleType:
  place, colon, _ = name.rpartition(":")
  if not colon:
    if name not in BUILT_IN:
      raise ValueError(
        f"unknown reward {name!r}{nearest(name, list(BUILT_IN))}: choose one"
        f" of {list(BUILT_IN)}, or your own as package.module:function or"
        " path/to/file.py:function"
      )
    place = f"grpojax.rewards.{BUILT_IN[name]}"
  if "/" in place and not place.endswith(".py"):
    raise ValueError(f"reward {name!r}: the name of a file ends in .py")
  try:
    with one_process():
      if place.endswith(".py"):
        return user_code.load(place)
      with user_code.own_directory():
        return importlib.import_module(place)
  except (ImportError, OSError, SyntaxError) as error:
    extra = ": pip install 'grpojax[math]'" if name == "math_verify" else ""
    raise ValueError(f"reward {name!r}: {error}{extra}") from error
  except KeyboardInterrupt:
    raise
  except BaseException as error:  # pytest's skip, and SystemExit
    raise ValueError(
      f"reward {name!r} cannot be loaded: {describe(error)}"
    ) from error


@contextlib.contextmanager
def one_process() -> Iterator[None]:
  """Ends a child at once that was forked inside and would go on after it."""
  process = os.getpid()
  try:
    yield
  finally:
    if os.getpid() != process:
      os._exit(0)


def describe(error: BaseException) -> str:
  """Describes an exception in one line, with the place where it was raised."""
  try:
    message = str(error)[:_LONGEST_ERROR]
  except KeyboardInterrupt:
    raise
  except BaseException:
    message = "(its message cannot be shown)"
  trace = error.__traceback__
  while trace.tb_next:
    trace = trace.tb_next
  file = os.path.basename(trace.tb_frame.f_code.co_filename)
  return f"{type(error).__name__}: {message} ({file}:{trace.tb_lineno})"
