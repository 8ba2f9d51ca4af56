"""Parser of command lines: a program's own flags, and overrides of its config.

    python -m grpojax.train [--config=configs/x.py] [--config.key=value ...]

A config file is Python with a `get_config()` that returns a `ConfigDict`;
`--config=x.py:text` calls `get_config("text")`. `--config=x` reads the packaged
config x, as does `--config=configs/x.py` if that file does not exist.

A flag is `--name=value` or `--name value`; a switch (True or False) is `--name`
or `--noname`. The prefix "config." is optional. A value is parsed as a
literal of the default's type, and never evaluated.
"""

import ast
import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from grpojax.core.options import Option, refusal
from grpojax.runtime.cli import help_text, settings
from grpojax.runtime.cli.config_file import load_file
from grpojax.runtime.cli.configs import flatten, nearest
from grpojax.runtime.terminal.screen import printable

CONFIG = "config."


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
  """Turns ValueError, OSError and MemoryError into a message and exit code 1.

  So is JAX's error for a device of JAX_PLATFORMS that does not exist. Wrap only
  code that reads user input, so that bugs elsewhere show a traceback.
  """
  try:
    yield
  except RuntimeError as error:
    if "Unable to initialize backend" not in str(error):
      raise
    raise SystemExit(printable(f"error: {error}")) from None
  except (ValueError, OSError, MemoryError) as error:
    text = f"{error}"
    if isinstance(error, OSError):
      path = f"{error.filename}: " if error.filename else ""
      text = f"{path}{error.strerror or error}"
    if isinstance(error, MemoryError):
      text = f"not enough memory: {error}"
    raise SystemExit(printable(f"error: {text}")) from None


def _typed(text: str, default: Any) -> Any:
  if isinstance(default, str):
    return text
  if isinstance(default, bool):
    values = {"true": True, "1": True, "false": False, "0": False}
    return values[text.lower()]
  if isinstance(default, (int, float)):
    return type(default)(text)
  if isinstance(default, tuple) and text[:1] not in tuple("([\"'"):
    # A tuple of texts may be typed without quotes (a, b) if it has no escapes.
    if {*map(type, default)} <= {str} and not re.search(r"\\|^[ ,]+$", text):
      return tuple(x.strip() for x in text.split(",") if x.strip())
  value = ast.literal_eval(text)
  if isinstance(default, tuple):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
  return value


def _value(name: str, text: str, flag: Option | None) -> Any:
  """Parses a value as the type of `flag`, or as a literal if that is None."""
  if flag is None:
    try:
      value = ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError):
      return {"true": True, "false": False}.get(text.lower(), text)
    if isinstance(value, dict):
      raise ValueError(f"--{name} is a dict: set its fields, --{name}.KEY=...")
    return value
  if text in flag.words:
    return text
  default = 1 if flag.default in flag.words else flag.default
  try:
    return _typed(text, default)
  except (KeyError, SyntaxError, TypeError, ValueError):
    items = default if isinstance(default, tuple) else (default,)
    example = " or ".join([",".join(map(str, items)), *flag.words])
    about = f" ({flag.text})" if flag.text else ""
    raise ValueError(
      f"--{name}{text and '='}{text}: expected a value of type "
      f"{type(default).__name__}, for example --{name}={example}{about}"
    ) from None


def expand_home(value: Any) -> Any:
  """Expands a leading ~/ or ~USER/ in a text, or in each text of a tuple.

  A shell expands ~ only at the start of an argument, not in --key=~/x.
  """
  if isinstance(value, tuple):
    return tuple(map(expand_home, value))
  if isinstance(value, str) and re.match(r"~[\w.-]*(/|$)", value):
    return os.path.expanduser(value)
  return value


def typed_text(argv: Sequence[str], name: str) -> str | None:
  """Returns the last text of a setting in `argv`, before other flags are known.

  It may choose the default config; `parse` reports mistakes.
  """
  text = None
  for word, following in itertools.pairwise([*argv, None]):
    flag, equals, value = word.partition("=")
    if re.fullmatch(rf"--?({CONFIG})?{re.escape(name)}", flag):
      text = value if equals else following
  return text


class _Names:
  """Names that a command line can set: program flags and config.SETTING."""

  def __init__(self, flags, declared, config):
    whole = settings.Section("", {"config": declared})
    known = dict(settings.flat_settings(whole))
    self.flags = {}
    for name, value in flatten(config).items():
      name = f"{CONFIG}{name}"
      option = known.get(name, Option(value, ""))  # only in a config file
      self.flags[name] = dataclasses.replace(option, default=value)
    self.flags |= {"config": Option("", "config file"), **flags}
    self.sections = settings.sections(whole)
    self._free = settings.free_sections(whole)

  def exists(self, name: str) -> bool:
    """Returns True for a flag, a setting or a key of a free section."""
    return name in self.flags or settings.is_free(name, self._free)

  def full(self, name: str) -> str:
    """Returns a name; adds "config." if the user left it out."""
    setting = f"{CONFIG}{name}"
    known = self.exists(setting) or setting in self.sections
    return setting if known and name not in self.flags else name

  def is_switch(self, name: str) -> bool:
    """Returns True if the flag's default is True or False."""
    return name in self.flags and isinstance(self.flags[name].default, bool)

  def unknown(self, name: str) -> ValueError:
    """Returns the error for an unknown name, with the nearest known name."""
    if name in self.sections:
      remedy = f"set its fields, --{name}.KEY=..."
      return ValueError(f"--{name} is a section: {remedy}")
    guess = nearest(name, list(self.flags))
    hint = f"; did you mean --{guess}?" if guess else "; --help lists all flags"
    return ValueError(f"unknown flag --{name}{hint}")


def _words(argv: Sequence[str], names: _Names) -> Iterator[tuple[str, Any]]:
  """Yields (name, value) per flag, and ("", text) per unnamed argument."""
  words = list(argv)
  while words:
    word = words.pop(0)
    match = re.match("(--?|)([^=]*)(=?)(.*)", word, re.DOTALL)
    dashes, name, equals, text = match.groups()
    if not dashes or word == "-":
      yield "", word
      continue
    name = names.full(name)
    off = names.full(name.removeprefix("no"))
    if names.is_switch(name) and not equals:
      yield name, True
    elif names.exists(name):
      flag = names.flags.get(name)
      if not equals and not (flag and words):
        raise ValueError(f"{word} needs a value: {word}=...")
      yield name, _value(name, text if equals else words.pop(0), flag)
    elif off == name or not names.is_switch(off):
      raise names.unknown(name)
    elif equals:
      raise ValueError(f"{word} does not take an argument: use --{name}")
    else:
      yield off, False


def _unread(name: str, flags: Mapping, reads: Sequence[str]) -> ValueError:
  """Returns the error for a setting that the program does not read."""
  parts = reversed(name.split("."))
  hint = next((f"; did you mean --{x}?" for x in parts if x in flags), "")
  names = ", ".join(f"{x}*" if x[-1:] == "." else x for x in reads)
  problem = f"this program reads only its own flags and settings {names}"
  return ValueError(f"--{name}: {problem}{hint}")


def _set(config: ConfigDict, name: str, value: Any) -> None:
  """Sets a key of a config; creates the key and its sections if missing."""
  *path, last = name.removeprefix(CONFIG).split(".")
  for key in path:
    if key not in config:
      config[key] = ConfigDict()
    config = config[key]
    if not isinstance(config, ConfigDict):
      raise ValueError(f"--{name}: {key} has no fields: it is {config!r}")
  if isinstance(config.get(last), ConfigDict):
    raise ValueError(f"--{name} is a section: set its fields, --{name}.KEY=...")
  with config.ignore_type():  # some settings take a number or a word
    config[last] = value


def parse(
  argv: Sequence[str],
  flags: Mapping[str, Option],
  declared: settings.Section | None = None,  # of the config, if any
  about: str = "",
  default: Callable[[], ConfigDict] | None = None,  # makes the default config
  positional: str = "",  # flag of unnamed arguments: RUN for --model=RUN
  reads: Sequence[str] = ("",),  # prefixes of all accepted settings
) -> tuple[ConfigDict, ConfigDict]:
  """Parses a program's command line; returns its config and its flags' values.

  The config includes the overrides; it is locked, but its values are unchecked.
  ValueError for an unknown name, a value of the wrong type or a bad config
  file. --help prints the help, which begins with `about`, and exits.
  """
  if "--" in argv:  # in other programs it ends the flags
    raise ValueError("unknown flag --; --help lists all flags")
  words = [word for word in argv if word not in ("--help", "-help", "-h")]
  file = expand_home(typed_text(words, "config"))
  if file and declared is None:
    raise ValueError(f"--config={file}: this program reads no config file")
  declared = declared or settings.Section("", {})
  default = default or (lambda: settings.to_config(declared))
  config = load_file(file, default) if file else default()
  config = config.copy_and_resolve_references()
  if len(words) < len(argv):
    print(help_text.help_text(about, flags, declared, config))
    raise SystemExit(0)
  values = {name: flag.default for name, flag in flags.items()}
  typed = set()
  with config.unlocked():
    for name, value in _words(words, _Names(flags, declared, config)):
      if name == "config":
        continue
      if not name and not positional:
        hint = "flags are --key=value"
        if re.search(r"\.py(:|$)", value):
          hint = f"did you mean --config={value}?"
        raise ValueError(f"unexpected argument {value!r}: {hint}")
      if positional in typed and name in ("", positional):
        extra = values[positional] if name else value
        problem = f"--{positional} is set already"
        raise ValueError(f"unexpected argument {extra!r}: {problem}")
      name = name or positional
      if name in values:
        values[name] = expand_home(value)
        typed.add(name)
      elif not name.removeprefix(CONFIG).startswith(tuple(reads)):
        raise _unread(name, flags, reads)
      else:
        _set(config, name, value)
    for name, value in flatten(config).items():
      if expand_home(value) != value:
        _set(config, f"{CONFIG}{name}", expand_home(value))
  for name in typed:
    if reason := refusal(flags[name], values[name]):
      raise ValueError(f"--{name}={values[name]}: {reason}")
  return config, ConfigDict(values).lock()
