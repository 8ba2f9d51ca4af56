"""A program's command line: its own flags and the config's overrides.

    python -m grpojax.train [--config=configs/x.py] [--config.key=value ...]

A config file is Python with a `get_config()` that returns a `ConfigDict`;
`--config=x.py:text` calls `get_config("text")`. `--config=x` is the x.py of
those that come with grpojax; so is configs/x.py where there is no such file.

absl reads the flags and ml_collections' config_flags sets numbers, switches
and texts, in a table of flags made anew for each command line. By hand is what
the tests show that these do otherwise.
"""

import contextlib
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import absl.flags
from absl.flags import FlagValues
from ml_collections import ConfigDict, config_flags

from grpojax.runtime import flag_values, help_text
from grpojax.runtime.config import (
  flatten,
  free_sections,
  is_free,
  nearest,
  sections,
)
from grpojax.runtime.config_file import load_file
from grpojax.runtime.screen import printable
from grpojax.runtime.settings import (
  Section,
  Setting,
  flat_settings,
  refusal,
  to_config,
  words,
)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
  """Turns an error of a program's set-up into a message and exit code 1.

  These are ValueErrors, what the operating system says of a file, and
  MemoryErrors. Wrap only what reads the user's input (`parse`, `validate`,
  `open_run`), so that a bug further in keeps its traceback. What the message
  quotes of files is escaped, see `printable`.
  """
  try:
    yield
  except ValueError as error:
    raise SystemExit(printable(f"error: {error}")) from None
  except OSError as error:
    path = f"{error.filename}: " if error.filename else ""
    said = f"error: {path}{error.strerror or error}"
    raise SystemExit(printable(said)) from None
  except MemoryError as error:
    raise SystemExit(f"error: not enough memory: {error}") from None


def _unknown(name: str, candidates: Sequence[str]) -> ValueError:
  """The error for a flag that does not exist, with the nearest that does."""
  guess = nearest(name, candidates)
  hint = f"; did you mean --{guess}?" if guess else "; --help lists all flags"
  return ValueError(f"unknown flag --{name}{hint}")


def _read(values: FlagValues, argv: Sequence[str]) -> list[str]:
  """Sets the flags that `values` has; returns the words of none of them."""
  values.set_gnu_getopt()  # words without a name may stand anywhere
  try:
    return values(["", *argv], known_only=True)[1:]
  except absl.flags.IllegalFlagValueError as error:
    # "flag --name=text: reason", where the reason is another error's text.
    text = str(error).removeprefix("flag ")
    word = text.removeprefix("--").removesuffix(f": {error.__context__}")
    name, _, typed = word.partition("=")
    flag = values[name]
    raise flag_values.wrong_type(flag, typed, flag.default) from None
  except absl.flags.Error:  # the last flag lacks its value
    raise ValueError(f"{argv[-1]} needs a value: {argv[-1]}=...") from None


def _prefixed(
  argv: Sequence[str], known: Sequence[str], free: Sequence[str]
) -> list[str]:
  """Gives settings the "config." that other libraries' users leave out."""
  words = []
  for word in argv:
    dashes, name, rest = re.match("(--?|)([^=]*)(.*)", word, re.DOTALL).groups()
    setting = f"config.{name}" in known or is_free(name, free)
    bare = dashes and setting and name not in known
    words.append(f"{dashes}config.{name}{rest}" if bare else word)
  return words


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


def _take_help(argv: Sequence[str]) -> tuple[str | None, list[str]]:
  """Takes --help[=TOPIC], --help TOPIC or -h out: a topic, or None."""
  for place, word in enumerate(argv):
    found = re.fullmatch("(?:--?help|-h)(?:=(.*))?", word)
    if found:
      topic, end = found[1] or "", place + 1
      if found[1] is None and argv[end:] and argv[end][:1] != "-":
        topic, end = argv[end], end + 1
      return topic, [*argv[:place], *argv[end:]]
  return None, list(argv)


def _split(argv: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
  """Takes the last --config=FILE and --help out of the command line.

  Returns:
    FILE or None; what help is asked for, "" for all of it, None for none; and
    the other words.
  """
  for word in argv:
    # absl's own: an end of all flags, more flags, unknown ones that may pass.
    if re.match("--$|--?(flagfile|undefok)(=|$)", word):
      raise _unknown(word.lstrip("-").partition("=")[0], ())
  values = FlagValues()
  path = absl.flags.DEFINE_string("config", None, "", flag_values=values)
  topic, rest = _take_help(argv)
  rest = _read(values, rest)
  return flag_values.expand_home(path.value), topic, rest


def _define_settings(
  values: FlagValues, config: ConfigDict, words: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
  """Makes a flag of each setting; returns those to `convert`, as they are."""
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
    if type(value) in flag_values.DEFINE and name not in words and readable:
      names.append(f"--config.{name}")
    else:
      texts[name] = value
  config_flags.DEFINE_config_dict(  # sys_argv: the settings to make flags of
    "config", config, flag_values=values, sys_argv=names
  )
  for name in texts:
    absl.flags.DEFINE_string(f"config.{name}", None, "", flag_values=values)
  return texts


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


def _define(
  flags: Mapping[str, Setting], declared: Section, config: ConfigDict
) -> tuple[FlagValues, dict[str, Any]]:
  """A new table of flags, and what `_define_settings` returns."""
  values = FlagValues()
  for name, one in flags.items():
    define = flag_values.DEFINE[type(one.default)]
    define(name, one.default, one.text, flag_values=values)
  texts = _define_settings(values, config, words(declared))
  for name, one in flat_settings(declared):
    if f"config.{name}" in values:
      values[f"config.{name}"].help = one.text
  return values, texts


def _own(flags: Mapping[str, Setting], values: FlagValues) -> ConfigDict:
  """The program's own flags by name; ValueError for a value that cannot be."""
  own = {name: flag_values.expand_home(values[name].value) for name in flags}
  for name, one in flags.items():
    if values[name].present and (why := refusal(one, own[name])):
      raise ValueError(f"--{name}={own[name]}: {why}")
  return ConfigDict(own).lock()


def parse(
  argv: Sequence[str],
  flags: Mapping[str, Setting],
  declared: Section | None,
  program: str,
  default: Callable[[], ConfigDict] | None = None,
  positional: str = "",
  about: str = "",
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
    about: what the program does, for --help: its docstring.

  Returns:
    The config with its overrides, locked; and the flags' values by name. The
    config is not validated yet.

  Raises:
    ValueError: an unknown name, a value of the wrong type or a bad config
      file; see `usage_errors`.
    SystemExit: with code 0, after printing the --help text.
  """
  file, topic, argv = _split(argv)
  if file and declared is None:
    raise ValueError(f"--config={file}: {program} reads no config file")
  declared = declared or Section("", {})
  default = default or (lambda: to_config(declared))
  config = load_file(file, default) if file else default()
  config = config.copy_and_resolve_references()
  if topic is not None:
    shown = flags, declared, config
    help_text.show(
      help_text.about(topic, *shown)
      if topic
      else help_text.everything(program, about, *shown)
    )
    raise SystemExit(0)
  values, texts = _define(flags, declared, config)
  rest = _read(values, _prefixed(argv, list(values), free_sections(config)))
  if positional:
    rest = _take_word(values[positional], rest)
  names = (f(config, "config.") for f in (free_sections, sections))
  names = [*names, list(values)]
  options = dict(_option(word, *names) for word in rest)
  may_be = words(declared)
  for name, old in texts.items():
    flag = values[f"config.{name}"]
    if flag.present:
      value = flag_values.convert(flag, old, may_be.get(name, ()))
      with config.ignore_type():  # a word may take the place of a number
        config.update_from_flattened_dict({name: value})
  with config.unlocked():
    for name, text in options.items():
      _add(config, name, flag_values.guess(text))
    flag_values.expand_homes(config)
  return config, _own(flags, values)
