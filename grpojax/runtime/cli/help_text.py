"""Texts made of declared settings: --help and docs/settings.md."""

import shutil
import textwrap
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from grpojax.core.options import Option
from grpojax.runtime.cli import settings as lib
from grpojax.runtime.cli.config import flatten
from grpojax.runtime.cli.config_file import packaged

Row = tuple[str, Any, Option]  # name, value and declaration of a setting

_MARGIN = 36  # columns of a name, to the left of its description


def _by_section(
  declared: lib.Section, config: ConfigDict
) -> dict[str, list[Row]]:
  """Returns rows by section; a free section belongs to its parent section."""
  known = dict(lib.flat_settings(declared))
  below = lib.sections(declared)
  free = lib.free_sections(declared)
  values = flatten(config)
  by_section = {"": []} | {name: [] for name in below if name not in free}
  for name in dict.fromkeys([*known, *values]):
    section = next((x for x in free if lib.is_free(name, [x])), "")
    if name in values and (name in known or section):
      parent = (section or name).rpartition(".")[0]
      text = below[section].text if section else ""
      option = known.get(name, Option(values[name], text))
      by_section[parent].append((name, values[name], option))
  for name in free:
    row = f"{name}.KEY", "...", Option("...", below[name].text)
    by_section[name.rpartition(".")[0]].append(row)
  return by_section


# --help


def _columns() -> int:
  return max(shutil.get_terminal_size((80, 24)).columns, 40)


def _entry(name: str, text: str) -> list[str]:
  """Returns a name with its description, which goes below a long name."""
  margin = min(_MARGIN, _columns() // 3)
  lines = textwrap.wrap(text, _columns() - margin, break_on_hyphens=False)
  lines = [" " * margin + line for line in lines]
  head = f"  {name}"
  if len(head) + 2 > margin:
    return [head, *lines]
  return [f"{head:{margin}}{lines[0].strip()}", *lines[1:]]


def _entries(rows: Iterable[Row], prefix: str = "config.") -> list[str]:
  lines = []
  for name, value, option in rows:
    typed = f"--{prefix}{name}={lib.value_text(value)}"
    lines += _entry(typed, lib.described(option))
  return lines


def _heading(text: str) -> list[str]:
  return ["", *textwrap.wrap(text, _columns())]


def help_text(
  about: str,
  flags: Mapping[str, Option],
  declared: lib.Section,
  config: ConfigDict,
) -> str:
  """Returns the text of --help, with the values of the config.

  The most changed settings come first, then all settings by section.
  """
  by_section = _by_section(declared, config)
  by_name = {row[0]: row for rows in by_section.values() for row in rows}
  lines = about.strip().splitlines()
  if by_name:
    lines += _heading(
      "The values below are the defaults, or those of --config=FILE.py if you "
      'give one; "config." may be left out.'
    )
  lines += _heading("The program's own flags")
  lines += _entries(((k, flag.default, flag) for k, flag in flags.items()), "")
  if by_name:
    lines += _entry(
      "--config=FILE.py",
      "Python with get_config(); FILE.py:TEXT for get_config(TEXT); or the "
      f"name of a packaged config: {', '.join(packaged())}",
    )
  if declared.first:
    lines += _heading("The settings that most people change")
    lines += _entries(by_name[n] for n in declared.first if n in by_name)
  titles = {"general": declared} | lib.sections(declared)
  for name, rows in by_section.items():
    if rows:
      title = name or "general"
      lines += _heading(f"{title}: {titles[title].text}") + _entries(rows)
  return "\n".join(lines)


# docs/settings.md

_HEAD = """# Settings

Written by `python -m grpojax --settings` from the declarations that `--help`
and the errors are made of: do not edit it. Without `--config` train and compile
take `configs/arithmetic.py`, which changes some of these defaults.
"""


def _table(rows: Iterable[tuple[str, Option]]) -> list[str]:
  lines = ["| setting | default | what it is |", "|---|---|---|"]
  for name, option in rows:
    default = lib.value_text(option.default)
    cells = [f"`{name}`", f"`{default}`" if default else ""]
    cells.append(lib.described(option))
    safe = [c.replace("|", "\\|").replace("<", "&lt;") for c in cells]
    lines.append(f"| {' | '.join(safe)} |")
  return [*lines, ""]


def _tables(declared: lib.Section, known: dict[str, lib.Section]) -> list[str]:
  """Returns the tables of all sections.

  A section with the settings of a program in `known` lists only the changes.
  """
  lines = []
  whole = lib.sections(declared)
  same = {
    name: program
    for name, part in whole.items()
    for program, other in known.items()
    if {*other.fields} <= {*part.fields}
  }
  for name, rows in _by_section(declared, lib.to_config(declared)).items():
    title = whole[name].text if name else ""
    table = [(path, option) for path, _, option in rows]
    if name in same:
      title = f"the settings of {same[name]}, with these defaults"
      before = dict(lib.flat_settings(known[same[name]]))
      table = [
        (f"{name}.{key}", option)
        for key, option in lib.flat_settings(whole[name])
        if key not in before or option.default != before[key].default
      ]
    elif name.startswith(tuple(f"{part}." for part in same)):
      continue
    lines += [f"### {name}: {title}", ""] if name else []
    lines += _table(table) if table else []
  return lines


def page(programs: Mapping[str, ModuleType]) -> str:
  """Returns docs/settings.md.

  `programs` maps commands to modules with FLAGS and SETTINGS (None without a
  config). Programs with the same settings share their tables.
  """
  lines, shared, known = [_HEAD], {}, {}
  for name, module in programs.items():
    shared.setdefault(id(module.SETTINGS), []).append(name)
  groups = sorted(shared.values(), key=lambda names: "train" not in names)
  for names in groups:
    declared = programs[names[0]].SETTINGS
    lines += [f"## {', '.join(names)}", ""]
    if declared:
      lines += ["Settings, each given as `--config.SETTING=VALUE`:", ""]
      lines += _tables(declared, known)
      known[names[-1]] = declared
    for name in names:
      flags = [(f"--{k}", flag) for k, flag in programs[name].FLAGS.items()]
      lines += [f"Flags of `python -m grpojax.{name}`:", "", *_table(flags)]
  return "\n".join(lines)
