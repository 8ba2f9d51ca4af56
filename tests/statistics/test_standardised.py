"""The standardised advantage of binary rewards, as groups grow."""

import itertools
import math

import jax
import numpy as np
import pytest

from grpojax.core import advantages

P = np.array(
  [0.2, 0.3, 0.5]
)  # of three completions, the first of which is right
REWARDS = np.array([1.0, 0.0, 0.0])
SCORES = np.eye(3) - P  # of a softmax, by its logits
VALUE = P[0]


def moments(group_size):
  """Mean and covariance of (1/G) sum s_i A_i, over all groups."""
  counts = np.array(
    [
      (a, b, group_size - a - b)
      for a, b in itertools.product(range(group_size + 1), repeat=2)
      if a + b <= group_size
    ]
  )
  log_chance = math.lgamma(group_size + 1) + counts @ np.log(P)
  log_chance -= [sum(math.lgamma(n + 1) for n in row) for row in counts]
  chance = np.exp(log_chance)
  rewards = np.arange(group_size) < np.arange(group_size + 1)[:, None]
  weights = jax.jit(advantages.grpo)(rewards.astype(float))
  right = np.asarray(weights[:, 0])  # with m right ones
  wrong = np.asarray(weights[:, -1])
  of_each = np.where(
    REWARDS > 0, right[counts[:, :1]], wrong[counts[:, :1]]
  )  # [groups, 3]
  estimates = (counts * of_each) @ SCORES / group_size
  mean = chance @ estimates
  return mean, (estimates - mean).T @ ((estimates - mean) * chance[:, None])


def test_its_gradient_is_that_of_the_arcsine(float64):
  """Proposition 13: 2 arcsin sqrt V, up to 1 / G."""
  gradient = (P * REWARDS) @ SCORES  # of V
  limit = gradient / math.sqrt(VALUE * (1 - VALUE))
  off = [np.linalg.norm(moments(g)[0] - limit) for g in (20, 40, 80)]
  assert off[0] < 0.1 * np.linalg.norm(limit)
  assert off[1] < 0.6 * off[0] and off[2] < 0.6 * off[1]


def test_it_is_asymptotically_a_u_statistic(float64):
  """Lemma 11: its covariance is that of its projection on single samples."""
  variance = VALUE * (1 - VALUE)
  deviation = REWARDS - VALUE
  gradient = (P * REWARDS) @ SCORES
  # U / sigma, and what the group's own sigma adds: -g (delta^2 - sigma^2) / (2
  # sigma^3).
  projection = SCORES * deviation[:, None] / math.sqrt(variance)
  shift = (deviation**2 - variance) / (2 * variance**1.5)
  projection -= np.outer(shift, gradient)
  projection -= P @ projection
  limit = projection.T @ (projection * P[:, None])
  off = [
    np.abs(g * moments(g)[1] - limit).max() / np.abs(limit).max()
    for g in (20, 40, 80)
  ]
  assert off[0] < 0.5 and off[1] < 0.6 * off[0] and off[2] < 0.6 * off[1]
  # Without that addition it would be another one.
  without = SCORES * deviation[:, None] / math.sqrt(variance)
  without -= P @ without
  other = without.T @ (without * P[:, None])
  assert np.abs(other - limit).max() > 3 * off[2] * np.abs(limit).max()


@pytest.mark.parametrize("group_size", [2, 5])
def test_what_a_finite_group_climbs(group_size, float64):
  """For every G a function of V, whose derivative is E[A | 1] - E[A | 0]."""
  rewards = np.arange(group_size) < np.arange(group_size + 1)[:, None]
  weights = np.asarray(jax.jit(advantages.grpo)(rewards.astype(float)))
  m = np.arange(group_size)  # of the others are right
  slope = weights[m + 1, 0] - weights[m, -1]
  chance = [
    math.comb(group_size - 1, k)
    * VALUE**k
    * (1 - VALUE) ** (group_size - 1 - k)
    for k in m
  ]
  gradient = (P * REWARDS) @ SCORES
  np.testing.assert_allclose(
    moments(group_size)[0], (slope @ chance) * gradient, rtol=1e-6
  )
