"""Pooled and weighted baselines: unbiased by enumeration, and better.

Every batch of a few small policies is enumerated, in float64, since what is
pooled depends on all its prompts.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from grpojax.core import advantages, baselines
from grpojax.core.baselines import beta_binomial, shrinkage
from grpojax.core.weighted_baselines import length_weighted

enable_x64 = getattr(jax, "enable_x64", None)
if enable_x64 is None:
  from jax.experimental import enable_x64

# Three prompts, three outcomes each.
LOGITS = np.array([[0.4, -0.3, 0.9], [0.0, 1.0, -0.5], [-0.6, 0.2, 0.1]])
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
SCORES = np.eye(3) - PROBABILITIES[:, None]  # with respect to the logits
BINARY = np.array([[1.0, 0, 0], [1, 1, 0], [0, 0, 1]])
REALS = np.array([[0.3, 1.5, -0.5], [2.0, 0.1, 0.1], [0.6, 0.2, 0.9]])


def expected_estimators(advantage, rewards, group_size):
  """E (1/G) sum_i s_{b,i} A_{b,i} of each prompt b, over all batches."""
  prompts = len(rewards)
  batches = list(itertools.product(range(3), repeat=prompts * group_size))
  batches = np.array(batches).reshape(-1, prompts, group_size)
  rows = np.arange(prompts)[:, None]
  probability = PROBABILITIES[rows, batches].prod((1, 2))
  z = jnp.asarray(rewards[rows, batches])
  weights = np.asarray(jax.jit(jax.vmap(advantage))(z))
  assert weights.dtype == np.float64
  scores = SCORES[rows, batches]
  total = np.einsum("n,nbg,nbgd->bd", probability, weights, scores)
  return total / group_size


def true_gradients(rewards):
  """Of each prompt's value, by automatic differentiation."""
  rewards, logits = jnp.asarray(rewards), jnp.asarray(LOGITS[: len(rewards)])
  value = lambda x: jnp.sum(jax.nn.softmax(x) * rewards)
  return jax.jit(jax.grad(value))(logits)


@pytest.mark.parametrize("name", ["shrinkage", "beta_binomial"])
@pytest.mark.parametrize("rewards", [BINARY, REALS], ids=["binary", "reals"])
def test_pooled_baselines_are_unbiased(name, rewards):
  with enable_x64(True):
    truth = true_gradients(rewards)
    found = expected_estimators(getattr(baselines, name), rewards, 2)
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("group_size", [2, 4])
def test_beta_binomial_of_a_single_prompt_is_unbiased(group_size):
  with enable_x64(True):
    found = expected_estimators(beta_binomial, BINARY[:1], group_size)
    truth = true_gradients(BINARY[:1])
    np.testing.assert_allclose(found, truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("lengths", [[3, 1, 8], [0, 5, 0], [0, 0, 0]])
def test_length_weighted_is_unbiased(lengths):
  lengths = np.array(lengths)
  with enable_x64(True):
    truth = true_gradients(REALS[:1])
    for group_size in (2, 4):
      groups = np.array(list(itertools.product(range(3), repeat=group_size)))
      weights = jax.jit(length_weighted)(
        jnp.asarray(REALS[0][groups]), jnp.asarray(lengths[groups])
      )
      total = np.einsum(
        "n,ng,ngd->d",
        PROBABILITIES[0][groups].prod(-1),
        np.asarray(weights),
        SCORES[0][groups],
      )
      found = total / group_size
      np.testing.assert_allclose(found, truth[0], rtol=0, atol=1e-10)


# Against their formulas, as loops over everything left out.


def test_shrinkage_is_its_formula():
  rng = np.random.default_rng(0)
  mild = rng.normal(size=(6, 1)) + rng.normal(size=(6, 4))
  alike = rng.normal(size=(6, 4))  # t2 = 0 for some
  binary = (rng.random((9, 3)) < rng.random((9, 1))).astype(float)
  outliers = [mild + 1e4 * (np.arange(6) == b)[:, None] for b in (0, 2)]
  seen = []
  for rewards in (mild, alike, binary, *outliers):
    prompts, group_size = rewards.shape
    truth = np.empty_like(rewards)
    for b, i in np.ndindex(prompts, group_size):
      rest = np.delete(rewards, b, 0)
      within = rest.var(-1, ddof=1).mean()
      between = rest.mean(-1).var(ddof=1) - within / group_size
      noise = within / (group_size - 1)
      weight = noise / (noise + max(between, 0))
      seen.append(weight)
      own = np.delete(rewards[b], i).mean()
      truth[b, i] = rewards[b, i] - (1 - weight) * own - weight * rest.mean()
    with enable_x64(True):
      found = jax.jit(shrinkage)(jnp.asarray(rewards))
    np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-9)
    found = jax.jit(shrinkage)(jnp.asarray(rewards, jnp.float32))
    # An outlier leaves the other prompts alone, and float32 its digits.
    scale = 1 + np.abs(truth).max(-1, keepdims=True)
    worst = np.max(np.abs(found - truth) / scale)
    assert worst < 1e-2 if rewards.max() > 1e3 else worst < 1e-5
  assert max(seen) == 1 and min(seen) < 0.5


def test_beta_binomial_is_the_posterior_mean():
  """With scipy's distribution, over the same grid."""
  rewards = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]])
  alpha, beta = baselines._ALPHA, baselines._BETA
  truth = np.empty(rewards.shape)
  for b, i in np.ndindex(*rewards.shape):
    posterior = np.ones_like(alpha)
    for count in np.delete(rewards, b, 0).sum(-1):
      posterior *= scipy.stats.betabinom.pmf(count, 3, alpha, beta)
    count = np.delete(rewards[b], i).sum()
    posterior *= scipy.stats.betabinom.pmf(count, 2, alpha, beta)
    rate = (alpha + count) / (alpha + beta + 2)
    truth[b, i] = rewards[b, i] - posterior @ rate / posterior.sum()
  with enable_x64(True):
    found = jax.jit(beta_binomial)(jnp.asarray(rewards, float))
    np.testing.assert_allclose(found, truth, atol=1e-10)
  np.testing.assert_allclose(
    jax.jit(beta_binomial)(jnp.asarray(rewards, bool)), truth, atol=1e-4
  )
  # Rewards outside [0, 1] are clipped in the baseline only.
  wild = rewards + 5 * (rewards == 1)
  np.testing.assert_allclose(
    jax.jit(beta_binomial)(jnp.asarray(wild, jnp.float32)),
    truth + wild - rewards,
    atol=1e-4,
  )


def test_beta_binomial_learns_the_prior():
  """From many prompts; then its baseline is that prior's posterior mean."""
  f, rng = jax.jit(beta_binomial), np.random.default_rng(1)
  for alpha, beta in ((2.0, 3.0), (0.2, 0.4), (60.0, 20.0)):
    rates = rng.beta(alpha, beta, (3000, 1))
    rewards = (rng.random((3000, 4)) < rates).astype(np.float32)
    others = rewards.sum(-1, keepdims=True) - rewards
    expected = (alpha + others) / (alpha + beta + 3)
    found = rewards - np.asarray(f(jnp.asarray(rewards)))
    far = np.mean((others / 3 - expected) ** 2)
    assert np.mean((found - expected) ** 2) < 0.1 * far


def test_length_weighted_is_its_formula():
  rng = np.random.default_rng(2)
  rewards = rng.normal(size=(3, 5))
  lengths = rng.integers(1, 100, (3, 5))
  lengths[1] = [0, 0, 7, 0, 0]
  lengths[2] = [1, 1, 1, 1, 10**6]  # leaves no rounding behind in the others
  truth = np.empty_like(rewards)
  for b, i in np.ndindex(3, 5):
    z, weight = np.delete(rewards[b], i), np.delete(lengths[b], i)
    if not weight.any():
      weight = np.ones(4)
    truth[b, i] = rewards[b, i] - np.average(z, weights=weight)
  found = jax.jit(length_weighted)(
    jnp.asarray(rewards, jnp.float32), jnp.asarray(lengths)
  )
  np.testing.assert_allclose(found, truth, atol=3e-6)


@pytest.mark.parametrize(
  "group_size, alpha, beta", [(2, 2.0, 3.0), (3, 0.5, 1.0), (4, 5.0, 1.0)]
)
def test_pooling_brings_the_baseline_closer_to_the_value(
  group_size, alpha, beta
):
  """Mean squared error of the baseline: 200 batches of 32 prompts."""
  rng = np.random.default_rng(3)
  rates = rng.beta(alpha, beta, (200, 32, 1))
  rewards = (rng.random((200, 32, group_size)) < rates).astype(np.float32)

  def errors(advantage):
    found = jax.jit(jax.vmap(advantage))(jnp.asarray(rewards))
    return ((rewards - np.asarray(found) - rates) ** 2).mean((1, 2))

  plain = errors(advantages.leave_one_out)
  # What the leave-one-out mean should cost: E[p (1 - p)] / (G - 1).
  variance = alpha * beta / (alpha + beta) / (alpha + beta + 1)
  assert plain.mean() == pytest.approx(variance / (group_size - 1), rel=0.05)
  for pooled in (shrinkage, beta_binomial):
    gain = plain - errors(pooled)
    assert gain.mean() > 5 * gain.std() / math.sqrt(len(gain)), pooled


def test_length_weighting_lowers_the_variance_where_length_is_information():
  """Scores of length l are sums of l unit vectors: ||s||^2 is l."""
  rng = np.random.default_rng(4)
  lengths = np.where(rng.random((4000, 8)) < 0.5, 2, 60)
  rewards = (lengths == 60) * 1.0 + rng.normal(size=lengths.shape)
  z, lengths = (jnp.asarray(x, jnp.float32) for x in (rewards, lengths))

  def variance(weights):
    return float(jnp.mean(lengths * weights**2))

  weighted = variance(length_weighted(z, lengths))
  assert weighted < 0.95 * variance(advantages.leave_one_out(z))


EVERY = {
  "shrinkage": shrinkage,
  "beta_binomial": beta_binomial,
  "length_weighted": lambda z: length_weighted(
    z, jnp.broadcast_to(jnp.arange(z.shape[-1]), z.shape)
  ),
}


@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_finite_and_equal_rewards(name):
  f = jax.jit(EVERY[name])
  jacobian = jax.jit(jax.jacobian(EVERY[name]))
  for value in (0.0, 0.1, 1 / 3, -7.7, 1e6 + 0.3):
    equal = jnp.full((4, 3), value)
    found = f(equal)
    if name == "beta_binomial":
      assert jnp.isfinite(found).all()
    else:
      assert (found == 0).all()
    for rewards in (equal, equal.at[1, 2].set(1.0)):
      assert jnp.isfinite(jacobian(rewards)).all()


def test_equal_groups_in_a_batch_that_varies():
  """What pooling is for; and where nothing can be pooled, w = 0."""
  rewards = jnp.array([[1.0, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 1]])
  for f in (shrinkage, beta_binomial):
    found = np.asarray(jax.jit(f)(rewards))
    assert (found[0] > 0.01).all() and (found[2] < -0.01).all()
  lengths = jnp.ones_like(rewards)
  found = np.asarray(jax.jit(length_weighted)(rewards, lengths))
  assert (found[[0, 2]] == 0).all()
  # Of the first prompt's others none varies within its group.
  rewards = jnp.array([[0.0, 1, 1], [0, 0, 0], [1, 1, 1]])
  expected = advantages.leave_one_out(rewards)[0]
  np.testing.assert_allclose(
    jax.jit(shrinkage)(rewards)[0], expected, atol=1e-6
  )


@pytest.mark.parametrize("name", EVERY)
def test_axes_transforms_and_dtypes(name):
  """All axes but the last are prompts of one batch; vmap has many batches."""
  f = jax.jit(EVERY[name])
  rewards = jax.random.bernoulli(jax.random.key(0), 0.4, (2, 3, 4))
  flat = f(rewards.reshape(6, 4))
  assert flat.dtype == jnp.float32 and jnp.abs(flat).max() > 0.1
  np.testing.assert_allclose(f(rewards).reshape(6, 4), flat, atol=1e-6)
  each = jnp.stack([f(batch) for batch in rewards])
  np.testing.assert_allclose(jax.jit(jax.vmap(f))(rewards), each, atol=1e-5)
  np.testing.assert_allclose(
    f(rewards.astype("bfloat16")), f(rewards), atol=1e-6
  )
  assert jnp.abs(each - f(rewards)).max() > 0.01 or name == "length_weighted"


@pytest.mark.parametrize("name", EVERY)
def test_a_group_of_one_is_refused(name):
  with pytest.raises(ValueError, match=f"{name} needs .* G >= 2"):
    EVERY[name](jnp.ones((5, 1)))


def test_shapes_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match="at least 3 prompts, not 2"):
    shrinkage(jnp.ones((2, 4)))
  # Without the run-time annotation checks, which only tests have.
  bare = getattr(length_weighted, "__wrapped__", length_weighted)
  with pytest.raises(ValueError, match="lengths of the same shape"):
    bare(jnp.ones((2, 4)), jnp.ones((2, 3)))
