"""Arithmetic questions as one asks a language model: "What is 3 + 4?".

Five kinds take turns: sums, differences, products and quotients of two small
numbers, and sums of three. Few and easy, because a model of 100 million
parameters that samples at temperature 1 gets most harder ones always wrong, and
rewards that are all equal have no gradient. No question is in both splits.
"""

import itertools

import numpy as np

from grpojax.data.examples import Example, check_split

HELD_OUT = 13
"""Held-out questions of each kind; 14 or more are left to be solved ones."""

PLAIN = "Question: {prompt}\nAnswer:"
"""Template of a question in plain text; its answer ends with the line."""


def _kinds() -> list[list[tuple[str, int]]]:
  """Lists all expressions of each kind, with their values."""
  pairs = list(itertools.product(range(2, 10), repeat=2))
  triples = itertools.product(range(1, 4), repeat=3)
  return [
    [(f"{a} + {b}", a + b) for a, b in pairs],
    [(f"{a} - {b}", a - b) for a, b in pairs if a > b],
    [(f"{a} * {b}", a * b) for a, b in pairs],
    [(f"{a * b} / {b}", a) for a, b in pairs],
    [(f"{a} + {b} + {c}", a + b + c) for a, b, c in triples],
  ]


def load(split: str) -> list[Example]:
  """Returns {"prompt": "What is 3 + 4?", "answer": "7"}, always the same ones.

  65 held-out questions ("test") and 70 that can be shown solved ("train").
  """
  check_split(split)
  rng = np.random.default_rng(0)
  chosen = slice(HELD_OUT) if split == "test" else slice(HELD_OUT, None)
  orders = [rng.permutation(len(kind))[chosen] for kind in _kinds()]
  return [
    {"prompt": f"What is {kind[i][0]}?", "answer": str(kind[i][1])}
    for turn in zip(*orders, strict=False)  # the shortest has 27
    for kind, i in zip(_kinds(), turn, strict=True)
  ]
