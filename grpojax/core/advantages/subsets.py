"""Advantages for objectives such as the best of k samples: U-statistics.

For a symmetric function f of k rewards, E f(Z_1, ..., Z_k) has the unbiased
gradient estimator (1/G) sum_i s_i A_i with

  A_i = k (mean of f over the k-subsets of the group that contain i
           - mean of f over the k-subsets without i),   G > k.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from grpojax.core.group_axis import as_float, count, present


def max_at_k(rewards: Shaped[Array, "*B G"], *, k: int) -> Float[Array, "*B G"]:
  """Advantages for the best of k samples; for binary rewards, pass@k.

  Let z_(1) <= ... <= z_(G) be the sorted rewards and gap_r = z_(r) - z_(r-1). A
  maximum is z_(1) plus the gaps below it, so the sample of rank rho has

    A = sum_{r <= rho} a_r gap_r + sum_{r > rho} b_r gap_r,
    a_r = k C(r-1, k) / C(G-1, k),
    b_r = k [C(r-2, k) / C(G-1, k) - C(r-2, k-1) / C(G-1, k-1)]
        = -k (G-r+1) / (G-k) C(r-2, k-1) / C(G-1, k-1).

  Each group sums to 0; k = 1 is `leave_one_out`. PKPO (arXiv 2505.15201) also
  optimizes max@k. ValueError if k < 1 or G <= k.
  """
  rewards = _checked(rewards, "max_at_k", k)
  return _sum_gaps(rewards, *_gap_weights(rewards.shape[-1], k))


def max_rl(rewards: Shaped[Array, "*B G"], *, k: int) -> Float[Array, "*B G"]:
  """Advantages for MaxRL's objective, sum_{j <= k} E[max of j rewards] / j.

  For binary rewards it is the sum of pass@j / j, whose gradient tends to grad
  log V as k grows: prompts that are rarely solved count most. k = G - 1 gives
  the form of arXiv 2602.02710, (Z_i - mean Z) / mean Z (0 if no sample is
  right): unbiased for the first G - 1 terms. ValueError if k < 1 or G <= k.
  """
  rewards = _checked(rewards, "max_rl", k)
  return _sum_gaps(rewards, *_max_rl_weights(rewards.shape[-1], k))


@functools.cache
def _max_rl_weights(group_size: int, k: int) -> np.ndarray:
  """Weights of gaps for `max_rl`: sum_{j <= k} of `_gap_weights` / j."""
  weights = (np.array(_gap_weights(group_size, j)) / j for j in range(1, k + 1))
  tables = sum(weights)
  tables[:, : k + 1] = 0  # groups with too few rewards
  return tables


def _sum_gaps(rewards: Array, below: np.ndarray, above: np.ndarray) -> Array:
  """Returns advantages: sums of gaps with the weights of `_gap_weights`."""
  rewarded = present(rewards)
  n = jnp.sum(rewarded, -1)
  # Missing rewards go to the end, equal to the best, so they add no gap.
  best = jnp.max(jnp.where(rewarded, rewards, -jnp.inf), -1, keepdims=True)
  order = jnp.argsort(jnp.where(rewarded, rewards, jnp.inf), -1)
  filled = jnp.where(rewarded, rewards, jnp.where(n[..., None] > 0, best, 0))
  ascending = jnp.take_along_axis(filled, order, -1)
  gaps = ascending[..., 1:] - ascending[..., :-1]
  # Look up each group's weights by its number of rewards: [*B, G - 1].
  below, above = (jnp.asarray(x, gaps.dtype)[n] for x in (below, above))
  axis = gaps.ndim - 1
  end = jnp.zeros_like(ascending[..., :1])
  # By rank: gaps up to the rank count with a_r, gaps above it with b_r.
  gain = jnp.concatenate([end, jax.lax.cumsum(gaps * below, axis)], -1)
  loss = jax.lax.cumsum(gaps * above, axis, reverse=True)
  by_rank = gain + jnp.concatenate([loss, end], -1)
  # argsort inverts the order, so each sample reads the entry of its rank.
  advantages = jnp.take_along_axis(by_rank, jnp.argsort(order, -1), -1)
  return jnp.where(rewarded, advantages, 0)


def min_at_k(rewards: Shaped[Array, "*B G"], *, k: int) -> Float[Array, "*B G"]:
  """Advantages for the worst of k samples: -max_at_k(-Z).

  For binary rewards the objective is the probability that all k are right.
  """
  return -max_at_k(-_checked(rewards, "min_at_k", k), k=k)


def pairwise_rank(rewards: Shaped[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Share of the group that a sample beats, minus the share it loses to.

  A_i = mean_{j != i} sign(Z_i - Z_j), in [-1, 1], unbiased for the gradient of
  E sign(Z - Z'), where Z' is the reward of a frozen copy of the policy. It is
  invariant to increasing transformations of the rewards; for binary rewards it
  is `leave_one_out`. G >= 2; its gradient with respect to rewards is 0.
  """
  rewards = as_float(rewards, "pairwise_rank", least=2)
  sample = rewards[..., :, None]
  rival = rewards[..., None, :]
  # Comparisons with nan (a missing reward) are false.
  wins = jnp.sum(sample > rival, -1) - jnp.sum(sample < rival, -1)
  return wins.astype(rewards.dtype) / jnp.maximum(count(rewards) - 1, 1)


def _checked(rewards: Array, name: str, k: int) -> Array:
  if k < 1:
    raise ValueError(f"{name} needs subsets of k >= 1 rewards, not k = {k}")
  return as_float(rewards, f"{name} with k = {k}", least=k + 1)


def _gap_weights(group_size: int, k: int) -> tuple[np.ndarray, np.ndarray]:
  """Tables of a_r and b_r of `max_at_k`, r = 2 .. G, in float64: [n, r - 2].

  Row n is for groups with n = 0 .. G rewards; it is 0 if n <= k, or for r > n.
  """
  below, above = np.zeros((2, group_size + 1, group_size - 1))
  for n in range(k + 1, group_size + 1):
    # The docstring of `max_at_k` has the formulas, with n in place of G.
    r = np.arange(2, n + 1)
    share = _binomial_ratios(n - 1, k - 1)[r - 2]
    below[n, : n - 1] = k * _binomial_ratios(n - 1, k)[r - 1]
    above[n, : n - 1] = -k * share * (n - r + 1) / (n - k)
  return below, above


def _binomial_ratios(n: int, k: int) -> np.ndarray:
  """C(m, k) / C(n, k) for m = 0 .. n, as products of factors of at most 1."""
  m = np.arange(1, n + 1)
  factors = np.maximum(m - k, 0) / m  # C(m - 1, k) / C(m, k)
  # Entry m is the product of the factors from m + 1 to n; entry n is 1.
  return np.append(np.cumprod(factors[::-1])[::-1], 1.0)
