"""Reduces the metrics and rewards of a run to a few points to draw.

A metric without its own interval is drawn as means of blocks of steps with
Student's 95% interval. Steps of a block count as independent, since they have
different prompts and samples; a trend within a block only widens the interval.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from grpojax.statistics.intervals import mean_interval

POINTS = 400  # largest number of points of a curve
BLOCKS = 40  # largest number of blocks; their lengths differ by at most a step
BLOCK = 5  # smallest number of steps in a block
REWARD_COLUMNS = 100  # largest number of columns, each of one or more steps
REWARD_VALUES = 12  # largest number of distinct rewards; else they are binned
REWARD_BINS = 20

ROUNDING = 1e-6  # nats per token, in float32
_LARGEST = 1e100  # its square is finite

Curve = dict[str, Any]
Columns = Mapping[str, tuple[list[int], list[float]]]
"""Steps and values of each metric, by its name."""
Counts = Mapping[int, Sequence[Sequence[float | int]]]
"""Pairs of a reward and its count, by step."""


def is_number(value: Any) -> bool:
  """Returns True for numbers that can be drawn: finite with a finite square."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return False
  return -_LARGEST < value < _LARGEST


def short(value: float) -> float:
  """Rounds to five significant digits, enough for a picture."""
  return float(f"{value:.5g}")


def without_rounding(name: str, value: float) -> float:
  """Replaces rounding errors (KL of a policy to itself) and -0 by 0."""
  is_zero = re.fullmatch(r"(.*/)?(loss|kl|rollout_kl)", name)
  return 0.0 if is_zero and abs(value) < ROUNDING else value + 0.0


def columns(rows: Iterable[Mapping[str, Any]]) -> Columns:
  """Collects the finite numbers of rows by metric; a step's last row counts."""
  by_name: dict[str, dict[int, float]] = {}
  for row in rows:
    for name, value in row.items():
      if name != "step" and is_number(value):
        value = without_rounding(name, float(value))
        by_name.setdefault(name, {})[row["step"]] = value
  return {
    name: (sorted(values), [values[step] for step in sorted(values)])
    for name, values in by_name.items()
  }


def thinned(values: Float[np.ndarray, "N"], points: int = POINTS) -> list[int]:
  """Returns the indices to draw: minimum and maximum of equally long parts."""
  count = len(values)
  if count <= points:
    return list(range(count))
  edges = np.linspace(0, count, points // 2, dtype=int).tolist()
  chosen = {0, count - 1}
  for start, end in zip(edges, edges[1:], strict=False):
    part = values[start:end]
    chosen |= {start + int(np.argmin(part)), start + int(np.argmax(part))}
  return sorted(chosen)


def block_edges(count: int) -> list[tuple[int, int]]:
  """Divides steps into blocks [start, end) of nearly equal size; [] if too few.

  The size is equal because a short last block would have a wide interval.
  """
  if count < 4 * BLOCK:
    return []
  edges = np.linspace(0, count, min(BLOCKS, count // BLOCK) + 1, dtype=int)
  return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def blocks(
  steps: Sequence[int], values: Sequence[float]
) -> dict[str, list[float]] | None:
  """Returns means of blocks with intervals; None if there are too few steps."""
  edges = block_edges(len(steps))
  if not edges:
    return None
  xs = np.array(steps, np.float64)
  ys = np.array(values, np.float64)
  means = [(float(np.mean(xs[a:b])), *mean_interval(ys[a:b])) for a, b in edges]
  names = ("x", "mean", "low", "high")
  return {
    name: [short(value) for value in column]
    for name, column in zip(names, zip(*means, strict=True), strict=True)
  }


def by_step(columns: Columns, name: str) -> dict[int, float]:
  """Returns the values of a metric by step; {} for a missing metric."""
  return dict(zip(*columns.get(name, ((), ())), strict=True))


def _curve(name: str, columns: Columns) -> Curve:
  steps, values = columns[name]
  lows, highs = (by_step(columns, f"{name}{x}") for x in ("_low", "_high"))
  chosen = thinned(np.array(values))
  curve: Curve = {
    "x": [steps[i] for i in chosen],
    "y": [short(values[i]) for i in chosen],
    "last": short(values[-1]),
  }
  # The metric's own 95% interval by step, if any; a high of None is infinite.
  if not lows.keys() & steps:
    return curve | {"blocks": blocks(steps, values)}
  for side, ends in (("low", lows), ("high", highs)):
    curve[side] = [short(ends[s]) if s in ends else None for s in curve["x"]]
  return curve


def curves(columns: Columns) -> dict[str, Curve]:
  """Returns the curves of all metrics of a run, by name.

  A curve has `x`, `y` (`thinned` if there are many steps), `last`, and either
  the metric's 95% interval `low` and `high` (None: no bound) or `blocks`.
  Columns `m_low`, `m_high` and `m_se` of a metric m have no curve of their own.
  """

  def is_bound(name):
    base, _, last = name.rpartition("_")
    return base in columns and last in ("low", "high", "se")

  return {name: _curve(name, columns) for name in columns if not is_bound(name)}


def reward_picture(counts: Counts) -> dict[str, Any] | None:
  """Returns the data of a picture of rewards by step; None without rewards.

  - "steps" [[1, 1], [2, 2]]: first and last step of each column.
  - "values" [[0, 0], [1, 1]]: lowest and highest reward of each row.
  - "shares" [[0.75, 0.25], [0.5, 0.5]]: share of a column's rewards by row.
  - "total" 16: number of rewards.
  """
  pairs = [pair for step_counts in counts.values() for pair in step_counts]
  if not pairs:
    return None
  # A row is a distinct reward or, if there are many, a bin of rewards.
  distinct = sorted({value for value, _ in pairs})
  binned = len(distinct) > REWARD_VALUES
  rows = [(value, value) for value in distinct]
  if binned:
    edges = np.linspace(distinct[0], distinct[-1], REWARD_BINS + 1)
    rows = list(zip(edges, edges[1:], strict=False))
  lows = np.array([low for low, _ in rows])

  steps = sorted(counts)
  size = math.ceil(len(steps) / REWARD_COLUMNS)
  columns = [steps[i : i + size] for i in range(0, len(steps), size)]
  shares = []
  for column in columns:
    totals = np.zeros(len(rows))
    for value, count in (pair for step in column for pair in counts[step]):
      totals[int(np.searchsorted(lows, value, "right")) - 1] += count
    shares.append([short(x) for x in totals / max(totals.sum(), 1)])
  return {
    "steps": [[column[0], column[-1]] for column in columns],
    "values": [
      [short(low), short(high)] if binned else [low, high] for low, high in rows
    ],
    "shares": shares,
    "total": sum(count for _, count in pairs),
  }
