"""Declares settings as a tree of sections, built from dataclasses of options.

    SETTINGS = section_of(TrainSettings())
    settings = build(TrainSettings(), config)  # from config.eval.every, ...

A program's default config, its --help, its checks of values and
docs/settings.md are derived from the declarations.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict, FieldReference

from grpojax.core.options import Option, interval_text, refusal, refuse
from grpojax.runtime.cli.configs import config_error, flatten, names, nearest

_FOREIGN = 10  # unknown keys from which a config is another program's

setting = Option  # declares a flag, or a setting outside of a dataclass


@dataclasses.dataclass(frozen=True)
class Section:
  """Section of a config: its settings and the sections inside it."""

  text: str  # heading in --help
  fields: Mapping[str, "Option | Section"]  # in the order of --help
  free: bool = False  # takes any key, for a function's arguments
  first: tuple[str, ...] = ()  # dotted names to list first in --help


def section(text: str, /, **fields: Option | Section) -> Section:
  """Declares a section without a dataclass."""
  return Section(text, fields)


def free_section(text: str) -> Section:
  """Declares a section that takes any key and is empty by default."""
  return Section(text, {}, free=True)


def inline(options: Any) -> Any:
  """Declares a nested dataclass whose settings join the outer section."""
  return dataclasses.field(default=options, metadata={"inline": True})


def free_field(text: str) -> Any:
  """Declares a dataclass field as a section that takes any key."""
  return dataclasses.field(default_factory=dict, metadata={"free": text})


def section_of(options: Any) -> Section:
  """Converts a dataclass of options to a section with its values as defaults.

  The section's text is the first line of the dataclass's docstring.
  """
  text = inspect.getdoc(options).splitlines()[0].rstrip(".")
  text = text if text[1].isupper() else text[0].lower() + text[1:]
  fields: dict[str, Option | Section] = {}
  for field in dataclasses.fields(options):
    value = getattr(options, field.name)
    meta = field.metadata
    if "option" in meta:
      fields[field.name] = dataclasses.replace(meta["option"], default=value)
    elif "free" in meta:
      fields[field.name] = free_section(meta["free"])
    elif "inline" in meta:
      fields |= section_of(value).fields
    else:
      fields[field.name] = section_of(value)
  return Section(text, fields)


def build(options: Any, config: Mapping[str, Any], prefix: str = "") -> Any:
  """Copies a dataclass of options and sets its values from a config.

  ValueError has a line "SETTING = VALUE: ..." per invalid value; `prefix` comes
  before the setting's name.
  """
  values = {}
  errors = []
  for field in dataclasses.fields(options):
    name = field.name
    value = getattr(options, field.name)
    try:
      if "inline" in field.metadata:
        values[name] = build(value, config, prefix)
      elif dataclasses.is_dataclass(value):
        values[name] = build(value, config[name], f"{prefix}{name}.")
      else:
        values[name] = config[name]
    except ValueError as error:
      errors += str(error).split("\n  ")
  try:
    options = dataclasses.replace(options, **values)  # without invalid sections
  except ValueError as error:
    errors += [f"{prefix}{line}" for line in str(error).split("\n  ")]
  refuse(errors)
  return options


def values_of(options: Any) -> dict[str, Any]:
  """Returns the values of a dataclass of options as a nested dict."""
  values = {}
  for field in dataclasses.fields(options):
    value = getattr(options, field.name)
    if "inline" in field.metadata:
      values |= values_of(value)
    else:
      is_section = dataclasses.is_dataclass(value)
      values[field.name] = values_of(value) if is_section else value
  return values


def changed(declared: Section, defaults: Mapping[str, Any]) -> Section:
  """Copies a section and changes its defaults, given by dotted path.

  KeyError for an unknown setting outside of free sections.
  """
  fields = dict(declared.fields)
  for path, value in defaults.items():
    name, _, below = path.partition(".")
    if declared.free and name not in fields:
      fields[name] = setting(value, declared.text)
    elif below:
      fields[name] = changed(fields[name], {below: value})
    else:
      fields[name] = dataclasses.replace(fields[name], default=value)
  return dataclasses.replace(declared, fields=fields)


def _below(declared: Section, kind: type, prefix: str = "") -> Iterator[tuple]:
  """Yields (dotted path, node) for each node of type `kind`."""
  for name, field in declared.fields.items():
    if isinstance(field, kind):
      yield f"{prefix}{name}", field
    if isinstance(field, Section):
      yield from _below(field, kind, f"{prefix}{name}.")


def flat_settings(declared: Section) -> Iterator[tuple[str, Option]]:
  """Yields (dotted path, declaration) for each setting."""
  return _below(declared, Option)


def sections(declared: Section) -> dict[str, Section]:
  """Returns all sections below this one by dotted path."""
  return dict(_below(declared, Section))


def free_sections(declared: Section) -> list[str]:
  """Returns the dotted paths of the sections that take any key."""
  return [path for path, part in sections(declared).items() if part.free]


def is_free(name: str, free: Sequence[str]) -> bool:
  """Returns True if a dotted name lies below one of the free sections."""
  return name.startswith(tuple(f"{section}." for section in free))


def _fill(config: ConfigDict, declared: Section) -> None:
  """Adds missing sections and defaults to a config."""
  for name, field in declared.fields.items():
    if isinstance(field, Section):
      if name not in config:
        config[name] = ConfigDict()
      if isinstance(config[name], ConfigDict):
        _fill(config[name], field)
    elif name not in config and field.words:  # a number or a word
      config[name] = FieldReference(field.default, field_type=object)
    elif name not in config:
      config[name] = field.default


def to_config(declared: Section) -> ConfigDict:
  """Returns the defaults as a config, locked except for its free sections."""
  config = ConfigDict()
  _fill(config, declared)
  config.lock()
  for name in free_sections(declared):
    functools.reduce(getattr, name.split("."), config).unlock()
  return config


def fill_in(config: ConfigDict, declared: Section) -> tuple[ConfigDict, list]:
  """Copies a config, adds the defaults of missing keys, and locks it.

  Also returns a line "key = value" per added key. Does not check the values.
  ValueError if most keys are missing: the config is then another program's.
  """
  filled = config.copy_and_resolve_references().unlock()
  _fill(filled, declared)
  filled = filled.copy_and_resolve_references()
  present = names(config)
  whole = flatten(filled) | dict.fromkeys(free_sections(declared), {})
  added = [f"{k} = {v!r}" for k, v in sorted(whole.items()) if k not in present]
  if 2 * len(added) > len(whole):
    raise ValueError(f"it lacks {len(added)} of {len(whole)} keys")
  return filled.lock(), added


def value_text(value: Any) -> str:
  """Returns a value as it is typed on a command line."""
  if isinstance(value, tuple):
    return ",".join(map(str, value))
  return value.replace("\n", "\\n") if isinstance(value, str) else str(value)


def described(declared: Option) -> str:
  """Returns a setting's text with its choices, bounds and special words."""
  parts = [declared.text]
  if declared.choices:
    parts.append(f"one of {', '.join(declared.choices)}")
  usual = r"\([0], inf[)\]]|\[[01], (inf|2\*\*)"  # bounds to leave out
  if declared.within and not re.match(usual, declared.within):
    parts.append(interval_text(declared.within))
  in_text = set(re.findall(r"\w+", declared.text))
  words = (f"or {word}" for word in declared.words if word not in in_text)
  return "; ".join([*parts, *words])


def key_errors(declared: Section, config: ConfigDict) -> list[str]:
  """Returns an error message per unknown, missing or mistyped key.

  A single message for a config of another program, which has many unknown keys.
  """
  below = sections(declared)
  free = free_sections(declared)
  known = {k: x for k, x in flat_settings(declared) if not is_free(k, free)}
  errors = []
  values = flatten(config)
  ours = (*below, *known)
  unknown = [k for k in values if k not in ours and not is_free(k, free)]
  if len(unknown) > _FOREIGN:
    first = ", ".join(unknown[:3])
    return [
      f"this program lacks {len(unknown)} of its settings ({first}, ...): give "
      "a config of this program"
    ]
  for name, value in values.items():
    remedy = ""
    if name in below:
      remedy = f"is a section: set its fields, --config.{name}.KEY=..."
    elif name in known and not _has_type(known[name], value):
      remedy = f"must be of type {type(known[name].default).__name__}"
    elif name in unknown:
      guess = nearest(name, list(known))
      remedy = "unknown key"
      remedy += f"; did you mean --config.{guess}?" if guess else ""
    errors += [config_error(name, value, remedy)] if remedy else []
  present = names(config)
  return errors + [
    f"--config.{name}: missing; start from default_config()"
    for name in [*free, *known]
    if name not in present
  ]


def _has_type(declared: Option, value: Any) -> bool:
  if isinstance(declared.default, float):
    return isinstance(value, (int, float)) and not isinstance(value, bool)
  return type(value) is type(declared.default) or value in declared.words


def value_errors(declared: Section, values: Mapping[str, Any]) -> list[str]:
  """Returns an error message per invalid value in `values` (by dotted path)."""
  return [
    config_error(name, values[name], reason)
    for name, option in flat_settings(declared)
    if name in values and (reason := refusal(option, values[name]))
  ]
