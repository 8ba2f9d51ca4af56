"""Sums of several steps: an endless, seeded, offline data set.

A problem is an expression such as `23*4+17+85`: with probability 1/2 a leading
product (10..99 times 2..9), then additions of 10..99. Its difficulty is the
number of operations; `drawn.split_of` assigns its split.

The bundled models were pretrained on texts of careful authors, who write all
steps, and hasty authors, who write only the answer. Both may forget carries.
"""

import functools
import operator
import re
from collections.abc import Callable, Sequence

import numpy as np

from grpojax.data import drawn
from grpojax.data.examples import MARK, Example, Examples, check_split

_MOST_OPERATIONS = 1000
_MOST_PROBLEMS = 3  # per document
_EXPRESSION = re.compile(r"[0-9]+(\*[0-9]+)?(\+[0-9]+)*")

Add = Callable[[int, int], int]


def steps(expression: str, add: Add = operator.add) -> tuple[list[str], int]:
  """Returns the lines of a problem's worked solution, and its value.

  Products are split into tens and units: "23*4+5" gives "20*4=80", "3*4=12",
  "80+12=92" and "92+5=97". `add(a, b)` adds as the author does.
  """
  if not _EXPRESSION.fullmatch(expression):
    raise ValueError(
      f"{expression!r} is not a sum of whole numbers whose first term may be a"
      ' product: write it like "23*4+17+85"'
    )
  first, *terms = expression.split("+")
  value, *factor = map(int, first.split("*"))
  lines = []
  if factor:
    units = value % 10
    parts = [part for part in (value - units, units) if part] or [0]
    lines = [f"{part}*{factor[0]}={part * factor[0]}" for part in parts]
    value, *products = (part * factor[0] for part in parts)
    terms = [*products, *terms]
  for term in map(int, terms):
    total = add(value, term)
    lines.append(f"{value}+{term}={total}")
    value = total
  return lines, value


def solution(expression: str, add: Add = operator.add) -> str:
  """Returns a careful author's solution: the steps, then "#### value"."""
  lines, value = steps(expression, add)
  return "\n".join([*lines, f"{MARK} {value}"])


def hasty(expression: str, add: Add = operator.add) -> str:
  """Returns a hasty author's solution, "#### value"."""
  return f"{MARK} {steps(expression, add)[1]}"


def sample(
  rng: np.random.Generator,
  split: str = "train",
  difficulty: int | Sequence[int] = (2, 4),
) -> str:
  """Draws a problem; `difficulty`: number of operations, or (low, high)."""
  check_split(split)
  low, high = drawn.bounds("difficulty", difficulty, _MOST_OPERATIONS)
  operations = int(rng.integers(low, high, endpoint=True))
  while True:
    product = int(rng.integers(2))
    numbers = rng.integers(10, 99, size=operations + 1 - product, endpoint=True)
    terms = [str(number) for number in numbers]
    if product:
      terms[0] += f"*{rng.integers(2, 9, endpoint=True)}"
    expression = "+".join(terms)
    if drawn.split_of(expression) == split:
      return expression


def load(
  split: str,
  *,
  seed: int = 0,
  difficulty: int | Sequence[int] = (2, 4),
  size: int | None = None,
) -> Examples:
  """Returns problems {"prompt": "23*4+17+85", "answer": "194"}."""
  bounds = drawn.bounds("difficulty", difficulty, _MOST_OPERATIONS)

  def draw(rng: np.random.Generator) -> Example:
    expression = sample(rng, split, bounds)
    return {"prompt": expression, "answer": str(steps(expression)[1])}

  return drawn.load(split, draw, seed=seed, size=size)


def document(
  rng: np.random.Generator,
  *,
  difficulty: int | Sequence[int] = (2, 4),
  hasty: float = 0.6,
  forget: tuple[float, float] = (0.0, 0.0),
) -> str:
  r"""Draws a document of 1 to 3 blocks "EXPRESSION\nSOLUTION\n\n".

  Its author is hasty with probability `hasty`. `sample` explains `difficulty`,
  `forgetful_sum` explains `forget`.
  """
  author = _author(rng, hasty, forget)
  count = int(rng.integers(1, _MOST_PROBLEMS, endpoint=True))
  problems = [sample(rng, "train", difficulty) for _ in range(count)]
  return "".join(f"{problem}\n{author(problem)}\n\n" for problem in problems)


def dialogue(
  rng: np.random.Generator,
  *,
  difficulty: int | Sequence[int] = (2, 4),
  hasty: float = 0.6,
  forget: tuple[float, float] = (0.0, 0.0),
) -> tuple[str, str]:
  r"""Draws "Q: EXPRESSION\nA: " and a solution; arguments as in `document`."""
  author = _author(rng, hasty, forget)
  problem = sample(rng, "train", difficulty)
  return f"Q: {problem}\nA: ", author(problem)


def forgetful_sum(
  rng: np.random.Generator, a: int, b: int, forget: tuple[float, float]
) -> int:
  """Adds a and b column by column and forgets carries at random: 48+37=75.

  `forget` has the probabilities of forgetting the carry of column sums 10 and
  19, linear between. The leftmost column is written in full: 95+7=102 or 92.
  """
  low, high = forget
  columns = max(len(str(a)), len(str(b)))
  total = carry = 0
  for place in range(columns - 1):
    column = a // 10**place % 10 + b // 10**place % 10 + carry
    total += column % 10 * 10**place
    carry = column // 10
    if carry and rng.random() < low + (high - low) * (column - 10) / 9:
      carry = 0
  leftmost = 10 ** (columns - 1)
  return total + (a // leftmost + b // leftmost + carry) * leftmost


def _author(
  rng: np.random.Generator, probability: float, forget: tuple[float, float]
) -> Callable[[str], str]:
  author = hasty if rng.random() < probability else solution
  if not any(forget):
    return author
  add = functools.partial(forgetful_sum, rng, forget=forget)
  return functools.partial(author, add=add)
