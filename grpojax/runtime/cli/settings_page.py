"""Declared settings as a page of Markdown: docs/settings.md."""

from collections.abc import Iterable, Mapping
from types import ModuleType

from grpojax.core.options import Option
from grpojax.runtime.cli.help_text import by_section
from grpojax.runtime.cli.settings import (
  Section,
  described,
  flat_settings,
  sections,
  to_config,
  value_text,
)

_HEAD = """# Settings

Written by `python -m grpojax --settings` from the declarations that `--help`
and the errors are made of: do not edit it. Without `--config` train and compile
take `configs/arithmetic.py`, which changes some of these defaults.
"""


def _table(rows: Iterable[tuple[str, Option]]) -> list[str]:
  lines = ["| setting | default | what it is |", "|---|---|---|"]
  for name, one in rows:
    default = value_text(one.default)
    cells = [
      f"`{name}`",
      f"`{default}`" if default else "",
      described(one),
    ]
    safe = [c.replace("|", "\\|").replace("<", "&lt;") for c in cells]
    lines.append(f"| {' | '.join(safe)} |")
  return [*lines, ""]


def _sections(declared: Section, known: Mapping[str, Section]) -> list[str]:
  """The tables of all sections.

  A section with the settings of another program has those alone that it
  changes.
  """
  lines, whole = [], sections(declared)
  same = {
    name: program
    for name, one in whole.items()
    for program, other in known.items()
    if {*other.fields} <= {*one.fields}
  }
  for name, rows in by_section(declared, to_config(declared)).items():
    title = whole[name].text if name else ""
    table = [(path.removeprefix("config."), one) for path, _, one in rows]
    if name in same:
      title = f"the settings of {same[name]}, with these defaults"
      before = dict(flat_settings(known[same[name]]))
      table = [
        (f"{name}.{key}", own)
        for key, own in flat_settings(whole[name])
        if key not in before or own.default != before[key].default
      ]
    elif name.startswith(tuple(f"{part}." for part in same)):
      continue
    lines += [f"### {name}: {title}", ""] if name else []
    lines += _table(table) if table else []
  return lines


def page(programs: Mapping[str, ModuleType]) -> str:
  """The page.

  Args:
    programs: modules with FLAGS and SETTINGS (None where it has no config) by
      the names that they are called by. Programs that have the same settings
      share their tables.
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
      lines += _sections(declared, known)
      known[names[-1]] = declared
    for name in names:
      flags = [(f"--{k}", one) for k, one in programs[name].FLAGS.items()]
      lines += [f"Flags of `python -m grpojax.{name}`:", "", *_table(flags)]
  return "\n".join(lines)
