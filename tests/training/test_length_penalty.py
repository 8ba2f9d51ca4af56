"""The penalty on lengths, by hand and in a run."""

import types

import numpy as np
import pytest

from grpojax.core.types import TrainState
from grpojax.rewards.pool import GroupRewards
from grpojax.runtime.files import records
from grpojax.training.step.draws import Draw
from grpojax.training.step.extension import Context, Drawn, Inputs
from grpojax.training.step.extensions import length_penalty
from grpojax.training.step.scoring import RewardPool


def test_penalties_follow_length_and_solve_rate():
  shares = np.array([[0.5, 1.0], [0.2, 0.4], [1.0, 1.0]])
  correct = np.array([[True, True], [True, False], [False, False]])
  expected = [[0.5, 1.0], [0.1, 0.2], [0.5, 0.5]]
  actual = length_penalty.penalties(shares, correct)
  np.testing.assert_allclose(actual, expected)


def test_all_rewards_of_a_draw_have_the_penalty(settings_with, samples_of):
  """Also those of the metrics by data set and of rewards.jsonl."""
  right = np.array([[1, 0.9, np.nan], [0, 0, 0]])
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
  # One of three is right in the first group; in the second 0, counted as 1 / 3.
  expected = rewarded - 0.3 * lengths / 4 / 3
  for actual in (new.batch.rewards.rewards, new.rewards.rewards):
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
  mean = pytest.approx(0.3 * lengths.mean() / 4 / 3)
  assert new.metrics == {"length_penalty_mean": mean}


@pytest.mark.slow
def test_rewards_in_a_run_have_the_penalty(train_short, tmp_path):
  rows = train_short(**{"reward.length_penalty": 0.5, "steps": 1})
  (mean,) = (x for row in rows if (x := row.get("length_penalty_mean")))
  assert 0 < mean <= 0.5
  samples = records.read_jsonl(tmp_path / "run" / "samples.jsonl")
  for sample in samples:
    assert sample["reward"] < sample["rewards"]["exact_answer"]


@pytest.mark.parametrize(
  "changes",
  [
    {"reward.on_device": True},
    {"filter_groups.enable": True},
    {"group_size": "auto", "diagnostics.every": 1},
    {
      "reward.aggregation": "normalize_then_sum",
      "reward.functions": ("exact_answer", "overlong"),
      "reward.weights": (1.0, 1.0),
    },
  ],
)
def test_other_rewards_are_refused(changes, settings_with):
  names = {k.replace(".", "__"): v for k, v in changes.items()}
  with pytest.raises(ValueError, match="length_penalty"):
    settings_with(reward__length_penalty=0.1, **names)
