"""Curves of metrics and rewards by step, against their definitions."""

import json
import math

import numpy as np
import pytest
import scipy.stats

from grpojax.reports import curves
from grpojax.reports.curves import BLOCK, BLOCKS, POINTS


def rows_of(name, values):
  return [{"step": i, name: value} for i, value in enumerate(values, 1)]


def curve_of(values, **others):
  every = {"m": values} | others
  rows = [row for item in every.items() for row in rows_of(*item)]
  return curves.curves(curves.columns(rows))["m"]


def test_columns_have_finite_numbers_of_last_rows():
  rows = [
    {"step": 2, "a": 5, "text": "x", "flag": True, "list": [1]},
    {"step": 1, "a": math.nan, "b": math.inf, "c": 10**400, "d": None},
    {"step": 2, "a": 6.5},
    {"step": 1, "a": 1},
  ]
  assert curves.columns(rows) == {"a": ([1, 2], [1.0, 6.5])}
  rows = rows_of("m", [math.nan, 1.0, 1e308, -1e308] * 10)
  json.dumps(curves.curves(curves.columns(rows)), allow_nan=False)


@pytest.mark.parametrize("count", [20, 37, 199, 201, 5003])
def test_blocks_cover_all_steps_with_students_interval(count):
  rng = np.random.default_rng(count)
  values = rng.normal(size=count)
  edges = curves.block_edges(count)
  assert edges[0][0] == 0 and edges[-1][1] == count
  assert all(a[1] == b[0] for a, b in zip(edges, edges[1:], strict=False))
  assert len(edges) <= BLOCKS and min(b - a for a, b in edges) >= BLOCK
  assert max(b - a for a, b in edges) - min(b - a for a, b in edges) <= 1
  blocks = curves.blocks(list(range(1, count + 1)), values.tolist())
  for i, (a, b) in enumerate(edges):
    part = values[a:b]
    low, high = scipy.stats.t.interval(
      0.95, b - a - 1, part.mean(), scipy.stats.sem(part)
    )
    expected = (a + 1 + b) / 2, part.mean(), low, high
    got = [blocks[name][i] for name in ("x", "mean", "low", "high")]
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_many_steps_keep_their_extremes():
  values = np.random.default_rng(0).normal(size=20_000)
  values[12345] = 50
  values[77] = -50
  made = curve_of(values.tolist())
  assert len(made["x"]) <= POINTS + 2
  assert made["y"][0] == pytest.approx(values[0], rel=1e-4)
  assert made["x"][-1] == 20_000 and made["last"] == made["y"][-1]
  assert max(made["y"]) == 50 and min(made["y"]) == -50
  assert made["x"][made["y"].index(50)] == 12_346
  assert made["x"] == sorted(set(made["x"]))
  assert curve_of([1.0] * 19)["blocks"] is None  # of few steps


def test_rounding_errors_become_zero():
  rows = [{"step": 1, "loss": 4e-9, "a/kl": -1e-13, "c1": 1e-9, "x": -0.0}]
  values = {k: v[0] for k, (_, v) in curves.columns(rows).items()}
  assert values == {"loss": 0, "a/kl": 0, "c1": 1e-9, "x": 0}
  assert all(math.copysign(1, value) == 1 for value in values.values())


def test_metric_with_bounds_uses_them_as_interval():
  made = curve_of([5, 6], m_low=[1, 2], m_high=[None, 9.0])
  assert made["low"] == [1, 2] and made["high"] == [None, 9]  # infinite
  assert "blocks" not in made
  made = curve_of([5, 6], m_low=[1, 2], m_high=[math.inf, None])
  assert made["low"] == [1, 2] and made["high"] == [None, None]
  assert "low" not in curve_of([5, 6], m_se=[1.0, 0.5])  # of few prompts
  # Bounds are not separate metrics; clip fractions are.
  names = "m", "m_low", "m_high", "n_se", "clip_fraction_low"
  columns = dict.fromkeys(names, ([1], [0.5]))
  assert set(curves.curves(columns)) == {"m", "n_se", "clip_fraction_low"}


def test_few_rewards_are_rows_and_steps_columns():
  counts = {1: [(0.0, 6), (1.0, 2)], 2: [(0.0, 1), (0.5, 2), (1.0, 1)]}
  picture = curves.reward_picture(counts)
  assert picture == {
    "steps": [[1, 1], [2, 2]],
    "values": [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]],
    "shares": [[0.75, 0.0, 0.25], [0.25, 0.5, 0.25]],
    "total": 12,
  }


def test_many_rewards_and_steps_are_binned():
  picture = curves.reward_picture(
    {i: [(i / 1000, 1), ((i + 500) / 1000, 3)] for i in range(1000)}
  )
  assert len(picture["steps"]) == curves.REWARD_COLUMNS
  assert picture["steps"][0] == [0, 9] and picture["steps"][-1] == [990, 999]
  assert len(picture["values"]) == curves.REWARD_BINS
  assert picture["values"][0][0] == 0 and picture["values"][-1][1] == 1.499
  for column in picture["shares"]:
    assert sum(column) == pytest.approx(1, abs=1e-3)
  # Rewards 0 to 0.009 have count 1, rewards 0.5 to 0.509 count 3.
  first = {i: x for i, x in enumerate(picture["shares"][0]) if x}
  assert first == {0: 0.25, 6: 0.75}
  assert picture["total"] == 4000
  assert curves.reward_picture({1: []}) is None
