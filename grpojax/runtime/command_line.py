"""A program's command line: its own flags and the config's overrides.

    python -m grpojax.train [--config=configs/x.py] [--config.key=value ...]

A config file is Python with a `get_config()` that returns a `ConfigDict`.

This is not absl: its flags live in one global table, ml_collections' config
flags read `sys.argv` by themselves, and a wrong config path ends in a
traceback. The syntax is theirs: `--key=value`, `--key value`, `--flag`,
`--noflag`; the last of several wins.
"""

import ast
import contextlib
import difflib
import os
import re
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from grpojax.runtime.config import flatten, is_free, nearest

_SETTINGS = "config"  # overrides are --config.key=value


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
  """Turns a ValueError of a program's set-up into a message and exit code 1.

  Wrap only what reads the user's input (`parse`, `validate`, `open_run`), so
  that a bug further in keeps its traceback.
  """
  try:
    yield
  except ValueError as error:
    raise SystemExit(f"error: {error}") from None


def _unknown(name: str, candidates: Sequence[str]) -> ValueError:
  """The error for a flag that does not exist, with the nearest that does."""
  guess = nearest(name, candidates)
  hint = f"; did you mean --{guess}?" if guess else "; --help lists all flags"
  return ValueError(f"unknown flag --{name}{hint}")


def _convert(name: str, text: str, old: Any) -> Any:
  """Reads `text` as a value of the type of `old`."""
  try:
    if isinstance(old, bool):
      return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if isinstance(old, str):
      return text
    if isinstance(old, (int, float)):
      return type(old)(text)
    if not isinstance(old, tuple):
      return ast.literal_eval(text)
    if all(isinstance(x, str) for x in old) and text[:1] not in ("(", "["):
      return tuple(word.strip() for word in text.split(",") if word.strip())
    value = ast.literal_eval(text)
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
  except (KeyError, SyntaxError, TypeError, ValueError):
    raise ValueError(
      f"--{name}={text}: expected a value of type {type(old).__name__}, "
      f"for example --{name}={old}"
    ) from None


def _free_sections(config: ConfigDict, prefix: str) -> tuple[str, ...]:
  """Where flags may stand for keys that the config does not have yet."""
  found = []
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      path = f"{prefix}{key}."
      found += [path] if is_free(path) else _free_sections(value, path)
  return tuple(found)


def _guess(text: str) -> Any:
  """A number, a tuple, ..., or else the text itself."""
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):
    return {"true": True, "false": False}.get(text.lower(), text)


def _add(config: ConfigDict, path: Sequence[str], value: Any) -> None:
  """Sets a key that need not exist, and its sections."""
  for key in path[:-1]:
    if key not in config:
      config[key] = ConfigDict()
    config = config[key]
  config[path[-1]] = value


def _setting(name: str, text: str, old: Any, words: Sequence[str]) -> Any:
  """Reads `text` as a setting: one of its words, or of the type of `old`."""
  if text in words:
    return text
  try:
    return _convert(name, text, 1 if old in words else old)
  except ValueError as error:
    raise ValueError(" or ".join([f"{error}", *words])) from None


def _split(
  argv: Sequence[str], known: Mapping[str, Any], free: tuple[str, ...]
) -> list:
  """Command line to (name, text) pairs, names checked.

  Those are right that are in `known` or begin with one of `free`.
  """
  pairs, words = [], list(argv)
  while words:
    word = words.pop(0)
    if not word.startswith("-") or word.lstrip("-") == "":
      raise ValueError(f"unexpected argument {word!r}: flags are --key=value")
    name, equals, text = word.lstrip("-").partition("=")
    if not equals:
      negated = name.removeprefix("no")
      if isinstance(known.get(name), bool):
        text = "true"
      elif name not in known and isinstance(known.get(negated), bool):
        name, text = negated, "false"
      elif name in known:
        if not words:
          raise ValueError(f"--{name} needs a value: --{name}=...")
        text = words.pop(0)
    if name not in known and name.startswith(free):
      if not equals:
        raise ValueError(f"--{name} needs a value: --{name}=...")
    elif name not in known:
      if any(key.startswith(f"{name}.") for key in known):
        raise ValueError(
          f"--{name} is a section: set its fields, --{name}.KEY=..."
        )
      raise _unknown(name, list(known))
    pairs.append((name, text))
  return pairs


def load_file(path: str, default: Callable[[], ConfigDict]) -> ConfigDict:
  """Runs a config file and returns what its `get_config()` returns.

  Raises:
    ValueError: the file is missing or fails; one line that says where.
  """
  if not os.path.isfile(path):
    folder = os.path.dirname(path) or "."
    names = os.listdir(folder) if os.path.isdir(folder) else []
    names = [os.path.join(folder, n) for n in names if n.endswith(".py")]
    guess = difflib.get_close_matches(path, names, n=1)
    hint = f"; did you mean {os.path.normpath(guess[0])}?" if guess else ""
    raise ValueError(
      f"--config={path}: no such file (looked from {os.getcwd()}){hint}"
    )
  try:
    config = runpy.run_path(path)["get_config"]()
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == path]
    where = f"{path}, line {lines[-1]}" if lines else path
    text = f"{type(error).__name__}: {error}"
    key = re.search(r'Key "(\w+)" does not exist', text)
    if key:
      guess = nearest(key[1], list(flatten(default())))
      hint = f"; did you mean config.{guess}?" if guess else ""
      text = f"unknown key {key[1]!r}{hint}"
    raise ValueError(f"{where}: {text}") from error
  if not isinstance(config, ConfigDict):
    raise ValueError(f"{path}: get_config() must return a ConfigDict")
  return config


def usage(program: str, flags: Mapping[str, tuple], config: ConfigDict) -> str:
  """The text of --help: all flags and settings with their defaults."""
  lines = [f"usage: {program} [--config=FILE.py] [--config.key=value ...]", ""]
  for name, (default, text) in flags.items():
    lines.append(f"  --{name}={default}  {text}")
  lines += [f"  --config.{k}={v!r}" for k, v in flatten(config).items()]
  return "\n".join(lines)


def parse(
  argv: Sequence[str],
  flags: Mapping[str, tuple[Any, str]] | None,
  default: Callable[[], ConfigDict],
  program: str,
  words: Mapping[str, Sequence[str]] | None = None,
) -> tuple[ConfigDict, ConfigDict]:
  """Reads a program's command line.

  Args:
    argv: the arguments, without the program's name: `sys.argv[1:]`.
    flags: the program's own flags, `{name: (default, help)}`; the default's
      type is the flag's type.
    default: makes the config that is used without --config.
    program: how the program is called, for --help.
    words: for some settings, texts that may stand in the place of a number.

  Returns:
    The config with its overrides, locked; and the flags' values by name. The
    config is not validated yet.

  Raises:
    ValueError: an unknown name, a value of the wrong type or a bad config
      file; see `usage_errors`.
    SystemExit: with code 0, after printing the --help text.
  """
  flags = dict(flags or {})
  config = _base(argv, default)
  if any(word in ("--help", "-help", "-h") for word in argv):
    print(usage(program, flags, config))
    raise SystemExit(0)
  own = {name: value for name, (value, _) in flags.items()}
  settings = {f"{_SETTINGS}.{k}": v for k, v in flatten(config).items()}
  known = {_SETTINGS: "", **own, **settings}
  free = _free_sections(config, f"{_SETTINGS}.")
  for name, text in _split(argv, known, free):
    if name in own:
      own[name] = _convert(name, text, own[name])
    elif name in settings:
      path = name.removeprefix(f"{_SETTINGS}.")
      value = _setting(name, text, settings[name], (words or {}).get(path, ()))
      with config.ignore_type():  # a word may take the place of a number
        config.update_from_flattened_dict({path: value})
    elif name != _SETTINGS:
      with config.unlocked():
        _add(config, name.split(".")[1:], _guess(text))
  return config, ConfigDict(own).lock()


def _base(argv: Sequence[str], default: Callable[[], ConfigDict]) -> ConfigDict:
  """The locked config before overrides: of the last --config, or `default`."""
  path = None
  for i, word in enumerate(argv):
    name, equals, text = word.partition("=")
    if name in (f"--{_SETTINGS}", f"-{_SETTINGS}"):
      path = text if equals else "".join(argv[i + 1 : i + 2])
  config = default() if path is None else load_file(path, default)
  return config.copy_and_resolve_references().lock()
