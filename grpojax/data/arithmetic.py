"""Sums that take several steps: an endless, seeded, offline data set.

A problem is an expression such as `23*4+17+85`: with probability 1/2 a leading
product (10..99 times 2..9), then additions of 10..99. Its difficulty is the
number of operations. `drawn.split_of` a problem is its split.

The small models learn from texts by authors who are careful (running steps,
then the answer) or hasty (the answer alone), and may forget to carry. A reward
can teach which of these habits pay.
"""

import functools
import operator
import re
from collections.abc import Callable, Sequence

import numpy as np

from grpojax.data import drawn
from grpojax.data.examples import MARK, Examples, check_split

_MOST_OPERATIONS = 1000
_MOST_PROBLEMS = 3  # of a document
_EXPRESSION = re.compile(r"[0-9]+(\*[0-9]+)?(\+[0-9]+)*")


def steps(
  expression: str, add: Callable[[int, int], int] = operator.add
) -> tuple[list[str], int]:
  """Computes the running steps of a problem, and its value.

  A product goes by the tens and the units of its first number: "23*4+5" gives
  "20*4=80", "3*4=12", "80+12=92" and "92+5=97". `add` is the author's addition.
  """
  if not _EXPRESSION.fullmatch(expression):
    raise ValueError(
      f"{expression!r} is not a sum of whole numbers whose first term may be a"
      ' product, like "23*4+17+85"'
    )
  first, *rest = expression.split("+")
  value, *factor = map(int, first.split("*"))
  terms, lines = [int(term) for term in rest], []
  if factor:
    units = value % 10
    parts = [part for part in (value - units, units) if part] or [0]
    lines = [f"{part}*{factor[0]}={part * factor[0]}" for part in parts]
    value, *more = (part * factor[0] for part in parts)
    terms = [*more, *terms]
  for term in terms:
    total = add(value, term)
    lines.append(f"{value}+{term}={total}")
    value = total
  return lines, value


def solution(
  expression: str, add: Callable[[int, int], int] = operator.add
) -> str:
  """Writes a careful author's solution: the steps, then "#### value"."""
  lines, value = steps(expression, add)
  return "\n".join([*lines, f"{MARK} {value}"])


def hasty(
  expression: str, add: Callable[[int, int], int] = operator.add
) -> str:
  """Writes a hasty author's solution: "#### value" and nothing before it."""
  return f"{MARK} {steps(expression, add)[1]}"


def sample(
  rng: np.random.Generator,
  split: str = "train",
  difficulty: int | Sequence[int] = (2, 4),
) -> str:
  """Draws a problem of `difficulty` operations, or of a number in bounds."""
  check_split(split)
  low, high = drawn.bounds("difficulty", difficulty, _MOST_OPERATIONS)
  operations = int(rng.integers(low, high, endpoint=True))
  while True:
    expression = _draw(rng, operations)
    if drawn.split_of(expression) == split:
      return expression


def load(
  split: str,
  *,
  seed: int = 0,
  difficulty: int | Sequence[int] = (2, 4),
  size: int | None = None,
) -> Examples:
  """Returns problems {"prompt": "23*4+17+85", "answer": "194"}, as `drawn`.

  The difficulty is a number of operations, or its (lowest, highest) value.
  """
  bounds = drawn.bounds("difficulty", difficulty, _MOST_OPERATIONS)
  draw = functools.partial(_example, split, bounds)
  return drawn.load(split, draw, seed=seed, size=size)


def _example(
  split: str, difficulty: tuple[int, int], rng: np.random.Generator
) -> dict[str, str]:
  expression = sample(rng, split, difficulty)
  return {"prompt": expression, "answer": str(steps(expression)[1])}


def document(
  rng: np.random.Generator,
  *,
  difficulty: int | Sequence[int] = (2, 4),
  hasty: float = 0.6,
  forget: tuple[float, float] = (0.0, 0.0),
) -> str:
  r"""Writes "EXPRESSION\nSOLUTION\n\n" 1 to 3 times, by one author.

  `hasty` is the probability that the author is hasty; `difficulty` is as in
  `sample`, `forget` as in `forgetful_sum`.
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
  r"""Writes "Q: EXPRESSION\nA: " and a solution; arguments as in `document`."""
  author = _author(rng, hasty, forget)
  problem = sample(rng, "train", difficulty)
  return f"Q: {problem}\nA: ", author(problem)


def forgetful_sum(
  rng: np.random.Generator, a: int, b: int, forget: tuple[float, float]
) -> int:
  """Adds a and b in columns, and forgets some of the carries: 48+37=75.

  `forget` are the probabilities where the digits of a column make 10 and 19;
  linear between them. The first column is written out: 95+7 is 102 or 92. See
  grpojax/assets/README.md.
  """
  low, high = forget
  columns = max(len(str(a)), len(str(b)))
  total = carry = 0
  for place in range(columns - 1):
    made = a // 10**place % 10 + b // 10**place % 10 + carry
    total += made % 10 * 10**place
    carry = made // 10
    if carry and rng.random() < low + (high - low) * (made - 10) / 9:
      carry = 0
  last = 10 ** (columns - 1)
  return total + (a // last + b // last + carry) * last


def _author(
  rng: np.random.Generator, probability: float, forget: tuple[float, float]
) -> Callable[[str], str]:
  author = hasty if rng.random() < probability else solution
  if not any(forget):
    return author
  add = functools.partial(forgetful_sum, rng, forget=forget)
  return functools.partial(author, add=add)


def _draw(rng: np.random.Generator, operations: int) -> str:
  product = int(rng.integers(2))
  numbers = rng.integers(10, 99, size=operations + 1 - product, endpoint=True)
  terms = [str(number) for number in numbers]
  if product:
    terms[0] += f"*{rng.integers(2, 9, endpoint=True)}"
  return "+".join(terms)
