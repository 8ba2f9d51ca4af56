"""The picture of rewards by step."""

import math

import pytest

from grpojax.reports import rewards


def test_each_reward_is_a_row_and_each_step_a_column():
  rows = [
    {"step": 1, "counts": [[0.0, 6], [1.0, 2]]},
    {"step": 2, "counts": [[0.0, 1], [0.5, 2], [1.0, 1]]},
  ]
  picture = rewards.picture(rewards.counted(rows))
  assert picture == {
    "steps": [[1, 1], [2, 2]],
    "values": [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]],
    "shares": [[0.75, 0.0, 0.25], [0.25, 0.5, 0.25]],
    "total": 12,
  }


def test_many_rewards_fall_into_intervals_and_many_steps_into_columns():
  rows = [
    {"step": step, "counts": [[step / 1000, 1], [(step + 500) / 1000, 3]]}
    for step in range(1000)
  ]
  picture = rewards.picture(rewards.counted(rows))
  assert len(picture["steps"]) == rewards.COLUMNS
  assert picture["steps"][0] == [0, 9] and picture["steps"][-1] == [990, 999]
  assert len(picture["values"]) == rewards.BINS
  assert picture["values"][0][0] == 0 and picture["values"][-1][1] == 1.499
  for column in picture["shares"]:
    assert sum(column) == pytest.approx(1, abs=1e-3)
  # Rewards 0 to 0.009, once each, and 0.5 to 0.509, three times each.
  first = {i: x for i, x in enumerate(picture["shares"][0]) if x}
  assert first == {0: 0.25, 6: 0.75}
  assert picture["total"] == 4000


def test_what_is_no_count_is_left_out():
  rows = [
    {"step": 1, "counts": [[math.nan, 1], ["x", 1], [1], 3, [2.0, -1]]},
    {"step": 2, "counts": "many"},
    {"step": 3},
  ]
  assert rewards.picture(rewards.counted(rows)) is None
  assert rewards.counted([*rows, {"step": 4, "counts": [[1, 2]]}])[4] == [
    (1.0, 2)
  ]


def test_samples_stand_in_for_rewards():
  rows = [{"step": 5, "reward": x} for x in (0.0, 1.0, 1.0, None, math.nan)]
  picture = rewards.picture(rewards.of_samples(rows))
  assert picture["total"] == 3
  assert picture["shares"] == [[pytest.approx(1 / 3, 1e-4), 0.66667]]
