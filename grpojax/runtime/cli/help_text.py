"""Declared settings as texts: --help, and the page docs/settings.md."""

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

_MARGIN = 36  # columns of a name, beside which its description stands


def _by_section(
  declared: lib.Section, config: ConfigDict
) -> dict[str, list[Row]]:
  """Returns rows by section; a free one is a part of the section around it."""
  known, below = dict(lib.flat_settings(declared)), lib.sections(declared)
  free, values = lib.free_sections(declared), flatten(config)
  by_name = {"": []} | {name: [] for name in below if name not in free}
  for name in dict.fromkeys([*known, *values]):
    section = next((x for x in free if lib.is_free(name, [x])), "")
    if name in values and (name in known or section):
      place = (section or name).rpartition(".")[0]
      text = below[section].text if section else ""
      one = known.get(name, Option(values[name], text))
      by_name[place].append((name, values[name], one))
  for name in free:
    row = f"{name}.KEY", "...", Option("...", below[name].text)
    by_name[name.rpartition(".")[0]].append(row)
  return by_name


# The text of --help.


def _columns() -> int:
  return max(shutil.get_terminal_size((80, 24)).columns, 40)


def _entry(name: str, text: str) -> list[str]:
  """A name with its description beside it, or below a long name."""
  margin = min(_MARGIN, _columns() // 3)
  lines = textwrap.wrap(
    text, _columns() - margin, break_long_words=True, break_on_hyphens=False
  )
  head, lines = f"  {name}", [" " * margin + line for line in lines]
  if len(head) + 2 > margin:
    return [head, *lines]
  return [f"{head:{margin}}{lines[0].strip()}", *lines[1:]]


def _entries(rows: Iterable[Row], prefix: str = "config.") -> list[str]:
  lines = []
  for name, value, one in rows:
    typed = f"--{prefix}{name}={lib.value_text(value)}"
    lines += _entry(typed, lib.described(one))
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

  The settings that are changed most come first, then all by section.
  """
  rows = _by_section(declared, config)
  by_name = {row[0]: row for part in rows.values() for row in part}
  lines = about.strip().splitlines()
  if by_name:
    lines += _heading(
      "Values below are the defaults, or those of a --config=FILE.py that is "
      'given; "config." may be left out.'
    )
  lines += _heading("The program's own flags")
  lines += _entries(((k, one.default, one) for k, one in flags.items()), "")
  if by_name:
    lines += _entry(
      "--config=FILE.py",
      "Python with get_config(); FILE.py:TEXT for get_config(TEXT); or the "
      f"name of one that comes along: {', '.join(packaged())}",
    )
  if declared.first:
    lines += _heading("The settings that most people change")
    lines += _entries(by_name[n] for n in declared.first if n in by_name)
  titles = {"general": declared} | lib.sections(declared)
  for name, part in rows.items():
    if part:
      title = name or "general"
      lines += _heading(f"{title}: {titles[title].text}") + _entries(part)
  return "\n".join(lines)


# The page.

_HEAD = """# Settings

Written by `python -m grpojax --settings` from the declarations that `--help`
and the errors are made of: do not edit it. Without `--config` train and compile
take `configs/arithmetic.py`, which changes some of these defaults.
"""


def _table(rows: Iterable[tuple[str, Option]]) -> list[str]:
  lines = ["| setting | default | what it is |", "|---|---|---|"]
  for name, one in rows:
    default = lib.value_text(one.default)
    cells = [f"`{name}`", f"`{default}`" if default else ""]
    cells.append(lib.described(one))
    safe = [c.replace("|", "\\|").replace("<", "&lt;") for c in cells]
    lines.append(f"| {' | '.join(safe)} |")
  return [*lines, ""]


def _tables(declared: lib.Section, known: dict[str, lib.Section]) -> list[str]:
  """Tables of sections; of a program's in `known` only the changed settings."""
  lines, whole = [], lib.sections(declared)
  same = {
    name: program
    for name, one in whole.items()
    for program, other in known.items()
    if {*other.fields} <= {*one.fields}
  }
  for name, rows in _by_section(declared, lib.to_config(declared)).items():
    title = whole[name].text if name else ""
    table = [(path, one) for path, _, one in rows]
    if name in same:
      title = f"the settings of {same[name]}, with these defaults"
      before = dict(lib.flat_settings(known[same[name]]))
      table = [
        (f"{name}.{key}", own)
        for key, own in lib.flat_settings(whole[name])
        if key not in before or own.default != before[key].default
      ]
    elif name.startswith(tuple(f"{part}." for part in same)):
      continue
    lines += [f"### {name}: {title}", ""] if name else []
    lines += _table(table) if table else []
  return lines


def page(programs: Mapping[str, ModuleType]) -> str:
  """Returns docs/settings.md.

  `programs` are modules with FLAGS and SETTINGS (None without a config) by the
  names of their commands. Programs with the same settings share their tables.
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
      flags = [(f"--{k}", one) for k, one in programs[name].FLAGS.items()]
      lines += [f"Flags of `python -m grpojax.{name}`:", "", *_table(flags)]
  return "\n".join(lines)
