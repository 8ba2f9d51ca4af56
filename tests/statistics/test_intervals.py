import functools
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from grpojax.statistics import intervals
from grpojax.statistics.intervals import (
  mean_interval,
  paired_difference,
  paired_proportions,
  wilson_interval,
)


def test_mean_interval_equals_scipy():
  for count, confidence in itertools.product((2, 3, 30), (0.5, 0.95, 0.999)):
    values = np.random.default_rng(count).normal(size=count)
    mean = np.mean(values)
    expected = stats.t.interval(confidence, count - 1, mean, stats.sem(values))
    found = mean_interval(values, confidence)
    np.testing.assert_allclose(found, [mean, *expected], rtol=1e-10, atol=1e-12)


def test_mean_interval_covers_when_prompts_are_clusters():
  """Per-prompt pass rates of 4 samples each; the true mean is 0.4."""
  rng = np.random.default_rng(0)
  repeats, prompts = 4000, 12
  rates = rng.beta(2, 3, size=(repeats, prompts))
  values = rng.binomial(4, rates) / 4
  _, low, high = np.array([mean_interval(row) for row in values]).T
  coverage = np.mean((low <= 0.4) & (0.4 <= high))
  # Four standard errors of the simulation, and skewness, around 95%.
  assert 0.93 < coverage < 0.965


@pytest.mark.parametrize("centre", [0.05, 0.5, 0.96])
def test_wilson_interval_covers(centre):
  """Summing the binomial over every count; averaged, as coverage oscillates."""
  n = 100
  counts = np.arange(n + 1)
  intervals_of_counts = [wilson_interval(count, n) for count in range(n + 1)]
  _, low, high = np.array(intervals_of_counts).T
  coverage = []
  for p in centre + np.linspace(-0.03, 0.03, 61):
    covered = (low <= p) & (p <= high)
    coverage.append(covered @ stats.binom.pmf(counts, n, p))
  assert 0.94 < np.mean(coverage) < 0.965


def test_intervals_refuse_what_they_cannot_do():
  with pytest.raises(ValueError, match="at least 2 prompts"):
    mean_interval(np.ones(1))
  with pytest.raises(ValueError, match="at least 1 trial"):
    wilson_interval(0, 0)
  for successes in (-1, 4):
    with pytest.raises(ValueError, match=f"can succeed, not {successes}"):
      wilson_interval(successes, 3)
  for confidence in (0.0, 1.0, 95.0):
    with pytest.raises(ValueError, match="within"):
      mean_interval(np.ones(3), confidence)
    with pytest.raises(ValueError, match="within"):
      wilson_interval(1, 3, confidence)


def test_paired_difference_is_the_t_test_and_the_sign_flip_test_of_scipy():
  rng = np.random.default_rng(0)
  a, b = rng.integers(0, 5, (2, 12)) / 4
  found = paired_difference(a, b, confidence=0.9)
  expected = stats.ttest_rel(a, b).confidence_interval(0.9)
  np.testing.assert_allclose(found[1:3], expected, rtol=1e-10)
  assert found.difference == pytest.approx(np.mean(a) - np.mean(b), abs=1e-12)
  test = stats.permutation_test(
    (a, b),
    lambda x, y: np.sum(x - y),
    permutation_type="samples",
    n_resamples=np.inf,
  )
  assert 0 < test.pvalue < 1
  assert found.p_value == pytest.approx(test.pvalue, abs=1e-12)
  back = paired_difference(b, a, confidence=0.9)
  np.testing.assert_allclose(
    back, [-found.difference, -found.high, -found.low, found.p_value]
  )


def test_ties_count_as_ties_in_spite_of_rounding():
  """0.1 and 0.2 against 0.3: all sums of thirds that tie, as in integers."""
  units = np.array([3, -1, -2, 2, 1, -1])
  floats = paired_difference(units * 0.1, np.zeros(6))
  whole = paired_difference(units, np.zeros(6, int))
  signs = np.array(list(itertools.product([-1, 1], repeat=6)))
  exact = np.mean(np.abs(signs @ units) >= abs(units.sum()))
  assert floats.p_value == pytest.approx(exact, abs=1e-12)
  assert whole.p_value == pytest.approx(exact, abs=1e-12)


def test_drawn_signs_agree_with_the_normal_limit_and_repeat():
  """300 prompts, each with a difference of its own size: too many to list."""
  rng = np.random.default_rng(1)
  a = rng.normal(size=300)
  a += 0.1 - a.mean()
  zero = np.zeros(300)
  found = paired_difference(a, zero)
  expected = 2 * stats.norm.sf(abs(a.sum()) / math.sqrt(np.sum(a**2)))
  assert 0.02 < expected < 0.5
  # Four standard errors of 20,000 draws.
  error = 4 * math.sqrt(expected * (1 - expected) / 20_000)
  assert abs(found.p_value - expected) < error + 0.002
  assert paired_difference(a, zero) == found
  assert paired_difference(a, zero, seed=1).p_value != found.p_value
  # No p-value below 1 / (1 + draws).
  assert paired_difference(a + 9, zero, draws=99).p_value == 0.01


def test_chunks_of_draws_are_all_drawn(monkeypatch):
  rng = np.random.default_rng(2)
  a = rng.normal(size=50) + 0.2
  whole = paired_difference(a, np.zeros(50), draws=4000).p_value
  monkeypatch.setattr(intervals, "_CHUNK", 50 * 300)
  parts = paired_difference(a, np.zeros(50), draws=4000).p_value
  assert abs(parts - whole) < 4 * math.sqrt(2 * whole * (1 - whole) / 4000)
  assert (parts * 4001) % 1 == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("wins, losses", [(0, 0), (1, 0), (5, 5), (9, 2)])
def test_mcnemar_equals_the_binomial_test(wins, losses):
  a = np.array([1] * wins + [0] * losses + [1] * 7 + [0] * 6, bool)
  b = np.array([0] * wins + [1] * losses + [1] * 7 + [0] * 6, bool)
  expected = 1.0
  if wins + losses:
    expected = stats.binomtest(wins, wins + losses).pvalue
  assert paired_proportions(a, b).p_value == pytest.approx(expected, rel=1e-9)
  same = paired_difference(a.astype(int), b.astype(int))
  assert same.p_value == pytest.approx(expected, rel=1e-9)


def test_agresti_min_worked_by_hand():
  """100 prompts: 40 both right, 25 only the first, 10 only the second.

  With half a prompt in each cell, 25.5 and 10.5 of 102 differ: 15 / 102 -+ z
  sqrt(36 - 15^2 / 102) / 102.
  """
  a = np.array([1] * 40 + [1] * 25 + [0] * 10 + [0] * 25, bool)
  b = np.array([1] * 40 + [0] * 25 + [1] * 10 + [0] * 25, bool)
  found = paired_proportions(a, b)
  assert found.difference == pytest.approx(0.15)
  assert found.low == pytest.approx(0.147059 - 0.111705, abs=2e-6)
  assert found.high == pytest.approx(0.147059 + 0.111705, abs=2e-6)
  # Where nothing differs, Student's interval is a point and this one is not.
  same = paired_proportions(a, a)
  assert same.low == -same.high and 0.01 < same.high < 0.04
  assert same.p_value == 1 and same.difference == 0
  assert paired_difference(a.astype(int), a.astype(int))[:3] == (0, 0, 0)
  # Nothing leaves [-1, 1], and the difference stays inside.
  one = paired_proportions(np.ones(1, bool), np.zeros(1, bool))
  assert -1 <= one.low < one.difference == one.high == 1


@functools.cache
def intervals_of_pairs(n):
  """Of all counts of prompts that only the one, or the other, solves."""
  pairs = [(i, j) for i in range(n + 1) for j in range(n + 1 - i)]
  ends = [
    paired_proportions(np.arange(n) < i, np.arange(n) >= n - j)[1:3]
    for i, j in pairs
  ]
  return *np.array(pairs).T, *np.array(ends).T


@pytest.mark.parametrize("share", [0.01, 0.1, 0.4])
def test_agresti_min_covers(share):
  """Summing the multinomial over the prompts that only one of the two solves.

  Averaged over differences, as coverage oscillates; `share` of prompts differ.
  """
  n, coverage = 60, []
  wins, losses, low, high = intervals_of_pairs(n)
  for split in np.linspace(0.2, 0.8, 13):
    rates = [share * split, share * (1 - split), 1 - share]
    weights = stats.multinomial.pmf(
      np.stack([wins, losses, n - wins - losses], -1), n, rates
    )
    true = rates[0] - rates[1]
    coverage.append(weights @ ((low <= true) & (true <= high)))
  # It is known to be cautious where few differ.
  assert 0.945 < np.mean(coverage) <= (1 if share < 0.05 else 0.985)
  assert min(coverage) > 0.93


def simulate(rng, prompts, shift=0.0, n=8):
  """Shares right of n samples of two checkpoints with clustered prompts."""
  rates = rng.beta(1, 1, prompts)
  other = np.clip(rates + shift, 0, 1)
  return rng.binomial(n, other) / n, rng.binomial(n, rates) / n


def test_paired_intervals_cover_and_p_values_have_their_size():
  """Two checkpoints with equal rates on every prompt, over 600 benchmarks."""
  rng = np.random.default_rng(3)
  found = [
    paired_difference(*simulate(rng, 40), draws=400, seed=i) for i in range(600)
  ]
  _, low, high, p_value = np.array(found).T
  # Three standard errors of 600 repeats.
  assert 0.923 < np.mean((low <= 0) & (0 <= high)) < 0.977
  assert np.mean(p_value <= 0.05) < 0.077
  assert abs(np.mean(p_value <= 0.5) - 0.5) < 0.07
  greedy = [simulate(rng, 40, n=1) for _ in range(600)]
  p_value = np.array(
    [paired_proportions(a > 0, b > 0).p_value for a, b in greedy]
  )
  assert 0 < np.mean(p_value <= 0.05) < 0.05  # McNemar's exact is cautious


def test_pairs_have_power():
  """A difference of 8 points that intervals of the two alone would not show."""
  rng = np.random.default_rng(4)
  found, apart = [], []
  for i in range(100):
    a, b = simulate(rng, 60, shift=0.08)
    found.append(paired_difference(a, b, draws=400, seed=i))
    apart.append(stats.ttest_ind(a, b).pvalue <= 0.05)
  _, low, _, p_value = np.array(found).T
  assert np.mean(p_value <= 0.05) > 0.75 and np.mean(low > 0) > 0.75
  assert np.mean(apart) < 0.5


def test_comparisons_refuse_what_they_cannot_do():
  with pytest.raises(ValueError, match="not of the same prompts"):
    intervals._check_pairs(np.zeros(3), np.zeros(4))
  with pytest.raises(ValueError, match="at least 2 prompts"):
    paired_difference(np.zeros(1), np.zeros(1))
  with pytest.raises(ValueError, match="at least 1 prompt"):
    paired_proportions(np.zeros(0, bool), np.zeros(0, bool))
  with pytest.raises(ValueError, match="not finite"):
    paired_difference(np.array([0.0, np.nan]), np.zeros(2))
  with pytest.raises(ValueError, match="at least 1 draw"):
    paired_difference(np.ones(3), np.zeros(3), draws=0)
  with pytest.raises(ValueError, match="within"):
    paired_proportions(np.ones(3, bool), np.ones(3, bool), confidence=95.0)
