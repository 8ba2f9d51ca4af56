"""Settings find the functions that ask for them, by the names of parameters."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def bind(function: Callable[..., Any], **offered: Any) -> Callable[..., Any]:
  """Binds those of the offered keyword arguments that a function takes.

  So a choice of functions may differ in what they need: whatever asks for `k`,
  `lengths` or `clip_low` gets it, and the caller need not know who does. What
  was bound before, by `functools.partial`, stays as it is.

  Args:
    function: any callable; one without a signature takes nothing.
    **offered: what there is.
  """
  try:
    parameters = inspect.signature(function).parameters
  except (TypeError, ValueError):  # some callables have no signature
    return function
  bound = getattr(function, "keywords", {})
  wanted = {
    name: value
    for name, value in offered.items()
    if name in parameters and name not in bound
  }
  return functools.partial(function, **wanted) if wanted else function
