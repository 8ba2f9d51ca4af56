"""Advantages: the weight of each sample's score in the gradient.

Each function maps rewards [..., G] to advantages [..., G]. With scores s_i =
grad log pi(Y_i | x) and rewards Z_i, (1/G) sum_i s_i A_i estimates g(x) = E[s
Z] (arXiv 2603.01162). docs/objectives.md says when to use which.

| function        | A_i                              | mean of the estimator  |
|-----------------|----------------------------------|------------------------|
| vanilla         | Z_i                              | g                      |
| oracle          | Z_i - V(x)                       | g                      |
| leave_one_out   | Z_i - mean_{j != i} Z_j          | g                      |
| dr_grpo         | Z_i - mean_j Z_j                 | (G-1)/G g              |
| grpo            | (Z_i - mean_j Z_j) / std_j Z     | biased: prompt weights |
| batch_std       | dr_grpo / std over the batch     | biased: a random scale |
| reinforce_plus_ | (Z_i - the batch's mean) / its   | biased: a random scale |
| plus            | std, both over tokens            | and O(1/N)             |
| shrinkage,      | Z_i - an estimate of V(x) from   | g                      |
| beta_binomial   | all prompts (`baselines`)        |                        |
| length_weighted,| Z_i - a weighted mean of the     | g                      |
| score_weighted, | group's other rewards            |                        |
| optimal_token_  | Z_i - a weighted mean per token, | g                      |
| baseline        | [..., G, T]                      |                        |
| max_at_k,       | best or worst of k (`subsets`)   | grad of E max, E min   |
| min_at_k        |                                  |                        |
| max_rl          | sum_{j <= k} max_at_j / j        | k terms of grad log V  |
| pairwise_rank   | mean_{j != i} sign(Z_i - Z_j)    | grad of wins - losses  |

To add an advantage, enter it in `ADVANTAGES` (docs/development.md). It must
raise ValueError if the shape shows that the group or batch is too small.

Rewards have any real dtype; integers, booleans and half precision become
float32. Advantages are in units of the reward unless the function says
otherwise; those in `WITHIN_GROUPS` are exactly 0 in a group of equal rewards.
Gradients with respect to rewards are finite. A sample whose reward is nan or
infinite counts as not drawn: its advantage is 0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from grpojax.core.advantages.baselines import beta_binomial, shrinkage
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
from grpojax.core.group_axis import (
  as_float,
  centred,
  count,
  minus_others,
  present,
)


def vanilla(rewards: Shaped[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Returns the rewards: REINFORCE without a baseline (Williams, 1992)."""
  rewards = as_float(rewards, "vanilla", least=1)
  return jnp.where(present(rewards), rewards, 0)


def oracle(
  rewards: Shaped[Array, "*B G"], values: Shaped[Array, "*B"]
) -> Float[Array, "*B G"]:
  """Reward minus the prompt's true value V(x), known only in simulations."""
  rewards = as_float(rewards, "oracle", least=1)
  values = jnp.asarray(values)
  if values.shape != rewards.shape[:-1]:
    raise ValueError(
      f"oracle takes one value per prompt: rewards {rewards.shape} need values "
      f"{rewards.shape[:-1]}, not {values.shape}"
    )
  return jnp.where(present(rewards), rewards - values[..., None], 0)


def leave_one_out(rewards: Shaped[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Reward minus the mean of the group's other rewards: the U-statistic.

  A_i = G / (G - 1) (Z_i - mean_j Z_j), unbiased (arXiv 2603.01162, Lemma 1;
  RLOO, arXiv 2402.14740). G >= 2; each group sums to 0.
  """
  return minus_others(as_float(rewards, "leave_one_out", least=2))


def dr_grpo(rewards: Shaped[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Reward minus the group's own mean: Dr. GRPO (arXiv 2503.20783).

  It is (G - 1) / G times `leave_one_out`. G >= 2; each group sums to 0.
  """
  return centred(as_float(rewards, "dr_grpo", least=2))


def grpo(
  rewards: Shaped[Array, "*B G"], *, epsilon: float = 1e-6
) -> Float[Array, "*B G"]:
  """Reward standardised within its group: the original GRPO.

  (Z_i - mean_j Z_j) / (std_j Z_j + epsilon), unitless (arXiv 2402.03300,
  section 4.1), with the *sample* standard deviation, as in TRL and verl. G >=
  2; each group sums to 0. Epsilon is in units of the reward.
  """
  rewards = as_float(rewards, "grpo", least=2)
  deviations = centred(rewards)
  squares = jnp.sum(deviations**2, -1, keepdims=True)
  variance = squares / jnp.maximum(count(rewards) - 1, 1)
  return _divide_by_std(deviations, variance, epsilon)


def batch_std(
  rewards: Shaped[Array, "*B G"], *, epsilon: float = 1e-6
) -> Float[Array, "*B G"]:
  """Group-centred reward divided by its standard deviation in the batch.

  (Z_i - mean_j Z_j) / (std + epsilon), unitless. As the batch grows, this
  common scale becomes a constant, and the only remaining bias is dr_grpo's
  factor (G - 1) / G (REINFORCE++ with baseline, arXiv 2501.03262). G >= 2; the
  rewards must be a whole batch, not a shard or micro-batch, without padding
  rows. Epsilon is in units of the reward.
  """
  rewards = as_float(rewards, "batch_std", least=2)
  deviations = centred(rewards)
  # Deviations have mean 0, so their second moment is their variance.
  samples = jnp.sum(present(rewards))
  variance = jnp.sum(deviations**2) / jnp.maximum(samples - 1, 1)
  return _divide_by_std(deviations, variance, epsilon)


def reinforce_plus_plus(
  rewards: Shaped[Array, "*B G"], lengths: Shaped[Array, "*B G"]
) -> Float[Array, "*B G"]:
  """Reward standardised over all tokens of the batch, across prompts.

  (Z_i - m) / sqrt(s^2 + 1e-8), with mean m and sample variance s^2 of rewards,
  each counted once per token of its completion (`lengths`), as in verl
  (REINFORCE++, arXiv 2501.03262, without its KL term). Prompts of
  different difficulty add noise. G >= 1; needs a whole batch, like `batch_std`.
  """
  rewards = as_float(rewards, "reinforce_plus_plus", least=1)
  tokens = jnp.where(present(rewards), lengths, 0).astype(rewards.dtype)
  first = jnp.argmax(jnp.ravel(tokens) > 0)
  moved = jnp.where(present(rewards), rewards - jnp.ravel(rewards)[first], 0)
  total = jnp.maximum(jnp.sum(tokens), 1)
  moved = moved - jnp.sum(tokens * moved) / total
  variance = jnp.sum(tokens * moved**2) / jnp.maximum(total - 1, 1)
  advantages = moved / jnp.sqrt(variance + 1e-8)
  return jnp.where(present(rewards), advantages, 0)


def _divide_by_std(deviations: Array, variance: Array, epsilon: float) -> Array:
  # The inner `where` avoids the root of 0: with its infinite slope the gradient
  # would be 0 * inf = nan.
  varies = variance > 0
  std = jnp.sqrt(jnp.where(varies, variance, 1.0))
  return jnp.where(varies, deviations / (std + epsilon), 0.0)


ADVANTAGES = {
  "leave_one_out": leave_one_out,
  "grpo": grpo,
  "dr_grpo": dr_grpo,
  "batch_std": batch_std,
  "reinforce_plus_plus": reinforce_plus_plus,
  "vanilla": vanilla,
  "shrinkage": shrinkage,
  "beta_binomial": beta_binomial,
  "length_weighted": length_weighted,
  "score_weighted": score_weighted,
  "optimal_token_baseline": optimal_token_baseline,
  "max_at_k": max_at_k,
  "min_at_k": min_at_k,
  "max_rl": max_rl,
  "pairwise_rank": pairwise_rank,
}
"""Advantages that a training run can compute, by name."""

_ACROSS = ("reinforce_plus_plus", "vanilla", "shrinkage", "beta_binomial")
WITHIN_GROUPS = tuple(name for name in ADVANTAGES if name not in _ACROSS)
"""Advantages that do not change if a constant is added to a group's rewards.
They are 0 in groups of equal rewards, which `core.dynamic_sampling` drops."""

OF_SUBSETS = {
  name: ADVANTAGES[name]
  for name in ("max_at_k", "min_at_k", "max_rl", "pairwise_rank")
}
"""Advantages of subsets, which need products of importance weights."""

SCALED_LEAVE_ONE_OUT = ("leave_one_out", "dr_grpo", "batch_std")
"""Advantages that are `leave_one_out` times one number for the whole batch."""
