"""The standardised advantage of binary rewards in growing groups."""

import itertools
import math

import jax
import numpy as np
import pytest
from scipy import stats

from grpojax.core import advantages

P = np.array([0.2, 0.3, 0.5])  # of completions; only the first is right
REWARDS = np.array([1.0, 0.0, 0.0])
SCORES = np.eye(3) - P  # of a softmax, by its logits
VALUE = P[0]
VARIANCE = VALUE * (1 - VALUE)
GRADIENT = (P * REWARDS) @ SCORES  # of V


def weights_of(group_size):
  """Returns advantages [G + 1, G] with the first m samples right."""
  rewards = np.arange(group_size) < np.arange(group_size + 1)[:, None]
  return np.asarray(jax.jit(advantages.grpo)(rewards.astype(float)))


def moments(group_size):
  """Returns mean and covariance of (1/G) sum s_i A_i over all groups."""
  pairs = itertools.product(range(group_size + 1), repeat=2)
  counts = [(a, b, group_size - a - b) for a, b in pairs if a + b <= group_size]
  counts = np.array(counts)
  chance = stats.multinomial.pmf(counts, group_size, P)
  weights = weights_of(group_size)[counts[:, 0]]
  weights = np.where(REWARDS > 0, weights[:, :1], weights[:, -1:])
  estimates = (counts * weights) @ SCORES / group_size
  mean = chance @ estimates
  return mean, (estimates - mean).T @ ((estimates - mean) * chance[:, None])


def test_gradient_tends_to_the_arcsine_objective(float64):
  """Proposition 13: the objective is 2 arcsin sqrt V, up to 1 / G."""
  limit = GRADIENT / math.sqrt(VARIANCE)
  off = [np.linalg.norm(moments(g)[0] - limit) for g in (20, 40, 80)]
  assert off[0] < 0.1 * np.linalg.norm(limit)
  assert off[1] < 0.6 * off[0] and off[2] < 0.6 * off[1]


def test_covariance_tends_to_a_u_statistic(float64):
  """Lemma 11: the covariance of the projection on single samples."""
  deviation = REWARDS - VALUE

  def covariance(projection):
    projection = projection - P @ projection
    return projection.T @ (projection * P[:, None])

  # U / sigma plus a term for the group's sigma: -g (delta^2 - sigma^2) / (2
  # sigma^3).
  projection = SCORES * deviation[:, None] / math.sqrt(VARIANCE)
  shift = (deviation**2 - VARIANCE) / (2 * VARIANCE**1.5)
  limit = covariance(projection - np.outer(shift, GRADIENT))
  off = [
    np.abs(g * moments(g)[1] - limit).max() / np.abs(limit).max()
    for g in (20, 40, 80)
  ]
  assert off[0] < 0.5 and off[1] < 0.6 * off[0] and off[2] < 0.6 * off[1]
  # Without this term the covariance would differ.
  without = covariance(projection)
  assert np.abs(without - limit).max() > 3 * off[2] * np.abs(limit).max()


@pytest.mark.parametrize("group_size", [2, 5])
def test_gradient_of_a_finite_group(group_size, float64):
  """The objective is a function of V with derivative E[A | 1] - E[A | 0]."""
  weights = weights_of(group_size)
  m = np.arange(group_size)  # number of right samples besides the first
  slope = weights[m + 1, 0] - weights[m, -1]
  expected = slope @ stats.binom.pmf(m, group_size - 1, VALUE) * GRADIENT
  np.testing.assert_allclose(moments(group_size)[0], expected, rtol=1e-6)
