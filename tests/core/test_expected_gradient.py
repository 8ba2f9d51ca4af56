"""The expected gradient of the loss, over all groups of a small policy.

The policy has three outputs of one or two tokens, so every group can be
enumerated, and the true policy gradient is known.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import advantages, losses, surrogates

TOKENS = np.array([[1, 0], [0, 1], [0, 0]])  # "end", "a end", "a a".
TOKEN_MASK = np.array([[True, False], [True, True], [True, True]])
REWARDS = np.array([0.3, 1.0, -0.5], np.float32)
THETA = jnp.array([[0.4, -0.3], [-0.8, 0.5]])


def token_logprobs(theta):
  return jax.nn.log_softmax(theta, -1)[jnp.arange(2), TOKENS]


def probabilities(theta):
  return jnp.exp(jnp.where(TOKEN_MASK, token_logprobs(theta), 0.0).sum(-1))


def expected_gradient(advantage, group_size):
  """E[-grad loss] over all 3^G groups."""
  groups = jnp.array(list(itertools.product(range(3), repeat=group_size)))
  group_probability = probabilities(THETA)[groups].prod(-1)

  def objective(theta):
    def one(group):
      mask = jnp.asarray(TOKEN_MASK)[group][None]
      return losses.grpo_loss(
        token_logprobs(theta)[group][None],
        advantage(jnp.asarray(REWARDS)[group][None]),
        losses.fixed_length(mask, 1),
        mask,
      )[0]

    return -group_probability @ jax.vmap(one)(groups)

  return jax.jit(jax.grad(objective))(THETA)


@functools.cache
def true_gradient():
  return jax.jit(jax.grad(lambda theta: probabilities(theta) @ REWARDS))(THETA)


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize(
  "name", ["vanilla", "oracle", "leave_one_out", "dr_grpo"]
)
def test_expected_gradient_is_the_policy_gradient(name, group_size):
  if name == "oracle":
    value = probabilities(THETA) @ REWARDS

    def advantage(rewards):
      return advantages.oracle(rewards, value[None])
  else:
    advantage = getattr(advantages, name)
  factor = (group_size - 1) / group_size if name == "dr_grpo" else 1.0
  np.testing.assert_allclose(
    expected_gradient(advantage, group_size),
    factor * true_gradient(),
    atol=1e-6,
  )


def test_expected_gradient_of_grpo_is_another():
  gradient = expected_gradient(advantages.grpo, 3)
  truth = true_gradient()
  parallel = jnp.vdot(gradient, truth) / jnp.vdot(truth, truth) * truth
  assert jnp.abs(gradient - parallel).max() > 1e-3


def test_expected_gradient_off_policy():
  """Sequence importance weights, unclipped: one token, so both ratios do."""
  theta, old = jnp.array([0.3, -0.7, 1.1]), jnp.array([0.6, -0.2, 0.5])

  def column(x):
    return jax.nn.log_softmax(x)[:, None, None]

  def loss(theta, ratio):
    return losses.grpo_loss(
      column(theta),
      jnp.asarray(REWARDS)[:, None],
      jnp.exp(column(old)),
      jnp.ones((3, 1, 1), bool),
      column(old),
      ratio=ratio,
      clip_low=1.0,
      clip_high=float("inf"),
    )[0]

  expected = jax.jit(jax.grad(lambda x: jax.nn.softmax(x) @ REWARDS))(theta)
  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  for ratio in (surrogates.token_ratio, surrogates.sequence_ratio):
    np.testing.assert_allclose(gradient(theta, ratio), -expected, atol=1e-6)
