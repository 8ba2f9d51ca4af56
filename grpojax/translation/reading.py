"""What a configuration of TRL or verl says, read and never run.

YAML and JSON are read as data, Python as a syntax tree of which only literals
count, shell scripts as text: variables that they set are put in, and no command
is looked at but for its words KEY=VALUE.
"""

import ast
import json
import operator
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import yaml

LARGEST = 2**20
"""Bytes of a file: configurations are far smaller."""

_MOST_KEYS = 5000
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_KEY = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_ASSIGNED = re.compile(r"\s*(?:export\s+|declare\s+-\w+\s+)?(\w+)=(.*)")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.FloorDiv: operator.floordiv,
  ast.Div: operator.floordiv,  # of whole numbers, as in a shell
}


class Source(NamedTuple):
  """What a file says.

  Attributes:
    settings: its values by name; of nested ones by dotted path.
    unread: what could not be read as a value: names, and what stands there.
    guarded: of a Python file, whether importing it runs nothing (what it runs
      is under `if __name__ == "__main__"`).
  """

  settings: dict[str, Any]
  unread: dict[str, str]
  guarded: bool = True


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

  def visit(value, path):
    if len(found) > _MOST_KEYS or len(path) > 30:
      raise ValueError("more keys than a configuration has")
    if isinstance(value, Mapping) and (value or not path):
      for key, item in value.items():
        visit(item, [*path, str(key)])
    else:
      found[".".join(path)] = plain(value)

  if not isinstance(tree, Mapping):
    raise ValueError(f"keys and values are needed, not {type(tree).__name__}")
  visit(tree, [])
  return found


def plain(value: Any) -> Any:
  """A value with texts like "1e-6", which YAML leaves texts, as numbers."""
  if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
    text = value.strip()
    return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else float(text)
  return value


def _yaml(text: str, _: pathlib.Path) -> Source:
  return Source(_flat(yaml.safe_load(text)), {})


def _json(text: str, _: pathlib.Path) -> Source:
  return Source(_flat(json.loads(text)), {})


def _called(node: ast.Call) -> str:
  function = node.func
  name = getattr(function, "attr", None) or getattr(function, "id", "")
  return name if isinstance(name, str) else ""


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
  """A literal, or a name that stands for one.

  Raises:
    ValueError: it is neither.
  """
  if isinstance(node, ast.Name) and node.id in names:
    return names[node.id]
  return plain(ast.literal_eval(node))


_CALLS = {"GRPOConfig": "", "GRPOTrainer": "", "LoraConfig": "lora."}
"""Calls whose keywords are settings, and what their names begin with here."""

_NO_SETTINGS = ("args", "processing_class", "peft_config", "train_dataset")


def _python(text: str, path: pathlib.Path) -> Source:
  """A script that makes a GRPOConfig: its keywords, and the trainer's."""
  tree = ast.parse(text)
  calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
  if not any(_called(call) == "GRPOConfig" for call in calls):
    raise ValueError("it has no GRPOConfig(...)")
  names, places = _constants(tree), _places(tree, path)
  settings: dict[str, Any] = {}
  unread: dict[str, str] = {}
  for call in calls:
    keywords = call.keywords if _called(call) in _CALLS else []
    given = {x.arg: x.value for x in keywords if x.arg not in _NO_SETTINGS}
    if _called(call) == "load_dataset" and call.args:
      given = {"dataset_name": call.args[0]}
    prefix = _CALLS.get(_called(call), "")
    for name, node in given.items():
      name = f"{prefix}{name or '**'}"
      try:
        functions = name == "reward_funcs"
        read = _functions(node, places) if functions else _value(node, names)
        settings[name] = read
      except ValueError:
        unread[name] = ast.unparse(node)[:80]
  return Source(settings, unread, _guarded(tree))


def _constants(tree: ast.Module) -> dict[str, Any]:
  """Names that are assigned a literal, or a model of that name."""
  names: dict[str, Any] = {}
  for node in ast.walk(tree):
    if not isinstance(node, ast.Assign):
      continue
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Name):
      continue
    if isinstance(value, ast.Call) and _called(value) == "from_pretrained":
      value = (value.args or [value])[0]
    try:
      names[target.id] = _value(value, names)
    except ValueError:
      names.pop(target.id, None)
  return names


def _places(tree: ast.Module, path: pathlib.Path) -> dict[str, str]:
  """Functions that a script knows, as package.module:name or FILE.py:name."""
  found = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
      for name in node.names:
        found[name.asname or name.name] = f"{node.module}:{name.name}"
    elif isinstance(node, ast.FunctionDef):
      found[node.name] = f"{path}:{node.name}"
  return found


def _functions(node: ast.expr, places: Mapping[str, str]) -> list[str]:
  """Reward functions, by names or by texts.

  Raises:
    ValueError: something else is among them.
  """
  nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
  found = []
  for one in nodes:
    if isinstance(one, ast.Name) and one.id in places:
      found.append(places[one.id])
    else:
      found.append(str(_value(one, {})))
  return found


def _guarded(tree: ast.Module) -> bool:
  """Whether a module's top does nothing but define and import."""
  quiet = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.If
  return all(
    isinstance(node, quiet)
    or isinstance(node, ast.Assign | ast.AnnAssign)
    and not any(isinstance(x, ast.Call) for x in ast.walk(node))
    or isinstance(node, ast.Expr)
    and isinstance(node.value, ast.Constant)
    for node in tree.body
  )


def arithmetic(text: str) -> int:
  """A sum of whole numbers such as "(1024 * 2) / 4".

  Raises:
    ValueError: it is something else.
  """

  def value(node):
    if isinstance(node, ast.Constant) and type(node.value) is int:
      return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
      return _OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError(f"{text!r} is no sum of numbers")

  try:
    return value(ast.parse(text.strip(), mode="eval").body)
  except (SyntaxError, ZeroDivisionError, RecursionError) as error:
    raise ValueError(f"{text!r} is no sum of numbers") from error


def _substituted(text: str, variables: Mapping[str, str]) -> str:
  """A line of a shell script with the variables and sums that are known."""

  def variable(match):
    name, default = match[1] or match[3], match[2]
    return variables.get(name, match[0] if default is None else default)

  def total(match):
    inside = re.sub(
      r"[A-Za-z_]\w*", lambda m: variables.get(m[0], m[0]), match[1]
    )
    try:
      return str(arithmetic(inside))
    except ValueError:
      return match[0]

  return _ARITHMETIC.sub(total, _VARIABLE.sub(variable, text))


def _shell(text: str, _: pathlib.Path) -> Source:
  """A script's words a.b=value, as Hydra reads them."""
  variables = {"HOME": "~"}
  settings: dict[str, Any] = {}
  unread: dict[str, str] = {}
  for line in re.sub(r"\\\r?\n", " ", text).splitlines():
    line = _substituted(line, variables)
    assigned = _ASSIGNED.fullmatch(line)
    try:
      words = shlex.split(line, comments=True)
    except ValueError:  # quotes that end on another line
      words = line.split()
    if assigned and "=" in (words or [""])[0]:
      first = next((w for w in words if w.startswith(f"{assigned[1]}=")), "=")
      variables[assigned[1]] = first.partition("=")[2]
    for word in words:
      if key := _KEY.fullmatch(word):
        value = key[2]
        if re.search(r"\$[\w{(]", value) and not value.startswith("${oc"):
          unread[key[1]] = value[:80]
        else:
          settings[key[1]] = _hydra(value)
  if not settings and not unread:
    raise ValueError("it has no words KEY.KEY=VALUE")
  return Source(settings, unread)


def _hydra(value: str) -> Any:
  """A value on Hydra's command line."""
  try:
    found = yaml.safe_load(value)
  except yaml.YAMLError:
    return value
  if value in ("None", "none"):  # what Python writes
    return None
  return plain(found)


READERS: dict[str, Callable[[str, pathlib.Path], Source]] = {
  ".yaml": _yaml,
  ".yml": _yaml,
  ".json": _json,
  ".py": _python,
  ".sh": _shell,
}
"""What reads a file, by its suffix."""
