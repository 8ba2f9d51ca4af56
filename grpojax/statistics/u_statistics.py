"""GRPO's policy gradient as a U-statistic, and its exact variance.

For a prompt x, completions Y_i have scores s_i = grad log pi(Y_i | x), with
E[s_i] = 0, and rewards Z_i with mean V(x) and variance sigma^2(x). Write
delta_i = Z_i - V(x), I(x) = E||s||^2 and g(x) = E[s Z], the prompt's policy
gradient. "Error" is the squared distance to g(x), or to E_x[g(x)] for a batch.

Lemma 1 and Theorem 2 are those of arXiv 2603.01162, which states mean squared
errors up to O(1 / G^2); the remainders here are exact. What follows for a batch
of prompts, and for the choice of G, is in `statistics.group_size`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from grpojax.core.advantages import leave_one_out
from grpojax.core.group_axis import present


class Estimators(NamedTuple):
  """One quantity for each estimator of the policy gradient.

  All of one shape: errors [*X], or covariances [d, d]. The estimators are

  Attributes:
    vanilla: (1/G) sum_i s_i Z_i.
    leave_one_out: (1/G) sum_i s_i (Z_i - mean_{j != i} Z_j), the U-statistic.
    centred: (1/G) sum_i s_i (Z_i - mean_j Z_j): Dr. GRPO, biased by -g / G.
    oracle: (1/G) sum_i s_i (Z_i - V(x)).
  """

  vanilla: Array
  leave_one_out: Array
  centred: Array
  oracle: Array


class Moments(NamedTuple):
  """Moments that the errors of all estimators for one prompt are made of.

  Attributes:
    gradient_sq: ||g||^2.
    oracle_trace: tr Var(s delta), the oracle's error times G.
    vanilla_trace: tr Var(s Z).
    remainder: I sigma^2 + ||g||^2, the second-order term of the U-statistic's
      error times G (G - 1).
  """

  gradient_sq: Float[Array, "*X"]
  oracle_trace: Float[Array, "*X"]
  vanilla_trace: Float[Array, "*X"]
  remainder: Float[Array, "*X"]


def leave_one_out_gradient(
  scores: Float[Array, "*B G d"], rewards: Real[Array, "*B G"]
) -> Float[Array, "*B d"]:
  """GRPO's gradient of each group, in the form that training uses.

  (1/G) sum_i s_i (Z_i - mean_{j != i} Z_j), unbiased for g(x).

  Args:
    scores: gradient of each sample's log-probability.
    rewards: one a sample, G >= 2; G is the number of those that are finite.
  """
  rewarded = jnp.sum(present(rewards), -1, keepdims=True)
  weights = leave_one_out(rewards) / jnp.maximum(rewarded, 1)
  return jnp.einsum("...g,...gd->...d", weights, scores)


def kernel_gradient(
  scores: Float[Array, "*B G d"], rewards: Real[Array, "*B G"]
) -> Float[Array, "*B d"]:
  """GRPO's gradient as a mean over pairs: a second-order U-statistic.

  C(G, 2)^-1 sum_{i<j} h(i, j), with the symmetric kernel
  h(i, j) = (s_i - s_j)(Z_i - Z_j) / 2 (arXiv 2603.01162, Lemma 1). Takes
  O(G^2 d) memory: for looking at, not for training.

  Args:
    scores: gradient of each sample's log-probability.
    rewards: one a sample, G >= 2; pairs are of those that are finite.

  Raises:
    ValueError: if G < 2.
  """
  group_size = rewards.shape[-1]
  if group_size < 2:
    raise ValueError(f"pairs need a group size of 2 or more, not {group_size}")
  i, j = np.triu_indices(group_size, 1)  # all pairs i < j
  score_differences = scores[..., i, :] - scores[..., j, :]  # [*B, pairs, d]
  rewarded = present(rewards)
  clean = jnp.where(rewarded, rewards, 0)
  whole = (rewarded[..., i] & rewarded[..., j])[..., None]  # [*B, pairs, 1]
  reward_differences = (clean[..., i] - clean[..., j])[..., None]
  kernels = jnp.where(whole, score_differences * reward_differences / 2, 0)
  return jnp.sum(kernels, -2) / jnp.maximum(jnp.sum(whole, -2), 1)


def hoeffding(
  scores: Float[Array, "*B G d"],
  rewards: Real[Array, "*B G"],
  gradient: Float[Array, "*B d"],
  value: Float[Array, "*B"],
) -> tuple[Float[Array, "*B G d"], Float[Array, "*B G G d"]]:
  """Projections of the kernel on one sample, and on pairs.

  U - g = (2/G) sum_i h1(i) + C(G, 2)^-1 sum_{i<j} h2(i, j), with
  h1(i) = (s_i delta_i - g) / 2 and h2(i, j) = -(s_i delta_j + s_j delta_i) / 2.
  The terms are uncorrelated. The first sum is exactly the oracle's error: this
  is why GRPO is equivalent to the oracle as G grows (arXiv 2603.01162, section
  4; W. Hoeffding, 1948).

  Args:
    scores: gradient of each sample's log-probability.
    rewards: one a sample.
    gradient: g(x).
    value: V(x).

  Returns:
    h1, and h2 as a symmetric array (its diagonal is no part of the sum).
  """
  delta = rewards - value[..., None]
  of_one = (scores * delta[..., None] - gradient[..., None, :]) / 2
  cross = scores[..., :, None, :] * delta[..., None, :, None]  # s_i delta_j
  of_pairs = -(cross + jnp.swapaxes(cross, -2, -3)) / 2
  return of_one, of_pairs


def policy_gradient(
  probabilities: Float[Array, "*X M"],
  scores: Float[Array, "*X M d"],
  rewards: Real[Array, "*X M"],
) -> Float[Array, "*X d"]:
  """Policy gradient g(x) = E[s Z], a sum over all M completions that exist.

  Arguments are those of `moments`.
  """
  return jnp.einsum("...m,...md->...d", probabilities * rewards, scores)


def moments(
  probabilities: Float[Array, "*X M"],
  scores: Float[Array, "*X M d"],
  rewards: Real[Array, "*X M"],
) -> Moments:
  """Exact moments of a prompt whose M completions can all be listed.

  Args:
    probabilities: probability of each completion; they sum to 1.
    scores: score of each completion; their mean is 0.
    rewards: reward of each completion.
  """
  value = jnp.sum(probabilities * rewards, -1, keepdims=True)
  delta = rewards - value
  score_sq = jnp.sum(scores**2, -1)  # ||s||^2 of each completion
  gradient = policy_gradient(probabilities, scores, rewards)
  gradient_sq = jnp.sum(gradient**2, -1)

  def mean(values):  # over completions
    return jnp.sum(probabilities * values, -1)

  return Moments(
    gradient_sq=gradient_sq,
    oracle_trace=mean(score_sq * delta**2) - gradient_sq,
    vanilla_trace=mean(score_sq * rewards**2) - gradient_sq,
    remainder=mean(score_sq) * mean(delta**2) + gradient_sq,
  )


def mse(moments: Moments, group_size: int) -> Estimators:
  """Mean squared error of one group's gradient, conditional on the prompt.

  Leave-one-out: tr Var(s delta) / G + (I sigma^2 + ||g||^2) / (G (G - 1)),
  Theorem 2 of arXiv 2603.01162 with its remainder. Centred by the mean of the
  whole group: ((G - 1) / G)^2 times that, plus the squared bias ||g||^2 / G^2.

  Args:
    moments: moments of the prompt, or of several.
    group_size: G >= 2.

  Returns:
    Errors, of the moments' shape.

  Raises:
    ValueError: if G < 2.
  """
  g = check_group_sizes(group_size)
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
  """Covariance matrices [d, d] of one group's gradient, given the prompt.

  Leave-one-out: Var(s delta) / G + (E[s s^T] sigma^2 + g g^T) / (G (G - 1)).
  Traces are the errors of `mse`, without the bias of `centred`. Arguments are
  those of `moments`, and G >= 2.
  """
  g = check_group_sizes(group_size)
  gradient = policy_gradient(probabilities, scores, rewards)
  outer = jnp.outer(gradient, gradient)
  delta = rewards - jnp.sum(probabilities * rewards)

  def second_moment(factors):  # E[factor^2 s s^T], one factor a completion
    return (scores * (probabilities * factors**2)[:, None]).T @ scores

  oracle = (second_moment(delta) - outer) / g
  variance = jnp.sum(probabilities * delta**2)  # sigma^2
  fisher = second_moment(jnp.ones_like(delta))  # E[s s^T]
  unbiased = oracle + (fisher * variance + outer) / (g * (g - 1))
  return Estimators(
    vanilla=(second_moment(rewards) - outer) / g,
    leave_one_out=unbiased,
    centred=((g - 1) / g) ** 2 * unbiased,
    oracle=oracle,
  )


def check_group_sizes(
  group_size: Real[Array, "*S"] | Real[np.ndarray, "*S"] | int,
) -> Float[Array, "*S"]:
  """Returns group sizes as floats; refuses those below 2 by a ValueError."""
  sizes = np.asarray(group_size)
  if np.min(sizes) < 2:
    raise ValueError(
      f"leave-one-out needs group sizes of 2 or more, not {group_size}"
    )
  return jnp.asarray(sizes, jnp.result_type(float))
