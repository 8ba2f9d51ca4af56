"""A translation as a config, and as a config file for people to go on with."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from grpojax.runtime import config as config_lib
from grpojax.runtime import settings as settings_lib
from grpojax.training.config import SETTINGS, default_config
from grpojax.translation.parts import Note, Setting, Translation

WIDTH = 80


def settled(translation: Translation) -> dict[str, Setting]:
  """The settings by name, of their types, in the order of the default config.

  Those that are what they are by default, and that nobody has asked for, are
  left out.

  Raises:
    ValueError: a value of a wrong type.
  """
  default = default_config()
  known = config_lib.flatten(default)
  free = config_lib.free_sections(default)
  found = {}
  for one in translation.settings:
    value = one.value
    if not config_lib.is_free(one.name, free):
      value = _typed(one, known[one.name])
    found[one.name] = one._replace(value=_literal(one, value))
  order = [path for path, _ in settings_lib.flat_settings(SETTINGS)]
  order += [name for name in found if name not in order]
  return {
    name: found[name]
    for name in order
    if name in found and not _says_nothing(found[name], known.get(name))
  }


def _says_nothing(one: Setting, default: Any) -> bool:
  asked = one.theirs and "(default)" not in one.theirs
  return one.value == default and not asked


def _typed(one: Setting, default: Any) -> Any:
  kind, value = type(default), one.value
  if isinstance(value, list | tuple) and kind is tuple:
    return tuple(value)
  same = kind in (bool, str) and isinstance(value, kind)
  number = isinstance(value, int | float) and not isinstance(value, bool)
  if not same and not (
    kind in (int, float) and number and value == kind(value)
  ):
    raise ValueError(
      f"{one.theirs or one.name}: {one.name} cannot be {value!r}"
    )
  return kind(value)


def _literal(one: Setting, value: Any) -> Any:
  """The value, of types that Python writes as they are read.

  Raises:
    ValueError: it is something else.
  """
  if isinstance(value, list | tuple):
    return tuple(_literal(one, item) for item in value)
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f"{one.theirs or one.name}: {value} is not finite")
  if value is None or isinstance(value, str | bool | int | float):
    return value
  raise ValueError(f"{one.theirs or one.name}: {value!r} is no value")


def config_of(translation: Translation) -> ConfigDict:
  """The default config with the settings of a translation.

  Raises:
    ValueError: a value of a wrong type.
  """
  config = default_config()
  free = config_lib.free_sections(config)
  for name, one in settled(translation).items():
    section, key = config, name
    for start in free:
      if config_lib.is_free(name, [start]):
        section, key = config[start], name.removeprefix(f"{start}.")
    *parents, key = key.split(".")
    for parent in parents:
      if parent not in section:
        section[parent] = ConfigDict()
      section = section[parent]
    section[key] = one.value
  return config


def _comment(text: str, indent: str = "", first: str = "") -> list[str]:
  """A text as comments; nothing in it can end the line."""
  clean = "".join(c if c.isprintable() else " " for c in text)
  lines = textwrap.wrap(
    " ".join(clean.split()),
    WIDTH - len(indent) - 2,
    initial_indent=first,
    subsequent_indent=" " * len(first),
  )
  return [f"{indent}# {line}" for line in lines]


def _assignment(target: str, value: Any, theirs: str) -> list[str]:
  line = f"  {target} = {value!r}"
  [*comment] = _comment(theirs)
  if len(comment) == 1 and len(line) + 2 + len(comment[0]) <= WIDTH:
    return [f"{line}  {comment[0]}"]
  return [*_comment(theirs, "  "), line]


def _notes(title: str, notes: Sequence[Note]) -> list[str]:
  if not notes:
    return []
  found = dict.fromkeys(f"{note.theirs}: {note.text}" for note in notes)
  lines = [line for text in found for line in _comment(text, first="- ")]
  return [f"# {title}:", *lines, "#"]


def config_file(translation: Translation, library: str, source: str) -> str:
  """The text of a config file.

  Args:
    translation: what it says.
    library: what it was translated from, and that was written for.
    source: the name of that file.

  Raises:
    ValueError: a value of a wrong type.
  """
  lines = ['"""GRPO, translated from another library\'s configuration."""', ""]
  lines += _comment(
    f"From {source}, of {library}; by python -m grpojax.translate."
  )
  lines += _comment(
    "Comments name the other library's settings; (default) is what holds there"
    " where the file says nothing."
  )
  lines += ["#", "# Command:   python -m grpojax.train --config=THIS_FILE", "#"]
  lines += _notes("What means something else here", translation.differs)
  lines += _notes("What has no counterpart", translation.missing)
  lines += ["", "from grpojax.training.config import default_config", "", ""]
  lines += ["def get_config():", "  config = default_config()"]
  free = config_lib.free_sections(default_config())
  options: dict[str, dict[str, Any]] = {}
  for name, one in settled(translation).items():
    sections = [s for s in free if config_lib.is_free(name, [s])]
    if not sections:
      lines += _assignment(f"config.{name}", one.value, one.theirs)
      continue
    *parents, key = name.removeprefix(f"{sections[0]}.").split(".")
    place = options.setdefault(sections[0], {})
    for parent in parents:
      place = place.setdefault(parent, {})
    place[key] = one.value
  for section, values in options.items():
    lines.append(f"  config.{section}.update({values!r})")
  return "\n".join([*lines, "  return config", ""])
