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
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from grpojax.core.options import Option, refusal
from grpojax.runtime.cli import help_text
from grpojax.runtime.cli.config import (
  flatten,
  free_sections,
  is_free,
  nearest,
  sections,
)
from grpojax.runtime.cli.config_file import load_file
from grpojax.runtime.cli.settings import Section, flat_settings, to_config
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


class _Flag(NamedTuple):
  """Flag or setting that may be typed.

  Attributes:
    default: Value whose type is that of the flag.
    option: Its declaration; None where a config file has made it up.
  """

  default: Any
  option: Option | None = None

  @property
  def words(self) -> tuple[str, ...]:
    """Texts that may stand in the place of a number."""
    return self.option.words if self.option else ()


def literal(text: str) -> Any:
  """Returns a number, a tuple, ..., or else the text itself."""
  try:
    return ast.literal_eval(text)
  except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
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
  if isinstance(default, tuple) and text[:1] not in ("(", "["):
    if all(isinstance(x, str) for x in default):  # "a, b" without quotes
      return tuple(x.strip() for x in text.split(",") if x.strip())
  value = ast.literal_eval(text)
  if isinstance(default, tuple):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
  return value


def _value(name: str, text: str, flag: _Flag) -> Any:
  """The value that was typed for a flag.

  Raises:
    ValueError: It has not the flag's type.
  """
  if text in flag.words:
    return text
  default = 1 if flag.default in flag.words else flag.default
  try:
    return _typed(text, default)
  except (
    KeyError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
  ):
    example = " or ".join([f"{default}", *flag.words])
    about = f" ({flag.option.text})" if flag.option else ""
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


def _unknown(name: str, candidates: Sequence[str]) -> ValueError:
  """The error for a flag that does not exist, with the nearest that does."""
  guess = nearest(name, candidates)
  hint = f"; did you mean --{guess}?" if guess else "; --help lists all flags"
  return ValueError(f"unknown flag --{name}{hint}")


def _take_help(argv: Sequence[str]) -> tuple[str | None, list[str]]:
  """Takes --help[=TOPIC], --help TOPIC or -h out: a topic, or None."""
  for place, word in enumerate(argv):
    match = re.fullmatch("(?:--?help|-h)(?:=(.*))?", word)
    if match:
      topic, end = match[1] or "", place + 1
      if match[1] is None and argv[end:] and argv[end][:1] != "-":
        topic, end = argv[end], end + 1
      return topic, [*argv[:place], *argv[end:]]
  return None, list(argv)


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
  """Names that a command line may have.

  Attributes:
    flags: Flags of the program and settings of the config, by name.
    free: Dotted names of sections that take any key.
    sections: Dotted names of all sections.
  """

  flags: dict[str, _Flag]
  free: list[str]
  sections: list[str]

  def full(self, name: str) -> str:
    """Adds the "config." that may be left out."""
    setting = f"{CONFIG}{name}"
    known = setting in self.flags or is_free(setting, self.free)
    return setting if known and name not in self.flags else name


def _words(argv: Sequence[str], names: _Names) -> Iterator[tuple[str, Any]]:
  """Yields name and value of each word; the name is "" for one without.

  Raises:
    ValueError: A word that is no flag, or lacks its value.
  """
  words = list(argv)
  while words:
    word = words.pop(0)
    dashes, name, equals, text = re.match(
      "(--?|)([^=]*)(=?)(.*)", word, re.DOTALL
    ).groups()
    if not dashes:
      yield "", word
      continue
    name = names.full(name)
    off = names.full(name.removeprefix("no"))
    flag = names.flags.get(name)
    if flag is None and name.startswith("no") and off in names.flags:
      if isinstance(names.flags[off].default, bool):
        if equals:
          raise ValueError(f"{word} does not take an argument")
        yield off, False
        continue
    if flag is None:
      yield _free_key(word, name, equals, names), literal(text)
    elif equals:
      yield name, _value(name, text, flag)
    elif isinstance(flag.default, bool):
      yield name, True
    elif words:
      yield name, _value(name, words.pop(0), flag)
    else:
      raise ValueError(f"{word} needs a value: {word}=...")


def _free_key(word: str, name: str, equals: str, names: _Names) -> str:
  """Checks the name of a key that the config lacks, where it may lack one."""
  if word == "-":
    raise ValueError(f"unexpected argument {word!r}: flags are --key=value")
  if is_free(name, names.free):
    if not equals:
      raise ValueError(f"--{name} needs a value: --{name}=...")
    return name
  if name in names.sections:
    raise ValueError(f"--{name} is a section: set its fields, --{name}.KEY=...")
  raise _unknown(name, list(names.flags))


def _unexpected(word: str) -> ValueError:
  is_file = re.search(r"\.py(:|$)", word)
  hint = (
    f"did you mean --config={word}?" if is_file else "flags are --key=value"
  )
  return ValueError(f"unexpected argument {word!r}: {hint}")


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
  declared: Section | None,
  program: str,
  default: Callable[[], ConfigDict] | None = None,
  positional: str = "",
  about: str = "",
) -> tuple[ConfigDict, ConfigDict]:
  """Reads a program's command line.

  Args:
    argv: Arguments without the program's name: `sys.argv[1:]`.
    flags: Flags of the program; a default's type is the flag's type: bool, int,
      float or str.
    declared: Settings of the config; None for a program without a config.
    program: Command that calls the program, for --help.
    default: Function that makes the config without --config; by default that of
      `declared`.
    positional: Flag that a word without a name is the value of, so that `RUN`
      is `--model=RUN`; "" for none.
    about: Docstring of the program, for --help.

  Returns:
    The config with its overrides, locked; and the flags' values by name. The
    config is not checked yet.

  Raises:
    ValueError: An unknown name, a value of the wrong type or a bad config file;
      see `usage_errors`.
    SystemExit: With code 0, after printing the --help text.
  """
  if "--" in argv:  # which ends all flags in other programs
    raise _unknown("", ())
  topic, argv = _take_help(argv)
  file, argv = _take_config(argv)
  file = expand_home(file)
  if file and declared is None:
    raise ValueError(f"--config={file}: {program} reads no config file")
  declared = declared or Section("", {})
  default = default or (lambda: to_config(declared))
  config = load_file(file, default) if file else default()
  config = config.copy_and_resolve_references()
  if topic is not None:
    help_text.print_help(topic, program, about, flags, declared, config)
    raise SystemExit(0)
  options = dict(flat_settings(declared))
  names = _Names(
    {name: _Flag(one.default, one) for name, one in flags.items()}
    | {
      f"{CONFIG}{name}": _Flag(value, options.get(name))
      for name, value in flatten(config).items()
      if not isinstance(value, dict)  # an empty section
    },
    free_sections(config, CONFIG),
    sections(config, CONFIG),
  )
  own = {name: one.default for name, one in flags.items()}
  present = set()
  with config.unlocked():
    for name, value in _words(argv, names):
      if not name:
        if not positional:
          raise _unexpected(value)
        name = positional
        if name in present:
          raise ValueError(
            f"unexpected argument {value!r}: --{name} is given already"
          )
      elif name == positional and name in present:
        first = own[name]
        raise ValueError(
          f"unexpected argument {first!r}: --{name} is given already"
        )
      if name in own:
        own[name] = expand_home(value)
        present.add(name)
      else:
        _set(config, name, value)
    _expand_homes(config)
  for name in present:
    if reason := refusal(flags[name], own[name]):
      raise ValueError(f"--{name}={own[name]}: {reason}")
  return config, ConfigDict(own).lock()
