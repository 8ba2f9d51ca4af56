"""Order-k advantages: expectations over all groups against derivatives."""

import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from grpojax.core.advantages.subsets import (
  max_at_k,
  max_rl,
  min_at_k,
  pairwise_rank,
)

THETA = np.array([0.4, -0.3, 0.9])  # logits of three outcomes
REWARDS = np.array([0.3, 1.0, -0.5])


def tuples(length):
  return np.array(list(itertools.product(range(3), repeat=length)))


def expected_estimator(advantage, group_size, rewards):
  """E (1/G) sum_i s_i A_i over all 3^G groups, with respect to the logits."""
  groups = tuples(group_size)
  probability = np.exp(THETA) / np.exp(THETA).sum()
  scores = np.eye(3) - probability
  weights = np.asarray(jax.jit(advantage)(jnp.asarray(rewards[groups])))
  assert weights.dtype == np.float64
  chance = probability[groups].prod(-1)
  total = np.einsum("n,ng,ngd->d", chance, weights, scores[groups])
  return total / group_size


def objective_gradient(f, k, rewards):
  """d/d logits of E f(Z_1, ..., Z_k), by automatic differentiation."""
  values = f(jnp.asarray(rewards[tuples(k)]))

  def objective(theta):
    return jax.nn.softmax(theta)[tuples(k)].prod(-1) @ values

  return np.asarray(jax.jit(jax.grad(objective))(jnp.asarray(THETA)))


@pytest.mark.slow
def test_max_rl_is_unbiased_for_a_sum_of_best_of_k(float64):
  for group_size, k in [(4, 3), (5, 2)]:
    of_k = functools.partial(max_rl, k=k)
    result = expected_estimator(of_k, group_size, REWARDS)
    terms = [
      objective_gradient(lambda z: jnp.max(z, -1), j, REWARDS) / j
      for j in range(1, k + 1)
    ]
    assert_allclose(result, sum(terms), rtol=0, atol=1e-10)
  # The paper's form for rewards 0 and 1, with the group's own mean.
  binary = np.array(list(itertools.product([0.0, 1.0], repeat=6)))
  mean = binary.mean(-1, keepdims=True)
  expected = (binary - mean) / np.where(mean > 0, mean, 1)
  result = jax.jit(lambda z: max_rl(z, k=5))(binary)
  assert_allclose(result, expected, atol=1e-12)


def test_pairwise_rank_is_unbiased_for_wins_minus_losses(float64):
  def sign(z):  # of two independent rewards
    return jnp.sign(z[..., 0] - z[..., 1])

  pairs = tuples(2)
  values = sign(jnp.asarray(REWARDS[pairs]))

  def rate(theta):  # the second is a frozen copy
    own = jax.nn.softmax(theta)[pairs[:, 0]]
    frozen = jax.nn.softmax(jnp.asarray(THETA))[pairs[:, 1]]
    return (own * frozen) @ values

  truth = jax.jit(jax.grad(rate))(jnp.asarray(THETA))
  assert jnp.abs(truth).max() > 1e-2
  for group_size in (2, 4):
    result = expected_estimator(pairwise_rank, group_size, REWARDS)
    assert_allclose(result, truth, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 700])
def test_large_groups_of_right_and_wrong_samples(k, float64):
  """Binomial coefficients beyond floats, against rational numbers."""
  n, wrong = 2000, 1200
  rewards = np.random.default_rng(k).permutation(np.arange(n) >= wrong)
  subsets = math.comb(n - 1, k)  # without the sample
  all_wrong = Fraction(math.comb(wrong - 1, k - 1), math.comb(n - 1, k - 1))
  expected = np.where(
    rewards,
    float(k * Fraction(math.comb(wrong, k), subsets)),
    float(k * (Fraction(math.comb(wrong - 1, k), subsets) - all_wrong)),
  )
  z = jnp.asarray(rewards, jnp.float64)
  assert_allclose(max_at_k(z, k=k), expected, rtol=1e-10)
  assert_allclose(min_at_k(-z, k=k), -expected, rtol=1e-10)


@pytest.mark.slow
def test_closed_forms_equal_the_mean_over_subsets():
  """Loops over subsets, with ties, for every k < G."""
  rewards = np.random.default_rng(0).integers(0, 4, (6, 5)).astype(float)
  for k in range(1, 5):
    subsets = list(itertools.combinations(range(5), k))
    for f, advantage in ((np.max, max_at_k), (np.min, min_at_k)):
      truth = np.empty_like(rewards)
      for b, i in np.ndindex(*rewards.shape):
        values = np.array([f(rewards[b, list(s)]) for s in subsets])
        held = np.array([i in s for s in subsets])
        truth[b, i] = k * (values[held].mean() - values[~held].mean())
      result = jax.jit(functools.partial(advantage, k=k))(jnp.asarray(rewards))
      assert_allclose(result, truth, atol=1e-5)
