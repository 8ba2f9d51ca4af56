import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from grpojax.statistics import group_size_interval as interval
from grpojax.statistics.group_size import Components

PROMPTS = 41


@pytest.mark.parametrize(
  "degrees, too_small",
  [(1, 0.2358), (2, 0.03055), (3, 0.00737), (8, 0.000179), (500, 0)],
)
def test_students_expansion_against_scipy(degrees, too_small, float64):
  result = interval._t_quantile(jnp.asarray(float(degrees)))
  error = float(result) / stats.t.ppf(0.975, degrees) - 1
  assert error == pytest.approx(-too_small, rel=1e-2, abs=1e-8)


def bounds(c1, c3, over_prompts, over_tangents=((0, 0), (0, 0)), tangents=4):
  """Returns the interval for these covariances [2, 2] of c1 and c3."""
  matrices = np.zeros((2, 5, 5))
  for matrix, covariance in zip(
    matrices, (over_prompts, over_tangents), strict=True
  ):
    matrix[np.ix_([0, 2], [0, 2])] = covariance
  zero = jnp.zeros(())
  low, high = interval.group_size_interval(
    Components(jnp.asarray(c1), zero, jnp.asarray(c3), zero, zero),
    *map(jnp.asarray, matrices),
    PROMPTS,
    tangents,
  )
  return float(low), float(high)


@pytest.mark.parametrize(
  "of_tangents, degrees",
  # Satterthwaite's degrees for equal shares of B - 1 = 40 and V - 1 = 3.
  [(0, 40), (1, 4 / (1 / 40 + 1 / 3))],
)
def test_bounds_solve_the_t_test(of_tangents, degrees, float64):
  """At both bounds of rho = c1 / c3, c1 - rho c3 is t errors away from 0."""
  c1 = 1.0
  c3 = 30.0
  covariance = np.array([[0.05, 0.1], [0.1, 4.5]])
  low, high = bounds(c1, c3, covariance, of_tangents * covariance)
  assert 2 < low < 1 + np.sqrt(30) < high < 30
  for size, sign in ((low, -1), (high, 1)):
    rho = 1 / (size - 1) ** 2
    contrast = np.array([1, -rho])
    error = contrast @ covariance @ contrast * (1 + of_tangents)
    t = sign * stats.t.ppf(0.975, degrees)
    rtol = 1e-3 if of_tangents else 1e-6
    np.testing.assert_allclose(contrast @ [c1, c3], t * error**0.5, rtol=rtol)


def test_unknown_bounds(float64):
  # c1 may be 0, so the size may be unbounded.
  low, high = bounds(1.0, 30.0, np.diag([1.0, 1.0]))
  assert 1 < low < 7 and high == np.inf
  # c3 may be 0 or is negative, so any size is possible.
  assert bounds(1.0, 3.0, np.diag([0.01, 9.0])) == (1, np.inf)
  assert bounds(1.0, -9.0, np.diag([0.01, 1.0])) == (1, np.inf)


def test_pooled_interval_is_a_paired_t_test():
  rng = np.random.default_rng(0)
  c1 = rng.normal(1.0, 0.3, 12)
  c3 = rng.normal(30.0, 5.0, 12)
  best, low, high = interval.pooled_group_size(c1, c3)
  assert best == pytest.approx(1 + np.sqrt(c3.mean() / c1.mean()))
  assert 1 < low < best < high < np.inf
  for size in (low, high):
    test = stats.ttest_1samp(c1 - c3 / (size - 1) ** 2, 0.0)
    assert test.pvalue == pytest.approx(0.05, rel=1e-3)


def test_one_or_two_diagnoses():
  c1 = np.array([1.0, 1.0])
  single = (2.0, 5.0)
  assert interval.pooled_group_size(c1, 9 * c1, single) == (4, 1, np.inf)
  assert interval.pooled_group_size(c1[:1], 9 * c1[:1], single) == (4, 2, 5)
