"""Files of TRL and verl as names and values: read, and never run.

YAML and JSON are data. A Python script is a syntax tree: of its GRPOConfig,
GRPOTrainer and LoraConfig count literals, and names of literals or functions.
"""

import ast
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from grpojax.data.jsonl import unique_keys

MAX_BYTES = 2**20  # of a file: configurations are far smaller
MAX_VALUES = 5000  # keys, and items of lists
SUFFIXES = (".yaml", ".yml", ".json", ".py")

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_NO_SETTINGS = ("args", "processing_class", "peft_config", "train_dataset")
_LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 8}
"""What peft's LoraConfig is by default, in the names of TRL's own scripts."""
_LORA_NAMES = {"r": "lora_r", "target_modules": "lora_target_modules"}


class Source(NamedTuple):
  """Settings that a file has."""

  settings: dict[str, Any]  # values by name; nested ones by dotted path
  # Expressions that are no literals, by the name of their setting.
  unread: dict[str, str]


def read(path: str | os.PathLike) -> Source:
  """Reads a file by its suffix: .yaml, .yml, .json or .py.

  Raises:
    ValueError: it cannot be read; one line.
    OSError: likewise.
  """
  path = pathlib.Path(path)
  suffix = path.suffix.lower()
  if suffix not in SUFFIXES:
    raise ValueError(f"{path}: give a file ending in {', '.join(SUFFIXES)}")
  if path.stat().st_size > MAX_BYTES:
    raise ValueError(
      f"{path} has more than {MAX_BYTES} bytes: no configuration"
    )
  try:
    text = path.read_text(encoding="utf-8")
    if suffix == ".py":
      return _read_script(text, path)
    if suffix == ".json":
      tree = json.loads(text, object_pairs_hook=unique_keys)
    else:
      _check_keys(yaml.compose(text, yaml.SafeLoader))
      tree = yaml.safe_load(text)
    return Source(_flatten(tree), {})
  except SyntaxError as error:
    raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error
  except (ValueError, RecursionError, MemoryError, yaml.YAMLError) as error:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    raise ValueError(f"{path} cannot be read: {reason}") from error


def _check_keys(root: yaml.Node | None) -> None:
  """Raises ValueError for a key of YAML that stands twice in one mapping."""
  waiting = [root]
  seen = set()  # aliases share their nodes
  while waiting:
    node = waiting.pop()
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
      continue
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
      waiting += node.value
      continue
    lines: dict[str, int] = {}
    for key, value in node.value:
      waiting.append(value)
      line = key.start_mark.line + 1
      if isinstance(key, yaml.ScalarNode) and key.value != "<<":
        if first := lines.get(key.value):
          raise ValueError(
            f"line {line}: the key {key.value!r} stands twice, first in line "
            f"{first}: keep one"
          )
        lines[key.value] = line


def _number_or_text(value: Any) -> Any:
  """The value, with texts like "1e-6", which YAML leaves texts, as numbers."""
  if not (isinstance(value, str) and _NUMBER.fullmatch(value.strip())):
    return value
  text = value.strip()
  return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)


def _flatten(tree: Any) -> dict[str, Any]:
  """Returns a tree of mappings by dotted path: {"a": {"b": 1}} as {"a.b": 1}.

  Raises:
    ValueError: no mapping, or more keys than a configuration has. An alias of
      YAML may stand for far more than is written, so visits are counted.
  """
  if not isinstance(tree, Mapping):
    raise ValueError(f"keys and values are needed, not {type(tree).__name__}")
  flat: dict[str, Any] = {}
  waiting, visits = [("", tree)], 0
  while waiting:
    path, value = waiting.pop()
    visits += 1
    if visits > MAX_VALUES:
      raise ValueError("more keys than a configuration has")
    if path in flat:
      raise ValueError(f"{path!r} stands twice, in two ways: keep one")
    if isinstance(value, Mapping) and (value or not path):
      prefix = f"{path}." if path else ""
      below = [(f"{prefix}{key}", item) for key, item in value.items()]
      waiting += reversed(below)
    elif isinstance(value, list | tuple):
      flat[path] = [
        "..." if isinstance(x, list | Mapping) else _number_or_text(x)
        for x in value[:MAX_VALUES]
      ]
    else:
      flat[path] = _number_or_text(value)
  return flat


def _read_script(text: str, path: pathlib.Path) -> Source:
  """Reads the keywords of a script's GRPOConfig, and of its trainer."""
  tree = ast.parse(text)
  calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
  if not any(_called(call) == "GRPOConfig" for call in calls):
    raise ValueError("it has no GRPOConfig(...)")
  constants = _constants(tree)
  functions = _defined(tree, path, ast.FunctionDef)
  classes = _defined(tree, path, ast.ClassDef)
  settings, unread = {}, {}
  for call in calls:
    keywords = [x for x in call.keywords if ast.unparse(x.value) != "None"]
    nodes = {x.arg or "**": x.value for x in keywords}
    match _called(call):
      case "load_dataset" if call.args:
        nodes = {"dataset_name": call.args[0]}
      case "LoraConfig":
        settings |= _LORA
        nodes = {_LORA_NAMES.get(name, name): x for name, x in nodes.items()}
      case "GRPOConfig" | "GRPOTrainer":
        pass
      case _:
        continue
    for name, node in nodes.items():
      try:
        is_list = name == "tools" and isinstance(node, ast.List | ast.Tuple)
        if name == "reward_funcs" or is_list:
          settings[name] = _names(node, functions)
        elif name == "environment_factory":
          (settings[name],) = _names(node, classes)
        elif name not in _NO_SETTINGS:
          settings[name] = _literal(node, constants)
      except ValueError:
        unread[name] = ast.unparse(node)[:80]
  return Source(_flatten(settings), unread)


def _called(node: ast.Call) -> str:
  """The name of the function or method that is called; "" for others."""
  function = node.func
  name = getattr(function, "attr", None) or getattr(function, "id", "")
  return name if isinstance(name, str) else ""


def _literal(node: ast.expr, constants: Mapping[str, Any]) -> Any:
  """The value of a literal, or of a name for one; ValueError for others."""
  if isinstance(node, ast.Name) and node.id in constants:
    return constants[node.id]
  return ast.literal_eval(node)


def _constants(tree: ast.Module) -> dict[str, Any]:
  """Names that are assigned a literal."""
  constants: dict[str, Any] = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
      name = node.targets[0].id
      try:
        constants[name] = _literal(node.value, constants)
      except ValueError:
        constants.pop(name, None)
  return constants


def _defined(
  tree: ast.Module, path: pathlib.Path, kind: type[ast.stmt]
) -> dict[str, str]:
  """Functions or classes of a script, FILE.py:name, and all that it imports."""
  known = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
      for name in node.names:
        known[name.asname or name.name] = f"{node.module}:{name.name}"
    elif isinstance(node, kind) and node in tree.body:
      known[node.name] = f"{path}:{node.name}"
  return known


def _names(node: ast.expr, known: Mapping[str, str]) -> list[str]:
  """Known ones by their names, or texts; ValueError for anything else."""
  nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
  return [
    known[one.id]
    if isinstance(one, ast.Name) and one.id in known
    else str(ast.literal_eval(one))
    for one in nodes
  ]
