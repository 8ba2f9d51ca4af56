"""Intervals and paired tests against scipy, enumeration and numbers by hand."""

import itertools
import math

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from grpojax.statistics import intervals
from grpojax.statistics.intervals import (
  mean_interval,
  paired_difference,
  paired_proportions,
  share_interval,
  wilson_interval,
)


@pytest.mark.parametrize("count", [2, 3, 30])
def test_mean_interval_equals_scipy(count):
  values = np.random.default_rng(count).normal(size=count)
  mean = np.mean(values)
  expected = stats.t.interval(0.95, count - 1, mean, stats.sem(values))
  result = mean_interval(values)
  assert_allclose(result, [mean, *expected], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
  "prompts, a, b", [(100, 0.02, 2), (20, 1, 1), (2, 9, 9)]
)
def test_share_interval_covers_near_0_and_1(prompts, a, b):
  """Student's covers 86% of the first, 87% of the last, and leaves [0, 1]."""
  rng = np.random.default_rng(0)
  held = 0
  for _ in range(400):
    values = rng.binomial(4, rng.beta(a, b, prompts)) / 4
    rate, low, high = share_interval(values)
    assert 0 <= low <= rate <= high <= 1 and low < high
    held += low <= a / (a + b) <= high
    mirrored = share_interval(1 - values)
    assert_allclose(mirrored, [1 - rate, 1 - high, 1 - low], atol=1e-12)
  assert held >= 0.94 * 400


def test_share_interval_is_students_in_the_middle():
  values = np.random.default_rng(0).binomial(4, 0.5, 10_000) / 4
  student = mean_interval(values)
  assert_allclose(share_interval(values), student, rtol=1e-3)


def test_wilson_interval_ends_where_the_score_test_just_rejects():
  rate, *ends = wilson_interval(7, 100)
  z = [(rate - p) / math.sqrt(p * (1 - p) / 100) for p in ends]
  assert_allclose(z, [1.959964, -1.959964], rtol=1e-6)


def test_paired_difference_equals_scipy():
  rng = np.random.default_rng(0)
  a, b = rng.integers(0, 5, (2, 12)) / 4
  result = paired_difference(a, b)
  expected = stats.ttest_rel(a, b).confidence_interval(0.95)
  assert_allclose(result[1:3], expected, rtol=1e-10)
  assert result.difference == pytest.approx(np.mean(a) - np.mean(b), abs=1e-12)
  options = {"permutation_type": "samples", "n_resamples": np.inf}
  test = stats.permutation_test((a, b), lambda x, y: np.sum(x - y), **options)
  assert 0 < test.pvalue < 1
  assert result.p_value == pytest.approx(test.pvalue, abs=1e-12)
  back = [-result.difference, -result.high, -result.low, result.p_value]
  assert_allclose(paired_difference(b, a), back)


def test_permutation_test_handles_ties_despite_rounding():
  """Sums of multiples of 0.1 tie like sums of integers."""
  units = np.array([3, -1, -2, 2, 1, -1])
  floats = paired_difference(units * 0.1, np.zeros(6))
  whole = paired_difference(units, np.zeros(6, int))
  signs = np.array(list(itertools.product([-1, 1], repeat=6)))
  exact = np.mean(np.abs(signs @ units) >= abs(units.sum()))
  assert floats.p_value == pytest.approx(exact, abs=1e-12)
  assert whole.p_value == pytest.approx(exact, abs=1e-12)


@pytest.mark.slow
def test_drawn_signs_agree_with_the_normal_limit():
  """300 different differences have too many signs to list."""
  a = np.random.default_rng(1).normal(size=300)
  zero = np.zeros(300)
  a += 0.1 - a.mean()
  result = paired_difference(a, zero)
  expected = 2 * stats.norm.sf(abs(a.sum()) / math.sqrt(np.sum(a**2)))
  # Four standard errors of 20,000 draws, and the limit's.
  error = 4 * math.sqrt(expected * (1 - expected) / 20_000) + 0.002
  assert 0.02 < expected < 0.5 and abs(result.p_value - expected) < error
  assert paired_difference(a, zero) == result
  assert paired_difference(a, zero, seed=1).p_value != result.p_value
  # No p-value below 2 / (1 + draws).
  assert paired_difference(a + 9, zero, draws=99).p_value == 0.02


@pytest.mark.parametrize("wins, losses", [(0, 0), (1, 0), (5, 5), (9, 2)])
def test_mcnemar_equals_the_sign_flip_test(wins, losses):
  a = np.array([1] * wins + [0] * losses + [1] * 7 + [0] * 6, bool)
  b = np.array([0] * wins + [1] * losses + [1] * 7 + [0] * 6, bool)
  same = paired_difference(a.astype(int), b.astype(int))
  p_value = paired_proportions(a, b).p_value
  assert p_value == pytest.approx(same.p_value, rel=1e-9)


def test_agresti_min_interval_by_hand():
  """With half a prompt in each cell, 25.5 and 10.5 of 102 differ.

  The interval is 15 / 102 -+ z sqrt(36 - 15^2 / 102) / 102.
  """
  a = np.array([1] * 40 + [1] * 25 + [0] * 10 + [0] * 25, bool)
  b = np.array([1] * 40 + [0] * 25 + [1] * 10 + [0] * 25, bool)
  result = paired_proportions(a, b)
  assert result.difference == pytest.approx(0.15)
  assert result.low == pytest.approx(0.147059 - 0.111705, abs=2e-6)
  assert result.high == pytest.approx(0.147059 + 0.111705, abs=2e-6)
  # Without differences, Student's interval is a point, unlike this interval.
  same = paired_proportions(a, a)
  assert same.low == -same.high and 0.01 < same.high < 0.04
  assert same.p_value == 1 and same.difference == 0
  assert paired_difference(a.astype(int), a.astype(int))[:3] == (0, 0, 0)
  # Bounds stay within [-1, 1], and the difference within the bounds.
  extreme = paired_proportions(np.ones(1, bool), np.zeros(1, bool))
  assert -1 <= extreme.low < extreme.difference == extreme.high == 1


NONE = np.zeros(0, bool)


@pytest.mark.parametrize(
  "function, args, message",
  [
    (intervals._check_pairs, (np.zeros(3), np.zeros(4)), "differ in shape"),
    (share_interval, (np.zeros(1),), "at least 2 prompts"),
    (paired_difference, (np.zeros(1), np.zeros(1)), "at least 2 prompts"),
    (paired_proportions, (NONE, NONE), "at least 1 prompt"),
    (paired_difference, (np.full(2, np.nan), np.zeros(2)), "not finite"),
  ],
)
def test_invalid_values_are_refused(function, args, message):
  with pytest.raises(ValueError, match=message):
    function(*args)
