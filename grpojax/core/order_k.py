"""Advantages for objectives of k rewards: one family of U-statistics.

For a symmetric function f of k rewards, the objective E f(Z_1, ..., Z_k) of k
independent completions of a prompt has the unbiased gradient estimator
(1/G) sum_i s_i A_i with

  A_i = k (mean of f over the k-subsets of the group that hold i
           - mean of f over those that do not),   G > k.

The first mean estimates what sample i is worth among k; the second is the
baseline, which does not depend on sample i. For k = 1 and f(z) = z this is
`leave_one_out`. The estimator is a U-statistic of order k + 1, of the family
that arXiv 2603.01162 analyses for k = 1.
"""

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from grpojax.core.group import as_float

MOST_SUBSETS = 200_000


def subset_advantages(
  rewards: Shaped[Array, "*B G"],
  f: Callable[[Array], Array],
  *,
  k: int,
) -> Float[Array, "*B G"]:
  """Advantages for any symmetric f of k rewards, by enumerating all subsets.

  A_i = k (mean of f over the k-subsets with i - mean over those without i):
  the module's formula as it stands. Takes C(G, k) evaluations of f a group;
  where f is the maximum or the minimum, use `max_at_k` or `min_at_k`.

  Args:
    rewards: one a sample, G > k.
    f: jittable `[..., k] -> [...]`, the same for any order of its k rewards.
    k: rewards that f compares.

  Returns:
    Advantages, in units of f; each group sums to 0. Groups of equal rewards
    give 0.

  Raises:
    ValueError: if k < 1, G <= k, there are more than 200,000 subsets, or f
      does not return one value a subset.
  """
  rewards = _checked(rewards, "subset_advantages", k)
  group_size = rewards.shape[-1]
  count = math.comb(group_size, k)
  if count > MOST_SUBSETS:
    raise ValueError(
      f"subset_advantages would enumerate {count:,} subsets of {k} out of "
      f"{group_size} rewards, more than {MOST_SUBSETS:,}: use a smaller k or "
      "group, or the closed forms max_at_k and min_at_k"
    )
  subsets = np.array(list(itertools.combinations(range(group_size), k)))
  values = jnp.asarray(f(rewards[..., subsets]))
  if values.shape != (*rewards.shape[:-1], count):
    raise ValueError(
      f"f must map [..., k] to [...]: subsets {(*rewards.shape[:-1], count, k)}"
      f" gave values {values.shape}"
    )
  values = values.astype(jnp.promote_types(values.dtype, rewards.dtype))
  # Measured from the first subset, so that equal values cancel exactly.
  values = values - values[..., :1]
  each = jnp.broadcast_to(values[..., None], (*values.shape, k))
  zeros = jnp.zeros(rewards.shape, values.dtype)
  within = zeros.at[..., subsets].add(each)  # sums over the subsets with i
  without = jnp.sum(values, -1, keepdims=True) - within
  within = within / math.comb(group_size - 1, k - 1)
  return k * (within - without / math.comb(group_size - 1, k))


def max_at_k(rewards: Shaped[Array, "*B G"], *, k: int) -> Float[Array, "*B G"]:
  """Advantages for the best of k samples: the max@k objective.

  Unbiased for the gradient of E max(Z_1, ..., Z_k). For binary rewards this is
  the gradient of pass@k, with a leave-one-out baseline. A member of the
  U-statistic family of arXiv 2603.01162 (see the module); arXiv 2505.15201
  (PKPO) optimizes max@k by transformed rewards too.

  Closed form: let z_(1) <= ... <= z_(G) be the group in order, and
  gap_r = z_(r) - z_(r-1). A maximum is z_(1) plus the gaps below it, so for
  the sample of rank rho

    A = sum_{r <= rho} a_r gap_r + sum_{r > rho} b_r gap_r,
    a_r = k C(r-1, k) / C(G-1, k),
    b_r = k [C(r-2, k) / C(G-1, k) - C(r-2, k-1) / C(G-1, k-1)]
        = -k (G-r+1) / (G-k) C(r-2, k-1) / C(G-1, k-1).

  Ties have gap 0, so their order does not matter. O(G log G), for sorting.

  Args:
    rewards: one a sample, G > k.
    k: samples of which the best counts; 1 is `leave_one_out`.

  Returns:
    Advantages, in units of the reward; each group sums to 0, exactly 0 where
    its rewards are all equal.

  Raises:
    ValueError: if k < 1 or G <= k.
  """
  rewards = _checked(rewards, "max_at_k", k)
  order = jnp.argsort(rewards, -1)
  ascending = jnp.take_along_axis(rewards, order, -1)
  gaps = ascending[..., 1:] - ascending[..., :-1]
  below, above = (jnp.asarray(c, gaps.dtype) for c in _weights(gaps, k))
  axis, end = gaps.ndim - 1, jnp.zeros_like(ascending[..., :1])
  gain = jax.lax.cumsum(gaps * below, axis)
  loss = jax.lax.cumsum(gaps * above, axis, reverse=True)
  sorted_advantages = jnp.concatenate([end, gain], -1) + jnp.concatenate(
    [loss, end], -1
  )
  return jnp.take_along_axis(sorted_advantages, jnp.argsort(order, -1), -1)


def min_at_k(rewards: Shaped[Array, "*B G"], *, k: int) -> Float[Array, "*B G"]:
  """Advantages for the worst of k samples: reliability.

  Unbiased for the gradient of E min(Z_1, ..., Z_k); for binary rewards, of the
  probability that k samples are all right. A = -max_at_k(-Z).

  Args:
    rewards: one a sample, G > k.
    k: samples of which the worst counts; 1 is `leave_one_out`.

  Returns:
    Advantages, in units of the reward; each group sums to 0, exactly 0 where
    its rewards are all equal.

  Raises:
    ValueError: if k < 1 or G <= k.
  """
  return -max_at_k(-_checked(rewards, "min_at_k", k), k=k)


def pairwise_rank(rewards: Shaped[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Share of the group's others that a sample beats, minus those it loses to.

  A_i = mean_{j != i} sign(Z_i - Z_j). The estimator is the second-order
  U-statistic of arXiv 2603.01162, Lemma 1, with the sign of Z_i - Z_j in its
  place. Unbiased for the gradient of E sign(Z - Z'), the rate of wins minus
  that of losses, where Z' is the reward of a frozen copy of the policy (draws
  count for neither side).

  Any increasing transformation of the rewards leaves it as it is, so no outlier
  can dominate a group. For binary rewards it equals `leave_one_out`.

  Args:
    rewards: one a sample, G >= 2. Their gradient is 0 everywhere.

  Returns:
    Advantages in [-1, 1]; each group sums to 0, exactly 0 where its rewards
    are all equal. A reward that is not a number gives one that is not.

  Raises:
    ValueError: if G < 2.
  """
  rewards = as_float(rewards, "pairwise_rank", least=2)
  own, others = rewards[..., :, None], rewards[..., None, :]
  wins = jnp.sum(own > others, -1) - jnp.sum(own < others, -1)
  ranks = wins.astype(rewards.dtype) / (rewards.shape[-1] - 1)
  # Comparisons with it are all false: it would pass for an average sample.
  return jnp.where(jnp.isnan(rewards), jnp.nan, ranks)


def _checked(rewards: Array, name: str, k: int) -> Array:
  if k < 1:
    raise ValueError(f"{name} needs subsets of k >= 1 rewards, not k = {k}")
  return as_float(rewards, f"{name} with k = {k}", least=k + 1)


def _weights(gaps: Array, k: int) -> tuple[np.ndarray, np.ndarray]:
  """a_r and b_r of `max_at_k`, r = 2 .. G, in float64."""
  group_size = gaps.shape[-1] + 1
  r = np.arange(2, group_size + 1)
  below = k * _binomial_ratios(group_size - 1, k)[r - 1]
  share = _binomial_ratios(group_size - 1, k - 1)[r - 2]
  return below, -k * share * (group_size - r + 1) / (group_size - k)


def _binomial_ratios(n: int, k: int) -> np.ndarray:
  """C(m, k) / C(n, k) for m = 0 .. n, by factors that never exceed 1."""
  m = np.arange(1, n + 1)
  factors = np.maximum(m - k, 0) / m  # C(m - 1, k) / C(m, k)
  return np.append(np.cumprod(factors[::-1])[::-1], 1.0)
