"""Files of TRL and verl as names and values: read, and never run.

YAML and JSON are data. A Python script is a syntax tree: of its GRPOConfig,
GRPOTrainer and LoraConfig count literals, and names that stand for one.
"""

import ast
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

MAX_BYTES = 2**20  # of a file: configurations are far smaller
MAX_VALUES = 5000  # keys, and items of lists
SUFFIXES = (".yaml", ".yml", ".json", ".py")

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_PREFIXES = {"GRPOConfig": "", "GRPOTrainer": "", "LoraConfig": "lora."}
"""Calls whose keywords are settings, and the beginning of their names."""
_NO_SETTINGS = ("args", "processing_class", "peft_config", "train_dataset")


class Source(NamedTuple):
  """Settings that a file has.

  Attributes:
    settings: Values by name; nested ones by dotted path.
    unread: Expressions that are no literals, by the name of their setting.
  """

  settings: dict[str, Any]
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
    tree = json.loads(text) if suffix == ".json" else yaml.safe_load(text)
    return Source(_flatten(tree), {})
  except (ValueError, RecursionError, MemoryError, yaml.YAMLError) as error:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    raise ValueError(f"{path} cannot be read: {reason}") from error
  except SyntaxError as error:
    raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error


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
  flat: dict[str, Any] = {}
  visits = 0

  def visit(value, path):
    nonlocal visits
    visits += 1
    if visits > MAX_VALUES or len(path) > 30:
      raise ValueError("more keys than a configuration has")
    if isinstance(value, Mapping) and (value or not path):
      for key, item in value.items():
        visit(item, [*path, str(key)])
    elif isinstance(value, list | tuple):
      flat[".".join(path)] = [
        "..." if isinstance(x, list | Mapping) else _number_or_text(x)
        for x in value[:MAX_VALUES]
      ]
    else:
      flat[".".join(path)] = _number_or_text(value)

  if not isinstance(tree, Mapping):
    raise ValueError(f"keys and values are needed, not {type(tree).__name__}")
  visit(tree, [])
  return flat


def _read_script(text: str, path: pathlib.Path) -> Source:
  """Reads the keywords of a script's GRPOConfig, and of its trainer."""
  tree = ast.parse(text)
  calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
  if not any(_called(call) == "GRPOConfig" for call in calls):
    raise ValueError("it has no GRPOConfig(...)")
  constants, functions = _constants(tree), _functions(tree, path)
  settings, unread = {}, {}
  for call in calls:
    function = _called(call)
    arguments = call.keywords if function in _PREFIXES else []
    nodes = {x.arg: x.value for x in arguments if x.arg not in _NO_SETTINGS}
    if function == "load_dataset" and call.args:
      nodes = {"dataset_name": call.args[0]}
    for name, node in nodes.items():
      name = f"{_PREFIXES.get(function, '')}{name or '**'}"
      try:
        if name == "reward_funcs":
          settings[name] = _reward_functions(node, functions)
        else:
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
  """Names that are assigned a literal, or a model of that name."""
  constants: dict[str, Any] = {}
  for node in ast.walk(tree):
    if not isinstance(node, ast.Assign):
      continue
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Name):
      continue
    if isinstance(value, ast.Call) and _called(value) == "from_pretrained":
      value = (value.args or [value])[0]
    try:
      constants[target.id] = _literal(value, constants)
    except ValueError:
      constants.pop(target.id, None)
  return constants


def _functions(tree: ast.Module, path: pathlib.Path) -> dict[str, str]:
  """Functions that a script knows, as package.module:name or FILE.py:name."""
  functions = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
      for name in node.names:
        functions[name.asname or name.name] = f"{node.module}:{name.name}"
    elif isinstance(node, ast.FunctionDef):
      functions[node.name] = f"{path}:{node.name}"
  return functions


def _reward_functions(
  node: ast.expr, functions: Mapping[str, str]
) -> list[str]:
  """Reward functions, by names or by texts; ValueError for anything else."""
  nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
  return [
    functions[one.id]
    if isinstance(one, ast.Name) and one.id in functions
    else str(_literal(one, {}))
    for one in nodes
  ]
