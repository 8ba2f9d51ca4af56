"""Command line of a program: its own flags and the config's overrides.

    python -m grpojax.train [--config=configs/x.py] [--config.key=value ...]

A config file is Python with a `get_config()` that returns a `ConfigDict`;
`--config=x.py:text` calls `get_config("text")`. `--config=x` is the x.py of
those that come with grpojax; so is configs/x.py where there is no such file.

A word is `--name=value`, `--name value`, or for a switch `--name` and
`--noname`. "config." may be left out. The value has the type of the default:
nothing is evaluated but literals.
"""

import ast
import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from grpojax.core.options import Option, refusal
from grpojax.runtime.cli import help_text
from grpojax.runtime.cli.config import flatten, nearest
from grpojax.runtime.cli.config_file import load_file
from grpojax.runtime.cli.settings import (
  Section,
  flat_settings,
  free_sections,
  is_free,
  sections,
  to_config,
)
from grpojax.runtime.terminal.screen import printable

CONFIG = "config."


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
  """Turns an error of a program's set-up into a message and exit code 1.

  These are ValueErrors, what the operating system says of a file, and
  MemoryErrors. Wrap only what reads the user's input, so that a bug further in
  keeps its traceback. What the message quotes of files is escaped.
  """
  try:
    yield
  except ValueError as error:
    raise SystemExit(printable(f"error: {error}")) from None
  except OSError as error:
    path = f"{error.filename}: " if error.filename else ""
    text = f"error: {path}{error.strerror or error}"
    raise SystemExit(printable(text)) from None
  except MemoryError as error:
    raise SystemExit(f"error: not enough memory: {error}") from None


def literal(text: str) -> Any:
  """Returns a number, a tuple, ..., or else the text itself."""
  try:
    return ast.literal_eval(text)
  except (SyntaxError, TypeError, ValueError):
    return {"true": True, "false": False}.get(text.lower(), text)


def _typed(text: str, default: Any) -> Any:
  """A text as a value of the default's type; ValueError where it is none."""
  if isinstance(default, str):
    return text
  if isinstance(default, bool):
    values = {"true": True, "1": True, "false": False, "0": False}
    return values[text.lower()]
  if isinstance(default, (int, float)):
    return type(default)(text)
  if isinstance(default, tuple) and text[:1] not in tuple("([\"'"):
    # "a, b" without quotes, where no escape needs them
    if {*map(type, default)} <= {str} and not re.search(r"\\|^[ ,]+$", text):
      return tuple(x.strip() for x in text.split(",") if x.strip())
  value = ast.literal_eval(text)
  if isinstance(default, tuple):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
  return value


def _value(name: str, text: str, flag: Option) -> Any:
  """The value that was typed for a flag; ValueError where it is no such."""
  if text in flag.words:
    return text
  default = 1 if flag.default in flag.words else flag.default
  try:
    return _typed(text, default)
  except (KeyError, SyntaxError, TypeError, ValueError):
    example = " or ".join([f"{default}", *flag.words])
    about = f" ({flag.text})" if flag.text else ""
    raise ValueError(
      f"--{name}{text and '='}{text}: expected a value of type "
      f"{type(default).__name__}, for example --{name}={example}{about}"
    ) from None


def expand_home(value: Any) -> Any:
  """Expands ~/ or ~USER/ at the beginning of a text, or of texts.

  A shell does that only where a word begins with ~, which --key=~/x does not.
  """
  if isinstance(value, tuple):
    return tuple(map(expand_home, value))
  if isinstance(value, str) and re.match(r"~[\w.-]*(/|$)", value):
    return os.path.expanduser(value)
  return value


def _expand_homes(config: ConfigDict) -> None:
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      _expand_homes(value)
    elif expand_home(value) != value:
      config[key] = expand_home(value)


def _take_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
  """Takes the last --config=FILE out of the words."""
  path, rest, words = None, [], list(argv)
  while words:
    word = words.pop(0)
    if re.fullmatch("--?config", word):
      if not words:
        raise ValueError(f"{word} needs a value: {word}=...")
      path = words.pop(0)
    elif match := re.match("--?config=(.*)", word, re.DOTALL):
      path = match[1]
    else:
      rest.append(word)
  return path, rest


class _Names(NamedTuple):
  """Names that a command line may have."""

  # Flags of the program and settings of the config, by name.
  flags: dict[str, Option]
  free: list[str]  # dotted names of sections that take any key
  sections: list[str]  # dotted names of all sections

  def full(self, name: str) -> str:
    """Adds the "config." that may be left out."""
    setting = f"{CONFIG}{name}"
    known = setting in self.flags or setting in self.sections
    known = known or is_free(setting, self.free)
    return setting if known and name not in self.flags else name

  def is_switch(self, name: str) -> bool:
    """Returns True for a flag that is True or False."""
    return name in self.flags and isinstance(self.flags[name].default, bool)

  def unknown(self, name: str) -> ValueError:
    """The error for a name that does not exist, with the nearest that does."""
    if name in self.sections:
      remedy = f"set its fields, --{name}.KEY=..."
      return ValueError(f"--{name} is a section: {remedy}")
    guess = nearest(name, list(self.flags))
    hint = f"; did you mean --{guess}?" if guess else "; --help lists all flags"
    return ValueError(f"unknown flag --{name}{hint}")


def _names(
  flags: Mapping[str, Option], declared: Section, config: ConfigDict
) -> _Names:
  """The names of a program's flags and of what its config has."""
  known, settings = dict(flat_settings(declared)), {}
  for name, value in flatten(config).items():
    one = known.get(name, Option(value, ""))  # a config file's own
    settings[f"{CONFIG}{name}"] = dataclasses.replace(one, default=value)
  return _Names(
    settings | dict(flags),
    [f"{CONFIG}{name}" for name in free_sections(declared)],
    [f"{CONFIG}{name}" for name in sections(declared)],
  )


def _words(argv: Sequence[str], names: _Names) -> Iterator[tuple[str, Any]]:
  """Yields name and value of each word; the name is "" for one without."""
  words = list(argv)
  while words:
    word = words.pop(0)
    dashes, name, equals, text = re.match(
      "(--?|)([^=]*)(=?)(.*)", word, re.DOTALL
    ).groups()
    if not dashes or word == "-":
      yield "", word
      continue
    name = names.full(name)
    flag = names.flags.get(name)
    if flag is None and is_free(name, names.free):
      if not equals:
        raise ValueError(f"--{name} needs a value: --{name}=...")
      value = literal(text)
      if isinstance(value, dict):
        raise ValueError(f"--{name}: set its fields, --{name}.KEY=...")
      yield name, value
    elif flag is None:
      off = names.full(name.removeprefix("no"))
      if off == name or not names.is_switch(off):
        raise names.unknown(name)
      if equals:
        raise ValueError(f"{word} does not take an argument")
      yield off, False
    elif equals:
      yield name, _value(name, text, flag)
    elif names.is_switch(name):
      yield name, True
    elif words:
      yield name, _value(name, words.pop(0), flag)
    else:
      raise ValueError(f"{word} needs a value: {word}=...")


def _unexpected(word: str) -> ValueError:
  is_file = re.search(r"\.py(:|$)", word)
  hint = (
    f"did you mean --config={word}?" if is_file else "flags are --key=value"
  )
  return ValueError(f"unexpected argument {word!r}: {hint}")


def _unread(
  name: str, flags: Mapping[str, Option], reads: Sequence[str]
) -> ValueError:
  parts = reversed(name.split("."))
  own = next((f"; did you mean --{x}?" for x in parts if x in flags), "")
  settings = ", ".join(f"{x}*" if x[-1:] == "." else x for x in reads)
  return ValueError(
    f"--{name}: this program reads only its own flags and {settings}{own}"
  )


def _set(config: ConfigDict, name: str, value: Any) -> None:
  """Sets a key that need not exist, and its sections."""
  *path, last = name.removeprefix(CONFIG).split(".")
  for key in path:
    if key not in config:
      config[key] = ConfigDict()
    config = config[key]
    if not isinstance(config, ConfigDict):
      raise ValueError(f"--{name}: {key} is no section, but {config!r}")
  if isinstance(config.get(last), ConfigDict):
    raise ValueError(f"--{name} is a section: set its fields, --{name}.KEY=...")
  with config.ignore_type():  # a word may take the place of a number
    config[last] = value


def parse(
  argv: Sequence[str],
  flags: Mapping[str, Option],
  declared: Section | None = None,
  about: str = "",
  default: Callable[[], ConfigDict] | None = None,
  positional: str = "",
  reads: Sequence[str] = ("",),
) -> tuple[ConfigDict, ConfigDict]:
  """Reads a program's command line.

  Args:
    argv: Arguments without the program's name.
    flags: Flags of the program.
    declared: Settings of the config; None for a program without a config.
    about: Docstring of the program, for --help.
    default: Function that makes the config without --config, if it is not that
      of `declared`.
    positional: Flag that a word without a name is the value of: `RUN` is
      `--model=RUN`.
    reads: Beginnings of the settings that may be typed, which are those that
      the program reads; a config file or a run has others as well.

  Returns:
    The config with its overrides, locked and not checked yet; and the flags'
    values by name.

  Raises:
    ValueError: An unknown name, a value of the wrong type or a bad config file.
    SystemExit: With code 0, after printing the --help text.
  """
  if "--" in argv:  # which ends all flags in other programs
    raise ValueError("unknown flag --; --help lists all flags")
  words = [word for word in argv if word not in ("--help", "-help", "-h")]
  file, rest = _take_config(words)
  file = expand_home(file)
  if file and declared is None:
    raise ValueError(f"--config={file}: this program reads no config file")
  declared = declared or Section("", {})
  default = default or (lambda: to_config(declared))
  config = load_file(file, default) if file else default()
  config = config.copy_and_resolve_references()
  if len(words) < len(argv):
    print(help_text.help_text(about, flags, declared, config))
    raise SystemExit(0)
  own = {name: one.default for name, one in flags.items()}
  typed = set()
  with config.unlocked():
    for name, value in _words(rest, _names(flags, declared, config)):
      if not name and not positional:
        raise _unexpected(value)
      if positional in typed and name in ("", positional):
        extra = own[positional] if name else value
        raise ValueError(
          f"unexpected argument {extra!r}: --{positional} is given already"
        )
      name = name or positional
      if name in own:
        own[name] = expand_home(value)
        typed.add(name)
      elif not name.removeprefix(CONFIG).startswith(tuple(reads)):
        raise _unread(name, flags, reads)
      else:
        _set(config, name, value)
    _expand_homes(config)
  for name in typed:
    if reason := refusal(flags[name], own[name]):
      raise ValueError(f"--{name}={own[name]}: {reason}")
  return config, ConfigDict(own).lock()
