"""Equality of answers: labelled pairs, random expressions, hostile ones."""

import cmath
import operator
import pathlib
import random

import pytest

from grpojax.rewards import math
from grpojax.rewards.pool import Pool

DATA = pathlib.Path(__file__).parents[1] / "data"
SOME_OR_ALL = [
  slice(0, None, 9),
  pytest.param(slice(None), marks=pytest.mark.slow),
]


def is_right(answer, reference):
  text = rf"So it is \boxed{{{answer}}}."
  return bool(math.math_answer("", text, {"answer": reference}))


@pytest.mark.parametrize("part", SOME_OR_ALL)
@pytest.mark.parametrize("name", ["right_answers.txt", "wrong_answers.txt"])
def test_pairs_of_answers(name, part):
  """Rows are "answer ~ reference"; a third part marks a known error."""
  lines = (DATA / name).read_text().splitlines()
  rows = [line.split(" ~ ") for line in lines]
  for answer, reference, *cause in rows[part]:
    expected = (name == "right_answers.txt") != bool(cause)
    assert is_right(answer, reference) == expected, (answer, reference)
  assert sum(len(row) > 2 for row in rows) < len(rows) / 20


OPERATORS = {
  "+": operator.add,
  "-": operator.sub,
  "*": operator.mul,
  "/": operator.truediv,
  "^": operator.pow,
  "sqrt": cmath.sqrt,
  "sin": cmath.sin,
}
LETTERS = ("x", "y", "n", "X", "Y", "N")


def expression(rng, depth):
  """Draws a letter, a digit or (operator, operands...)."""
  if not depth or rng.random() < 0.2:
    return rng.choice([*LETTERS[:3], 1, 2, 3, 5])
  name = rng.choice(list(OPERATORS))
  count = 1 if name in ("sqrt", "sin") else 2
  return (name, *(expression(rng, depth - 1) for _ in range(count)))


def latex(tree):
  if not isinstance(tree, tuple):
    return str(tree)
  name, *operands = tree
  texts = [latex(operand) for operand in operands]
  grouped = [
    f"({text})" if isinstance(operand, tuple) else text
    for operand, text in zip(operands, texts, strict=True)
  ]
  if name == "/":
    return rf"\frac{{{texts[0]}}}{{{texts[1]}}}"
  if name == "^":
    return f"{grouped[0]}^{{{texts[1]}}}"
  if name in ("sqrt", "sin"):
    return rf"\{name}{{{texts[0]}}}" if name == "sqrt" else rf"\sin({texts[0]})"
  return {"*": r"\cdot "}.get(name, name).join(grouped)


def value(tree, point):
  if not isinstance(tree, tuple):
    return point.get(tree, tree)
  return OPERATORS[tree[0]](*(value(operand, point) for operand in tree[1:]))


def neighbours(tree):
  """Yields trees with a changed letter, sign or order, or a moved term."""
  if not isinstance(tree, tuple):
    yield tree.swapcase() if isinstance(tree, str) else tree + 1
    return
  name, *operands = tree
  for i, operand in enumerate(operands):
    before, after = operands[:i], operands[i + 1 :]
    for other in neighbours(operand):
      yield (name, *before, other, *after)
    if isinstance(operand, tuple) and len(operand) == 3:
      inner, first, second = operand
      yield (inner, (name, *before, first, *after), second)
      yield (inner, first, (name, *before, second, *after))
  if len(operands) == 2:
    yield (name, *reversed(operands))
    yield ({"+": "-", "-": "+", "*": "/", "/": "*", "^": "*"}[name], *operands)


@pytest.mark.parametrize(
  "count", [12, pytest.param(150, marks=pytest.mark.slow)]
)
def test_equal_expressions_have_equal_values(count):
  rng = random.Random(0)
  equal = 0
  for _ in range(count):
    tree = expression(rng, 3)
    other = rng.choice([*neighbours(tree)])
    if not is_right(latex(other), latex(tree)):
      continue
    equal += 1
    for _ in range(10):
      point = {letter: rng.uniform(0.5, 3) for letter in LETTERS}
      values = [value(each, point) for each in (tree, other)]
      assert cmath.isclose(*values, rel_tol=1e-9), (latex(other), latex(tree))
  assert 0 < equal < count


HOSTILE = [
  *("10^{10^{10}}", "9^{9^{9^{9}}}", "((9^{999})^{999})^{999}", "99999999!"),
  *(r"\binom{10^9}{5 \cdot 10^8}", r"\sum_{i=1}^{10^9} \sin i", "(" * 240),
  *("{" * 240, r"\sqrt{" * 60 + "x" + "}" * 60, "x^{" * 120 + "}" * 120),
  *("x+" * 240 + "x", "(x+y)" * 90, "(x+y+z)^{999}", r"\frac{1}{" * 50 + "x"),
  *("__import__('os')._exit(1)", r"\int_0^1 x^x dx", "x!^{x!^{x!}}", "1/0"),
]


@pytest.mark.slow
def test_hostile_expressions_do_not_stop_the_worker():
  for reference in ("2x+1", "(2x, 1)"):
    texts = [f"#### {answer}" for answer in HOSTILE]
    texts.append(f"#### {reference.replace('2x', 'x + x')}")
    example = {"answer": reference}
    with Pool(["math_answer"], timeout=300) as pool:
      sent = pool.submit([[("", text, example)] for text in texts], 1)
      result = pool.collect([sent])
    assert not result.failed.any(), result.failures
    assert result.rewards[:, 0].tolist() == [0.0] * len(HOSTILE) + [1.0]
