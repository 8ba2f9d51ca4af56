"""Against the enumeration of all groups of a small softmax policy, float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.statistics import u_statistics as u

M = 4  # completions that exist
THETA = np.array([0.3, -0.7, 1.1, 0.2])
FEATURES = np.random.default_rng(0).normal(size=(M, 3))
REWARDS = np.array([1.0, 0.0, 0.4, 2.0])


pytestmark = pytest.mark.usefixtures("float64")


def population(theta=THETA):
  """Probabilities, scores with respect to 3 shared features, and rewards."""
  p = np.exp(theta) / np.exp(theta).sum()
  return p, FEATURES - p @ FEATURES, REWARDS


def groups(group_size, p):
  """Indices of every group that can be drawn, and its probability."""
  index = np.array(list(itertools.product(range(M), repeat=group_size)))
  return index, p[index].prod(-1)


def estimates(group_size):
  """All estimators of all groups: gradients, probabilities, and the truth."""
  p, s, z = population()
  index, weight = groups(group_size, p)
  scores, rewards = s[index], z[index]
  mean = rewards.mean(-1, keepdims=True)
  others = (rewards.sum(-1, keepdims=True) - rewards) / (group_size - 1)

  def gradient(advantages):
    return np.einsum("ng,ngd->nd", advantages, scores) / group_size

  all_of_them = u.Estimators(
    vanilla=gradient(rewards),
    leave_one_out=gradient(rewards - others),
    centred=gradient(rewards - mean),
    oracle=gradient(rewards - p @ z),
  )
  return all_of_them, weight, (p * z) @ s


@pytest.mark.parametrize("group_size", [2, 3, 4, 5])
def test_kernel_form_equals_leave_one_out_form(group_size):
  p, s, z = population()
  index, weight = groups(group_size, p)
  pairs = jax.jit(u.kernel_gradient)(s[index], z[index])
  loo = jax.jit(u.leave_one_out_gradient)(s[index], z[index])
  expected, _, truth = estimates(group_size)
  np.testing.assert_allclose(pairs, expected.leave_one_out, atol=1e-12)
  np.testing.assert_allclose(loo, expected.leave_one_out, atol=1e-12)
  np.testing.assert_allclose(weight @ pairs, truth, atol=1e-12)


@pytest.mark.parametrize("missing", [np.nan, np.inf, -np.inf])
def test_a_sample_without_a_reward_is_left_out(missing):
  _, s, z = population()
  index, kept = np.array([0, 1, 2, 1]), np.array([0, 1, 3])
  rewards = np.where(np.arange(4) == 2, missing, z[index])
  for gradient in map(jax.jit, (u.kernel_gradient, u.leave_one_out_gradient)):
    found = gradient(s[index], rewards)
    expected = gradient(s[index[kept]], rewards[kept])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_mse_equals_enumeration(group_size):
  found, weight, truth = estimates(group_size)
  exact = jax.jit(lambda *x: u.mse(u.moments(*x), group_size))(*population())
  for name in u.Estimators._fields:
    error = ((getattr(found, name) - truth) ** 2).sum(-1)
    np.testing.assert_allclose(
      getattr(exact, name), weight @ error, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_covariance_equals_enumeration(group_size):
  found, weight, _ = estimates(group_size)
  exact = jax.jit(lambda *x: u.covariance(*x, group_size))(*population())
  for name in u.Estimators._fields:
    x = getattr(found, name)
    x = x - weight @ x
    expected = np.einsum("n,nd,ne->de", weight, x, x)
    np.testing.assert_allclose(getattr(exact, name), expected, atol=1e-10)


@pytest.mark.parametrize("group_size", [2, 4])
def test_hoeffding_terms_add_up_and_are_uncorrelated(group_size):
  p, s, z = population()
  index, weight = groups(group_size, p)
  truth, value = (p * z) @ s, p @ z
  n = len(index)
  first, second = jax.jit(u.hoeffding)(
    s[index], z[index], np.broadcast_to(truth, (n, 3)), np.full(n, value)
  )
  i, j = np.triu_indices(group_size, 1)
  linear = 2 * first.mean(1)
  pairs = second[:, i, j].mean(1)
  found, _, _ = estimates(group_size)
  np.testing.assert_allclose(
    truth + linear + pairs, found.leave_one_out, atol=1e-12
  )
  np.testing.assert_allclose(truth + linear, found.oracle, atol=1e-12)
  covariance = np.einsum("n,nd,ne->de", weight, linear, pairs)
  np.testing.assert_allclose(covariance, 0, atol=1e-12)
  # A pair's remainder has mean 0 given either of the two samples.
  for k in range(M):
    rows = index[:, 0] == k
    mean = weight[rows] @ second[rows, 0, 1]
    np.testing.assert_allclose(mean, 0, atol=1e-12)


def test_policy_gradient_is_the_derivative_of_the_value():
  def value(shift):  # theta + features @ shift
    p = jax.nn.softmax(jnp.asarray(THETA) + jnp.asarray(FEATURES) @ shift)
    return p @ jnp.asarray(REWARDS)

  gradient = u.policy_gradient(*map(jnp.asarray, population()))
  np.testing.assert_allclose(
    gradient, jax.grad(value)(jnp.zeros(3)), atol=1e-12
  )


def test_several_prompts_at_once():
  p, s, z = (np.stack([a, a[::-1]]) for a in population())
  both = u.moments(jnp.asarray(p), jnp.asarray(s), jnp.asarray(z))
  one = u.moments(*map(jnp.asarray, population()))
  for name in u.Moments._fields:
    np.testing.assert_allclose(
      getattr(both, name), np.repeat(getattr(one, name), 2), rtol=1e-12
    )


def test_groups_of_one_are_refused():
  p, s, z = map(jnp.asarray, population())
  with pytest.raises(ValueError, match="2 or more, not 1"):
    u.mse(u.moments(p, s, z), 1)
  with pytest.raises(ValueError, match="2 or more, not 1"):
    u.covariance(p, s, z, 1)
  with pytest.raises(ValueError, match="2 or more, not 1"):
    u.kernel_gradient(s[:1], z[:1])
