"""Bias and error of the advantages: docs/theory.md's table, by enumeration.

Twenty random policies of one to two tokens; two of seven completions are right.
"""

import itertools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import advantages as a

POLICIES = 20
SIZES = (4, 8, 16)
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "theory.md"
MASK = np.array([[1, 0]] + [[1, 1]] * 6, bool)  # the first token 0 is the end


def policy(rng):
  """Probabilities, scores of tokens by all logits, and rewards."""
  first, second = (np.exp(rng.normal(size=n)) for n in (3, (3, 3)))
  first = first / first.sum()
  second = second / second.sum(-1, keepdims=True)
  scores = np.zeros((7, 2, 12))
  p = np.zeros(7)
  outcomes = [(0, 0), *itertools.product((1, 2), range(3))]
  for i, (x, y) in enumerate(outcomes):
    scores[i, 0, :3], p[i] = np.eye(3)[x] - first, first[x]
    if x:
      scores[i, 1, 3 * x + 3 : 3 * x + 6] = np.eye(3)[y] - second[x]
      p[i] *= second[x][y]
  return p, scores, rng.permutation([1.0, 1, 0, 0, 0, 0, 0])


@jax.jit
def all_advantages(rewards, unsure, mask):
  """Advantages of groups, [n, G] or [n, G, 2], by the names of the table."""
  sums = unsure.sum(-1)
  lengths = mask.sum(-1)
  tokens = rewards, unsure, mask, 1.0
  with_own = a.optimal_token_baseline(*tokens, leave_one_out=False)
  return {
    "leave_one_out": a.leave_one_out(rewards),
    "dr_grpo": a.dr_grpo(rewards),
    "grpo": a.grpo(rewards),
    "vanilla": a.vanilla(rewards),
    "length_weighted": a.length_weighted(rewards, lengths),
    "score_weighted": a.score_weighted(rewards, sums, 1.0),
    "optimal_token_baseline": a.optimal_token_baseline(*tokens),
    "leave_one_out=False": with_own,
  }


MARKED = [
  4,
  pytest.param(8, marks=pytest.mark.slow),
  pytest.param(16, marks=pytest.mark.long),
]


@pytest.mark.parametrize("size", MARKED)
def test_the_table_of_docs_theory(size, float64):
  rng = np.random.default_rng(0)
  totals = {}
  groups = itertools.combinations_with_replacement(range(7), size)
  groups = np.array(list(groups))
  orders = [
    math.factorial(size) / math.prod(map(math.factorial, np.bincount(x)))
    for x in groups
  ]
  for _ in range(POLICIES):
    p, scores, z = policy(rng)
    chance = p[groups].prod(-1) * orders
    g = (p * z) @ scores.sum(1)
    assert chance.sum() == pytest.approx(1)
    token_sq = (scores**2).sum(-1)
    arrays = (jnp.asarray(x[groups]) for x in (z, token_sq, MASK))
    for name, advantage in all_advantages(*arrays).items():
      weights = np.asarray(advantage).reshape(*groups.shape, -1, 1) / size
      estimate = (weights * scores[groups]).sum((1, 2))
      bias = np.linalg.norm(chance @ estimate - g) / np.linalg.norm(g)
      scaled = estimate * (g @ g) / (chance @ estimate @ g)
      errors = (chance @ ((x - g) ** 2).sum(-1) for x in (estimate, scaled))
      totals[name] = totals.get(name, 0) + np.array([bias, *errors]) / POLICIES
  least = totals["leave_one_out"][1]
  (column,) = (i for i, x in enumerate(SIZES) if x == size)
  rows = re.findall(r"^\| `([\w=]+)` \| (.+%.+) \|$", PAGE.read_text(), re.M)
  shown = {name: cells.split(" | ")[column] for name, cells in rows}
  for name, (bias, error, _) in totals.items():
    unbiased = name not in ("dr_grpo", "grpo", "leave_one_out=False")
    assert (bias < 1e-12) == unbiased
    assert shown[name] == f"{bias:.1%}, {error / least:.3f}", name
  assert totals["dr_grpo"][2] == pytest.approx(least)
  sentence = r"error of the last row is ([\d.]+), ([\d.]+) and ([\d.]+) at"
  scaled = re.search(sentence, PAGE.read_text())[column + 1]
  own = totals["leave_one_out=False"][2]
  assert scaled == f"{own / least:.3f}"
