import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from grpojax.core.intervals import (
  mean_interval,
  pass_at_k,
  wilson_interval,
)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
  correct = np.array([[i < c for i in range(n)] for c in range(n + 1)])
  for k in range(1, n + 1):
    subsets = list(itertools.combinations(range(n), k))
    expected = [
      np.mean([row[list(s)].any() for s in subsets]) for row in correct
    ]
    got = jax.jit(pass_at_k, static_argnums=1)(jnp.asarray(correct), k)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_pass_at_k_is_unbiased():
  """Over all outcomes of 5 trials with p = 0.3, by enumeration."""
  outcomes = np.array(list(itertools.product([0, 1], repeat=5)), bool)
  probability = np.where(outcomes, 0.3, 0.7).prod(-1)
  for k in (1, 2, 5):
    mean = probability @ np.asarray(pass_at_k(jnp.asarray(outcomes), k))
    np.testing.assert_allclose(mean, 1 - 0.7**k, atol=1e-6)


def test_pass_at_k_of_many_samples():
  """Where the binomial coefficients themselves overflow float32."""
  n, c, k = 2000, 3, 700
  correct = jnp.arange(n) < c
  expected = 1 - math.comb(n - c, k) / math.comb(n, k)
  np.testing.assert_allclose(pass_at_k(correct, k), expected, rtol=1e-5)


def test_pass_at_k_limits_are_exact():
  correct = jnp.array([[False] * 6, [False] * 4 + [True] * 2, [True] * 6])
  for k in range(1, 7):
    got = pass_at_k(correct, k)
    assert got[0] == 0 and got[2] == 1
  assert pass_at_k(correct, 5)[1] == 1
  assert pass_at_k(jnp.arange(2000) < 1990, 2000) == 1


@pytest.mark.parametrize("k", [0, 7])
def test_pass_at_k_refuses_k_beyond_the_samples(k):
  with pytest.raises(ValueError, match="1 <= k <= n"):
    pass_at_k(jnp.ones((2, 6), bool), k)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 30, 31, 500])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_mean_interval_equals_scipy(count, confidence):
  values = np.random.default_rng(count).normal(size=count)
  expected = stats.t.interval(
    confidence, count - 1, np.mean(values), stats.sem(values)
  )
  mean, low, high = mean_interval(jnp.asarray(values), confidence)
  np.testing.assert_allclose(mean, np.mean(values), atol=1e-6)
  np.testing.assert_allclose([low, high], expected, rtol=1e-4, atol=1e-5)


def test_mean_interval_covers_when_prompts_are_clusters():
  """Per-prompt pass rates of 4 samples each; the true mean is 0.4."""
  rng = np.random.default_rng(0)
  repeats, prompts = 4000, 12
  rates = rng.beta(2, 3, size=(repeats, prompts))
  values = rng.binomial(4, rates) / 4
  _, low, high = jax.jit(jax.vmap(mean_interval))(jnp.asarray(values))
  coverage = np.mean((low <= 0.4) & (0.4 <= high))
  # Four standard errors of the simulation, and skewness, around 95%.
  assert 0.93 < coverage < 0.965


@pytest.mark.parametrize("centre", [0.05, 0.5, 0.96])
def test_wilson_interval_covers(centre):
  """Summing the binomial over every count; averaged, as coverage oscillates."""
  n = 100
  counts = np.arange(n + 1)
  _, low, high = map(np.asarray, wilson_interval(jnp.asarray(counts), n))
  coverage = []
  for p in centre + np.linspace(-0.03, 0.03, 61):
    covered = (low <= p) & (p <= high)
    coverage.append(covered @ stats.binom.pmf(counts, n, p))
  assert 0.94 < np.mean(coverage) < 0.965


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (3, 10), (10, 10)])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_wilson_interval_equals_scipy(successes, n, confidence):
  expected = stats.binomtest(successes, n).proportion_ci(confidence, "wilson")
  rate, low, high = wilson_interval(successes, n, confidence)
  np.testing.assert_allclose(rate, successes / n)
  np.testing.assert_allclose([low, high], expected, atol=1e-6)
  assert 0 <= low <= rate <= high <= 1


def test_intervals_refuse_what_they_cannot_do():
  with pytest.raises(ValueError, match="at least 2 prompts"):
    mean_interval(jnp.ones(1))
  with pytest.raises(ValueError, match="at least 1 trial"):
    wilson_interval(0, 0)
  for confidence in (0.0, 1.0, 95.0):
    with pytest.raises(ValueError, match="within"):
      mean_interval(jnp.ones(3), confidence)
    with pytest.raises(ValueError, match="within"):
      wilson_interval(1, 3, confidence)
