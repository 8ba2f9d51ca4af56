"""Example of a tool: a calculator.

--config.environment.tools=grpojax.environments.calculator:calculator
"""

import ast
import operator
import re
from fractions import Fraction

_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.UAdd: operator.pos,
  ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
  """Computes an expression of numbers.

  Args:
    expression: numbers with + - * / and parentheses, as "(2 + 3) * 4"

  Returns:
    The result, exact if it is a whole number.
  """
  text = str(expression).strip()
  if not re.fullmatch(r"[-+*/(). 0-9]{,200}", text):
    raise ValueError("only numbers, + - * / and (), up to 200 characters")
  try:
    value = _compute(ast.parse(text, mode="eval").body)
  except (SyntaxError, MemoryError, RecursionError) as error:
    raise ValueError("this is not an expression") from error
  return str(value) if value.denominator == 1 else f"{float(value):.12g}"


def _compute(node: ast.expr) -> Fraction:
  """Returns the exact value of a syntax tree of the four operations."""
  if isinstance(node, ast.Constant):
    return Fraction(repr(node.value))  # Fraction(0.1) is not 1/10
  function = _OPERATORS.get(type(getattr(node, "op", None)))
  if function is None:  # such as ** and //
    raise ValueError("only numbers, + - * / and ()")
  if isinstance(node, ast.UnaryOp):
    return function(_compute(node.operand))
  return function(_compute(node.left), _compute(node.right))
