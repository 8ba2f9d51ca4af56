"""A translation: settings of ours, and what is to be said about theirs."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Setting(NamedTuple):
  """A setting of ours.

  Attributes:
    name: its dotted path.
    value: what it is.
    theirs: what the other library calls it, and its value there.
  """

  name: str
  value: Any
  theirs: str = ""


class Note(NamedTuple):
  """Something about a setting of theirs: its name, and a sentence."""

  theirs: str
  text: str


class Translation(NamedTuple):
  """A configuration, or a part of one.

  Attributes:
    settings: of ours; of two of one name the later one counts.
    differs: settings that mean something else here.
    missing: settings without a counterpart, and why.
  """

  settings: tuple[Setting, ...] = ()
  differs: tuple[Note, ...] = ()
  missing: tuple[Note, ...] = ()

  def __add__(self, other: "Translation") -> "Translation":
    return Translation(*(a + b for a, b in zip(self, other, strict=True)))


class Theirs(NamedTuple):
  """The other library's settings.

  Attributes:
    library: its name and version.
    given: what the user's file says.
    defaults: what holds where it says nothing.
  """

  library: str
  given: Mapping[str, Any]
  defaults: Mapping[str, Any]

  def __getitem__(self, name: str) -> Any:
    """The value of a setting: the user's, else the default."""
    return self.given.get(name, self.defaults[name])

  def said(self, *names: str) -> str:
    """Settings for a comment: "name=value", marked where it is a default."""
    return ", ".join(
      f"{name}={self[name]!r}" + " (default)" * (name not in self.given)
      for name in names
    )


def setting(theirs: Theirs, ours: str, name: str, value: Any = None):
  """A setting that has one of theirs, by default with the same value."""
  value = theirs[name] if value is None else value
  return Translation((Setting(ours, value, theirs.said(name)),))


def also(ours: str, value: Any, comment: str = "") -> Translation:
  """A setting that follows from others."""
  return Translation((Setting(ours, value, comment),))


def differs(name: str, text: str) -> Translation:
  """A setting that means something else here."""
  return Translation(differs=(Note(name, text),))


def missing(name: str, text: str) -> Translation:
  """A setting without a counterpart."""
  return Translation(missing=(Note(name, text),))


NOTHING = Translation()


def total(*parts: Translation) -> Translation:
  """All parts together."""
  return sum(parts, NOTHING)


def with_known_types(theirs: Theirs) -> dict[str, Any]:
  """What the user gives, without the nulls that stand for defaults.

  Raises:
    ValueError: something that is no number where one is needed, or an infinite
      one.
  """
  given = {}
  for name, value in theirs.given.items():
    default = theirs.defaults.get(name)
    number = isinstance(default, int | float) and not isinstance(default, bool)
    if value is None and default is not None and not name.endswith(NULLABLE):
      continue
    if number and value is not None and not _is_number(value):
      raise ValueError(
        f"{name} = {value!r}: {theirs.library} has a number there"
      )
    given[name] = value
  return given


NULLABLE = ("clip_ratio_low", "clip_ratio_high")
"""Settings of theirs that are numbers, and may be null."""


def _is_number(value: Any) -> bool:
  known = isinstance(value, int | float) and not isinstance(value, bool)
  return known and math.isfinite(value)
