"""The penalty on lengths, by hand and in a run."""

import numpy as np
import pytest

from grpojax.runtime.files import records
from grpojax.training.step.extensions import length_penalty


def test_penalties_follow_length_and_solve_rate():
  shares = np.array([[0.5, 1.0], [0.2, 0.4], [1.0, 1.0]])
  correct = np.array([[True, True], [True, False], [False, False]])
  expected = [[0.5, 1.0], [0.1, 0.2], [0.5, 0.5]]
  actual = length_penalty.penalties(shares, correct)
  np.testing.assert_allclose(actual, expected)


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
