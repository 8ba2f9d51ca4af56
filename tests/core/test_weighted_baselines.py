"""Weighted baselines and subsets: by enumeration, and equal to their formulas.

test_exact_errors.py enumerates them with a policy's own weights.
"""

import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpojax.core.advantages.subsets import (
  max_at_k,
  max_rl,
  min_at_k,
  pairwise_rank,
)
from grpojax.core.advantages.weighted_baselines import (
  length_weighted,
  optimal_token_baseline,
  score_weighted,
)
from grpojax.core.batch import make_batch
from grpojax.core.objective import Objective
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts

# Four outcomes, of which the policy is sure of a right one.
PROBABILITIES = np.array([0.55, 0.2, 0.15, 0.1])
SCORES = np.eye(4) - PROBABILITIES  # by the logits; they add up to 0
SCORE_SQ = (SCORES**2).sum(-1)
BINARY = np.array([1.0, 0, 0, 1])
REALS = np.array([2.0, -0.7, 0.4, 0.1])


def test_optimal_token_baseline_by_hand(float64):
  """Sums of the scores so far, without the tokens that were not sampled."""
  sampled = jnp.array([[True, True, False], [True, False, True]] + [[True] * 3])
  token_sq = jnp.array([[1.0, 2, 9], [3, 9, 1], [2, 2, 4]])
  rewards = jnp.array([1.0, 0.0, 3.0])
  result = optimal_token_baseline(rewards, token_sq, sampled, 1.0)
  expected = [
    [1 - (3 * 0 + 2 * 3) / 5, 1 - (4 * 0 + 4 * 3) / 8, 0],
    [0 - (1 * 1 + 2 * 3) / 3, 0, 0 - (3 * 1 + 4 * 3) / 7],
    # No other sample has a third token: the plain mean.
    [3 - (1 * 1 + 3 * 0) / 4, 3 - (3 * 1 + 4 * 0) / 7, 3 - (1 + 0) / 2],
  ]
  assert_allclose(result, expected, atol=1e-14)
  missing = rewards.at[0].set(jnp.nan)
  result = optimal_token_baseline(missing, token_sq, sampled, 1.0)
  expected = [[0, 0, 0], [-3, 0, -3], [3, 3, 3]]
  assert_allclose(result, expected, atol=1e-14)
  to_go = jnp.broadcast_to(rewards[:, None], sampled.shape)
  to_go = to_go + jnp.array([2.0, 1.0, 0.0])  # rewards of tokens
  later = optimal_token_baseline(to_go, token_sq, sampled, 1.0)
  assert later[0, 0] == pytest.approx(1 - 6 / 5)
  junk = jnp.where(sampled, to_go, jnp.nan)  # other tokens are not read
  again = optimal_token_baseline(junk, token_sq, sampled, 1.0)
  assert_array_equal(again, later)
  alone = optimal_token_baseline(
    jnp.array([1.0, jnp.nan, jnp.nan]), token_sq, sampled, leave_one_out=False
  )
  assert_array_equal(alone[0], [1, 1, 0])  # as if drawn alone
  large = optimal_token_baseline(rewards, token_sq, sampled, 200.0)
  assert_allclose(large[0, 0], 1 - 0)  # the reward of the largest score
  huge = score_weighted(rewards, jnp.array([1e30, 2e30, 3e30]), 5.0)
  assert np.isfinite(huge).all()
  with pytest.raises(ValueError, match="for tokens"):
    optimal_token_baseline(rewards[:2], token_sq, sampled)


@pytest.mark.parametrize("rewards", [BINARY, REALS], ids=["binary", "reals"])
@pytest.mark.parametrize(
  "group_size", [2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_unbiased(rewards, group_size, float64):
  """With good weights, bad weights, and zeros."""
  groups = np.array(list(itertools.product(range(4), repeat=group_size)))
  z = jnp.asarray(rewards[groups])
  weighted = [
    jax.jit(score_weighted, static_argnums=2)(z, jnp.asarray(w[groups]), power)
    for w, power in [
      (SCORE_SQ, 1.0),
      (np.array([0.0, 5, 0, 1e-3]), 2.0),
      (np.zeros(4), 0.5),
    ]
  ]
  lengths = jnp.array([3, 0, 8, 1])[groups]
  weighted.append(jax.jit(length_weighted)(z, lengths))
  for result in weighted:
    assert result.dtype == np.float64
    estimates = np.einsum("ng,ngd->nd", result, SCORES[groups]) / group_size
    mean = PROBABILITIES[groups].prod(-1) @ estimates
    assert_allclose(mean, (PROBABILITIES * rewards) @ SCORES, atol=1e-12)


@pytest.mark.slow
def test_make_batch_binds_weights_by_parameter_and_clips(tabular):
  lm = tabular.lm(3, 5)
  table = lm.init(jax.random.key(5))
  prompts = Prompts(jnp.arange(3)[:, None], jnp.ones((3, 1), bool))
  options = {"group_size": 4, "max_new_tokens": 6, "eos_ids": 0}
  draw = jax.jit(functools.partial(rollout, lm, **options))
  samples = draw(table, prompts, jax.random.key(1))
  rewards = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)))
  make = jax.jit(functools.partial(make_batch, lm), static_argnames="objective")
  settings = {"score_power": 1.5, "advantage_clip": 0.3}
  batch = make(samples, rewards, Objective("score_weighted", **settings))
  mask = np.asarray(samples.completion_mask)
  assert 0 < mask.mean() < 1
  unsure = np.where(mask, (1 - np.exp(samples.logprobs)) ** 2, 0).sum(-1)
  weights = jnp.asarray(unsure, jnp.float32)
  expected = score_weighted(rewards, weights, power=1.5)
  assert np.abs(expected).max() > 0.3 > np.abs(expected).min()
  assert_allclose(batch.advantages, expected.clip(-0.3, 0.3), atol=1e-4)
  objective = Objective(lambda rewards, lengths: rewards * lengths)
  batch = make(samples, rewards, objective)
  assert_allclose(batch.advantages, rewards * mask.sum(-1), rtol=1e-6)


# Subsets of a group.

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
  n = 2000
  wrong = 1200
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
