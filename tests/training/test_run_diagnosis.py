"""The group size that a whole run's noise asked for."""

import json
import math

import numpy as np
import pytest

from grpojax.runtime.files import records
from grpojax.training.step import diagnosis


def rows_of(*pairs):
  """Rows as metrics.jsonl has them, between rows without a diagnosis."""
  rows = [{"step": 0, "accuracy": 0.5}]
  for c1, c3 in pairs:
    rows += [{"step": 1, "c1": c1, "c3": c3}, {"step": 2, "reward_mean": 0.1}]
  return rows


def test_the_components_are_averaged_first():
  """4 = 1 + sqrt(9 / 1): the mean of single best sizes would be inf."""
  pairs = (0.5, 8.0), (2.6, 9.5), (-0.1, 9.5), (None, 1.0)
  found = diagnosis.summary(rows_of(*pairs))
  assert found["optimal_group_size"] == pytest.approx(4.0)
  low, high = found["optimal_group_size_interval"]
  assert 1 < low < 4 and high == math.inf
  assert diagnosis.line(found) == (
    f"the gradient's noise asked for groups of 4.0 [{low:.1f}, inf]"
  )


def test_what_was_written_is_said_as_well(tmp_path):
  found = diagnosis.summary(rows_of((1.0, 9.0), (1.0, 9.0)))
  records.write_json(tmp_path / "x.json", found)
  read = json.loads((tmp_path / "x.json").read_text())
  assert read["optimal_group_size_interval"] == [1.0, None]
  assert diagnosis.line(read) == diagnosis.line(found)
  assert diagnosis.line(found) == (
    "the gradient's noise left the best group size open: 4.0 [1.0, inf]"
  )


@pytest.mark.parametrize("high, bound", [(7.5, 7.5), (None, math.inf)])
def test_a_single_diagnosis_has_an_interval_of_its_own(high, bound):
  rows = rows_of((1.0, 9.0), (None, None))
  for row in rows[1::2]:
    row["optimal_group_size_low"] = 1.5
    row["optimal_group_size_high"] = high
  found = diagnosis.summary(rows)
  assert found["optimal_group_size"] == pytest.approx(4.0)
  assert found["optimal_group_size_interval"] == [1.5, bound]


@pytest.mark.parametrize("pairs", [(), ((None, None),), ((np.nan, 1.0),)])
def test_nothing_is_said_without_a_diagnosis(pairs):
  assert diagnosis.summary(rows_of(*pairs)) == {}
