"""The standardised advantage of binary rewards, as groups grow."""

import itertools
import math

import jax
import numpy as np
import pytest
from scipy import stats

from grpojax.core import advantages

P = np.array([0.2, 0.3, 0.5])  # of completions; the first is right
REWARDS = np.array([1.0, 0.0, 0.0])
SCORES = np.eye(3) - P  # of a softmax, by its logits
VALUE = P[0]
VARIANCE = VALUE * (1 - VALUE)
GRADIENT = (P * REWARDS) @ SCORES  # of V


def weights_of(group_size):
  """Advantages [G + 1, G] with m right ones, which come first."""
  rewards = np.arange(group_size) < np.arange(group_size + 1)[:, None]
  return np.asarray(jax.jit(advantages.grpo)(rewards.astype(float)))


def moments(group_size):
  """Mean and covariance of (1/G) sum s_i A_i, over all groups."""
  pairs = itertools.product(range(group_size + 1), repeat=2)
  counts = [(a, b, group_size - a - b) for a, b in pairs if a + b <= group_size]
  counts = np.array(counts)
  chance = stats.multinomial.pmf(counts, group_size, P)
  weights = weights_of(group_size)[counts[:, 0]]
  of_each = np.where(REWARDS > 0, weights[:, :1], weights[:, -1:])
  estimates = (counts * of_each) @ SCORES / group_size
  mean = chance @ estimates
  return mean, (estimates - mean).T @ ((estimates - mean) * chance[:, None])


def test_its_gradient_is_that_of_the_arcsine(float64):
  """Proposition 13: 2 arcsin sqrt V, up to 1 / G."""
  limit = GRADIENT / math.sqrt(VARIANCE)
  off = [np.linalg.norm(moments(g)[0] - limit) for g in (20, 40, 80)]
  assert off[0] < 0.1 * np.linalg.norm(limit)
  assert off[1] < 0.6 * off[0] and off[2] < 0.6 * off[1]


def test_it_is_asymptotically_a_u_statistic(float64):
  """Lemma 11: its covariance is that of its projection on single samples."""
  deviation = REWARDS - VALUE

  def covariance(projection):
    projection = projection - P @ projection
    return projection.T @ (projection * P[:, None])

  # U / sigma, and what the group's own sigma adds: -g (delta^2 - sigma^2) / (2
  # sigma^3).
  projection = SCORES * deviation[:, None] / math.sqrt(VARIANCE)
  shift = (deviation**2 - VARIANCE) / (2 * VARIANCE**1.5)
  limit = covariance(projection - np.outer(shift, GRADIENT))
  off = [
    np.abs(g * moments(g)[1] - limit).max() / np.abs(limit).max()
    for g in (20, 40, 80)
  ]
  assert off[0] < 0.5 and off[1] < 0.6 * off[0] and off[2] < 0.6 * off[1]
  # Without that addition it would be another one.
  other = covariance(projection)
  assert np.abs(other - limit).max() > 3 * off[2] * np.abs(limit).max()


@pytest.mark.parametrize("group_size", [2, 5])
def test_what_a_finite_group_climbs(group_size, float64):
  """For every G a function of V, whose derivative is E[A | 1] - E[A | 0]."""
  weights = weights_of(group_size)
  m = np.arange(group_size)  # of the others are right
  slope = weights[m + 1, 0] - weights[m, -1]
  expected = slope @ stats.binom.pmf(m, group_size - 1, VALUE) * GRADIENT
  np.testing.assert_allclose(moments(group_size)[0], expected, rtol=1e-6)
