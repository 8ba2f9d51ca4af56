"""Against the enumeration of all groups of a small softmax policy, float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import advantages
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


@pytest.mark.parametrize("group_size", [2, 4])
def test_leave_one_out_is_the_u_statistic(group_size):
  """A mean over all pairs of h(i, j) = (s_i - s_j)(Z_i - Z_j) / 2 (Lemma 1)."""
  p, s, z = population()
  index, weight = groups(group_size, p)
  first, second = np.array(list(itertools.combinations(range(group_size), 2))).T
  scores, rewards = s[index], z[index]
  differences = rewards[:, first] - rewards[:, second]
  kernels = (scores[:, first] - scores[:, second]) * differences[..., None] / 2
  weights = advantages.leave_one_out(jnp.asarray(rewards))
  found = np.einsum("ng,ngd->nd", weights, scores) / group_size
  np.testing.assert_allclose(found, kernels.mean(1), atol=1e-12)
  np.testing.assert_allclose(weight @ found, (p * z) @ s, atol=1e-12)


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


@pytest.mark.slow
def test_policy_gradient_is_the_derivative_of_the_value():
  def value(shift):  # theta + features @ shift
    p = jax.nn.softmax(jnp.asarray(THETA) + jnp.asarray(FEATURES) @ shift)
    return p @ jnp.asarray(REWARDS)

  gradient = u.policy_gradient(*map(jnp.asarray, population()))
  np.testing.assert_allclose(
    gradient, jax.grad(value)(jnp.zeros(3)), atol=1e-12
  )


def test_groups_of_one_are_refused():
  p, s, z = map(jnp.asarray, population())
  with pytest.raises(ValueError, match="2 or more, not 1"):
    u.mse(u.moments(p, s, z), 1)
