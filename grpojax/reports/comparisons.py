"""Several runs side by side: differences of what they have in common.

Held-out answers are compared prompt by prompt, where both runs were asked the
same ones. Metrics of steps are compared step by step, as means of blocks of
steps: neighbours are alike, blocks are less so. Such an interval is about these
two runs; it says nothing about other seeds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpojax.reports.curves import block_edges, is_number, short
from grpojax.reports.metric_groups import COMPARED
from grpojax.statistics.group_size_interval import pooled_group_size
from grpojax.statistics.intervals import (
  mean_interval,
  paired_difference,
  paired_proportions,
)

Columns = Mapping[str, tuple[list[int], list[float]]]
Answers = Mapping[int, tuple[str, str]]  # by step: problems, right


def answers(rows: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, str]]:
  """Evaluations by step, from rows of evaluations.jsonl; the last counts."""
  found = {}
  for row in rows:
    right, problems = row.get("right"), row.get("problems")
    texts = isinstance(right, str) and isinstance(problems, str)
    if texts and right and set(right) <= {"0", "1"}:
      found[row["step"]] = problems, right
  return found


def _of_answers(a: tuple[str, str], b: tuple[str, str]):
  """B less a, prompt by prompt; None where they were asked other things."""
  if a[0] != b[0] or len(a[1]) != len(b[1]):
    return None
  first, second = (np.array(list(right)) == "1" for _, right in (a, b))
  found = paired_proportions(second, first)._asdict()
  return {name: short(value) for name, value in found.items()} | {
    "prompts": len(first)
  }


def before_and_after(found: Answers) -> dict[str, Any] | None:
  """A run's last evaluation against its first, prompt by prompt."""
  if len(found) < 2:
    return None
  first, last = min(found), max(found)
  compared = _of_answers(found[first], found[last])
  return compared and compared | {"first": first, "last": last}


def held_out(a: Answers, b: Answers) -> list[dict[str, Any]]:
  """B less a after each step at which both were asked the same prompts."""
  return [
    {"step": step} | compared
    for step in sorted(a.keys() & b.keys())
    if (compared := _of_answers(a[step], b[step]))
  ]


def steps(a: Columns, b: Columns) -> list[dict[str, Any]]:
  """B less a of the metrics `COMPARED`, over the steps that both have.

  Returns:
    For each metric: `steps` in common, the means of both, the `difference` with
    interval (`low`, `high`) and `p_value`, and `blocks` of the difference along
    training, see `curves.blocks`. Nothing of a metric with few steps.
  """
  found = []
  for name in COMPARED:
    if name not in a or name not in b:
      continue
    ours, theirs = (dict(zip(*x[name], strict=True)) for x in (a, b))
    common = sorted(ours.keys() & theirs.keys())
    edges = block_edges(len(common))
    if len(edges) < 2:
      continue
    first, second = (
      np.array([values[step] for step in common]) for values in (ours, theirs)
    )
    found.append(
      {"metric": name, "steps": len(common)}
      | _blocked(np.array(common, np.float64), first, second, edges)
    )
  return found


def _blocked(xs, first, second, edges) -> dict[str, Any]:
  """The numbers of `steps` of one metric."""
  gap = second - first
  means = [
    np.array([values[a:b].mean() for a, b in edges])
    for values in (second, first)
  ]
  compared = paired_difference(*means)._asdict()
  along = [(float(xs[a:b].mean()), *mean_interval(gap[a:b])) for a, b in edges]
  columns = zip(
    ("x", "mean", "low", "high"), zip(*along, strict=True), strict=True
  )
  numbers = {"mean_a": float(first.mean()), "mean_b": float(second.mean())}
  numbers = {name: short(x) for name, x in (numbers | compared).items()}
  return numbers | {
    "blocks": {name: [short(x) for x in column] for name, column in columns}
  }


def group_size(found: Columns) -> dict[str, float | None] | None:
  """G* of all diagnoses together, as a run's end says it; None without any.

  Returns:
    `best`, `low` and `high`; None for what is infinite.
  """
  names = ("c1", "c3", "optimal_group_size_low", "optimal_group_size_high")
  c1, c3, low, high = (
    dict(zip(*found.get(x, ((), ())), strict=True)) for x in names
  )
  both = sorted(c1.keys() & c3.keys())
  if not both:
    return None
  # Columns have no null, which an infinite bound is.
  own = [[low.get(i, math.inf), high.get(i, math.inf)] for i in both]
  sizes = pooled_group_size(
    *(np.array([c[i] for i in both]) for c in (c1, c3)), np.array(own)
  )
  names = ("best", "low", "high")
  shown = [short(x) if is_number(x) else None for x in sizes]
  return dict(zip(names, shown, strict=True))


def speed(found: Columns) -> list[dict[str, Any]]:
  """Where the time of a run's steps went: median and share of each part.

  What no part accounts for is "other" (records, text for people).
  """
  if "seconds_step" not in found:
    return []
  whole = np.array(found["seconds_step"][1])
  parts = {
    name: np.array(values)
    for name, (_, values) in found.items()
    if name.startswith("seconds_") and name != "seconds_step"
  }
  rest = whole.sum() - sum(values.sum() for values in parts.values())
  rows = [
    {
      "name": name,
      "median": short(float(np.median(values))),
      "share": short(float(values.sum() / max(whole.sum(), 1e-12))),
    }
    for name, values in parts.items()
    if is_number(float(values.sum()))
  ]
  share = max(float(rest / max(whole.sum(), 1e-12)), 0.0)
  other = {"name": "other", "median": None, "share": short(share)}
  step = float(np.median(whole))
  step = {"name": "seconds_step", "median": short(step), "share": 1.0}
  return [*rows, other, step] if parts else [step]
