"""What --help prints: settings by section, or those that are asked for."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from grpojax.runtime.config import flatten, nearest
from grpojax.runtime.config_file import packaged
from grpojax.runtime.settings import (
  Section,
  Setting,
  described,
  flat_settings,
  sections,
  setting,
  value_text,
)

_MARGIN = 36  # columns of a name, beside which its description stands


def show(text: str) -> None:
  """Prints a text, as far as who reads it wants: `--help | head`."""
  try:
    print(text, flush=True)
  except BrokenPipeError:  # nor may Python complain about it at its end
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _columns() -> int:
  """The terminal's width, or 80; never so narrow that nothing fits."""
  return max(shutil.get_terminal_size((80, 24)).columns, 40)


def _entry(name: str, text: str) -> list[str]:
  """A name with its description beside it, or below it where it is long."""
  margin = min(_MARGIN, _columns() // 3)
  lines = textwrap.wrap(
    text, _columns() - margin, break_long_words=True, break_on_hyphens=False
  )
  head = f"  {name}"
  if len(head) + 2 > margin:
    return [head, *(" " * margin + line for line in lines)]
  first, *others = lines
  rest = [" " * margin + line for line in others]
  return [f"{head:{margin}}{first}", *rest]


def _entries(rows: Iterable[tuple[str, Any, Setting]]) -> list[str]:
  """Settings or flags: name as typed, value, declaration."""
  lines = []
  for name, value, one in rows:
    lines += _entry(f"--{name}={value_text(value)}", described(one))
  return lines


def _heading(text: str) -> list[str]:
  return ["", *textwrap.wrap(text, _columns())]


def _by_section(
  declared: Section, config: ConfigDict
) -> dict[str, list[tuple[str, Any, Setting]]]:
  """The rows of `_entries` by the dotted name of their section.

  A free section is a part of the one that it is in. A key that a config file
  has added has the description of its section.
  """
  known, there = dict(flat_settings(declared)), sections(declared)
  free = [name for name, one in there.items() if one.free]
  found = {"": []} | {name: [] for name in there if name not in free}
  values = flatten(config)
  in_order = {name: values[name] for name in known if name in values}
  for name, value in (in_order | values).items():
    inside = [part for part in free if name.startswith(f"{part}.")]
    place = (inside or [name])[0].rpartition(".")[0]
    text = there[inside[0]].text if inside else "a setting of this config"
    one = known.get(name, setting(value, text))
    found.setdefault(place, []).append((f"config.{name}", value, one))
  for name in free:
    row = f"config.{name}.KEY", "...", setting("...", there[name].text)
    found[name.rpartition(".")[0]].append(row)
  return found


def _title(name: str, declared: Section) -> str:
  there = {"": declared} | sections(declared)
  return f"{name or 'general'}: {there[name].text}" if name in there else name


def everything(
  program: str,
  about: str,
  flags: Mapping[str, Setting],
  declared: Section,
  config: ConfigDict,
) -> str:
  """The whole text: what is changed most, then all by section.

  Args:
    program: how it is called.
    about: what it does: its docstring.
    flags: the program's own.
    declared: the config's settings; without fields if it has no config.
    config: with the values to show, those of a --config file.
  """
  rows = _by_section(declared, config)
  all_rows = {name: row for part in rows.values() for name, *row in part}
  lines = about.strip().splitlines() or [f"usage: {program} [--flag=value ...]"]
  if all_rows:
    lines += _heading(
      "Values below are the defaults, or those of a --config=FILE.py that is "
      "given. --help=loss shows a section, --help=rate what has that in its "
      'name; "config." may be left out.'
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
  for name, part in rows.items():
    if part:
      lines += _heading(_title(name, declared)) + _entries(part)
  if all_rows:  # the end of a long text is what a terminal shows
    lines += _heading(
      "That is all of it: --help=optim shows one section, --help=rate what has "
      "that in its name."
    )
  return "\n".join(lines)


def about(
  topic: str,
  flags: Mapping[str, Setting],
  declared: Section,
  config: ConfigDict,
) -> str:
  """The text of --help=TOPIC.

  Args:
    topic: a section, or a part of a name: "optim", "optim.", "rate",
      "--config.optim.learning_rate"; or of descriptions, where no name has it.
    flags: the program's own.
    declared: the config's settings.
    config: with the values to show.

  Raises:
    ValueError: nothing is called so.
  """
  word = topic.strip("-").removeprefix("config.").rstrip(".").lower()
  rows = _by_section(declared, config)
  chosen = [n for n in rows if word and f"{n}.".startswith(f"{word}.")]
  if chosen:
    lines = []
    for name in chosen:
      if rows[name]:
        lines += _heading(_title(name, declared)) + _entries(rows[name])
    return "\n".join(lines[1:])
  every = [(name, one.default, one) for name, one in flags.items()]
  every += [row for part in rows.values() for row in part]
  for text in (_short_name, _description):
    found = [row for row in every if word and word in text(row).lower()]
    if found:
      return "\n".join(_entries(found))
  raise ValueError(_nothing(topic, word, [row[0] for row in every], list(rows)))


def _short_name(row: tuple[str, Any, Setting]) -> str:
  return row[0].removeprefix("config.")


def _description(row: tuple[str, Any, Setting]) -> str:
  return described(row[2])


def _nothing(
  topic: str, word: str, names: Sequence[str], parts: Sequence[str]
) -> str:
  known = [name.removeprefix("config.") for name in names]
  guess = nearest(word, list(filter(None, parts))) or nearest(word, known)
  hint = f"did you mean --help={guess}? " if guess else ""
  return (
    f"--help={topic}: no setting, flag or section is called so; {hint}"
    f"sections: {', '.join(part for part in parts if part)}"
  )
