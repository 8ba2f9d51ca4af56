"""From a file to a translation: whose configuration it is, and what it says."""

import os
from types import ModuleType

from grpojax.translation import reading, trl, verl
from grpojax.translation.parts import (
  Note,
  Theirs,
  Translation,
  differs,
  with_known_types,
)

LIBRARIES: dict[str, ModuleType] = {"TRL": trl, "verl": verl}
"""Modules that have LIBRARY, DEFAULTS, knows(name) and translate(given)."""


def library_of(source: reading.Source) -> ModuleType:
  """The library that a file was written for: the one that knows most names.

  Raises:
    ValueError: neither knows any.
  """
  names = [*source.settings, *source.unread]
  known = {
    name: sum(map(module.knows, names)) for name, module in LIBRARIES.items()
  }
  best = max(known, key=known.get)
  if not known[best]:
    raise ValueError(
      "none of its names is one of TRL's GRPOConfig or of verl's trainer:"
      f" {', '.join(names[:5])}"
    )
  return LIBRARIES[best]


def translate(
  path: str | os.PathLike, processes: int = 1, examples: int | None = None
) -> tuple[str, Translation]:
  """The library of a file, and its translation.

  Args:
    path: see `reading.read`.
    processes: that TRL was started with.
    examples: of the training data, where epochs are to be counted.

  Raises:
    ValueError: it cannot be read or translated; one line.
    OSError: it cannot be read.
  """
  source = reading.read(path)
  module = library_of(source)
  theirs = Theirs(module.LIBRARY, source.settings, module.DEFAULTS)
  given = with_known_types(theirs)
  try:
    found = module.translate(given, processes, examples)
  except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
    raise ValueError(
      f"{path}: a value is of no kind that {module.LIBRARY} takes ({error}): "
      "a list or 0 where there is a name or a size, or the like"
    ) from error
  notes = [
    Note(
      name,
      f"{text} is no plain value: what the library has by default is"
      " taken; set it yourself",
    )
    for name, text in source.unread.items()
  ]
  found = found._replace(missing=(*notes, *found.missing))
  functions = dict((s.name, s.value) for s in found.settings)
  own = f"{path}:"
  if not source.guarded and any(
    name.startswith(own) for name in functions["reward.functions"]
  ):
    found += differs(
      "reward_funcs",
      f"workers import {path}, which would start its training: move the"
      " functions to a file of their own, or what starts it under"
      " `if __name__ == '__main__'`",
    )
  return module.LIBRARY, found
