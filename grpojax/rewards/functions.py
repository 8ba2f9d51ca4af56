"""Reward functions by name, and several of them as one number.

A reward is a function `(prompt, completion, example) -> float | None`: prompt
and completion are texts, the example is a dict, None abstains. A name is one of
`BUILT_IN`, or "package.module:function", or "path/to/file.py:function".
Functions of TRL's and verl's users are known by the names of their parameters:
`conventions`.

This module and those of the built-in rewards load without JAX, so that a worker
process starts in a fraction of a second.
"""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from grpojax.data.examples import SOURCE
from grpojax.rewards import conventions

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
"""Result of `resolve`: a function of a completion, or (TRL's) of a group."""


def resolve(name: str, options: Mapping[str, Any] | None = None) -> Reward:
  """Finds the reward function of a name, and binds its options.

  Args:
    name: a built-in one, "package.module:function" or "file.py:function".
    options: keyword arguments.

  Returns:
    `(prompt, completion, example) -> float | None`, or a dict with numbers to
    be logged (`worker.evaluate` reads it); or one of TRL's convention, which
    takes all completions of a prompt at once.

  Raises:
    ValueError: there is no such function, its file cannot be loaded, it
      follows no convention, or more than one, it does not take these options,
      or a built-in function refuses an option's value.
  """
  options = dict(options or {})
  module, attribute = _module(name), label(name)
  function = getattr(module, attribute, None)
  if not callable(function):
    if function is not None:
      raise ValueError(f"reward {name!r} is no function: {type(function)}")
    hint = _nearest(attribute, [n for n in vars(module) if n[0] != "_"])
    raise ValueError(f"reward {name!r}: no such function{hint}")
  if name not in BUILT_IN:
    followed = conventions.follow(name, function, options)
    if followed is not None:
      return followed
  try:
    signature = inspect.signature(function)
  except ValueError:  # some functions that are written in C
    signature = None
  if signature is not None:
    _check(name, signature, options)
  bound = functools.partial(function, **options) if options else function
  if name in BUILT_IN:
    try:
      bound("", "", dict(_TRIAL))  # refuses values of options
    except (TypeError, ValueError) as error:
      raise ValueError(f"reward {name!r}: {error}") from error
  return bound


def resolve_all(
  names: Sequence[str],
  options: Mapping[str, Any] | None = None,
  sources: Mapping[str, Sequence[str]] | None = None,
) -> list[Reward]:
  """Finds the functions of several names, by `resolve`.

  Args:
    names: names of functions.
    options: keyword arguments of each, by its `label`.
    sources: data sets of a mixture that a function is for, by its `label`; it
      abstains from the others. One that is not named is for all.

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
        f"{_nearest(name, labels)}"
      )
  rewards = []
  for name, short in zip(names, labels, strict=True):
    reward = resolve(name, options.get(short))
    if short in (sources or {}):
      reward = _restricted(reward, tuple(sources[short]))
    rewards.append(reward)
  return rewards


def _restricted(reward: Reward, sources: Sequence[str]) -> Reward:
  """A reward that abstains from the examples of other data sets."""
  if isinstance(reward, conventions.Trl):
    return reward._replace(sources=sources)

  def restricted(prompt, completion, example):
    if example.get(SOURCE) in sources:
      return reward(prompt, completion, example)
    return None

  return restricted


def combine(
  values: Sequence[int | float | None], weights: Sequence[int | float]
) -> float | None:
  """Computes the weighted sum of the rewards of one completion.

  A function that abstains adds nothing, and the weights of the others stay as
  they are.

  Args:
    values: a value of each function; None where it abstains.
    weights: one for each value.

  Returns:
    The sum; None where all abstain.
  """
  pairs = zip(values, weights, strict=True)
  terms = [weight * value for value, weight in pairs if value is not None]
  return math.fsum(terms) if terms else None


def _module(name: str) -> ModuleType:
  place, colon, _ = name.rpartition(":")
  if not colon:
    if name not in BUILT_IN:
      raise ValueError(
        f"unknown reward {name!r}{_nearest(name, list(BUILT_IN))}: choose one"
        f" of {list(BUILT_IN)}, or your own as package.module:function or"
        " path/to/file.py:function"
      )
    place = f"grpojax.rewards.{BUILT_IN[name]}"
  if "/" in place and not place.endswith(".py"):
    raise ValueError(f"reward {name!r}: the name of a file ends in .py")
  try:
    with one_process():
      return _load(place)
  except (ImportError, OSError, SyntaxError) as error:
    extra = ": pip install 'grpojax[math]'" if name == "math_verify" else ""
    raise ValueError(f"reward {name!r}: {error}{extra}") from error
  except (Exception, SystemExit) as error:
    raise ValueError(
      f"reward {name!r} cannot be loaded: {describe(error)}"
    ) from error


def _load(place: str) -> ModuleType:
  if not place.endswith(".py"):
    return importlib.import_module(place)
  path = pathlib.Path(place).resolve()
  if not path.exists():
    raise OSError(f"there is no file {path}")
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


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


def _check(name: str, signature: inspect.Signature, options: dict[str, Any]):
  """Refuses options that the function does not take."""
  if wrong := [key for key in options if not _takes(signature, key)]:
    known = [key for key in signature.parameters if _takes(signature, key)]
    raise ValueError(
      f"reward {name!r} has no option {wrong[0]!r}"
      f"{_nearest(wrong[0], known)}: it takes {known or 'none'}"
    )
  try:
    signature.bind("", "", {}, **options)
  except TypeError as error:
    raise ValueError(
      f"reward {name!r} cannot be called with prompt, completion, example and"
      f" the options {options}: {error} (TRL's convention is known by a"
      " parameter `completions`, verl's by one `solution_str`)"
    ) from error


def _takes(signature: inspect.Signature, key: str) -> bool:
  """True where the function has this keyword, besides its three arguments."""
  for i, p in enumerate(signature.parameters.values()):
    by_name = p.kind is p.KEYWORD_ONLY or (
      p.kind is p.POSITIONAL_OR_KEYWORD and i > 2
    )
    if p.kind is p.VAR_KEYWORD or (p.name == key and by_name):
      return True
  return False


def _nearest(name: str, candidates: Sequence[str]) -> str:
  close = difflib.get_close_matches(name, candidates, 1)
  return f"; did you mean {close[0]!r}?" if close else ""
