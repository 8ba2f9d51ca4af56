"""Text of --help: settings by section."""

import shutil
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from grpojax.core.options import Option
from grpojax.runtime.cli.config import flatten
from grpojax.runtime.cli.config_file import packaged
from grpojax.runtime.cli.settings import (
  Section,
  described,
  flat_settings,
  free_sections,
  is_free,
  sections,
  value_text,
)

_MARGIN = 36  # columns of a name, beside which its description stands


def _columns() -> int:
  return max(shutil.get_terminal_size((80, 24)).columns, 40)


def _entry(name: str, text: str) -> list[str]:
  """A name with its description beside it, or below it where it is long."""
  margin = min(_MARGIN, _columns() // 3)
  lines = textwrap.wrap(
    text, _columns() - margin, break_long_words=True, break_on_hyphens=False
  )
  head, lines = f"  {name}", [" " * margin + line for line in lines]
  if len(head) + 2 > margin:
    return [head, *lines]
  return [f"{head:{margin}}{lines[0].strip()}", *lines[1:]]


def _entries(rows: Iterable[tuple[str, Any, Option]]) -> list[str]:
  """Settings or flags: name as typed, value, declaration."""
  lines = []
  for name, value, one in rows:
    lines += _entry(f"--{name}={value_text(value)}", described(one))
  return lines


def _heading(text: str) -> list[str]:
  return ["", *textwrap.wrap(text, _columns())]


def by_section(
  declared: Section, config: ConfigDict
) -> dict[str, list[tuple[str, Any, Option]]]:
  """Returns settings, values and declarations by the dotted name of a section.

  A free section is a part of the one that it is in.
  """
  known, below = dict(flat_settings(declared)), sections(declared)
  free, values = free_sections(declared), flatten(config)
  by_name = {"": []} | {name: [] for name in below if name not in free}
  for name in dict.fromkeys([*known, *values]):
    section = next((x for x in free if is_free(name, [x])), "")
    if name in values and (name in known or section):
      place = (section or name).rpartition(".")[0]
      text = below[section].text if section else ""
      one = known.get(name, Option(values[name], text))
      by_name[place].append((f"config.{name}", values[name], one))
  for name in free:
    row = f"config.{name}.KEY", "...", Option("...", below[name].text)
    by_name[name.rpartition(".")[0]].append(row)
  return by_name


def help_text(
  about: str,
  flags: Mapping[str, Option],
  declared: Section,
  config: ConfigDict,
) -> str:
  """Returns the text of --help, with the values of the config.

  The settings that are changed most come first, then all by section.
  """
  rows = by_section(declared, config)
  all_rows = {name: row for part in rows.values() for name, *row in part}
  lines = about.strip().splitlines()
  if all_rows:
    lines += _heading(
      "Values below are the defaults, or those of a --config=FILE.py that is "
      'given; "config." may be left out.'
    )
  lines += _heading("The program's own flags")
  lines += _entries((name, one.default, one) for name, one in flags.items())
  if all_rows:
    lines += _entry(
      "--config=FILE.py",
      "Python with get_config(); FILE.py:TEXT for get_config(TEXT); or the "
      f"name of one that comes along: {', '.join(packaged())}",
    )
  names = [f"config.{name}" for name in declared.first]
  if names:
    lines += _heading("The settings that most people change")
    lines += _entries((n, *all_rows[n]) for n in names if n in all_rows)
  titles = {"general": declared} | sections(declared)
  for name, part in rows.items():
    if part:
      title = name or "general"
      lines += _heading(f"{title}: {titles[title].text}") + _entries(part)
  return "\n".join(lines)
