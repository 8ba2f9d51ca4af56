"""Leave-one-out baselines that weight samples by the size of their scores.

A_i = Z_i - sum_{j != i} w_j Z_j / sum_{j != i} w_j is unbiased if a sample's
weight depends on that sample alone. If w is proportional to |s|^2, the baseline
tends to the best constant, b* = E[|s|^2 Z] / E|s|^2 (E. Greensmith, P. Bartlett
and J. Baxter, 2004; docs/theory.md, "The best baseline is not the value").

| function               | w_j                              |
|------------------------|----------------------------------|
| length_weighted        | tokens                           |
| score_weighted         | (sum over tokens of (1 - p)^2)^2 |
| optimal_token_baseline | (sum up to the token)^2          |

G >= 2; groups do not sum to 0. If all other weights are 0, they become equal.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from grpojax.core.binding import asks_for
from grpojax.core.group_axis import (
  as_float,
  count,
  present,
  shifted,
  sum_of_others,
)
from grpojax.core.types import Rollout


def _minus_weighted_others(
  rewards: Float[Array, "*B G"], weights: Shaped[Array, "..."], name: str
) -> Float[Array, "*B G"]:
  """Rewards minus the others' weighted mean; errors call the weights `name`."""
  weights = jnp.asarray(weights).astype(rewards.dtype)
  if weights.shape != rewards.shape:
    raise ValueError(
      f"{name} are per sample: rewards {rewards.shape} need {name} of the same "
      f"shape, not {weights.shape}"
    )
  rewarded = present(rewards)
  # A shift of all rewards changes nothing, except that equal rewards give 0.
  moved = shifted(rewards)
  weights = jnp.where(rewarded, weights, 0)
  total = sum_of_others(weights)
  # If all other weights are 0, the baseline is the others' unweighted mean.
  known = total > 0
  weighted = sum_of_others(weights * moved) / jnp.where(known, total, 1)
  plain = sum_of_others(moved) / jnp.maximum(count(rewards) - 1, 1)
  alone = count(rewards) < 2
  advantages = moved - jnp.where(known, weighted, plain)
  return jnp.where(rewarded & ~alone, advantages, 0)


def _power(weights: Array, power: float) -> Array:
  """Powers of weights relative to the group's largest, so none overflows."""
  largest = jnp.max(weights, -1, keepdims=True)
  return (weights / jnp.where(largest > 0, largest, 1)) ** power


def length_weighted(
  rewards: Shaped[Array, "*B G"], lengths: Shaped[Array, "*B G"]
) -> Float[Array, "*B G"]:
  """Reward minus the length-weighted mean of the group's other rewards.

  This is OPO (arXiv 2505.23585), for losses that are sums over tokens. It is
  unbiased because the sample itself is left out of the mean.
  """
  rewards = as_float(rewards, "length_weighted", least=2)
  return _minus_weighted_others(rewards, lengths, "lengths")


def score_weighted(
  rewards: Shaped[Array, "*B G"],
  logit_score_sq: Float[Array, "*B G"],
  power: float = 2.0,
) -> Float[Array, "*B G"]:
  """Reward minus the uncertainty-weighted mean of the group's other rewards.

  w = (sum_t (1 - p_t)^2)^power. Use power 2 if the scores of tokens point the
  same way, 1 if they are independent; 0 is `leave_one_out`.
  """
  rewards = as_float(rewards, "score_weighted", least=2)
  weights = _power(jnp.asarray(logit_score_sq), power)
  return _minus_weighted_others(rewards, weights, "logit_score_sq")


def token_score_sq(
  logprobs: Float[Array, "*B G T"], mask: Bool[Array, "*B G T"]
) -> Float[Array, "*B G T"]:
  """(1 - p_t)^2, which measures the policy's uncertainty; 0 outside the mask.

  p_t is the probability under the sampling distribution, 1 - p_t the derivative
  of log p_t with respect to the token's own logit. The derivatives for other
  logits say less about |s|^2 (measured in grpojax/studies/README.md).
  """
  return jnp.where(mask, jnp.expm1(logprobs) ** 2, 0)


def optimal_token_baseline(
  rewards: Shaped[Array, "*S"],
  token_score_sq: Float[Array, "*B G T"],
  sampled: Bool[Array, "*B G T"],
  power: float = 2.0,
  *,
  leave_one_out: bool = True,
) -> Float[Array, "*B G T"]:
  """Reward minus, for each token, a weighted mean of the group's other rewards.

  A_it = R_it - sum_{j != i} w_jt R_jt / sum_{j != i} w_jt, over samples j with
  a t-th sampled token, w_jt = (sum_{u <= t} token_score_sq_ju)^power: the
  optimal token baseline (arXiv 2602.07078), unbiased because it leaves out the
  sample's own reward. If no other sample has a t-th token, the baseline is the
  unweighted mean of R over the other samples.

  verl's `optimal_token_baseline` (`tir_optimal_token_baseline` with
  handle_zero_tail for several turns) has leave_one_out = False, power = 1, and
  1 - 2 p + sum_v p_v^2 in place of (1 - p)^2. Its mean includes the sample's
  reward, which rescales each token's gradient; tokens that only one sample has
  get no baseline.

  `rewards` has R per sample, [*B, G], or per token, [*B, G, T]: the sum of
  rewards from that token on, 0 after the end. Unsampled tokens get 0.
  """
  rewards = jnp.asarray(rewards)
  if rewards.shape == sampled.shape[:-1]:
    rewards = jnp.broadcast_to(rewards[..., None], sampled.shape)
  elif rewards.shape == sampled.shape:
    # One missing reward leaves out the whole sample.
    missing = jnp.any(sampled & ~jnp.isfinite(rewards), -1, keepdims=True)
    rewards = jnp.where(missing, jnp.nan, jnp.where(sampled, rewards, 0))
  if rewards.shape != sampled.shape or token_score_sq.shape != sampled.shape:
    raise ValueError(
      "optimal_token_baseline takes rewards [..., G] or [..., G, T] for tokens "
      f"[..., G, T]: got {rewards.shape}, token_score_sq "
      f"{token_score_sq.shape} and sampled {sampled.shape}"
    )
  # Align the t-th sampled tokens of a group, [*B, T, G].
  sums = jnp.cumsum(jnp.where(sampled, token_score_sq, 0), -1)
  # A stable sort puts sampled tokens first, without changing their order.
  order = jnp.argsort(~sampled, axis=-1, stable=True)
  is_token, weights, to_go = (
    jnp.swapaxes(jnp.take_along_axis(x, order, -1), -1, -2)
    for x in (sampled, sums, rewards)
  )
  to_go = as_float(to_go, "optimal_token_baseline", least=2)
  weights = _power(jnp.where(is_token, weights, 0), power)
  if leave_one_out:
    advantages = _minus_weighted_others(to_go, weights, "weights")
  else:
    weights = jnp.where(present(to_go), weights, 0)
    # verl's baseline includes the sample's own reward; 0 for a single sample.
    total = jnp.maximum(jnp.sum(weights, -1), 1e-8)
    mean = jnp.sum(weights * jnp.where(present(to_go), to_go, 0), -1) / total
    mean = jnp.where(jnp.sum(is_token & present(to_go), -1) > 1, mean, 0)
    advantages = jnp.where(present(to_go), to_go - mean[..., None], 0)
  # Back to the rows: `place` is a token's index among the sampled ones.
  place = jnp.maximum(jnp.cumsum(sampled, -1) - 1, 0)
  advantages = jnp.take_along_axis(jnp.swapaxes(advantages, -1, -2), place, -1)
  return jnp.where(sampled, advantages, 0)


def sample_weights(
  advantage: Callable[..., Array], rollout: Rollout
) -> dict[str, Shaped[Array, "B G *t"]]:
  """Computes the arrays that an advantage function's parameters name."""
  mask = rollout.sampled
  token_scores = lambda: token_score_sq(rollout.logprobs, mask)
  weights = {
    "lengths": lambda: jnp.sum(mask, axis=-1),
    "logit_score_sq": lambda: jnp.sum(token_scores(), axis=-1),
    "token_score_sq": token_scores,
    "sampled": lambda: mask,
  }
  return {k: f() for k, f in weights.items() if asks_for(advantage, k)}
