"""Unbiased estimates of `Components`, from directional derivatives of scores.

There are V directions, B prompts and G samples per prompt. a[v, x, i] = s_i . v
is the score of sample i of prompt x in direction v, Z[x, i] its reward. Random
directions have E[v v^T] = I, so E_v[a_i a_j] = s_i . s_j, and means over them
estimate quadratic functions of scores. Products over distinct samples estimate
products of expectations without bias.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from grpojax.statistics.group_size import Components

Groups = Float[Array, "*B G"] | Float[np.ndarray, "*B G"]


class PromptEstimates(NamedTuple):
  """Unbiased estimates by direction (V) and prompt (B), or sums over B."""

  gradient_sq: Float[Array, "V *B"]  # ||g(x)||^2
  oracle: Float[Array, "V *B"]  # E[||s||^2 delta^2]
  vanilla: Float[Array, "V *B"]  # E[||s||^2 Z^2]
  fisher_times_variance: Float[Array, "V *B"]  # I(x) sigma^2(x)
  pairs: Float[Array, "V *BB"]  # g(x) . g(x'); 0 on the diagonal


def _baselines(
  score_sq: Float[Array, "V B"], score_sq_reward: Float[Array, "V B"]
) -> tuple[Float[Array, "B"], Float[Array, "B B"]]:
  """Returns the baselines of least variance, E[||s||^2 Z] / E||s||^2.

  Entry [x] is computed without prompt x, entry [x, x'] without x and x'; the
  diagonal is meaningless. Inputs are group means of a^2 and a^2 Z. As E[s] = 0,
  every baseline b that is independent of the samples has E[s (Z - b)] = g(x).
  """

  def sums_without(values):  # each prompt [B], or each pair [B, B]
    by_prompt = jnp.sum(values, 0)  # [B]
    without_prompt = jnp.sum(by_prompt) - by_prompt
    # Entry (x, x') of the second is without both x and x'.
    return without_prompt, without_prompt[:, None] - by_prompt

  def ratio(numerator, denominator):  # 0, a valid baseline, if scores are 0
    positive = denominator > 0
    safe = jnp.where(positive, denominator, 1.0)
    return jnp.where(positive, numerator / safe, 0.0)

  rewards, pair_rewards = sums_without(score_sq_reward)
  scores, pair_scores = sums_without(score_sq)
  return ratio(rewards, scores), ratio(pair_rewards, pair_scores)


def reward_moments(rewards: Groups) -> tuple[Groups, Groups]:
  """Estimates delta_i^2 and sigma^2 for each sample i, without knowing V(x).

  Let c_i = Z_i - mean(Z) and S = sum_i c_i^2. The first is the mean of (Z_i -
  Z_j)(Z_i - Z_k) over distinct j and k other than i; these products sum to
  (sum_j (Z_i - Z_j))^2 - sum_j (Z_i - Z_j)^2 = G (G - 1) c_i^2 - S. The second
  is the variance of the rewards except Z_i, so it is independent of the score
  of i; their squared deviations sum to S - G / (G - 1) c_i^2.
  """
  n = rewards.shape[-1]
  centred = rewards - rewards.mean(-1, keepdims=True)
  sum_of_squares = (centred**2).sum(-1, keepdims=True)
  delta_sq = (n * (n - 1) * centred**2 - sum_of_squares) / ((n - 1) * (n - 2))
  variance = (sum_of_squares - n / (n - 1) * centred**2) / (n - 2)
  return delta_sq, variance


def prompt_estimates(
  a: Float[Array, "V B G"], rewards: Groups
) -> PromptEstimates:
  """Computes the U-statistics of every group and direction, in closed form.

  They are means over distinct samples i, j, k of a group, with G >= 3 and a
  baseline b of `_baselines`:

      ||g||^2               a_i a_j (Z_i - b)(Z_j - b)
      E[||s||^2 delta^2]    a_i^2 (Z_i - Z_j)(Z_i - Z_k)
      E[||s||^2 Z^2]        a_i^2 Z_i^2
      I sigma^2             a_i^2 (Z_j - Z_k)^2 / 2
      g(x) . g(x')          a_i (Z_i - b) of x times a_j (Z_j - b) of x'
  """
  n = rewards.shape[-1]
  delta_sq, variance = reward_moments(rewards)
  baseline, pair_baseline = _baselines(  # [B], [B, B]
    jnp.mean(a**2, -1), jnp.mean(a**2 * rewards, -1)
  )

  # ||g||^2: with y_i = a_i (Z_i - b), the mean of y_i y_j over i != j is
  # (G mean(y)^2 - mean(y^2)) / (G - 1).
  y = a * (rewards - baseline[:, None])
  gradient_sq = n * jnp.mean(y, -1) ** 2 - jnp.mean(y**2, -1)
  gradient_sq /= n - 1

  # g(x) . g(x'), [V, B, B]: means of a (Z - b); b does not use x and x'.
  score = jnp.mean(a, -1)[..., None]  # [V, B, 1]
  first = jnp.mean(a * rewards, -1)[..., None] - pair_baseline * score
  products = first * first.swapaxes(1, 2)
  different = ~jnp.eye(rewards.shape[0], dtype=bool)
  return PromptEstimates(
    gradient_sq=gradient_sq,
    oracle=jnp.mean(a**2 * delta_sq, -1),
    vanilla=jnp.mean(a**2 * rewards**2, -1),
    fisher_times_variance=jnp.mean(a**2 * variance, -1),
    pairs=jnp.where(different, products, 0.0),
  )


def combine(sums: PromptEstimates, count: int) -> Components:
  """Computes components from sums over `count` prompts and their pairs."""
  mean = jax.tree.map(lambda x: x / count, sums)
  # Products of different prompts have the mean ||E_x g(x)||^2.
  gradient_sq = mean.pairs / (count - 1)
  return Components(
    c1=mean.gradient_sq - gradient_sq,
    c2=mean.oracle - mean.gradient_sq,
    c3=mean.fisher_times_variance + mean.gradient_sq,
    c2_vanilla=mean.vanilla - mean.gradient_sq,
    gradient_sq=gradient_sq,
  )


def covariances(
  estimates: PromptEstimates, per_tangent: Float[Array, "V 5"], count: int
) -> tuple[Float[Array, "5 5"], Float[Array, "5 5"]]:
  """Estimates covariances of the components, over prompts and over directions.

  The first is a jackknife, because components are not plain means over prompts;
  the second is the spread of the directions. Both have the order of
  `Components`. Their sum counts common variation twice, so it is conservative.
  """
  tangents = per_tangent.shape[0]
  # Terms with prompt x, [V, B] each: its pairs are (x, x') and (x', x).
  leaving = estimates._replace(pairs=2 * jnp.sum(estimates.pairs, -1))
  totals = jax.tree.map(lambda x: jnp.sum(x, -1, keepdims=True), leaving)
  # The sum over prompts counts each pair twice.
  totals = totals._replace(pairs=totals.pairs / 2)  # [V, 1] each
  remaining = jax.tree.map(jnp.subtract, totals, leaving)
  # Components without each prompt: [5, V, B], then [5, B].
  without_each = jnp.stack(combine(remaining, count - 1)).mean(1)
  by_prompt = without_each - jnp.mean(without_each, -1, keepdims=True)
  by_tangent = per_tangent.T - jnp.mean(per_tangent, 0)[:, None]  # [5, V]
  return (
    by_prompt @ by_prompt.T * (count - 1) / count,  # jackknife
    by_tangent @ by_tangent.T / (tangents * (tangents - 1)),
  )
