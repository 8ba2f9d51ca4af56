"""Reads names and values from files of TRL and verl, which are never run."""

import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import yaml

from grpojax.data.jsonl import unique_keys
from grpojax.translation import script
from grpojax.translation.script import Source

MAX_BYTES = 2**20
MAX_VALUES = 5000  # keys of a file, items of a list
SUFFIXES = (".yaml", ".yml", ".json", ".py")

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def read(
  path: str | os.PathLike,
  parsed: Mapping[str, Any] = {},
  code: pathlib.Path | None = None,
) -> Source:
  """Reads a YAML, JSON or Python file; `script.read` explains the arguments.

  ValueError, with a single line, if it is not a configuration.
  """
  path = pathlib.Path(path)
  suffix = path.suffix.lower()
  if suffix not in SUFFIXES:
    raise ValueError(f"{path}: use a file ending in {', '.join(SUFFIXES)}")
  if path.stat().st_size > MAX_BYTES:
    raise ValueError(f"{path} has over {MAX_BYTES} bytes: not a configuration")
  try:
    text = path.read_text(encoding="utf-8-sig")
    if suffix == ".py":
      source = script.read(text, path, parsed, code)
      return source._replace(settings=_flatten(source.settings))
    if suffix == ".json":
      tree = json.loads(text, object_pairs_hook=unique_keys)
    else:
      tree = yaml.load(text, _UniqueKeys)
    return Source(_flatten(tree))
  except SyntaxError as error:
    raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
  except (ValueError, RecursionError, MemoryError, yaml.YAMLError) as error:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    raise ValueError(f"{path} cannot be read: {reason}") from error


class _UniqueKeys(yaml.SafeLoader):
  """YAML loader that refuses repeated keys."""

  def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
    node = super().compose_mapping_node(anchor)
    lines: dict[str, int] = {}
    for key, _ in node.value:
      line = key.start_mark.line + 1
      if isinstance(key, yaml.ScalarNode) and key.value != "<<":
        if first := lines.get(key.value):
          raise ValueError(
            f"line {line}: the key {key.value!r} is also in line {first}: "
            "remove one"
          )
        lines[key.value] = line
    return node


def _number_or_text(value: Any) -> Any:
  """Converts texts such as "1e-6", which YAML leaves as text, to numbers."""
  if not (isinstance(value, str) and _NUMBER.fullmatch(value.strip())):
    return value
  text = value.strip()
  return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)


def _flatten(tree: Any) -> dict[str, Any]:
  """Returns {"a.b": 1} for {"a": {"b": 1}}; ValueError for too many keys.

  Counts repeated visits too, because YAML's aliases can grow exponentially.
  """
  if not isinstance(tree, Mapping):
    raise ValueError(f"must have keys and values, not {type(tree).__name__}")
  flat: dict[str, Any] = {}
  waiting = [("", tree)]
  visits = 0
  while waiting:
    path, value = waiting.pop()
    visits += 1
    if visits > MAX_VALUES:
      raise ValueError(f"more than {MAX_VALUES} keys: not a configuration")
    if path in flat:
      raise ValueError(f"{path!r} is set twice, nested and dotted: remove one")
    if isinstance(value, Mapping) and (value or not path):
      prefix = f"{path}." if path else ""
      waiting += reversed([(f"{prefix}{k}", item) for k, item in value.items()])
    elif isinstance(value, list | tuple):
      flat[path] = [
        "..." if isinstance(x, list | Mapping) else _number_or_text(x)
        for x in value[:MAX_VALUES]
      ]
    else:
      flat[path] = _number_or_text(value)
  return flat
