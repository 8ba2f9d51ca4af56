"""Loading of config files: Python that defines `get_config()`."""

import contextlib
import difflib
import io
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict, FrozenConfigDict, config_dict

from grpojax.runtime.cli.configs import flatten, nearest
from grpojax.runtime.files import user_code


@contextlib.contextmanager
def _located(path: str, default: Callable[[], ConfigDict]) -> Iterator[None]:
  """Turns a config file's error into a ValueError with the file and line."""
  before = sys.stdin
  sys.stdin = io.StringIO()  # empty, so that `input()` cannot wait
  try:
    yield
  except (Exception, SystemExit) as error:
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames]
    if isinstance(error, SyntaxError):
      places.append((error.filename or "", error.lineno))
    real = os.path.realpath
    lines = [line for file, line in places if real(file) == real(path)]
    place = f"{path}, line {lines[-1]}" if lines else path
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if key := re.search(r'Key "(\w+)" does not exist', text):
      guess = nearest(key[1], list(flatten(default())))
      hint = f"; did you mean config.{guess}?" if guess else ""
      text = f"unknown key {key[1]!r}{hint}"
    if isinstance(error, config_dict.RequiredValueError):
      text = (
        "a required_placeholder has no value: set one in the file, which "
        "--config.key=value can override"
      )
    raise ValueError(f"{place}: {text}") from error
  finally:
    sys.stdin = before


def packaged() -> dict[str, str]:
  """Returns the paths of the packaged config files by name."""
  package = pathlib.Path(__file__).parents[2]
  folder = package / "configs"  # in a wheel
  if not folder.is_dir():
    folder = package.parent / "configs"  # in a checkout
  return {path.stem: str(path) for path in sorted(folder.glob("*.py"))}


def _find(path: str) -> str:
  """Returns the path of an existing file or of a packaged config."""
  if os.path.isfile(path):
    return path
  folder, name = os.path.split(os.path.normpath(path))
  name = name.removesuffix(".py")
  configs = packaged()
  if folder in ("", "configs") and name in configs:
    return configs[name]
  near = {known: known for known in configs}
  for file in pathlib.Path(folder or ".").glob("*.py"):
    near[file.stem] = str(file)
  guess = difflib.get_close_matches(name, near, n=1)
  hint = f"did you mean {near[guess[0]]}? " if guess else ""
  raise ValueError(
    f"--config={path}: no such file (looked from {os.getcwd()}); {hint}"
    f"the packaged configs are {', '.join(configs)}"
  )


def load_file(file: str, default: Callable[[], ConfigDict]) -> ConfigDict:
  """Runs a config file and returns the result of its `get_config()`.

  `file` is a path, PATH:ARGUMENT for `get_config(ARGUMENT)`, or the name of a
  packaged config (x or configs/x.py). An error about an unknown key suggests a
  key of `default()`. ValueError, in one line, if the file is missing or fails.
  """
  path, mark, text = file.partition(".py:")
  is_path = os.path.isfile(file) or not mark
  argument = [] if is_path else [text]
  path = _find(file if is_path else f"{path}.py")
  with _located(path, default):
    get_config = getattr(user_code.load(path), "get_config", None)
  if not callable(get_config):
    raise ValueError(f"{path}: define get_config(), which returns the config")
  with _located(path, default):
    with user_code.own_directory():
      config = get_config(*argument)
    if isinstance(config, FrozenConfigDict):
      config = ConfigDict(config)  # to allow overrides
    if isinstance(config, ConfigDict):
      return config.copy_and_resolve_references()
  raise ValueError(f"{path}: get_config() must return a ConfigDict")
