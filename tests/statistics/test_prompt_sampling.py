"""Prompts drawn by priority: averages by enumeration."""

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose

from grpojax.statistics import prompt_sampling
from grpojax.statistics.prompt_sampling import Stratum

STRATA = [Stratum(3, 2.0), Stratum(2, 1.0)]
ORIGINAL = np.array([2 / 9, 2 / 9, 2 / 9, 1 / 6, 1 / 6])


class Fixed:
  """A random generator with given orders of the strata and a given number."""

  def __init__(self, orders, number):
    self.orders, self.number = list(orders), number

  def permutation(self, x):
    return x[np.array(self.orders.pop(0))] if self.orders else x

  def random(self):
    return self.number


def outcomes(expected):
  """Lists all orders and intervals of the random number, with probabilities."""
  orders = itertools.product(
    *(itertools.permutations(range(n)) for n in (3, 2))
  )
  for order in orders:
    whole = [*order[0], *(3 + i for i in order[1])]
    edges = np.cumsum(expected[whole])
    cuts = np.unique(np.concatenate([[0, 1], edges % 1]))
    for low, high in itertools.pairwise(cuts):
      yield (high - low) / 12, Fixed(order, (low + high) / 2)


@pytest.mark.parametrize("rows, most", [(2, 1), (4, 1), (5, 3)])
@pytest.mark.parametrize(
  "priorities", [(1, 4, 0, 2, 0), (0, 0, 0, 1, 1), (1, 1, 1, 1, 1)]
)
def test_importance_weights_remove_the_bias(priorities, rows, most):
  options = {"rows": rows, "uniform": 0.25, "most": most}
  priorities = np.array(priorities, float)
  expected = prompt_sampling.expected_rows(priorities, STRATA, **options)
  assert np.sum(expected) == pytest.approx(rows)
  total = 0.0
  counts = np.zeros(5)
  estimate = np.zeros(5)
  for probability, rng in outcomes(expected):
    indices, weights = prompt_sampling.draw(priorities, STRATA, rng, **options)
    count = np.bincount(indices, minlength=5)
    assert len(indices) == rows and count.max() <= most
    assert np.all(np.abs(count - expected) < 1)  # rounded up or down
    assert weights.max() <= 1 / 0.25 + 1e-9
    total += probability
    counts += probability * count
    each = np.bincount(indices, weights, minlength=5)
    estimate += probability * each / rows
  assert total == pytest.approx(1)
  assert_allclose(counts, expected, atol=1e-12)
  assert_allclose(estimate, ORIGINAL, atol=1e-12)


@pytest.mark.parametrize(
  "priorities, strata, options, expected",
  [
    # The uniform share is 1/30 each; the second data set has no priorities.
    (
      [1.0, 0, 0, 0, 0],
      STRATA,
      {"rows": 1, "uniform": 0.1},
      [2 / 3 - 4 / 90, 2 / 90, 2 / 90, 1 / 6, 1 / 6],
    ),
    # An excess over a row goes to the same data set.
    (
      [96.0, 1, 1, 1, 1, 1],
      [Stratum(4, 2.0), Stratum(2, 1.0)],
      {"rows": 3, "uniform": 0.01},
      [1, *[1 / 3] * 3, 1 / 2, 1 / 2],
    ),
  ],
)
def test_shares_shift_within_a_stratum(priorities, strata, options, expected):
  rows = prompt_sampling.expected_rows(np.array(priorities), strata, **options)
  assert_allclose(rows, expected)


def test_strata_keep_their_rows_in_random_order():
  rng = np.random.default_rng(0)
  strata = [Stratum(40, 3.0), Stratum(20, 1.0)]
  options = {"rows": 8, "uniform": 0.1}
  first = [
    prompt_sampling.draw(rng.random(60), strata, rng, **options)[0] < 40
    for _ in range(20)
  ]
  assert all(np.sum(x) == 6 for x in first)
  assert any(np.any(np.diff(1 * x) > 0) for x in first)
