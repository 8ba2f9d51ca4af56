"""What a configuration of TRL or verl says, read and never run.

YAML and JSON are read as data, Python as a syntax tree of which only literals
count, shell scripts as text: variables that they set are put in, and no command
is looked at but for its words KEY=VALUE.
"""

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from grpojax.translation import python_scripts, shell_scripts
from grpojax.translation.source import Source, plain

LARGEST = 2**20
"""Bytes of a file: configurations are far smaller."""

_MOST = 5000  # keys, and items of lists


def read(path: str | os.PathLike) -> Source:
  """Reads a file by its suffix: .yaml, .yml, .json, .py or .sh.

  Raises:
    ValueError: it cannot be read; one line.
    OSError: likewise.
  """
  path = pathlib.Path(path)
  reader = READERS.get(path.suffix.lower())
  if reader is None:
    raise ValueError(f"{path}: give a file ending in {', '.join(READERS)}")
  if path.stat().st_size > LARGEST:
    raise ValueError(f"{path} has more than {LARGEST} bytes: no configuration")
  try:
    return reader(path.read_text(encoding="utf-8"), path)
  except (ValueError, RecursionError, MemoryError, yaml.YAMLError) as error:
    said = " ".join(str(error).split())[:300] or type(error).__name__
    raise ValueError(f"{path} cannot be read: {said}") from error
  except SyntaxError as error:
    raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error


def _flat(tree: Any) -> dict[str, Any]:
  """A tree of mappings by dotted path, with numbers as numbers."""
  found: dict[str, Any] = {}
  visited = 0

  def visit(value, path):
    nonlocal visited
    visited += 1  # an alias may stand for far more than is written
    if visited > _MOST or len(path) > 30:
      raise ValueError("more keys than a configuration has")
    name = ".".join(path)
    if isinstance(value, Mapping) and (value or not path):
      for key, item in value.items():
        visit(item, [*path, str(key)])
    elif isinstance(value, list):
      nested = (list, Mapping)
      found[name] = [
        "..." if isinstance(x, nested) else plain(x) for x in value[:_MOST]
      ]
    else:
      found[name] = plain(value)

  if not isinstance(tree, Mapping):
    raise ValueError(f"keys and values are needed, not {type(tree).__name__}")
  visit(tree, [])
  return found


def _yaml(text: str, _: pathlib.Path) -> Source:
  return Source(_flat(yaml.safe_load(text)), {})


def _json(text: str, _: pathlib.Path) -> Source:
  return Source(_flat(json.loads(text)), {})


READERS: dict[str, Callable[[str, pathlib.Path], Source]] = {
  ".yaml": _yaml,
  ".yml": _yaml,
  ".json": _json,
  ".py": python_scripts.read,
  ".sh": shell_scripts.read,
}
"""What reads a file, by its suffix."""
