"""Weighted baselines: unbiased by enumeration, and equal to their formulas.

test_exact_errors.py enumerates them with a policy's own weights.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

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
