"""Against the enumeration of all groups of a small softmax policy, float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from grpojax.core import advantages
from grpojax.statistics import u_statistics as u

M = 4  # completions that exist
THETA = np.array([0.3, -0.7, 1.1, 0.2])
FEATURES = np.random.default_rng(0).normal(size=(M, 3))
REWARDS = np.array([1.0, 0.0, 0.4, 2.0])


pytestmark = pytest.mark.usefixtures("float64")


def population():
  """Probabilities, scores with respect to 3 shared features, and rewards."""
  p = np.exp(THETA) / np.exp(THETA).sum()
  return p, FEATURES - p @ FEATURES, REWARDS


def groups(group_size):
  """Scores and rewards of every group that can be drawn, and probabilities."""
  p, s, z = population()
  index = np.array(list(itertools.product(range(M), repeat=group_size)))
  return s[index], z[index], p[index].prod(-1)


def estimates(group_size):
  """All estimators of all groups: gradients, probabilities, and the truth."""
  p, s, z = population()
  scores, rewards, weight = groups(group_size)
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


@pytest.mark.parametrize("group_size", [2, 4])
def test_leave_one_out_is_the_u_statistic(group_size):
  """A mean over all pairs of h(i, j) = (s_i - s_j)(Z_i - Z_j) / 2 (Lemma 1)."""
  p, s, z = population()
  first, second = np.array(list(itertools.combinations(range(group_size), 2))).T
  scores, rewards, weight = groups(group_size)
  differences = rewards[:, first] - rewards[:, second]
  kernels = (scores[:, first] - scores[:, second]) * differences[..., None] / 2
  weights = advantages.leave_one_out(jnp.asarray(rewards))
  result = np.einsum("ng,ngd->nd", weights, scores) / group_size
  assert_allclose(result, kernels.mean(1), atol=1e-12)
  assert_allclose(weight @ result, (p * z) @ s, atol=1e-12)


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_errors_and_covariances_equal_enumeration(group_size):
  result, weight, truth = estimates(group_size)
  mse = jax.jit(lambda *x: u.mse(u.moments(*x), group_size))(*population())
  covariance = jax.jit(u.covariance, static_argnums=3)
  covariance = covariance(*population(), group_size)
  for name in u.Estimators._fields:
    x = getattr(result, name)
    error = weight @ ((x - truth) ** 2).sum(-1)
    assert_allclose(getattr(mse, name), error, rtol=0, atol=1e-10)
    x = x - weight @ x
    expected = np.einsum("n,nd,ne->de", weight, x, x)
    assert_allclose(getattr(covariance, name), expected, atol=1e-10)


@pytest.mark.slow
def test_policy_gradient_is_the_derivative_of_the_value():
  def value(shift):  # theta + features @ shift
    p = jax.nn.softmax(jnp.asarray(THETA) + jnp.asarray(FEATURES) @ shift)
    return p @ jnp.asarray(REWARDS)

  gradient = u.policy_gradient(*map(jnp.asarray, population()))
  expected = jax.grad(value)(jnp.zeros(3))
  assert_allclose(gradient, expected, atol=1e-12)


def test_groups_of_one_are_refused():
  p, s, z = map(jnp.asarray, population())
  with pytest.raises(ValueError, match="2 or more, not 1"):
    u.mse(u.moments(p, s, z), 1)
