"""A program's command line: its own flags and the config's overrides.

    python -m grpojax.train [--config=configs/x.py] [--config.key=value ...]

A config file is Python with a `get_config()` that returns a `ConfigDict`;
`--config=x.py:text` calls `get_config("text")`. `--config=x` is the x.py of
those that come with grpojax; so is configs/x.py where there is no such file.

absl reads the flags and ml_collections' config_flags sets numbers, switches
and texts, in a table of flags made anew for each command line. By hand is what
the tests show that these do otherwise.
"""

import ast
import contextlib
import keyword
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import absl.flags
from absl.flags import FlagValues
from ml_collections import ConfigDict, config_flags

from grpojax.runtime.config import (
  flatten,
  free_sections,
  is_free,
  nearest,
  sections,
)
from grpojax.runtime.config_file import load_file, packaged
from grpojax.runtime.settings import (
  Section,
  Setting,
  leaves,
  refusal,
  to_config,
  words,
)

_DEFINE = {
  bool: absl.flags.DEFINE_boolean,
  int: absl.flags.DEFINE_integer,
  float: absl.flags.DEFINE_float,
  str: absl.flags.DEFINE_string,
}


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
  """Turns an error of a program's set-up into a message and exit code 1.

  These are ValueErrors, what the operating system says of a file, and
  MemoryErrors. Wrap only what reads the user's input (`parse`, `validate`,
  `open_run`), so that a bug further in keeps its traceback.
  """
  try:
    yield
  except ValueError as error:
    raise SystemExit(f"error: {error}") from None
  except OSError as error:
    path = f"{error.filename}: " if error.filename else ""
    raise SystemExit(f"error: {path}{error.strerror or error}") from None
  except MemoryError as error:
    raise SystemExit(f"error: not enough memory: {error}") from None


def _unknown(name: str, candidates: Sequence[str]) -> ValueError:
  """The error for a flag that does not exist, with the nearest that does."""
  guess = nearest(name, candidates)
  hint = f"; did you mean --{guess}?" if guess else "; --help lists all flags"
  return ValueError(f"unknown flag --{name}{hint}")


def _wrong_type(word: str, name: str, old: Any) -> ValueError:
  return ValueError(
    f"{word}: expected a value of type {type(old).__name__}, "
    f"for example --{name}={old}"
  )


def _read(values: FlagValues, argv: Sequence[str]) -> list[str]:
  """Sets the flags that `values` has; returns the words of none of them."""
  values.set_gnu_getopt()  # words without a name may stand anywhere
  try:
    return values(["", *argv], known_only=True)[1:]
  except absl.flags.IllegalFlagValueError as error:
    # "flag --name=text: reason", where the reason is another error's text.
    text = str(error).removeprefix("flag ")
    name = text.removeprefix("--").split("=")[0]
    word = text.removesuffix(f": {error.__context__}")
    raise _wrong_type(word, name, values[name].default) from None
  except absl.flags.Error:  # the last flag lacks its value
    raise ValueError(f"{argv[-1]} needs a value: {argv[-1]}=...") from None


def _take_word(flag: absl.flags.Flag, rest: Sequence[str]) -> list[str]:
  """Gives the flag the word without a name, if there is one."""
  words = [word for word in rest if not word.startswith("-")]
  if len(words) > 1 or (words and flag.present):
    raise ValueError(
      f"unexpected argument {words[-1]!r}: --{flag.name} is given already"
    )
  for word in words:
    flag.value, flag.present = word, 1
  return [word for word in rest if word not in words]


def _split(argv: Sequence[str]) -> tuple[str | None, bool, list[str]]:
  """Takes the last --config=FILE and --help out of the command line."""
  for word in argv:
    # absl's own: an end of all flags, more flags, unknown ones that may pass.
    if re.match("--$|--?(flagfile|undefok)(=|$)", word):
      raise _unknown(word.lstrip("-").partition("=")[0], ())
  values = FlagValues()
  path = absl.flags.DEFINE_string("config", None, "", flag_values=values)
  help_ = absl.flags.DEFINE_boolean("help", False, "", values, short_name="h")
  rest = _read(values, argv)
  return expand_home(path.value), help_.value, rest


def _define_settings(
  values: FlagValues, config: ConfigDict, words: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
  """Makes a flag of each setting; returns those to `_convert`, as they are."""
  names, texts = [], {}
  for name, value in flatten(config).items():
    # config_flags reads a path as a Python expression: no "from", no "a-b", and
    # no method's name, which would be the method.
    readable = all(
      p.isidentifier()
      and not keyword.iskeyword(p)
      and not hasattr(ConfigDict, p)
      for p in name.split(".")
    )
    if type(value) in _DEFINE and name not in words and readable:
      names.append(f"--config.{name}")
    else:
      texts[name] = value
  config_flags.DEFINE_config_dict(  # sys_argv: the settings to make flags of
    "config", config, flag_values=values, sys_argv=names
  )
  for name in texts:
    absl.flags.DEFINE_string(f"config.{name}", None, "", flag_values=values)
  return texts


def _guess(text: str) -> Any:
  """A number, a tuple, ..., or else the text itself."""
  try:
    return ast.literal_eval(text)
  except (SyntaxError, TypeError, ValueError):
    return {"true": True, "false": False}.get(text.lower(), text)


def _convert(name: str, text: str, old: Any, words: Sequence[str]) -> Any:
  """Reads what config_flags does not: "a, b" for a tuple, a number's words."""
  if text in words:
    return text
  old = 1 if old in words else old
  try:
    if words:
      return type(old)(text)
    if type(old) in _DEFINE:
      return _guess(text)
    if not isinstance(old, tuple):
      return ast.literal_eval(text)
    if all(isinstance(x, str) for x in old) and text[:1] not in ("(", "["):
      return tuple(word.strip() for word in text.split(",") if word.strip())
    value = ast.literal_eval(text)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
  except (SyntaxError, TypeError, ValueError):
    error = _wrong_type(f"--{name}={text}", name, old)
    raise ValueError(" or ".join([f"{error}", *words])) from None


def _option(
  word: str,
  free: Sequence[str],
  all_sections: Sequence[str],
  known: Sequence[str],
) -> tuple[str, str]:
  """Name and text of a key that the config lacks, where it may lack one."""
  name, equals, text = re.sub("^--?", "", word).partition("=")
  if not word.startswith("-") or name.strip("-") == "":
    is_file = re.search(r"\.py(:|$)", word)
    hint = (
      f"did you mean --config={word}?" if is_file else "flags are --key=value"
    )
    raise ValueError(f"unexpected argument {word!r}: {hint}")
  if is_free(name, free):
    if not equals:
      raise ValueError(f"--{name} needs a value: --{name}=...")
    return name, text
  if name in all_sections:
    raise ValueError(f"--{name} is a section: set its fields, --{name}.KEY=...")
  raise _unknown(name, known)


def _add(config: ConfigDict, name: str, value: Any) -> None:
  """Sets a key that need not exist, and its sections."""
  *path, last = name.split(".")[1:]
  for key in path:
    if key not in config:
      config[key] = ConfigDict()
    config = config[key]
    if not isinstance(config, ConfigDict):
      raise ValueError(f"--{name}: {key} is no section, but {config!r}")
  if isinstance(config.get(last), ConfigDict):
    raise ValueError(f"--{name} is a section: set its fields, --{name}.KEY=...")
  config[last] = value


def expand_home(value: Any) -> Any:
  """A text or texts that begin with ~/ or ~USER/, with the home directory.

  A shell does that only where a word begins with ~, which --key=~/x does not.
  """
  if isinstance(value, tuple):
    return tuple(map(expand_home, value))
  if isinstance(value, str) and re.match(r"~[\w.-]*(/|$)", value):
    return os.path.expanduser(value)
  return value


def _expand_homes(config: ConfigDict) -> None:
  """All texts of a config; see `expand_home`."""
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      _expand_homes(value)
    elif expand_home(value) != value:
      config[key] = expand_home(value)


def _described(one: Setting) -> str:
  also = [one.text, *(f"or {word}" for word in one.words)]
  if one.choices:
    also.append(f"one of {', '.join(one.choices)}")
  return "; ".join(also)


def usage(
  program: str,
  flags: Mapping[str, Setting],
  declared: Section,
  config: ConfigDict,
) -> str:
  """The text of --help: all flags and settings, a line each (absl takes 3)."""
  known = dict(leaves(declared))
  lines = [f"usage: {program} [--config=FILE.py] [--config.key=value ...]", ""]
  lines += ["  --config=FILE.py:TEXT  for a FILE.py with get_config(TEXT)"]
  lines += [f"  --config=NAME  one that comes along: {', '.join(packaged())}"]
  for name, one in flags.items():
    lines.append(f"  --{name}={one.default}  {_described(one)}")
  for name, value in flatten(config).items():
    also = f"  {_described(known[name])}" if name in known else ""
    lines.append(f"  --config.{name}={value!r}{also}")
  lines += [
    f"  --config.{name}.KEY=...  keyword arguments of what is named elsewhere"
    for name in free_sections(config)
  ]
  return "\n".join(lines)


def parse(
  argv: Sequence[str],
  flags: Mapping[str, Setting],
  declared: Section | None,
  program: str,
  default: Callable[[], ConfigDict] | None = None,
  positional: str = "",
) -> tuple[ConfigDict, ConfigDict]:
  """Reads a program's command line.

  Args:
    argv: the arguments, without the program's name: `sys.argv[1:]`.
    flags: the program's own flags; the default's type is the flag's type:
      bool, int, float or str.
    declared: the config's settings; None for a program without a config.
    program: how the program is called, for --help.
    default: makes the config that is used without --config; by default that of
      `declared`.
    positional: the flag that a word without a name is the value of, so that
      `RUN` is `--model=RUN`; "" for none.

  Returns:
    The config with its overrides, locked; and the flags' values by name. The
    config is not validated yet.

  Raises:
    ValueError: an unknown name, a value of the wrong type or a bad config
      file; see `usage_errors`.
    SystemExit: with code 0, after printing the --help text.
  """
  declared = declared or Section("", {})
  default, may_be = default or (lambda: to_config(declared)), words(declared)
  file, wants_help, argv = _split(argv)
  config = load_file(file, default) if file else default()
  config = config.copy_and_resolve_references()
  if wants_help:
    print(usage(program, flags, declared, config))
    raise SystemExit(0)
  values = FlagValues()
  for name, one in flags.items():
    _DEFINE[type(one.default)](name, one.default, "", flag_values=values)
  texts = _define_settings(values, config, may_be)
  rest = _read(values, argv)
  if positional:
    rest = _take_word(values[positional], rest)
  names = (f(config, "config.") for f in (free_sections, sections))
  names = [*names, list(values)]
  options = dict(_option(word, *names) for word in rest)
  for name, old in texts.items():
    flag = values[f"config.{name}"]
    if flag.present:
      value = _convert(flag.name, flag.value, old, may_be.get(name, ()))
      with config.ignore_type():  # a word may take the place of a number
        config.update_from_flattened_dict({name: value})
  with config.unlocked():
    for name, text in options.items():
      _add(config, name, _guess(text))
    _expand_homes(config)
  own_flags = {name: expand_home(values[name].value) for name in flags}
  for name, one in flags.items():
    if values[name].present and (why := refusal(one, own_flags[name])):
      raise ValueError(f"--{name}={own_flags[name]}: {why}")
  return config, ConfigDict(own_flags).lock()
