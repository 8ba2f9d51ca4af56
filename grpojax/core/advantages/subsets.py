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

from grpojax.core.group_axis import as_float, count, present

MOST_SUBSETS = 200_000


def subset_advantages(
  rewards: Shaped[Array, "*B G"],
  f: Callable[[Array], Array],
  *,
  k: int,
) -> Float[Array, "*B G"]:
  """Advantages for any symmetric f of k rewards, by enumerating all subsets.

  A_i = k (mean of f over the k-subsets with i - mean over those without i),
  as it stands in the module's docstring. Takes C(G, k) evaluations of f a
  group; where f is the maximum or the minimum, use `max_at_k` or `min_at_k`.

  Args:
    rewards: one a sample, G > k.
    f: jittable `[..., k] -> [...]`, the same for any order of its k rewards.
    k: number of rewards that f compares.

  Returns:
    Advantages, in units of f; each group sums to 0. Groups of equal rewards
    give 0.

  Raises:
    ValueError: if k < 1, G <= k, there are more than 200,000 subsets, or f
      does not return one value a subset.
  """
  rewards = _checked(rewards, "subset_advantages", k)
  group_size = rewards.shape[-1]
  total = math.comb(group_size, k)
  if total > MOST_SUBSETS:
    raise ValueError(
      f"subset_advantages would enumerate {total:,} subsets of {k} out of "
      f"{group_size} rewards, more than {MOST_SUBSETS:,}: use a smaller k or "
      "group, or the closed forms max_at_k and min_at_k"
    )
  subsets = np.array(list(itertools.combinations(range(group_size), k)))
  rewarded = present(rewards)
  values = jnp.asarray(f(jnp.where(rewarded, rewards, 0)[..., subsets]))
  if values.shape != (*rewards.shape[:-1], total):
    raise ValueError(
      f"f must map [..., k] to [...]: subsets "
      f"{(*rewards.shape[:-1], total, k)} gave values {values.shape}"
    )
  values = values.astype(jnp.promote_types(values.dtype, rewards.dtype))
  complete = jnp.all(rewarded[..., subsets], -1)
  # Measured from one of the subsets, so that equal values cancel exactly.
  first = jnp.argmax(complete, -1)[..., None]
  values = values - jnp.take_along_axis(values, first, -1)

  def sums(x):
    """Sums for each sample, over the subsets with it and over those without."""
    x = jnp.where(complete, x, 0)
    each = jnp.broadcast_to(x[..., None], (*x.shape, k))
    within = jnp.zeros(rewards.shape, x.dtype).at[..., subsets].add(each)
    return within, jnp.sum(x, -1, keepdims=True) - within

  within, without = sums(values)
  count_within, count_without = sums(jnp.ones_like(values))
  worth = within / jnp.maximum(count_within, 1)
  baseline = without / jnp.maximum(count_without, 1)
  enough = rewarded & (count(rewards) > k)
  return jnp.where(enough, k * (worth - baseline), 0)


def max_at_k(rewards: Shaped[Array, "*B G"], *, k: int) -> Float[Array, "*B G"]:
  """Advantages for the best of k samples: the max@k objective.

  Unbiased for the gradient of E max(Z_1, ..., Z_k). For binary rewards this is
  the gradient of pass@k, with a leave-one-out baseline. arXiv 2505.15201 (PKPO)
  optimizes max@k by transformed rewards too.

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
    k: number of samples of which the best counts; 1 is `leave_one_out`.

  Returns:
    Advantages, in units of the reward; each group sums to 0, exactly 0 where
    its rewards are all equal.

  Raises:
    ValueError: if k < 1 or G <= k.
  """
  rewards = _checked(rewards, "max_at_k", k)
  rewarded, n = present(rewards), jnp.sum(present(rewards), -1)
  # A missing reward goes to the end, equal to the best: without a gap before
  # it, it has no influence.
  best = jnp.max(jnp.where(rewarded, rewards, -jnp.inf), -1, keepdims=True)
  order = jnp.argsort(jnp.where(rewarded, rewards, jnp.inf), -1)
  filled = jnp.where(rewarded, rewards, jnp.where(n[..., None] > 0, best, 0))
  ascending = jnp.take_along_axis(filled, order, -1)
  gaps = ascending[..., 1:] - ascending[..., :-1]
  tables = _weights(rewards.shape[-1], k)
  below, above = (jnp.asarray(table, gaps.dtype)[n] for table in tables)
  axis, end = gaps.ndim - 1, jnp.zeros_like(ascending[..., :1])
  gain = jnp.concatenate([end, jax.lax.cumsum(gaps * below, axis)], -1)
  loss = jax.lax.cumsum(gaps * above, axis, reverse=True)
  by_rank = gain + jnp.concatenate([loss, end], -1)
  advantages = jnp.take_along_axis(by_rank, jnp.argsort(order, -1), -1)
  return jnp.where(rewarded, advantages, 0)


def min_at_k(rewards: Shaped[Array, "*B G"], *, k: int) -> Float[Array, "*B G"]:
  """Advantages for the worst of k samples: reliability.

  Unbiased for the gradient of E min(Z_1, ..., Z_k); for binary rewards, of the
  probability that k samples are all right. A = -max_at_k(-Z), of which
  arguments, results and errors are those of `max_at_k`.
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
  can dominate a group. For binary rewards it equals `leave_one_out`. G >= 2.
  Advantages are in [-1, 1]; each group sums to 0, exactly 0 where its rewards
  are all equal. Their gradient by the rewards is 0 everywhere.
  """
  rewards = as_float(rewards, "pairwise_rank", least=2)
  mine, theirs = rewards[..., :, None], rewards[..., None, :]
  wins = jnp.sum(mine > theirs, -1) - jnp.sum(mine < theirs, -1)
  # All comparisons with nan, which is no reward, are false.
  return wins.astype(rewards.dtype) / jnp.maximum(count(rewards) - 1, 1)


def _checked(rewards: Array, name: str, k: int) -> Array:
  if k < 1:
    raise ValueError(f"{name} needs subsets of k >= 1 rewards, not k = {k}")
  return as_float(rewards, f"{name} with k = {k}", least=k + 1)


def _weights(group_size: int, k: int) -> tuple[np.ndarray, np.ndarray]:
  """a_r and b_r of `max_at_k`, r = 2 .. G, in float64: [n, r - 2].

  One row for each number n = 0 .. G of rewards that a group may have; 0 where
  n <= k, and from r = n + 1 on.
  """
  below, above = np.zeros((2, group_size + 1, group_size - 1))
  for n in range(k + 1, group_size + 1):
    r = np.arange(2, n + 1)
    share = _binomial_ratios(n - 1, k - 1)[r - 2]
    below[n, : n - 1] = k * _binomial_ratios(n - 1, k)[r - 1]
    above[n, : n - 1] = -k * share * (n - r + 1) / (n - k)
  return below, above


def _binomial_ratios(n: int, k: int) -> np.ndarray:
  """C(m, k) / C(n, k) for m = 0 .. n, by factors that never exceed 1."""
  m = np.arange(1, n + 1)
  factors = np.maximum(m - k, 0) / m  # C(m - 1, k) / C(m, k)
  return np.append(np.cumprod(factors[::-1])[::-1], 1.0)
