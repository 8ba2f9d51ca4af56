"""Binds settings to the parameters of the same names in a function."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def asks_for(function: Callable[..., Any], name: str) -> bool:
  """True if a function has an unbound parameter of this name."""
  try:
    parameters = inspect.signature(function).parameters
  except (TypeError, ValueError):  # some callables have no signature
    return False
  return name in parameters and name not in getattr(function, "keywords", {})


def bind(function: Callable[..., Any], **offered: Any) -> Callable[..., Any]:
  """Binds the offered keyword arguments for which a function has parameters.

  Arguments bound by `functools.partial` stay bound. A callable without a
  signature gets no arguments.
  """
  taken = {k: v for k, v in offered.items() if asks_for(function, k)}
  return functools.partial(function, **taken) if taken else function
