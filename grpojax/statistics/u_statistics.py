"""Exact errors of a prompt's policy gradient; GRPO's estimate is a U-statistic.

For a prompt x, completions Y_i have scores s_i = grad log pi(Y_i | x), with
E[s_i] = 0, and rewards Z_i with mean V(x) and variance sigma^2(x). Write
delta_i = Z_i - V(x), I(x) = E||s||^2 and g(x) = E[s Z], the prompt's policy
gradient. An error is a mean squared distance to g(x). docs/theory.md derives it
exactly, arXiv 2603.01162 to O(1 / G^2). `group_size` has the errors of a batch.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real


class Estimators(NamedTuple):
  """Errors [*X], or covariances [d, d], of (1/G) sum_i s_i (Z_i - b_i)."""

  vanilla: Array  # b_i = 0
  leave_one_out: Array  # b_i = mean_{j != i} Z_j: a U-statistic
  centred: Array  # b_i = mean_j Z_j: Dr. GRPO, biased by -g / G
  oracle: Array  # b_i = V(x)


class Moments(NamedTuple):
  """Moments of a prompt that determine the errors of all estimators."""

  gradient_sq: Float[Array, "*X"]  # ||g||^2
  oracle_trace: Float[Array, "*X"]  # tr Var(s delta)
  vanilla_trace: Float[Array, "*X"]  # tr Var(s Z)
  remainder: Float[Array, "*X"]  # I sigma^2 + ||g||^2


def policy_gradient(
  probabilities: Float[Array, "*X M"],
  scores: Float[Array, "*X M d"],
  rewards: Real[Array, "*X M"],
) -> Float[Array, "*X d"]:
  """Returns the policy gradient g(x) = E[s Z]; see `moments` for arguments."""
  return jnp.einsum("...m,...md->...d", probabilities * rewards, scores)


def moments(
  probabilities: Float[Array, "*X M"],
  scores: Float[Array, "*X M d"],
  rewards: Real[Array, "*X M"],
) -> Moments:
  """Computes the exact moments of each prompt x from all its M completions.

  Probabilities sum to 1, and the mean of the scores in R^d is 0.
  """
  value = jnp.sum(probabilities * rewards, -1, keepdims=True)
  delta = rewards - value
  score_sq = jnp.sum(scores**2, -1)  # ||s||^2 of each completion
  gradient = policy_gradient(probabilities, scores, rewards)
  gradient_sq = jnp.sum(gradient**2, -1)

  def mean(values):
    return jnp.sum(probabilities * values, -1)

  return Moments(
    gradient_sq=gradient_sq,
    oracle_trace=mean(score_sq * delta**2) - gradient_sq,
    vanilla_trace=mean(score_sq * rewards**2) - gradient_sq,
    remainder=mean(score_sq) * mean(delta**2) + gradient_sq,
  )


def mse(moments: Moments, group_size: int) -> Estimators:
  """Returns the mean squared error of a group's gradient given the prompt.

  Leave-one-out: L = tr Var(s delta) / G + (I sigma^2 + ||g||^2) / (G (G - 1)).
  Centred, by the mean of the whole group: ((G - 1) / G)^2 L plus the squared
  bias ||g||^2 / G^2. ValueError if G < 2.
  """
  g = check_sizes(group_size)
  unbiased = moments.oracle_trace / g + moments.remainder / (g * (g - 1))
  return Estimators(
    vanilla=moments.vanilla_trace / g,
    leave_one_out=unbiased,
    centred=((g - 1) / g) ** 2 * unbiased + moments.gradient_sq / g**2,
    oracle=moments.oracle_trace / g,
  )


def covariance(
  probabilities: Float[Array, "M"],
  scores: Float[Array, "M d"],
  rewards: Real[Array, "M"],
  group_size: int,
) -> Estimators:
  """Returns covariance matrices [d, d] of a group's gradient given the prompt.

  Leave-one-out: Var(s delta) / G + (E[s s^T] sigma^2 + g g^T) / (G (G - 1)).
  Traces are the errors of `mse`, without the bias of `centred`. Arguments are
  those of `moments`, and G >= 2.
  """
  gradient = policy_gradient(probabilities, scores, rewards)
  outer = jnp.outer(gradient, gradient)
  delta = rewards - jnp.sum(probabilities * rewards)

  def second_moment(factors):  # E[factor^2 s s^T], a factor per completion
    return (scores * (probabilities * factors**2)[:, None]).T @ scores

  variance = jnp.sum(probabilities * delta**2)  # sigma^2
  fisher = second_moment(jnp.ones_like(delta))  # E[s s^T]
  # `mse` is linear in the moments, so matrices may replace their traces.
  matrices = Moments(
    gradient_sq=jnp.zeros_like(outer),  # no bias
    oracle_trace=second_moment(delta) - outer,
    vanilla_trace=second_moment(rewards) - outer,
    remainder=fisher * variance + outer,
  )
  return mse(matrices, group_size)


def check_sizes(
  group_size: Real[Array, "*S"] | Real[np.ndarray, "*S"] | int,
) -> Float[Array, "*S"]:
  """Returns group sizes as floats; ValueError for sizes below 2."""
  sizes = np.asarray(group_size)
  if np.min(sizes) < 2:
    raise ValueError(f"group sizes must be at least 2, not {group_size}")
  return jnp.asarray(sizes, jnp.result_type(float))
