"""Settings as they are declared: default, description, values they may have.

    SETTINGS = section(
      "a training run",
      steps=setting(40, "training steps", within="[0, 2**31)"),
      optim=section(
        "the optimizer",
        name=setting("adamw", "its name", choices=OPTIMIZERS),
      ),
    )

One declaration is the source of a program's default config, of its --help, of
the errors for wrong values and of docs/settings.md.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict, FieldReference

from grpojax.runtime.config import config_error


@dataclasses.dataclass(frozen=True)
class Setting:
  """One setting of a config, or one flag of a program.

  Attributes:
    default: the setting has its type.
    text: what it is: a phrase without a full stop, with the unit and what 0 or
      "" mean.
    choices: the names that it may have; () is any.
    within: an interval that a number must be in, as "[0, 1)" or "(0, inf)";
      "" is any.
    words: texts that may stand in the place of a number.
  """

  default: Any
  text: str
  choices: Collection[str] = ()
  within: str = ""
  words: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Section:
  """Settings under one name.

  Attributes:
    text: what they are about: a phrase, a heading of --help.
    fields: settings and sections by name, in the order of --help.
    free: whether it takes any key: keyword arguments of what the config names
      elsewhere, or things that a user names.
    first: dotted names of the settings that most people change.
  """

  text: str
  fields: Mapping[str, "Setting | Section"]
  free: bool = False
  first: tuple[str, ...] = ()


setting = Setting  # in lower case where it declares, as `section`


def section(text: str, /, **fields: Setting | Section) -> Section:
  """Declares settings under one name; see `Section`."""
  return Section(text, fields)


def free_section(text: str) -> Section:
  """Declares a section that takes any key, and has none by default."""
  return Section(text, {}, free=True)


def changed(declared: Section, defaults: Mapping[str, Any]) -> Section:
  """The same settings with other defaults.

  Args:
    declared: the settings.
    defaults: by dotted path; below a free section they may be new.

  Raises:
    KeyError: there is no such setting.
  """
  fields = dict(declared.fields)
  for path, value in defaults.items():
    name, _, rest = path.partition(".")
    if declared.free and name not in fields:
      fields[name] = setting(value, declared.text)
    elif rest:
      fields[name] = changed(fields[name], {rest: value})
    else:
      fields[name] = dataclasses.replace(fields[name], default=value)
  return dataclasses.replace(declared, fields=fields)


def flat_settings(
  declared: Section, prefix: str = ""
) -> Iterator[tuple[str, Setting]]:
  """All settings with their dotted paths, in the order of declaration."""
  for name, field in declared.fields.items():
    if isinstance(field, Section):
      yield from flat_settings(field, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", field


def sections(declared: Section, prefix: str = "") -> dict[str, Section]:
  """All sections below this one by their dotted paths."""
  found = {}
  for name, field in declared.fields.items():
    if isinstance(field, Section):
      found[f"{prefix}{name}"] = field
      found |= sections(field, f"{prefix}{name}.")
  return found


def words(declared: Section) -> dict[str, tuple[str, ...]]:
  """Of the numbers that may also be words, these words by dotted path."""
  return {name: one.words for name, one in flat_settings(declared) if one.words}


def choices(declared: Section) -> dict[str, tuple[str, ...]]:
  """Of the settings that name something, all names by dotted path."""
  return {
    name: tuple(one.choices)
    for name, one in flat_settings(declared)
    if one.choices
  }


def _values(declared: Section) -> ConfigDict:
  config = ConfigDict()
  for name, field in declared.fields.items():
    if isinstance(field, Section):
      config[name] = _values(field)
    elif field.words:  # of any type
      config[name] = FieldReference(field.default, field_type=object)
    else:
      config[name] = field.default
  return config


def to_config(declared: Section) -> ConfigDict:
  """The defaults as a config. Locked, but for the free sections."""
  config = _values(declared).lock()
  for name, one in sections(declared).items():
    if one.free:
      part = config
      for key in name.split("."):
        part = part[key]
      part.unlock()
  return config


def _bound(text: str) -> float:
  base, power, exponent = text.partition("**")
  return float(base) ** float(exponent) if power else float(base)


def _interval(text: str) -> tuple[str, str, str, str]:
  """The brackets and bounds of "[0, 1)"; ValueError where it is none."""
  parts = re.fullmatch(r"([\[(])([^, ]+), ([^, ]+)([\])])", text)
  if not parts:
    raise ValueError(f"{text!r} is no interval like '[0, 1)'")
  return parts.groups()


def allows(within: str, value: float | int) -> bool:
  """Whether a number is in an interval like "[0, 1)"; NaN is in none."""
  left, low, high, right = _interval(within)
  above = value >= _bound(low) if left == "[" else value > _bound(low)
  below = value <= _bound(high) if right == "]" else value < _bound(high)
  return above and below


def say(within: str) -> str:
  """An interval in words: "0 or more", "more than 0", "in [0, 1)".

  A power is the bound of an integer type: `[0, 2**31)`.
  """
  left, low, high, _ = _interval(within)
  if "**" in high:
    return f"{low} or more, and less than {high}"
  if high != "inf":
    return f"in {within}"
  return f"{low} or more" if left == "[" else f"more than {low}"


def value_text(value: Any) -> str:
  """A value as it is typed; "" where it is the empty text."""
  if isinstance(value, tuple):
    return ",".join(map(str, value))
  return value.replace("\n", "\\n") if isinstance(value, str) else str(value)


def described(one: Setting) -> str:
  """What a setting is, and which values it may have; no plain bounds."""
  parts = [one.text]
  if one.choices:
    parts.append(f"one of {', '.join(one.choices)}")
  if one.within and not re.match(r"\([0], inf|\[[01], (inf|2\*\*)", one.within):
    parts.append(say(one.within))
  said = set(re.findall(r"\w+", one.text))
  return "; ".join([*parts, *(f"or {w}" for w in one.words if w not in said)])


def refusal(one: Setting, value: Any) -> str | None:
  """Why a setting cannot have this value; None where it can.

  Args:
    one: the setting.
    value: of its type.

  Returns:
    What the value must be, with the setting's description.
  """
  if value in one.words:
    return None
  values = value if isinstance(one.default, tuple) else (value,)
  if one.choices and (errors := [x for x in values if x not in one.choices]):
    near = difflib.get_close_matches(str(errors[0]), one.choices, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}use one of {', '.join(one.choices)} ({one.text})"
  if one.within and not allows(one.within, value):
    finite = "" if math.isfinite(value) else ", and finite"
    either = "".join(f", or {word}" for word in one.words)
    return f"must be {say(one.within)}{either}{finite} ({one.text})"
  return None


def config_errors(declared: Section, values: Mapping[str, Any]) -> list[str]:
  """Values that their settings cannot have, a line each.

  Args:
    declared: the settings.
    values: by dotted path, each of its default's type.
  """
  errors = []
  for name, one in flat_settings(declared):
    if name in values and (why := refusal(one, values[name])):
      errors.append(config_error(name, values[name], why))
  return errors
