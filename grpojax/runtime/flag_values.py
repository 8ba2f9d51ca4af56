"""From what is typed to values: by the type that a setting has."""

import ast
import os
import re
from collections.abc import Sequence
from typing import Any

import absl.flags
from absl.flags import Flag
from ml_collections import ConfigDict

DEFINE = {
  bool: absl.flags.DEFINE_boolean,
  int: absl.flags.DEFINE_integer,
  float: absl.flags.DEFINE_float,
  str: absl.flags.DEFINE_string,
}


def wrong_type(
  flag: Flag, text: str, old: Any, example: str = ""
) -> ValueError:
  """The error for a flag's text that has not the type of the old value.

  Args:
    flag: its help is the setting's description, "" or None for none.
    text: what was typed; "" where the word had no value.
    old: the value that the setting has.
    example: what may be typed; "" is the old value.
  """
  about = f" ({flag.help})" if flag.help else ""
  return ValueError(
    f"--{flag.name}{text and '='}{text}: expected a value of type "
    f"{type(old).__name__}, for example --{flag.name}={example or old}{about}"
  )


def guess(text: str) -> Any:
  """A number, a tuple, ..., or else the text itself."""
  try:
    return ast.literal_eval(text)
  except (SyntaxError, TypeError, ValueError):
    return {"true": True, "false": False}.get(text.lower(), text)


def convert(flag: Flag, old: Any, words: Sequence[str]) -> Any:
  """Reads what config_flags does not: "a, b" for a tuple, a number's words."""
  text = flag.value
  if text in words:
    return text
  old = 1 if old in words else old
  try:
    if words:
      return type(old)(text)
    if type(old) in DEFINE:
      return guess(text)
    if not isinstance(old, tuple):
      return ast.literal_eval(text)
    if all(isinstance(x, str) for x in old) and text[:1] not in ("(", "["):
      return tuple(word.strip() for word in text.split(",") if word.strip())
    value = ast.literal_eval(text)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
  except (SyntaxError, TypeError, ValueError):
    example = " or ".join([f"{old}", *words])
    raise wrong_type(flag, text, old, example) from None


def expand_home(value: Any) -> Any:
  """A text or texts that begin with ~/ or ~USER/, with the home directory.

  A shell does that only where a word begins with ~, which --key=~/x does not.
  """
  if isinstance(value, tuple):
    return tuple(map(expand_home, value))
  if isinstance(value, str) and re.match(r"~[\w.-]*(/|$)", value):
    return os.path.expanduser(value)
  return value


def expand_homes(config: ConfigDict) -> None:
  """All texts of a config; see `expand_home`."""
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      expand_homes(value)
    elif expand_home(value) != value:
      config[key] = expand_home(value)
