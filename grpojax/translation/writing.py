"""Converts a translation to a config, and to the text of a config file."""

import math
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

from flax.traverse_util import unflatten_dict
from ml_collections import ConfigDict

from grpojax.runtime.cli import configs, settings
from grpojax.training.config import SETTINGS, default_config
from grpojax.translation.rules import Note, Setting, Translation

WIDTH = 80


def _typed(setting: Setting, default: Any) -> Any:
  """Converts a setting's value to the type of `default`, if that is not None.

  ValueError if the types differ, or the value is not a literal.
  """
  value = setting.value
  if isinstance(value, list | tuple) and isinstance(default, tuple | None):
    items = (setting._replace(value=item) for item in value)
    return tuple(_typed(item, None) for item in items)
  kind = type(default)
  is_number = type(value) in (int, float) and math.isfinite(value)
  if is_number and kind in (int, float) and value == kind(value):
    return kind(value)
  is_plain = is_number or isinstance(value, bool | str | None)
  if is_plain and (default is None or type(value) is kind):
    return value
  source = setting.origin or setting.name
  raise ValueError(f"{source}: {setting.name} cannot be {value!r}: change it")


def _settled(
  translation: Translation,
) -> tuple[dict[str, Setting], dict[str, dict[str, Any]]]:
  """Returns the settings to write, and the values of each free section.

  Settings are in the order of --help. Defaults are omitted unless the file sets
  them. ValueError as in `_typed`.
  """
  defaults = configs.flatten(default_config())
  free = settings.free_sections(SETTINGS)
  by_name = {
    setting.name: setting._replace(
      value=_typed(setting, defaults.get(setting.name))
    )
    for setting in translation.settings
  }
  paths = [path for path, _ in settings.flat_settings(SETTINGS)]
  rank = {path: i for i, path in enumerate(paths)}
  fixed = {}
  nested = {}
  for name in sorted(by_name, key=lambda x: rank.get(x, len(rank))):
    setting = by_name[name]
    is_set = setting.origin and "(default)" not in setting.origin
    if setting.value == defaults.get(name) and not is_set:
      continue
    section = next((s for s in free if settings.is_free(name, [s])), None)
    if section is None:
      fixed[name] = setting
    else:
      below = name.removeprefix(f"{section}.")
      nested.setdefault(section, {})[below] = setting.value
  nested = {k: unflatten_dict(x, sep=".") for k, x in nested.items()}
  return fixed, nested


def config_of(translation: Translation) -> ConfigDict:
  """Returns the translated config; ValueError as in `_typed`."""
  config = default_config()
  fixed, nested = _settled(translation)
  config.update_from_flattened_dict({k: x.value for k, x in fixed.items()})
  for section, values in nested.items():
    config[section].update(values)
  return config


def _comment(text: str, indent: str = "", first: str = "") -> list[str]:
  """Wraps a text as comment lines, the first of which starts with `first`."""
  # Line breaks and control characters would end the comment.
  clean = "".join(c if c.isprintable() else " " for c in text)
  clean = " ".join(clean.split())
  width = WIDTH - len(indent) - 2
  blanks = " " * len(first)
  lines = textwrap.wrap(
    clean, width, initial_indent=first, subsequent_indent=blanks
  )
  return [f"{indent}# {line}" for line in lines]


def _notes(title: str, notes: Sequence[Note], missing: bool) -> list[str]:
  texts = [f"{x.origin}: {x.text}" for x in notes if x.missing == missing]
  lines = [x for y in dict.fromkeys(texts) for x in _comment(y, first="- ")]
  return [f"# {title}:", *lines, "#"] if lines else []


def screen_lines(translation: Translation) -> list[str]:
  """Returns the notes as lines for the screen."""
  means = {True: "may change the run", False: "differs in meaning"}
  lines = [
    f"- {note.origin} {means[note.missing]}: {note.text}"
    for note in dict.fromkeys(translation.notes)
  ]
  if translation.unneeded:
    lines.append(f"- not needed here: {', '.join(translation.unneeded)}")
  return lines


def command(translation: Translation, config: str) -> str:
  """Returns the training command, with flags for missing settings."""
  flags = dict.fromkeys(x.flag for x in translation.notes if x.flag)
  words = [f"python -m grpojax.train --config={shlex.quote(config)}"]
  return " \\\n    ".join([*words, *(f"--config.{x}" for x in flags)])


def config_file(translation: Translation, source: str) -> str:
  """Returns a config file's text for `source`; ValueError as in `_typed`."""
  fixed, nested = _settled(translation)
  notes = translation.notes
  unneeded = "; ".join(translation.unneeded)
  lines = [
    '"""GRPO, translated from another library\'s configuration."""',
    "",
    *_comment(
      f"From {source} for {translation.library}, by python -m"
      " grpojax.translate. Comments name the settings of the other library;"
      " (default) marks its defaults."
    ),
    "#",
    *(f"# {x}" for x in command(translation, "THIS_FILE").splitlines()),
    "#",
    *_notes("Settings that differ in meaning", notes, False),
    *_notes(
      "Settings without a counterpart, which may change the run", notes, True
    ),
    *_comment(unneeded and f"Not needed here: {unneeded}"),
    "",
    "from grpojax.training.config import default_config",
    "",
    "",
    "def get_config():",
    "  config = default_config()",
  ]
  for name, setting in fixed.items():
    line = f"  config.{name} = {setting.value!r}"
    comment = _comment(setting.origin)
    if len(comment) == 1 and len(line) + 2 + len(comment[0]) <= WIDTH:
      lines.append(f"{line}  {comment[0]}")
    else:
      lines += [*_comment(setting.origin, "  "), line]
  for section, values in nested.items():
    lines.append(f"  config.{section}.update({values!r})")
  return "\n".join([*lines, "  return config", ""])
