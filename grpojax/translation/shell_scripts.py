"""Shell scripts as text: their words KEY.KEY=VALUE, as Hydra reads them.

Variables that a script sets are put in, sums of whole numbers are added up; no
command is run.
"""

import ast
import operator
import pathlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from grpojax.translation.source import Source, plain

_KEY = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_ASSIGNED = re.compile(r"\s*(?:export\s+|declare\s+-\w+\s+)?(\w+)=(.*)")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_LONGEST = 10_000  # characters of a variable
_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.FloorDiv: operator.floordiv,
  ast.Div: operator.floordiv,  # of whole numbers, as in a shell
}


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


def read(text: str, _: pathlib.Path) -> Source:
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
    first = [
      w for w in words[:3] if assigned and w.startswith(f"{assigned[1]}=")
    ]
    if first:
      variables[assigned[1]] = value = first[0].partition("=")[2]
      if len(value) > _LONGEST:
        raise ValueError(f"the variable {assigned[1]} grows without end")
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
