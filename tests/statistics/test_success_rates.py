"""Beta posteriors of success rates, and priorities based on them."""

import jax.numpy as jnp
import numpy as np
import scipy.stats
from numpy.testing import assert_allclose, assert_array_equal

from grpojax.core.binding import bind
from grpojax.statistics import success_rates
from grpojax.statistics.success_rates import PRIORITIES

POSTERIORS = [(0.5, 0.5), (8.5, 0.5), (0.5, 4.5), (3.25, 2.0), (20.5, 21.5)]


def test_counts_are_discounted():
  rates = success_rates.unknown(4)
  nan = np.nan
  right = jnp.array([[1, 1, 0], [nan, 1, nan], [nan, nan, nan]], jnp.float32)
  rates = success_rates.observe(rates, jnp.array([2, 0, 1]), right, half_life=2)
  assert_allclose(rates.successes, [1, 0, 2, 0])
  assert_allclose(rates.failures, [0, 0, 1, 0])
  # The same prompt twice in a step.
  right = jnp.array([[1, 0], [0, 0]], jnp.float32)
  rates = success_rates.observe(rates, jnp.array([2, 2]), right, half_life=2)
  half = 0.5**0.5
  assert_allclose(rates.successes, [half, 0, 2 * half + 1, 0])
  assert_allclose(rates.failures, [0, 0, half + 3, 0])
  a, b = success_rates.posterior(rates)
  assert a.dtype == np.float64
  assert_allclose(a[3], 0.5)
  assert_allclose(b[2], half + 3.5)


def expected(function, a, b):
  """Computes E[f(p)] by quadrature; p = sin^2 keeps the density finite."""
  t = (np.arange(20000) + 0.5) / 20000 * np.pi / 2
  p = np.sin(t) ** 2
  density = scipy.stats.beta.pdf(p, a, b) * 2 * np.sin(t) * np.cos(t)
  return np.sum(function(p) * density) * np.pi / 2 / 20000


def test_priorities_equal_quadrature():
  a, b = np.array(POSTERIORS).T
  varies = bind(PRIORITIES["varies"], group_size=5)(a, b)
  both = [expected(lambda p: 1 - p**5 - (1 - p) ** 5, *x) for x in POSTERIORS]
  assert_allclose(varies, both, rtol=1e-5)
  deviations = [expected(lambda p: (p - p * p) ** 0.5, *x) for x in POSTERIORS]
  assert_allclose(PRIORITIES["spread"](a, b), deviations, rtol=1e-5)
  density = PRIORITIES["target"](a, b, target=0.8)
  assert_allclose(density, scipy.stats.beta.pdf(0.8, a, b), rtol=1e-10)


def test_solved_prompt_returns_to_the_band():
  rates = success_rates.unknown(3)
  indices = jnp.array([0, 1])
  right = jnp.array([[1] * 8, [0] * 8], jnp.float32)
  rates = success_rates.observe(rates, indices, right, half_life=10)

  def priorities():
    return PRIORITIES["band"](*success_rates.posterior(rates), band=(0.1, 0.9))

  assert_array_equal(priorities(), [0, 0, 1])
  unrated = jnp.full((1, 8), np.nan, jnp.float32)
  steps = 0
  while not priorities().all():
    steps += 1
    rates = success_rates.observe(rates, jnp.array([2]), unrated, half_life=10)
  # (1/2 + 8 k) / (1 + 8 k) <= 0.9 once k = 2^(-steps / 10) <= 1/2.
  assert steps == 10
