"""Comparisons of runs."""

import math

import numpy as np
import pytest

from grpojax.reports import comparisons, curves
from grpojax.statistics import group_size, intervals


def test_answers_are_compared_prompt_by_prompt():
  a = {5: ("q", "0011001100"), 10: ("q", "0011001101"), 15: ("q", "1")}
  b = {5: ("q", "0111001111"), 10: ("other", "1" * 10), 20: ("q", "1")}
  (compared,) = comparisons.held_out(a, b)  # only step 5 has equal prompts
  assert compared["step"] == 5 and compared["prompts"] == 10
  assert compared["difference"] == pytest.approx(0.3)
  # Three wins of three: 2 / 2**3.
  assert compared["p_value"] == pytest.approx(0.25)
  bits = [np.array(list(x[5][1])) == "1" for x in (b, a)]
  expected = intervals.paired_proportions(*bits)
  assert compared["low"] == pytest.approx(expected.low, abs=1e-4)
  assert compared["low"] < 0.3 < compared["high"]


def test_before_and_after_use_first_and_last_evaluation():
  rows = [{"step": 0, "problems": "q", "right": x} for x in ("01", "11")]
  assert comparisons.answers(rows) == {0: ("q", "11")}  # the last counts
  evaluations = {0: ("q", "0000"), 5: ("q", "0110"), 8: ("q", "1111")}
  gain = comparisons.before_and_after(evaluations)
  assert (gain["first"], gain["last"], gain["difference"]) == (0, 8, 1.0)
  assert comparisons.before_and_after({0: ("q", "1")}) is None
  assert comparisons.before_and_after({0: ("q", "1"), 1: ("r", "1")}) is None


def columns(steps, values):
  return {"reward_mean": (list(steps), list(values)), "mine": ([1], [2.0])}


def test_metrics_are_compared_on_common_steps():
  rng = np.random.default_rng(0)
  noise = rng.normal(size=200)
  a = columns(range(1, 201), noise)
  b = columns(range(101, 301), np.concatenate([noise[100:] + 0.5, noise[:100]]))
  (compared,) = comparisons.steps(a, b)
  assert compared["metric"] == "reward_mean" and compared["steps"] == 100
  # Pairing removes the noise, so the interval is exact, too.
  for name in ("difference", "low", "high"):
    assert compared[name] == pytest.approx(0.5, abs=1e-4)
  assert compared["mean_b"] - compared["mean_a"] == pytest.approx(0.5, abs=1e-3)
  assert compared["p_value"] < 0.001
  blocks = compared["blocks"]
  assert len(blocks["x"]) == 20 and blocks["x"][0] == 103
  assert blocks["mean"] == pytest.approx([0.5] * 20, abs=1e-4)


def test_correlated_steps_widen_the_interval():
  """A slow wave without a trend: 25 plateaus of 40 steps are not 1000 draws."""
  rng = np.random.default_rng(1)
  wave = np.repeat(rng.normal(size=25), 40)
  a = columns(range(1000), np.zeros(1000))
  (compared,) = comparisons.steps(a, columns(range(1000), wave))
  naive = intervals.mean_interval(wave)
  assert compared["high"] - compared["low"] > 3 * (naive[2] - naive[1])
  few = columns(range(19), [0.0] * 19)  # are not compared
  assert comparisons.steps(few, few) == [] == comparisons.steps({}, few)


def test_speed_has_median_and_share_by_part():
  columns = {
    "seconds_step": ([1, 2, 3], [10.0, 1.0, 1.0]),
    "seconds_rollout": ([1, 2, 3], [5.0, 0.25, 0.25]),
    "seconds_update": ([1, 2, 3], [4.0, 0.5, 0.5]),
    "tokens_per_second": ([1], [3.0]),
  }
  rows = comparisons.speed(columns)
  names = ["seconds_rollout", "seconds_update", "other", "seconds_step"]
  assert [row["name"] for row in rows] == names
  assert [row["median"] for row in rows] == [0.25, 0.5, None, 1.0]
  shares = [5.5 / 12, 5 / 12, 1.5 / 12, 1]
  assert [row["share"] for row in rows] == pytest.approx(shares, 1e-4)
  assert comparisons.speed({}) == []


def test_texts_are_paired_by_prompt():
  def row(step, *prompts):
    samples = [{"prompt": p, "completion": f"{p} {step}"} for p in prompts]
    return {"step": step, "samples": samples}

  rows = [row(8, "a", "b"), row(0, "a", "b"), row(4, "a", "b"), {"step": 9}]
  paired = comparisons.texts_before_and_after(rows)
  assert (paired["first"], paired["last"]) == (0, 8)
  texts = [[sample["completion"] for sample in x] for x in paired["pairs"]]
  assert texts == [["a 0", "a 8"], ["b 0", "b 8"]]
  assert comparisons.texts_before_and_after(rows[:1]) is None
  assert comparisons.texts_before_and_after([*rows, row(12, "b", "a")]) is None


INF = math.inf


@pytest.mark.parametrize(
  "sizes, expected",
  [
    ([None, (4.0, 1.5, 7.5)], (4.0, 1.5, 7.5)),
    ([(4.0, 1.5, 7.5), (5.0, 2.0, None)], (5.0, 2.0, INF)),  # null is infinite
    ([(None, 2.0, None)], (INF, 2.0, INF)),
    ([(4.0, 1.5, 7.5), None], None),
    ([None], None),
    ([], None),
  ],
)
def test_group_size_comes_from_the_last_diagnosis(sizes, expected):
  rows = [{"step": 0, "accuracy": 0.5}]
  for i, size in enumerate(sizes):
    row = {"step": 2 * i, "c1": 1.0}
    for end, value in zip(("", "_low", "_high"), size or (), strict=False):
      row[f"optimal_group_size{end}"] = value
    rows += [row, {"step": 2 * i + 1}]
  assert comparisons.group_size(curves.columns(rows)) == expected


@pytest.mark.slow
def test_error_of_best_equals_mse_curve():
  """The best size is 1 + sqrt(32 / 2) = 5."""
  values = {"c1": [1.0, 3.0], "c2": [10.0, 20.0], "c3": [30.0, 34.0]}
  columns = {name: ([0, 10], x) for name, x in values.items()}
  parts = group_size.Components(2.0, 15.0, 32.0, 0.0, 0.0)
  curve = group_size.mse_curve(parts, np.arange(2, 30), 64).leave_one_out
  for size in (2, 5, 8):
    error = comparisons.error_of_best(columns, size)
    assert error == pytest.approx(float(curve[size - 2] / curve.min()))
  assert comparisons.error_of_best(columns, 5) == 1.0
  assert comparisons.error_of_best(columns | {"c1": ([0], [-1.0])}, 8) is None
  assert comparisons.error_of_best({}, 8) is None
