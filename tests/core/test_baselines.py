"""Pooled baselines: unbiased by enumeration, and equal to their formulas."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from grpojax.core.advantages import baselines
from grpojax.core.advantages.baselines import beta_binomial, shrinkage

NAN = np.nan
# Three prompts, three outcomes each.
LOGITS = np.array([[0.4, -0.3, 0.9], [0.0, 1.0, -0.5], [-0.6, 0.2, 0.1]])
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
SCORES = np.eye(3) - PROBABILITIES[:, None]  # with respect to the logits
BINARY = np.array([[1.0, 0, 0], [1, 1, 0], [0, 0, 1]])
REALS = np.array([[0.3, 1.5, -0.5], [2.0, 0.1, 0.1], [0.6, 0.2, 0.9]])
BOTH = [(BINARY, (2, 2, 2)), (REALS, (2, 2, 2)), (BINARY, (2, 1, 2))]
CASES = [(name, *x) for x in BOTH for name in ("shrinkage", "beta_binomial")]
CASES.append(("beta_binomial", BINARY[:1], (4,)))


@pytest.mark.parametrize("name, values, sizes", CASES)
def test_unbiased(name, values, sizes, float64):
  """Enumerates all batches of prompts with these numbers of rewards."""
  rows, columns = np.array(
    [(b, i) for b, n in enumerate(sizes) for i in range(n)]
  ).T
  outcomes = np.array(list(itertools.product(range(3), repeat=len(rows))))
  rewards = np.full((len(outcomes), len(sizes), max(sizes)), NAN)
  rewards[:, rows, columns] = values[rows, outcomes]
  weights = jax.jit(jax.vmap(getattr(baselines, name)))(jnp.asarray(rewards))
  assert weights.dtype == np.float64
  chance = PROBABILITIES[rows, outcomes].prod(-1)
  each = np.einsum(
    "n,nk,nkd->kd", chance, weights[:, rows, columns], SCORES[rows, outcomes]
  )
  n = len(values)
  arrays = PROBABILITIES[:n], values, SCORES[:n]
  true = np.einsum("bo,bo,bod->bd", *arrays)
  for b, n in enumerate(sizes):
    mean = each[rows == b].sum(0) / n
    np.testing.assert_allclose(mean, true[b], rtol=0, atol=1e-10)


def ragged(rng, sizes, draw):
  """Rewards [B, max] with nan in random places."""
  rewards = np.full((len(sizes), max(sizes)), NAN)
  for row, n in zip(rewards, sizes, strict=True):
    row[rng.permutation(len(row))[:n]] = draw(n)
  return rewards


def groups_of(rewards):
  return [row[~np.isnan(row)] for row in rewards]


def shrunk(rewards, seen):
  """The formula of `shrinkage` as loops; its weights are added to `seen`."""
  groups = groups_of(rewards)
  expected = np.zeros_like(rewards)
  for b, i in np.argwhere(~np.isnan(rewards)):
    rest = [g for j, g in enumerate(groups) if j != b and len(g)]
    others = np.delete(rewards[b], i)
    others = others[~np.isnan(others)]
    if not rest:
      expected[b, i] = rewards[b, i] - others.mean() if len(others) else 0
      continue
    pooled = np.mean([g.mean() for g in rest])
    variances = [g.var(ddof=1) for g in rest if len(g) > 1]
    within = np.mean(variances) if variances else 0
    weight = 1
    own = 0
    if len(others):
      weight = 0
      own = others.mean()
      if len(rest) > 1 and within:
        spread = np.var([g.mean() for g in rest], ddof=1)
        spread -= within * np.mean([1 / len(g) for g in rest])
        noise = within / len(others)
        weight = noise / (noise + max(spread, 0))
        seen.append(weight)
    expected[b, i] = rewards[b, i] - weight * pooled - (1 - weight) * own
  return expected


@pytest.mark.slow
def test_shrinkage_equals_its_formula(float64):
  rng = np.random.default_rng(0)
  mild = rng.normal(size=(6, 1)) + rng.normal(size=(6, 4))
  alike = rng.normal(size=(6, 4))  # t2 = 0 for some
  binary = (rng.random((9, 3)) < rng.random((9, 1))).astype(float)
  # All other prompts of the first have equal rewards.
  equal = np.array([[0.0, 1, 1], [0, 0, 0], [1, 1, 1]])
  outliers = [mild + 1e4 * (np.arange(6) == b)[:, None] for b in (0, 2)]
  some_missing = [
    ragged(rng, sizes, lambda n: rng.normal(size=n) + n)
    for sizes in ([4, 2, 3, 4, 1, 0], [3, 3, 0, 1], [1, 4, 0], [4, 0, 0, 0])
  ]
  seen = []
  for rewards in (mild, alike, binary, equal, *outliers, *some_missing):
    truth = shrunk(rewards, seen)
    actual = jax.jit(shrinkage)(jnp.asarray(rewards))
    np.testing.assert_allclose(actual, truth, rtol=1e-6, atol=1e-9)
    actual = jax.jit(shrinkage)(jnp.asarray(rewards, jnp.float32))
    # In float32 an outlier costs digits of its own prompt only.
    scale = 1 + np.abs(truth).max(-1, keepdims=True)
    worst = np.max(np.abs(actual - truth) / scale)
    assert worst < 1e-2 if np.nanmax(rewards) > 1e3 else worst < 1e-5
  assert max(seen) == 1 and min(seen) < 0.5


@pytest.mark.slow
def test_beta_binomial_is_the_posterior_mean(float64):
  """Compares with scipy's distribution, over the same grid."""
  rng = np.random.default_rng(2)
  alpha = baselines._ALPHA
  beta = baselines._BETA
  pmf = scipy.stats.betabinom.pmf
  for sizes in ([3, 3, 3, 3], [4, 2, 3, 1, 0], [1, 0, 4]):
    rewards = ragged(rng, sizes, lambda n: rng.integers(0, 2, n))
    groups = groups_of(rewards)
    truth = np.zeros_like(rewards)
    for b, i in np.argwhere(~np.isnan(rewards)):
      others = np.delete(rewards[b], i)
      rest = [*groups[:b], *groups[b + 1 :], others[~np.isnan(others)]]
      posterior = np.ones_like(alpha)
      for group in rest:
        posterior *= pmf(group.sum(), len(group), alpha, beta)
      rate = (alpha + rest[-1].sum()) / (alpha + beta + len(rest[-1]))
      truth[b, i] = rewards[b, i] - posterior @ rate / posterior.sum()
    # Rewards outside [0, 1] are clipped in the baseline only.
    outside = rewards + 5 * (rewards == 1)
    for dtype, atol in (("float64", 1e-10), ("float32", 1e-4)):
      for z in (rewards, outside):
        actual = jax.jit(beta_binomial)(jnp.asarray(z, dtype))
        extra = np.nan_to_num(z - rewards)
        np.testing.assert_allclose(actual, truth + extra, atol=atol)
