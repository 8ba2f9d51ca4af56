"""Gradients with truncated completions, over all groups of a policy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import losses
from grpojax.core.batch import make_batch
from grpojax.core.losses.truncation import TRUNCATED
from grpojax.core.objective import Objective
from grpojax.core.types import Rollout

IDS = np.array([[0, 0], [1, 0], [1, 1], [2, 0], [2, 1]])  # 0 is the end
MASK = np.array([[1, 0], [1, 1], [1, 1], [1, 1], [1, 1]], bool)
ENDS = np.array([1, 1, 0, 1, 0], bool)
REWARDS = np.array([0.3, 1.0, 0.1, -0.5, 0.2], np.float32)
G = 3


def logprobs(table, ids=IDS):
  """Log-probabilities; after the first token only 0 and 1 may follow."""
  first = jax.nn.log_softmax(table[0, :3])[ids[..., 0]]
  second = jax.nn.log_softmax(table[1:3, :2], -1)
  follows = second[np.maximum(ids[..., 0] - 1, 0), np.minimum(ids[..., 1], 1)]
  return jnp.stack([first, follows], -1)


def probabilities(table):
  return jnp.exp(jnp.where(MASK, logprobs(table), 0).sum(-1))


def batch_of(tabular, group, truncated="keep"):
  """Batch of groups of the completions with these numbers."""
  lm = tabular.lm(1, 3)
  shape = (len(group), 1)
  prompts = jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool)
  ids, mask, ends = (jnp.asarray(x[group]) for x in (IDS, MASK, ENDS))
  rollout = Rollout(*prompts, ids, mask, jnp.zeros(ids.shape), ends)
  objective = Objective(truncated=truncated)
  return make_batch(lm, rollout, jnp.asarray(REWARDS[group]), objective)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUNCATED)
def test_expected_gradients_equal_the_module_table(tabular, name):
  table = jax.random.normal(jax.random.key(0), (3, 3))
  groups = np.array(list(itertools.product(range(len(IDS)), repeat=G)))
  batch = batch_of(tabular, groups, truncated=name)

  def objective(x):
    share = jax.lax.stop_gradient(probabilities(x))[groups].prod(-1)
    weights = share[:, None, None] / G * batch.completion_mask
    args = batch.advantages, weights, batch.completion_mask
    return -losses.grpo_loss(logprobs(x)[groups], *args)[0]

  p = lambda x: probabilities(x) @ ENDS
  value = lambda x: probabilities(x) @ REWARDS
  ended_value = lambda x: probabilities(x) @ (REWARDS * ENDS)
  another = 1 - (1 - p(table)) ** (G - 1)
  expected = {
    "keep": value,
    "mask": lambda x: ended_value(x) - value(table) * p(x),
    "drop": lambda x: p(table) * another * ended_value(x) / p(x),
  }
  result = jax.jit(jax.grad(objective))(table)
  truths = {k: jax.jit(jax.grad(f))(table) for k, f in expected.items()}
  np.testing.assert_allclose(result, truths[name], atol=1e-6)
  for other in truths.keys() - {name}:
    assert np.abs(truths[name] - truths[other]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("weighting", losses.WEIGHTINGS)
def test_token_weights_count_only_completions_in_the_loss(tabular, weighting):
  group = np.array([[0, 2, 1], [2, 4, 2]])  # all of the second are cut off
  weigh = {"fixed_length": lambda mask: losses.fixed_length(mask, 4)}
  weigh = weigh.get(weighting, losses.WEIGHTINGS[weighting])
  left = batch_of(tabular, np.array([[0, 1]])).completion_mask
  for name in ("mask", "drop"):
    batch = batch_of(tabular, group, truncated=name)
    weights = np.asarray(weigh(batch.completion_mask))
    np.testing.assert_allclose(weights[:1, [0, 2]], weigh(left), rtol=1e-6)
    assert not weights[0, 1].any() and not weights[1].any()
