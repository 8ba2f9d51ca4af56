"""Python scripts as syntax trees: what they give to GRPOConfig and its trainer.

Only literals count, and names that stand for one; nothing is run.
"""

import ast
import pathlib
from collections.abc import Mapping
from typing import Any

from grpojax.translation.source import Source, plain


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


def read(text: str, path: pathlib.Path) -> Source:
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
