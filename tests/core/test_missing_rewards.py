"""Samples without a reward (nan, inf): as if they had not been drawn."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from grpojax.core import advantages, baselines
from grpojax.core.weighted_baselines import ScoreNorms

G, NAN = 6, np.nan
LENGTHS = np.array([5.0, 1, 3, 9, 2, 4])


def oracle(rewards):
  return advantages.oracle(rewards, jnp.full(rewards.shape[:-1], 0.25))


def length_weighted(rewards):
  """With LENGTHS, shortened to those samples that a compacted group keeps."""
  lengths = LENGTHS if rewards.shape[-1] == G else length_weighted.kept
  lengths = jnp.broadcast_to(jnp.asarray(lengths, jnp.float32), rewards.shape)
  return advantages.length_weighted(rewards, lengths)


def score_weighted(rewards):
  """With the same weights, which are no whole numbers."""
  weights = LENGTHS if rewards.shape[-1] == G else length_weighted.kept
  weights = jnp.broadcast_to(jnp.sqrt(jnp.asarray(weights)), rewards.shape)
  return advantages.score_weighted(rewards, weights)


def norm_ratio(rewards):
  norms = ScoreNorms(jnp.float32(2), jnp.float32(-0.3), jnp.float32(1.8))
  return advantages.norm_ratio(rewards, norms)


def subsets(rewards):
  """Not one of max and min; and infinite where a 0 stands for a missing one."""
  return advantages.subset_advantages(
    rewards, lambda z: jnp.log(jnp.abs(z)).sum(-1) + z.max(-1), k=2
  )


# Name: (advantage, fewest rewards that a group needs).
WITHIN_GROUPS = {
  "vanilla": (advantages.vanilla, 1),
  "oracle": (oracle, 1),
  "leave_one_out": (advantages.leave_one_out, 2),
  "dr_grpo": (advantages.dr_grpo, 2),
  "grpo": (advantages.grpo, 2),
  "pairwise_rank": (advantages.pairwise_rank, 2),
  "max_at_k": (functools.partial(advantages.max_at_k, k=2), 3),
  "min_at_k": (functools.partial(advantages.min_at_k, k=3), 4),
  "length_weighted": (length_weighted, 2),
  "score_weighted": (score_weighted, 2),
  "norm_ratio": (norm_ratio, 2),
  "subsets": (subsets, 3),
}


@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_a_group_is_what_has_rewards(name):
  """A group of n rewards in any places of a larger one gives the same."""
  f, fewest = WITHIN_GROUPS[name]
  rng, jitted = np.random.default_rng(0), jax.jit(f)
  for n in range(G + 1):
    rewards = np.full(G, NAN, np.float32)
    kept = np.sort(rng.permutation(G)[:n])
    rewards[kept] = rng.choice([0.3, 1.0, -2.0, 5.0], n)
    found = np.asarray(jitted(rewards))
    expected = np.zeros(G)
    if n >= fewest:
      length_weighted.kept = LENGTHS[kept]
      expected[kept] = jitted(rewards[kept])
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert (found[np.isnan(rewards)] == 0).all()
    if n > 1 and name not in ("vanilla", "oracle"):
      rewards[kept] = 0.1  # whose mean rounds
      assert (np.asarray(jitted(rewards)) == 0).all()


@pytest.mark.parametrize(
  "name", [*WITHIN_GROUPS, "batch_std", "shrinkage", "beta_binomial"]
)
def test_gradients_are_finite(name):
  f = WITHIN_GROUPS.get(name, (getattr(advantages, name, None),))[0]
  if name == "subsets":
    pytest.skip("its f has no gradient at 0")
  rewards = np.full((4, G), NAN, np.float32)
  rewards[0, 1:5], rewards[1, 2], rewards[2] = [1, 0, 0.5, 1], 1, 0.1
  jacobian = jax.jit(jax.jacobian(f))(rewards)
  assert np.isfinite(jacobian).all()


BY_NAME = advantages.ADVANTAGES | {
  name: f for name, (f, _) in WITHIN_GROUPS.items()
}


@pytest.mark.parametrize("name", BY_NAME)
def test_an_infinite_reward_is_none(name):
  """Bit for bit, with a finite gradient; in every group that has one."""
  rng, f = np.random.default_rng(3), BY_NAME[name]
  rewards = rng.choice([0.3, 1.0, 2.0], (5, G)).astype(np.float32)
  holes = rng.random((5, G)) < 0.3
  holes[0] = True
  holes[1], holes[4] = np.arange(G) == 2, False
  signs = np.where(rng.random((5, G)) < 0.5, np.inf, -np.inf)
  jitted = jax.jit(f)
  expected = np.asarray(jitted(np.where(holes, NAN, rewards)))
  for bad in (np.inf, -np.inf, signs):
    found = jitted(np.where(holes, bad, rewards).astype(np.float32))
    np.testing.assert_array_equal(found, expected)
  assert np.isfinite(expected).all() and (expected[holes] == 0).all()
  assert expected.any()
  if name != "subsets":  # whose f has no gradient at 0
    broken = np.where(holes, signs, rewards).astype(np.float32)
    jacobian = jax.jit(jax.jacobian(lambda z: f(z)))(broken)
    assert np.isfinite(jacobian).all()


def test_batch_std_is_over_what_has_rewards():
  rewards = jnp.array([[0.0, 2.0, NAN], [10.0, 16.0, NAN], [5.0, NAN, NAN]])
  found = advantages.batch_std(rewards)
  std = np.std([-1, 1, -3, 3, 0], ddof=1)
  expected = np.array([[-1, 1, 0], [-3, 3, 0], [0, 0, 0]]) / std
  np.testing.assert_allclose(found, expected, atol=1e-5)


def ragged(rng, sizes, draw):
  """Rewards [B, max] with nan in random places, and as a list of groups."""
  rewards = np.full((len(sizes), max(sizes)), NAN)
  for row, n in zip(rewards, sizes, strict=True):
    row[rng.permutation(len(row))[:n]] = draw(n)
  return rewards, [row[~np.isnan(row)] for row in rewards]


def test_shrinkage_is_its_formula():
  """Of groups of different sizes, as loops over everything left out."""
  rng = np.random.default_rng(1)
  for sizes in ([4, 2, 3, 4, 1, 0], [3, 3, 0, 1], [1, 4, 0], [4, 0, 0, 0]):
    rewards, groups = ragged(rng, sizes, lambda n: rng.normal(size=n) + n)
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
      weight, own = 1, 0
      if len(others):
        weight, own = 0, others.mean()
        if len(rest) > 1 and within:
          spread = np.var([g.mean() for g in rest], ddof=1)
          spread -= within * np.mean([1 / len(g) for g in rest])
          noise = within / len(others)
          weight = noise / (noise + max(spread, 0))
      expected[b, i] = rewards[b, i] - weight * pooled - (1 - weight) * own
    found = jax.jit(advantages.shrinkage)(jnp.asarray(rewards, jnp.float32))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_beta_binomial_is_the_posterior_mean():
  rng = np.random.default_rng(2)
  alpha, beta = baselines._ALPHA, baselines._BETA
  for sizes in ([4, 2, 3, 1, 0], [1, 0, 4]):
    draw = lambda n: rng.integers(0, 2, n)
    rewards, groups = ragged(rng, sizes, draw)
    expected = np.zeros_like(rewards)
    for b, i in np.argwhere(~np.isnan(rewards)):
      posterior = np.ones_like(alpha)
      for j, group in enumerate(groups):
        if j != b and len(group):
          counts = group.sum(), len(group)
          posterior *= scipy.stats.betabinom.pmf(*counts, alpha, beta)
      others = np.delete(rewards[b], i)
      others = others[~np.isnan(others)]
      if len(others):
        counts = others.sum(), len(others)
        posterior *= scipy.stats.betabinom.pmf(*counts, alpha, beta)
      rate = (alpha + others.sum()) / (alpha + beta + len(others))
      expected[b, i] = rewards[b, i] - posterior @ rate / posterior.sum()
    found = jax.jit(advantages.beta_binomial)(jnp.asarray(rewards, jnp.float32))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["shrinkage", "beta_binomial"])
def test_pooled_baselines_stay_unbiased(name):
  """Over all batches of prompts with 2, 1 and 2 rewards."""
  logits = np.array([[0.4, -0.3, 0.9], [0.0, 1.0, -0.5], [-0.6, 0.2, 0.1]])
  probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  scores = np.eye(3) - probability[:, None]
  values = np.array([[1.0, 0, 0], [1, 1, 0], [0, 0, 1]])
  rows, columns = np.array([0, 0, 1, 2, 2]), np.array([0, 1, 1, 0, 1])
  outcomes = np.array(list(itertools.product(range(3), repeat=5)))
  rewards = np.full((len(outcomes), 3, 2), NAN, np.float32)
  rewards[:, rows, columns] = values[rows, outcomes]
  weights = jax.jit(jax.vmap(getattr(advantages, name)))(jnp.asarray(rewards))
  chance = probability[rows, outcomes].prod(-1)
  each = np.einsum(
    "n,nk,nkd->kd", chance, weights[:, rows, columns], scores[rows, outcomes]
  )
  true = np.einsum("bo,bo,bod->bd", probability, values, scores)
  for b, n in enumerate((2, 1, 2)):
    mean = each[rows == b].sum(0) / n
    np.testing.assert_allclose(mean, true[b], atol=2e-6)
