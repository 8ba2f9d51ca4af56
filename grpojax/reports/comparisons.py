"""Compares runs by their held-out answers and metrics.

Held-out answers are compared by prompt, metrics by blocks of steps because
neighbouring steps are correlated. Intervals describe these two runs, not other
seeds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.reports.curves import (
  Columns,
  block_edges,
  blocks,
  by_step,
  is_number,
  short,
)
from grpojax.reports.metric_groups import COMPARED
from grpojax.statistics.group_size import Components, mse_curve
from grpojax.statistics.intervals import paired_difference, paired_proportions

Answers = Mapping[int, tuple[str, str]]
"""Evaluations by step: hash of the problems, and "1" per right answer."""
Rows = Sequence[Mapping[str, Any]]


def answers(rows: Rows) -> Answers:
  """Reads evaluations by step from evaluations.jsonl: each step's last row."""
  return {row["step"]: (row["problems"], row["right"]) for row in rows}


def _paired(a: tuple[str, str], b: tuple[str, str]) -> dict[str, Any] | None:
  """Returns the difference of accuracies b - a; None if the problems differ."""
  if a[0] != b[0] or len(a[1]) != len(b[1]):
    return None
  first, second = (np.array(list(right)) == "1" for _, right in (a, b))
  paired = paired_proportions(second, first)._asdict()
  numbers = {name: short(value) for name, value in paired.items()}
  return numbers | {"prompts": len(first)}


def before_and_after(evaluations: Answers) -> dict[str, Any] | None:
  """Compares a run's last evaluation with its first, prompt by prompt."""
  if len(evaluations) < 2:
    return None
  first, last = min(evaluations), max(evaluations)
  paired = _paired(evaluations[first], evaluations[last])
  return paired and paired | {"first": first, "last": last}


def texts_before_and_after(rows: Rows) -> dict[str, Any] | None:
  """Pairs the first and last completions of held-out prompts, if any."""
  rows = sorted((r for r in rows if r.get("samples")), key=lambda r: r["step"])
  if len(rows) < 2:
    return None
  first = rows[0]
  last = rows[-1]
  pairs = list(zip(first["samples"], last["samples"], strict=False))
  if any(before["prompt"] != after["prompt"] for before, after in pairs):
    return None
  return {"first": first["step"], "last": last["step"], "pairs": pairs}


def held_out(a: Answers, b: Answers) -> list[dict[str, Any]]:
  """Returns accuracy of run b minus run a, at steps with the same problems."""
  return [
    {"step": step} | paired
    for step in sorted(a.keys() & b.keys())
    if (paired := _paired(a[step], b[step]))
  ]


def steps(a: Columns, b: Columns) -> list[dict[str, Any]]:
  """Returns metrics (`COMPARED`) of run b minus run a, over common steps.

  A row has means, a difference with interval and p-value, and its blocks.
  """
  rows = []
  for name in COMPARED:
    if name not in a or name not in b:
      continue
    values = [by_step(x, name) for x in (a, b)]
    common = sorted(values[0].keys() & values[1].keys())
    edges = block_edges(len(common))
    if len(edges) < 2:
      continue
    first, second = (np.array([x[s] for s in common]) for x in values)
    paired = paired_difference(
      np.array([second[start:end].mean() for start, end in edges]),
      np.array([first[start:end].mean() for start, end in edges]),
    )
    numbers = {"mean_a": float(first.mean()), "mean_b": float(second.mean())}
    numbers |= paired._asdict()
    row = {"metric": name, "steps": len(common)}
    row |= {name: short(value) for name, value in numbers.items()}
    rows.append(row | {"blocks": blocks(common, (second - first).tolist())})
  return rows


def group_size(columns: Columns) -> tuple[float, float, float] | None:
  """Returns G* from all diagnoses, with 95% bounds; None if unknown."""
  steps, lows = columns.get("optimal_group_size_low", ((), ()))
  if not steps or steps[-1] != columns["c1"][0][-1]:
    return None
  best, high = (
    by_step(columns, f"optimal_group_size{end}") for end in ("", "_high")
  )
  # Columns leave out infinite values, so a missing value is infinite.
  return best.get(steps[-1], math.inf), lows[-1], high.get(steps[-1], math.inf)


def error_of_best(columns: Columns, group_size: int) -> float | None:
  """Returns the gradient error at a group size divided by the least error.

  Both use mean c1, c2 and c3 at equal samples. None unless c1 and errors > 0.
  """
  names = "c1", "c2", "c3"
  if not all(name in columns for name in names) or group_size < 2:
    return None
  c1, c2, c3 = (float(np.mean(columns[name][1])) for name in names)
  means = Components(c1, c2, c3, c2_vanilla=0.0, gradient_sq=0.0)
  sizes = np.arange(2, max(1024, group_size) + 1)
  errors = np.asarray(mse_curve(means, sizes, 1).leave_one_out)
  if not (c1 > 0 and np.isfinite(errors).all() and errors.min() > 0):
    return None
  return float(errors[group_size - 2] / errors.min())


def speed(columns: Columns) -> list[dict[str, Any]]:
  """Returns the median and the share of each part of a step's time."""
  if "seconds_step" not in columns:
    return []
  whole = np.array(columns["seconds_step"][1])
  total = max(whole.sum(), 1e-12)
  parts = {
    name: np.array(values)
    for name, (_, values) in columns.items()
    if name.startswith("seconds_") and name != "seconds_step"
  }

  def row(name: str, values: np.ndarray) -> dict[str, Any]:
    median = float(np.median(values))
    share = float(values.sum() / total)
    return {"name": name, "median": short(median), "share": short(share)}

  rows = [row(*x) for x in parts.items() if is_number(float(x[1].sum()))]
  remaining = whole.sum() - sum(values.sum() for values in parts.values())
  share = short(max(float(remaining / total), 0.0))
  other = {"name": "other", "median": None, "share": share}
  step = row("seconds_step", whole) | {"share": 1.0}
  return [*rows, other, step] if parts else [step]
