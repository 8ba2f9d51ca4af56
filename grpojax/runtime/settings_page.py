"""Declared settings as a page of Markdown: docs/settings.md."""

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from grpojax.runtime.settings import Section, Setting, say

_HEAD = """# Settings

Written by `python -m grpojax --settings` from the declarations that `--help`
and the errors are made of: do not edit it.
"""


def value_text(value: Any) -> str:
  """A default as it is typed; "" where it is the empty text."""
  if isinstance(value, tuple):
    return ",".join(map(str, value))
  return value.replace("\n", "\\n") if isinstance(value, str) else str(value)


def described(one: Setting) -> str:
  """What a setting is, and which values it may have."""
  parts = [one.text]
  if one.choices:
    parts.append(f"one of {', '.join(one.choices)}")
  if one.within:
    parts.append(say(one.within))
  return "; ".join([*parts, *(f"or {word}" for word in one.words)])


def _table(rows: Iterable[tuple[str, Setting]]) -> list[str]:
  lines = ["| setting | default | what it is |", "|---|---|---|"]
  for name, one in rows:
    default = value_text(one.default)
    cells = [
      f"`{name}`",
      f"`{default}`" if default else "",
      described(one).replace("<", "&lt;"),
    ]
    lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
  return [*lines, ""]


def _sections(declared: Section, prefix: str, level: str) -> list[str]:
  """The tables of a section and of those below it."""
  plain = [
    (f"{prefix}{name}", one)
    for name, one in declared.fields.items()
    if isinstance(one, Setting)
  ]
  lines = _table(plain) if plain else []
  for name, one in declared.fields.items():
    if isinstance(one, Section) and one.free:
      lines += [f"`{prefix}{name}.KEY`: {one.text}.", ""]
  for name, one in declared.fields.items():
    if isinstance(one, Section) and not one.free:
      lines += [f"{level} {prefix}{name}: {one.text}", ""]
      lines += _sections(one, f"{prefix}{name}.", level)
  return lines


def page(programs: Mapping[str, ModuleType]) -> str:
  """The page.

  Args:
    programs: modules with FLAGS and SETTINGS (None where it has no config) by
      the names that they are called by. Programs that have the same settings
      share their tables.
  """
  lines, shared = [_HEAD], {}
  for name, module in programs.items():
    shared.setdefault(id(module.SETTINGS), []).append(name)
  for names in shared.values():
    lines += [f"## {', '.join(names)}", ""]
    for name in names:
      flags = [(f"--{k}", one) for k, one in programs[name].FLAGS.items()]
      lines += [f"Flags of `python -m grpojax.{name}`:", "", *_table(flags)]
    declared = programs[names[0]].SETTINGS
    if declared:
      lines += ["Settings, each given as `--config.SETTING=VALUE`:", ""]
      lines += _sections(declared, "", "###")
  return "\n".join(lines)
