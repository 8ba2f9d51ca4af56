"""The penalty on lengths, by hand; test_reward_inputs.py has it in a run."""

import types

import numpy as np
import pytest

from grpojax.core.types import TrainState
from grpojax.rewards.pool import GroupRewards
from grpojax.training.step.draws import Draw
from grpojax.training.step.extension import Context, Drawn, Inputs
from grpojax.training.step.extensions import length_penalty
from grpojax.training.step.scoring import RewardPool


def test_all_rewards_of_a_draw_have_the_penalty(settings_with, samples_of):
  """Also those of the metrics by data set and of rewards.jsonl."""
  right = np.array([[1, 1, np.nan], [0, 0.9, 0]])
  rewarded = np.float32([[1, np.nan, 0.5], [0, 0, 2]])
  lengths = np.array([[1, 4, 2], [3, 0, 4]])
  settings = settings_with(
    reward__length_penalty=0.3, sampling__max_new_tokens=4
  )
  pool = RewardPool(types.SimpleNamespace(names=["judge"]))
  inputs = Inputs(settings, None, None, None, None, reward_pool=pool)
  rewards = GroupRewards(
    rewarded, {"judge": right}, np.isnan(rewarded), [[[]] * 3]
  )
  samples = samples_of(np.arange(4) < lengths[..., None])
  draw = Draw(samples, rewards, [{}, {}])
  drawn = Drawn(draw, rewards, draw.examples, None)
  extension = length_penalty.extension(inputs)
  state = TrainState(*[None] * 6)
  new = extension.after_draw(state, drawn, Context(*[None] * 5))
  # Two of three are right in the first group; in the second 0, counted as 1.
  penalty = 0.3 * lengths / 4 * np.array([[2 / 3], [1 / 3]])
  expected = rewarded - penalty
  for actual in (new.batch.rewards.rewards, new.rewards.rewards):
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
  mean = pytest.approx(penalty.mean())
  assert new.metrics == {"length_penalty_mean": mean}
