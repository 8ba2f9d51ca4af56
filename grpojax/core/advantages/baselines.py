"""Baselines pooled over prompts, for better estimates of a prompt's value.

A sample's own reward stays out of its baseline, so estimators stay unbiased.
Rewards must be of a whole batch without padding rows, not of a part of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from grpojax.core.group_axis import (
  as_float,
  centred,
  count,
  minus_others,
  present,
  sum_of_others,
)

# Grid of Beta(alpha, beta) priors, 15 means by 10 concentrations alpha + beta:
# low sums put success rates near 0 or 1, high sums make them nearly equal.
_MEANS = (np.arange(15) + 0.5) / 15
_CONCENTRATIONS = np.logspace(-0.5, 2.5, 10)
_ALPHA = np.outer(_MEANS, _CONCENTRATIONS).ravel()
_BETA = np.outer(1 - _MEANS, _CONCENTRATIONS).ravel()


def shrinkage(rewards: Shaped[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Reward minus the leave-one-out mean shrunk towards other prompts' mean.

  A = Z_{b,i} - (1 - w_b) mean_{j != i} Z_{b,j} - w_b (mean of other prompts),
  w_b = v / (v + t2), v = s2 / (G - 1), a James-Stein estimate. s2 is the
  variance within groups, t2 the variance of the prompts' values (that of their
  means less s2 / G, at least 0). Unlike in arXiv 2511.03710, both are estimated
  from the *other* prompts; w_b = 0 if none of their groups varies. A group of
  equal rewards gets 0 only if no group varies. ValueError if G < 2 or B < 3.
  """
  rewards = as_float(rewards, "shrinkage", least=2)
  rows = rewards.reshape(-1, rewards.shape[-1])
  if len(rows) < 3:
    raise ValueError(
      f"shrinkage needs a batch of at least 3 prompts, not {len(rows)}, to "
      "estimate the variance between prompts: increase batch_size"
    )
  rewarded = present(rows)  # [B, G]
  counts = count(rows)[:, 0]  # [B]
  # Subtract a reward of the batch, so equal rewards become exact zeros.
  origin = rows.ravel()[jnp.argmax(rewarded)]
  moved = jnp.where(rewarded, jnp.where(rewarded, rows, 0) - origin, 0)
  means = jnp.sum(moved, -1) / jnp.maximum(counts, 1)
  squares = jnp.sum(centred(rows) ** 2, -1)  # sums of squares
  # Estimates for each prompt from all other prompts.
  has_mean = (counts > 0).astype(counts.dtype)  # prompts with a mean
  has_variance = (counts > 1).astype(counts.dtype)  # prompts with a variance
  others = sum_of_others(has_mean)
  # s2: the mean of the other prompts' variances within their groups.
  within = sum_of_others(squares / jnp.maximum(counts - 1, 1) * has_variance)
  within = within / jnp.maximum(sum_of_others(has_variance), 1)
  pooled = sum_of_others(means * has_mean) / jnp.maximum(others, 1)
  # t2: the variance of the other prompts' means, less the part due to noise.
  # It uses all pairs: "total minus x_b" would keep an outlier's rounding error.
  different = ~jnp.eye(len(counts), dtype=bool)
  distances = has_mean * different * (means - pooled[:, None]) ** 2
  spread = jnp.sum(distances, -1) / jnp.maximum(others - 1, 1)
  inverse = sum_of_others(has_mean / jnp.maximum(counts, 1))
  inverse = inverse / jnp.maximum(others, 1)  # the mean of 1 / count
  between = jnp.maximum(spread - within * inverse, 0)
  # With fewer than two others s2 = 0: w_b = 0 selects the leave-one-out mean.
  within = jnp.where(others > 1, within, 0)
  # w_b, with numerator and denominator times count - 1, which may be 0.
  total = within + between * (counts - 1)
  weight = jnp.where(total > 0, within / jnp.where(total > 0, total, 1), 0)
  # A prompt's only sample has the pooled mean as its baseline.
  single = counts == 1
  weight = jnp.where(single, 1, weight)[:, None]
  others_mean = sum_of_others(moved) / jnp.maximum(counts - 1, 1)[:, None]
  leave_one_out = jnp.where(single[:, None], moved, minus_others(rows))
  advantages = leave_one_out - weight * (pooled[:, None] - others_mean)
  # Without rewards of other prompts there is no pooled mean.
  advantages = jnp.where(others[:, None] > 0, advantages, minus_others(rows))
  return jnp.where(rewarded, advantages, 0).reshape(rewards.shape)


def beta_binomial(rewards: Shaped[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Reward minus the Bayesian estimate of the prompt's success rate.

  For binary rewards. The prior: success rates are Beta(alpha, beta), with
  (alpha, beta) uniform over a grid of 150 pairs. The baseline of sample (b, i)
  is the posterior mean of its prompt's rate given all rewards except Z_{b,i}:

    sum_grid p (alpha + S) / (alpha + beta + G - 1),  S = sum_{j != i} Z_{b,j},

  where p is proportional to the beta-binomial likelihood of those rewards. It
  is also unbiased for other rewards: the baseline clips them to [0, 1] and
  counts fractions as parts of a success. G >= 2; takes memory for B G 150
  numbers. Equal rewards give advantages near 0, not exactly 0.
  """
  rewards = as_float(rewards, "beta_binomial", least=2)
  group_size = rewards.shape[-1]
  rows = rewards.reshape(-1, group_size)
  rewarded = present(rows)
  counts = jnp.sum(rewarded, -1)
  rows = jnp.clip(jnp.where(rewarded, rows, 0), 0, 1)
  # Log-likelihoods by trials (0 to G), successes and prior.
  table = np.zeros((group_size + 1, group_size + 2, _ALPHA.size))
  for trials in range(1, group_size + 1):
    table[trials, : trials + 1] = _log_marginals(trials)
  table = jnp.asarray(table, rows.dtype)

  def log_marginal(successes, trials):
    """Returns log-likelihoods [..., 150], interpolated for fractions."""
    below = jnp.clip(jnp.floor(successes), 0, jnp.maximum(trials - 1, 0))
    part = jnp.clip(successes - below, 0, 1)[..., None]
    below = below.astype(int)
    return table[trials, below] * (1 - part) + table[trials, below + 1] * part

  prompt_loglik = log_marginal(jnp.sum(rows, -1), counts)
  others_loglik = sum_of_others(prompt_loglik.T).T
  successes = sum_of_others(rows)
  others = jnp.maximum(counts - 1, 0)[:, None]
  group_loglik = log_marginal(successes, others)
  weights = jax.nn.softmax(others_loglik[:, None] + group_loglik, -1)
  alpha = jnp.asarray(_ALPHA, rows.dtype)
  total = jnp.asarray(_ALPHA + _BETA, rows.dtype) + others[..., None]
  rates = (alpha + successes[..., None]) / total
  baseline = jnp.sum(weights * rates, -1).reshape(rewards.shape)
  return jnp.where(present(rewards), rewards - baseline, 0)


def _log_marginals(trials: int) -> np.ndarray:
  """Beta-binomial log-likelihoods [trials + 1, 150] of 0 .. trials successes.

  A constant is subtracted from each row, so that its largest entry is 0.
  """

  def rising(start):  # log of start (start + 1) ... (start + n - 1)
    terms = np.log(start + np.arange(trials)[:, None])
    return np.concatenate([np.zeros((1, start.size)), np.cumsum(terms, 0)])

  table = rising(_ALPHA) + rising(_BETA)[::-1] - rising(_ALPHA + _BETA)[-1]
  return table - table.max(-1, keepdims=True)
