"""Settings as they are declared: a tree of sections, made of dataclasses.

    @frozen_options
    class EvalSettings:
      every: int = option(5, "steps between evaluations", within="[1, inf)")

    @frozen_options
    class TrainSettings:
      steps: int = option(40, "training steps", within="[0, 2**31)")
      eval: EvalSettings = section_field(EvalSettings)

    SETTINGS = section_of(TrainSettings)
    settings = build(TrainSettings, config)  # from config.eval.every, ...

One declaration is the source of a program's default config, of its --help, of
the errors for wrong values and of docs/settings.md. The values themselves check
their ranges (`core.options`).
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict, FieldReference

from grpojax.core.options import Option, interval_text, refusal
from grpojax.runtime.cli.config import config_error

setting = Option  # a flag, or a setting of a config that no dataclass has


@dataclasses.dataclass(frozen=True)
class Section:
  """Settings under one name.

  Attributes:
    text: Phrase that says what they are about: a heading of --help.
    fields: Settings and sections by name, in the order of --help.
    free: True where it takes any key: keyword arguments of what the config
      names elsewhere, or things that a user names.
    first: Dotted names of the settings that most people change.
  """

  text: str
  fields: Mapping[str, "Option | Section"]
  free: bool = False
  first: tuple[str, ...] = ()


def section(text: str, /, **fields: Option | Section) -> Section:
  """Declares settings under one name, without a dataclass."""
  return Section(text, fields)


def free_section(text: str) -> Section:
  """Declares a section that takes any key, and has none by default."""
  return Section(text, {}, free=True)


def section_field(kind: type) -> Any:
  """Declares a dataclass's field as a section: another dataclass."""
  return dataclasses.field(default_factory=kind, metadata={"section": kind})


def inline_field(kind: type, **defaults: Any) -> Any:
  """Declares a field whose settings stand in the section that it is in.

  Args:
    kind: Dataclass of the field.
    **defaults: Defaults that differ from the dataclass's own.
  """
  return dataclasses.field(
    default_factory=lambda: kind(**defaults),
    metadata={"inline": kind, "defaults": defaults},
  )


def free_field(text: str) -> Any:
  """Declares a field as a section that takes any key."""
  return dataclasses.field(default_factory=dict, metadata={"free": text})


def section_of(kind: type, **defaults: Any) -> Section:
  """Returns the declarations of a dataclass's fields as a section.

  Its text is the first line of the dataclass's docstring.
  """
  text = inspect.getdoc(kind).splitlines()[0].rstrip(".")
  text = text if text[1].isupper() else text[0].lower() + text[1:]
  fields: dict[str, Option | Section] = {}
  for field in dataclasses.fields(kind):
    meta = field.metadata
    if "option" in meta:
      fields[field.name] = meta["option"]
    elif "section" in meta:
      fields[field.name] = section_of(meta["section"])
    elif "inline" in meta:
      fields |= section_of(meta["inline"], **meta["defaults"]).fields
    elif "free" in meta:
      fields[field.name] = free_section(meta["free"])
  return changed(Section(text, fields), defaults)


def build(kind: type, config: Mapping[str, Any], prefix: str = "") -> Any:
  """Builds a dataclass from a config with its keys.

  Args:
    kind: The dataclass.
    config: Values by field name, sections as mappings.
    prefix: Dotted name of the section, with a dot at its end, for errors.

  Raises:
    ValueError: Values out of range, one line "SETTING = VALUE: ..." each, of
      all sections.
  """
  values, errors = {}, []
  for field in dataclasses.fields(kind):
    meta = field.metadata
    try:
      if "section" in meta:
        values[field.name] = build(
          meta["section"], config[field.name], f"{prefix}{field.name}."
        )
      elif "inline" in meta:
        values[field.name] = build(meta["inline"], config, prefix)
      elif "free" in meta:
        value = config[field.name]
        is_config = isinstance(value, ConfigDict)
        values[field.name] = value.to_dict() if is_config else dict(value)
      else:
        values[field.name] = config[field.name]
    except ValueError as error:
      errors += str(error).split("\n  ")
  try:
    if not errors:
      return kind(**values)
    kind(**{name: x for name, x in values.items() if name in config})
  except ValueError as error:
    errors += [f"{prefix}{line}" for line in str(error).split("\n  ")]
  raise ValueError("\n  ".join(errors))


def values_of(settings: Any) -> dict[str, Any]:
  """Returns the values that `build` makes such a dataclass of."""
  values = {}
  for field in dataclasses.fields(settings):
    value, meta = getattr(settings, field.name), field.metadata
    if "inline" in meta:
      values |= values_of(value)
    else:
      values[field.name] = values_of(value) if "section" in meta else value
  return values


def changed(declared: Section, defaults: Mapping[str, Any]) -> Section:
  """Returns the same settings with other defaults.

  Args:
    declared: The settings.
    defaults: Defaults by dotted path; below a free section they may be new.

  Raises:
    KeyError: There is no such setting.
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
) -> Iterator[tuple[str, Option]]:
  """Yields all settings with their dotted paths, as they were declared."""
  for name, field in declared.fields.items():
    if isinstance(field, Section):
      yield from flat_settings(field, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", field


def sections(declared: Section, prefix: str = "") -> dict[str, Section]:
  """Returns all sections below this one by their dotted paths."""
  below = {}
  for name, field in declared.fields.items():
    if isinstance(field, Section):
      below[f"{prefix}{name}"] = field
      below |= sections(field, f"{prefix}{name}.")
  return below


def words(declared: Section) -> dict[str, tuple[str, ...]]:
  """Returns the words that some numbers may also be, by dotted path."""
  return {name: one.words for name, one in flat_settings(declared) if one.words}


def choices(declared: Section) -> dict[str, tuple[str, ...]]:
  """Returns the names that some settings choose from, by dotted path."""
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
  """Returns the defaults as a config, locked but for its free sections."""
  config = _values(declared).lock()
  for name, one in sections(declared).items():
    if one.free:
      part = config
      for key in name.split("."):
        part = part[key]
      part.unlock()
  return config


def value_text(value: Any) -> str:
  """Returns a value as it is typed; "" for the empty text."""
  if isinstance(value, tuple):
    return ",".join(map(str, value))
  return value.replace("\n", "\\n") if isinstance(value, str) else str(value)


def described(one: Option) -> str:
  """Returns the text of a setting with its choices, and bounds not plain."""
  parts = [one.text]
  if one.choices:
    parts.append(f"one of {', '.join(one.choices)}")
  plain = r"\([0], inf[)\]]|\[[01], (inf|2\*\*)"
  if one.within and not re.match(plain, one.within):
    parts.append(interval_text(one.within))
  in_text = set(re.findall(r"\w+", one.text))
  words = (f"or {word}" for word in one.words if word not in in_text)
  return "; ".join([*parts, *words])


def config_errors(declared: Section, values: Mapping[str, Any]) -> list[str]:
  """Returns a line for each value that its setting cannot have.

  Args:
    declared: The settings.
    values: Values by dotted path, each of its default's type.
  """
  return [
    config_error(name, values[name], reason)
    for name, one in flat_settings(declared)
    if name in values and (reason := refusal(one, values[name]))
  ]
