"""Dynamic sampling does not bias the gradient, over all possible draws."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import advantages, dynamic_sampling
from grpojax.core.binding import bind
from grpojax.core.group_axis import varies
from grpojax.core.types import Rollout

G = 3
PROMPTS = np.array([0.5, 0.3, 0.2])  # probability of each
POLICY = np.array([[0.2, 0.5, 0.3], [0.05, 0.9, 0.05], [0.6, 0.3, 0.1]])
REWARDS = np.array([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
LENGTHS = np.array([1, 2, 4])
GROUPS = np.array(list(itertools.product(range(3), repeat=G)))


def all_groups(name):
  """Probability, whether rewards vary, and U of all 27 groups per prompt."""
  advantage = bind(advantages.ADVANTAGES[name], k=2)

  @jax.jit
  @jax.vmap
  def alone(rewards, lengths, unsure):
    offered = {"lengths": lengths[None], "logit_score_sq": unsure[None]}
    offered["token_score_sq"] = unsure[None, :, None]
    offered["sampled"] = jnp.ones((1, *rewards.shape, 1), bool)
    return bind(advantage, **offered)(rewards[None]).reshape(rewards.shape)

  probability = []
  varied = []
  estimates = []
  for x, (often, policy) in enumerate(zip(PROMPTS, POLICY, strict=True)):
    rewards = REWARDS[x][GROUPS].astype(np.float32)
    arrays = rewards, LENGTHS[GROUPS], 1 - policy[GROUPS]
    weights = np.asarray(alone(*arrays), np.float64)
    scores = np.eye(3)[GROUPS] - policy
    table = np.zeros((len(GROUPS), 3, 3))
    table[:, x] = np.mean(weights[..., None] * scores, axis=1)
    probability.append(often * policy[GROUPS].prod(-1))
    varied.append(varies(rewards))
    estimates.append(table)
  return map(np.array, (probability, varied, estimates))


def mean(probability, estimates):
  return np.einsum("xg,xgij->ij", probability, estimates)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", [x for x in advantages.WITHIN_GROUPS if x != "batch_std"]
)
def test_the_kept_groups_have_the_gradient_of_all(name):
  probability, varied, estimates = all_groups(name)
  whole = mean(probability, estimates)
  acceptance = np.sum(probability, where=varied)
  taken = np.where(varied, probability, 0) / acceptance
  assert np.abs(whole).max() > 0.01 and acceptance < 0.6
  actual = acceptance * mean(taken, estimates)
  np.testing.assert_allclose(actual, whole, atol=1e-7)


def test_batch_std_is_scaled_by_the_root_of_the_acceptance():
  """For a large batch, which has the distribution's deviation."""
  probability, varied, estimates = all_groups("dr_grpo")
  acceptance = np.sum(probability, where=varied)
  taken = np.where(varied, probability, 0) / acceptance
  variances = np.var(np.stack([z[GROUPS] for z in REWARDS]), axis=-1)
  whole, actual = (
    mean(p, estimates) / np.sqrt(np.sum(p * variances))
    for p in (probability, taken)
  )
  scale = dynamic_sampling.batch_std_scale(acceptance, 8, 8, G)
  np.testing.assert_allclose(scale * actual, whole, atol=1e-7)
  assert scale == pytest.approx(np.sqrt(acceptance)) and acceptance < 0.6


@pytest.mark.parametrize("draw", [1, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_the_rescaled_gradient_is_unbiased_whatever_the_limit(size, draw):
  """Two prompts and groups of 2, which are equal or vary in a single way."""
  limit = 6
  often = np.array([0.7, 0.3])
  rate = np.array([0.9, 0.5])
  varied = 2 * often * rate * (1 - rate)
  probability = np.array([1 - varied.sum(), *varied])
  # Leave-one-out of rewards 1 and 0: (s_1 - s_0) / 2, by the own logit.
  estimates = np.array([[0.0, 0.0], [0.5, 0.0], [0.0, 0.5]])
  truth = often * rate * (1 - rate)  # the gradient of V
  actual = np.zeros(2)
  accepted = 0.0
  share = 0.0
  for drawn in itertools.product(range(3), repeat=limit):
    chance = probability[list(drawn)].prod()
    drawn = np.array(drawn)
    ends = range(draw, limit + 1, draw)
    end = next((n for n in ends if (drawn[:n] > 0).sum() >= size), limit)
    drawn = drawn[:end]
    taken = drawn[drawn > 0][:size]
    estimate = dynamic_sampling.acceptance(drawn > 0, size)
    accepted += chance * estimate
    share += chance * len(taken) / end
    if len(taken):
      actual += chance * estimate * estimates[taken].mean(0)
  np.testing.assert_allclose(actual, truth, rtol=1e-12)
  np.testing.assert_allclose(accepted, varied.sum(), rtol=1e-12)
  if draw == 1:
    assert share > 1.05 * varied.sum()  # the plain share is biased


def samples(ids, prompt_length):
  """A rollout whose arrays are derived from its prompts' ids."""
  ids = jnp.asarray(ids)
  prompts = jnp.broadcast_to(ids[:, None], (len(ids), prompt_length))
  each = jnp.broadcast_to(ids[:, None, None], (len(ids), 2, 4))
  arrays = each, each > 0, each / 7.0, each[..., 0] > 2
  experts = {"experts": each[..., None], "prompt_experts": prompts[..., None]}
  return Rollout(prompts, prompts > 0, *arrays, **experts)


@pytest.mark.parametrize("lengths", [(3, 3), (3, 2), (2, 3)])
def test_groups_are_replaced_whole(lengths):
  batch = samples([1, 2, 3], lengths[0])
  drawn = samples([4, 5], lengths[1])
  source = jnp.array([-1, 1, 0])
  actual = jax.jit(dynamic_sampling.replace_groups)(batch, drawn, source)
  lengths = np.array([lengths[0], lengths[1], lengths[1]])[:, None]
  mask = np.arange(3) < lengths
  ids = np.array([[1], [5], [4]]) * mask
  prompts = {"prompt_ids": ids, "prompt_experts": ids[..., None]}
  expected = samples([1, 5, 4], 3).replace(prompt_mask=mask, **prompts)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)
