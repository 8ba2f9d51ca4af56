"""Advantages: the weight that each sample's score carries in the gradient.

Every function maps rewards [..., G] to advantages [..., G]. With score
s_i = grad log pi(Y_i | x) and reward Z_i, the gradient estimator of a group is
(1/G) sum_i s_i A_i, and estimates g(x) = E[s Z]. How the estimators differ is
worked out in arXiv 2603.01162 ("Its Policy Gradient is a U-Statistic").

| function        | A_i                              | mean of the estimator  |
|-----------------|----------------------------------|------------------------|
| vanilla         | Z_i                              | g                      |
| oracle          | Z_i - V(x)                       | g                      |
| leave_one_out   | Z_i - mean_{j != i} Z_j          | g                      |
| dr_grpo         | Z_i - mean_j Z_j                 | (G-1)/G g              |
| grpo            | (Z_i - mean_j Z_j) / std_j Z     | biased: prompt weights |
| batch_std       | dr_grpo / std over the batch     | biased: a random scale |
| shrinkage       | leave_one_out, the mean shrunk   | g                      |
|                 | towards the other prompts' mean  |                        |
| beta_binomial   | Z_i - posterior success rate     | g                      |
|                 | given all rewards but Z_i        |                        |
| length_weighted | leave_one_out, the mean weighted | g                      |
|                 | by completion lengths            |                        |
| score_weighted  | ... by how unsure the policy was | g                      |
|                 | of them                          |                        |
| norm_ratio      | ... by the score length of right | g                      |
|                 | and wrong answers, squared       |                        |
| max_at_k        | best of k: mean over subsets     | grad of E max of k     |
|                 | with i - of those without        | (binary: of pass@k)    |
| min_at_k        | worst of k, likewise             | grad of E min of k     |
| pairwise_rank   | mean_{j != i} sign(Z_i - Z_j)    | grad of wins - losses  |

`shrinkage` and `beta_binomial` are in `core.advantages.baselines`, those with
weights in `core.advantages.weighted_baselines`; the advantages for other
objectives, and for any function of k rewards (`subset_advantages`), in
`core.advantages.subsets`.

An advantage plugs in by its name in `ADVANTAGES`: `(rewards [..., G]) ->
advantages [..., G]`, pure and jittable. If it has a parameter `lengths`, it
gets the completions' lengths [B, G], in tokens; `logit_score_sq` a stand-in for
their scores' squared lengths [B, G] (`weighted_baselines.logit_score_sq`);
`score_norms` those of `TrainState`; `k` the config's `subset_size`, `power` its
`score_power`. What it cannot work with (too small a group or batch) it refuses
by ValueError, from the shapes alone: a run is refused by the same error before
it starts.

Common to all: rewards are one a sample, of any real dtype; integer, boolean and
half-precision ones become float32. Advantages are in units of the reward unless
the function says otherwise. A group of equal rewards gives exactly 0 wherever
only the group's own rewards are subtracted (not in shrinkage and beta_binomial,
which pool prompts), and finite gradients with respect to the rewards; a group
smaller than the estimator needs is a ValueError. A reward that is not finite
(nan, inf or -inf) means that there is none (it failed, or nobody could judge):
the advantages are those of the group without that sample, whose own is 0; so
are those of a group with too few left.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from grpojax.core.advantages.baselines import beta_binomial, shrinkage
from grpojax.core.advantages.subsets import (
  max_at_k,
  min_at_k,
  pairwise_rank,
)
from grpojax.core.advantages.subsets import (
  subset_advantages as subset_advantages,
)
from grpojax.core.advantages.weighted_baselines import (
  length_weighted,
  norm_ratio,
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
  """Rewards as they are: REINFORCE without a baseline.

  A_i = Z_i. Unbiased for g, with the largest variance of the family,
  tr Var(s Z) / G (arXiv 2603.01162; Williams, 1992). G >= 1.
  """
  rewards = as_float(rewards, "vanilla", least=1)
  return jnp.where(present(rewards), rewards, 0)


def oracle(
  rewards: Shaped[Array, "*B G"], values: Shaped[Array, "*B"]
) -> Float[Array, "*B G"]:
  """Reward minus the prompt's true value, which only an oracle knows.

  A_i = Z_i - V(x). Unbiased for g whatever the values are, as long as they
  depend on the prompt alone; with V(x) = E[Z | x] its mean squared error,
  tr Var(s (Z - V)) / G, is the one that `leave_one_out` approaches as G grows
  (arXiv 2603.01162, Theorem 2).

  Args:
    rewards: one a sample, G >= 1.
    values: expected reward of each prompt; the group axis is left out.

  Raises:
    ValueError: if values do not have the shape of rewards without the last
      axis.
  """
  rewards = as_float(rewards, "oracle", least=1)
  values = jnp.asarray(values)
  if values.shape != rewards.shape[:-1]:
    raise ValueError(
      f"oracle takes one value a prompt: rewards {rewards.shape} need values "
      f"{rewards.shape[:-1]}, not {values.shape}"
    )
  return jnp.where(present(rewards), rewards - values[..., None], 0)


def leave_one_out(rewards: Shaped[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Reward minus the mean of the group's other rewards: the U-statistic.

  A_i = Z_i - mean_{j != i} Z_j = G / (G - 1) (Z_i - mean_j Z_j).
  Unbiased for g: the estimator is exactly the second-order U-statistic with
  kernel h(i, j) = (s_i - s_j)(Z_i - Z_j) / 2 (arXiv 2603.01162, Lemma 1). The
  same advantage is RLOO's (arXiv 2402.14740). G >= 2; each group sums to 0.
  """
  return minus_others(as_float(rewards, "leave_one_out", least=2))


def dr_grpo(rewards: Shaped[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Reward minus the group's own mean: Dr. GRPO.

  A_i = Z_i - mean_j Z_j. A sample's own reward is part of its baseline, so the
  estimator is (G - 1)/G times the one of `leave_one_out`: biased by -g/G, in
  length only (arXiv 2503.20783; arXiv 2603.01162, Lemma 1). G >= 2; each group
  sums to 0.
  """
  return centred(as_float(rewards, "dr_grpo", least=2))


def grpo(
  rewards: Shaped[Array, "*B G"], *, epsilon: float = 1e-6
) -> Float[Array, "*B G"]:
  """Reward standardised within its group: the original GRPO.

  A_i = (Z_i - mean_j Z_j) / (std_j Z_j + epsilon), with the *sample* standard
  deviation (divided by G - 1, as TRL and verl do). Biased: prompts on which
  nearly all or nearly no samples succeed weigh more than g gives them. For
  binary rewards the expected direction of one prompt's gradient is still that
  of g(x) (arXiv 2402.03300, section 4.1).

  Args:
    rewards: one a sample, G >= 2.
    epsilon: added to the standard deviation, in units of the reward.

  Returns:
    Advantages, without unit; each group sums to 0.
  """
  rewards = as_float(rewards, "grpo", least=2)
  deviations = centred(rewards)
  squares = jnp.sum(deviations**2, -1, keepdims=True)
  variance = squares / jnp.maximum(count(rewards) - 1, 1)
  return _divide_by_std(deviations, variance, epsilon)


def batch_std(
  rewards: Shaped[Array, "*B G"], *, epsilon: float = 1e-6
) -> Float[Array, "*B G"]:
  """Group-centred rewards, divided by one standard deviation for the batch.

  A_i = C_i / (std C + epsilon), C_i = Z_i - mean_j Z_j, where std C is the
  sample standard deviation of the centred rewards of all prompts together (all
  axes; equal to `grpo` for a single group). Prompts keep their relative
  weights, unlike in `grpo`; the common scale depends on the rewards, a bias
  that vanishes as the batch grows, up to dr_grpo's factor (G - 1)/G
  (REINFORCE++ with baseline, arXiv 2501.03262).

  Args:
    rewards: one a sample, G >= 2; the whole batch, not a shard or a micro-batch
      of it, and without rows that only pad it.
    epsilon: added to the standard deviation, in units of the reward.

  Returns:
    Advantages, without unit; each group sums to 0.
  """
  rewards = as_float(rewards, "batch_std", least=2)
  deviations = centred(rewards)
  # Deviations have mean 0, so their second moment is their variance.
  samples = jnp.sum(present(rewards))
  variance = jnp.sum(deviations**2) / jnp.maximum(samples - 1, 1)
  return _divide_by_std(deviations, variance, epsilon)


def _divide_by_std(deviations: Array, variance: Array, epsilon: float) -> Array:
  # The square root has an infinite slope at 0, which a single `where` after it
  # would turn into 0 * inf = nan in the gradient: hence one before and one
  # after.
  varies = variance > 0
  std = jnp.sqrt(jnp.where(varies, variance, 1.0))
  return jnp.where(varies, deviations / (std + epsilon), 0.0)


ADVANTAGES = {
  "leave_one_out": leave_one_out,
  "grpo": grpo,
  "dr_grpo": dr_grpo,
  "batch_std": batch_std,
  "vanilla": vanilla,
  "shrinkage": shrinkage,
  "beta_binomial": beta_binomial,
  "length_weighted": length_weighted,
  "score_weighted": score_weighted,
  "norm_ratio": norm_ratio,
  "max_at_k": max_at_k,
  "min_at_k": min_at_k,
  "pairwise_rank": pairwise_rank,
}
"""Advantages by name, those that a training run can compute: `oracle` needs the
true values."""

SCALED_LEAVE_ONE_OUT = ("leave_one_out", "dr_grpo", "batch_std")
"""Advantages that are `leave_one_out` times one number for the whole batch.

Their gradient has its direction, and so the error that `statistics.group_size`
knows the best group size for. All others have another: `vanilla` does not
compare (its error is smallest at the smallest group), pooled and weighted
baselines know the prompts' values better or otherwise, `grpo` weighs the
prompts, and the rest have another objective."""

ZERO_IN_EQUAL_GROUPS = (
  "leave_one_out",
  "grpo",
  "dr_grpo",
  "batch_std",
  "length_weighted",
  "score_weighted",
  "norm_ratio",
  "max_at_k",
  "min_at_k",
  "pairwise_rank",
)
"""Advantages that are exactly 0 in a group of equal rewards, whatever the other
groups are: such a group can be left out (`core.dynamic_sampling`)."""
