"""Curves of metrics along training: few points, however many steps there are.

What is drawn of a metric without an interval of its own are means of blocks of
steps with Student's 95% interval: steps draw their prompts and samples anew, so
within a block they count as independent observations (what is learned meanwhile
only makes the interval wider).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from grpojax.statistics.intervals import mean_interval

POINTS = 400  # of a curve, at most
BLOCKS = 40  # at most; of as many steps each, give or take one
BLOCK = 5  # steps of a block, at least
NORMAL = 1.959964  # standard errors on either side of 95%

_LARGEST = 1e100  # of which the square is finite

Curve = dict[str, Any]


def is_number(value: Any) -> bool:
  """Whether it can be drawn: a finite number, and not beyond all bounds."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return False
  return -_LARGEST < value < _LARGEST


def short(value: float) -> float:
  """Five digits of it: more cannot be seen."""
  return float(f"{value:.5g}")


def columns(
  rows: Iterable[Mapping[str, Any]],
) -> dict[str, tuple[list[int], list[float]]]:
  """Steps and values of each metric, by its name; of a step the last counts.

  Args:
    rows: with a "step"; what is no finite number is left out.
  """
  found: dict[str, dict[int, float]] = {}
  for row in rows:
    for name, value in row.items():
      if name != "step" and is_number(value):
        found.setdefault(name, {})[row["step"]] = float(value)
  return {
    name: (sorted(values), [values[step] for step in sorted(values)])
    for name, values in found.items()
  }


def thinned(values: Float[np.ndarray, "N"], points: int = POINTS) -> list[int]:
  """Which points of a curve to keep: the extremes of equal parts of it."""
  count = len(values)
  if count <= points:
    return list(range(count))
  edges = np.linspace(0, count, points // 2, dtype=int).tolist()
  kept = {0, count - 1}
  for start, end in zip(edges, edges[1:], strict=False):
    part = values[start:end]
    kept |= {start + int(np.argmin(part)), start + int(np.argmax(part))}
  return sorted(kept)


def block_edges(count: int) -> list[tuple[int, int]]:
  """Blocks of neighbouring steps, alike in size, or none for few steps.

  A last block of what is left over would have a mean of few steps: its interval
  would be many times as wide as the others', and a curve's scale with it.
  """
  if count < 4 * BLOCK:
    return []
  edges = np.linspace(0, count, min(BLOCKS, count // BLOCK) + 1, dtype=int)
  return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


def blocks(
  steps: Sequence[int], values: Sequence[float]
) -> dict[str, list[float]] | None:
  """Means of blocks of steps with their intervals; None for few steps."""
  edges = block_edges(len(steps))
  if not edges:
    return None
  xs = np.array(steps, np.float64)
  ys = np.array(values, np.float64)
  found = [(float(np.mean(xs[a:b])), *mean_interval(ys[a:b])) for a, b in edges]
  names = ("x", "mean", "low", "high")
  return {
    name: [short(value) for value in column]
    for name, column in zip(names, zip(*found, strict=True), strict=True)
  }


def _bounds(
  name: str, found: Mapping[str, tuple[list[int], list[float]]]
) -> dict[int, tuple[float, float | None]]:
  """A metric's own 95% interval by step; None above is infinite."""
  steps, values = found[name]
  if f"{name}_low" in found:
    lows = dict(zip(*found[f"{name}_low"], strict=True))
    highs = dict(zip(*found.get(f"{name}_high", ((), ())), strict=True))
    return {s: (lows[s], highs.get(s)) for s in steps if s in lows}
  if f"{name}_se" not in found:
    return {}
  errors = dict(zip(*found[f"{name}_se"], strict=True))
  return {
    s: (y - NORMAL * errors[s], y + NORMAL * errors[s])
    for s, y in zip(steps, values, strict=True)
    if s in errors
  }


def _is_bound(name: str, found: Mapping[str, Any]) -> bool:
  """Whether a metric is only the interval of another one."""
  base, _, last = name.rpartition("_")
  return base in found and last in ("low", "high", "se")


def curve(
  name: str, found: Mapping[str, tuple[list[int], list[float]]]
) -> Curve:
  """One metric, see `curves`."""
  steps, values = found[name]
  bounds = _bounds(name, found)
  kept = thinned(np.array(values))
  made: Curve = {
    "x": [steps[i] for i in kept],
    "y": [short(values[i]) for i in kept],
    "last": short(values[-1]),
  }
  if bounds:
    pairs = [bounds.get(steps[i], (None, None)) for i in kept]
    for side, ends in zip(
      ("low", "high"), zip(*pairs, strict=True), strict=True
    ):
      made[side] = [None if end is None else short(end) for end in ends]
  else:
    made["blocks"] = blocks(steps, values)
  return made


def curves(
  found: Mapping[str, tuple[list[int], list[float]]],
) -> dict[str, Curve]:
  """All metrics of a run, by name.

  Args:
    found: from `columns`.

  Returns:
    For each: `x`, `y` (the extremes, where there are many steps), `last`, and
    either `low` and `high`, its own 95% interval (None above: no bound), or
    `blocks`, see the module.
  """
  return {
    name: curve(name, found) for name in found if not _is_bound(name, found)
  }
