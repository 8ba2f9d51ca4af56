"""A translation as a config, and as a config file."""

import math
import shlex
import textwrap
from typing import Any

from ml_collections import ConfigDict

from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.cli import settings as settings_lib
from grpojax.training.config import SETTINGS, default_config
from grpojax.translation.rules import Note, Setting, Translation

WIDTH = 80


def _typed(setting: Setting, default: Any) -> Any:
  """Returns the value in the type of its default; of any plain type for None.

  ValueError if it has another type, or Python cannot read it back.
  """
  value = setting.value
  if isinstance(value, list | tuple) and isinstance(default, tuple | None):
    items = (setting._replace(value=item) for item in value)
    return tuple(_typed(item, None) for item in items)
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if is_number and math.isfinite(value):
    if default is None:
      return value
    kind = type(default)
    if kind in (int, float) and value == kind(value):
      return kind(value)
  elif isinstance(value, bool | str | None) and (
    default is None or type(value) is type(default)
  ):
    return value
  source = setting.theirs or setting.name
  raise ValueError(f"{source}: {setting.name} cannot be {value!r}")


def _settled(
  translation: Translation,
) -> tuple[dict[str, Setting], dict[str, dict[str, Any]]]:
  """Returns settings in the order of --help, and dicts of free sections.

  Our defaults are left out unless the file sets them. ValueError as `_typed`.
  """
  known = config_lib.flatten(default_config())
  free = settings_lib.free_sections(SETTINGS)
  by_name = {
    one.name: one._replace(value=_typed(one, known.get(one.name)))
    for one in translation.settings
  }
  order = [path for path, _ in settings_lib.flat_settings(SETTINGS)]
  fixed, nested = {}, {}
  for name in dict.fromkeys([*order, *by_name]):
    one = by_name.get(name)
    if not one or (
      one.value == known.get(name)
      and (not one.theirs or "(default)" in one.theirs)
    ):
      continue
    section = next((s for s in free if settings_lib.is_free(name, [s])), None)
    if section is None:
      fixed[name] = one
      continue
    *parents, key = name.removeprefix(f"{section}.").split(".")
    place = nested.setdefault(section, {})
    for parent in parents:
      place = place.setdefault(parent, {})
    place[key] = one.value
  return fixed, nested


def config_of(translation: Translation) -> ConfigDict:
  """Returns the default config with a translation's; ValueError as `_typed`."""
  config = default_config()
  fixed, nested = _settled(translation)
  config.update_from_flattened_dict({n: one.value for n, one in fixed.items()})
  for section, values in nested.items():
    config[section].update(values)
  return config


def _comment(text: str, indent: str = "", first: str = "") -> list[str]:
  """Returns a text as comments, without characters that end a line."""
  clean = "".join(c if c.isprintable() else " " for c in text)
  lines = textwrap.wrap(
    " ".join(clean.split()),
    WIDTH - len(indent) - 2,
    initial_indent=first,
    subsequent_indent=" " * len(first),
  )
  return [f"{indent}# {line}" for line in lines]


def _notes(title: str, notes: list[Note]) -> list[str]:
  texts = dict.fromkeys(f"{note.theirs}: {note.text}" for note in notes)
  lines = [line for text in texts for line in _comment(text, first="- ")]
  return [f"# {title}:", *lines, "#"] if lines else []


def screen_lines(translation: Translation) -> list[str]:
  """Returns the notes as lines for the screen."""
  means = {True: "may change the run", False: "means something else"}
  lines = [
    f"- {note.theirs} {means[note.missing]}: {note.text}"
    for note in dict.fromkeys(translation.notes)
  ]
  if translation.unneeded:
    lines.append(f"- not needed here: {', '.join(translation.unneeded)}")
  return lines


def command(translation: Translation, config: str) -> str:
  """Returns the command that trains, with flags for missing settings."""
  flags = dict.fromkeys(x.flag for x in translation.notes if x.flag)
  words = [f"python -m grpojax.train --config={shlex.quote(config)}"]
  return " \\\n    ".join([*words, *(f"--config.{x}" for x in flags)])


def config_file(translation: Translation, source: str) -> str:
  """Returns a config file of a file `source`; ValueError as `_typed`."""
  fixed, nested = _settled(translation)
  differs = [note for note in translation.notes if not note.missing]
  missing = [note for note in translation.notes if note.missing]
  unneeded = "; ".join(translation.unneeded)
  lines = [
    '"""GRPO, translated from another library\'s configuration."""',
    "",
    *_comment(
      f"From {source}, of {translation.library}; by python -m"
      " grpojax.translate."
    ),
    *_comment(
      "Comments name the other library's settings; (default) is what holds"
      " there where the file says nothing."
    ),
    "#",
    *(f"# {x}" for x in command(translation, "THIS_FILE").splitlines()),
    "#",
    *_notes("What means something else here", differs),
    *_notes("What has no counterpart, and may change the run", missing),
    *_comment(unneeded and f"Not needed here: {unneeded}"),
    "",
    "from grpojax.training.config import default_config",
    "",
    "",
    "def get_config():",
    "  config = default_config()",
  ]
  for name, one in fixed.items():
    line, comment = f"  config.{name} = {one.value!r}", _comment(one.theirs)
    if len(comment) == 1 and len(line) + 2 + len(comment[0]) <= WIDTH:
      lines.append(f"{line}  {comment[0]}")
    else:
      lines += [*_comment(one.theirs, "  "), line]
  for section, values in nested.items():
    lines.append(f"  config.{section}.update({values!r})")
  return "\n".join([*lines, "  return config", ""])
