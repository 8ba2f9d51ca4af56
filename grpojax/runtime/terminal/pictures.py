"""Learning curve of a run, drawn by matplotlib.

Rows of training steps have `reward_mean`, `completion_length_mean`, `entropy`,
`kl` and `zero_variance_groups`. Diagnosed steps add `group_size` and
`optimal_group_size` (may be infinite) with a 95% interval: suffixes `_low` and
`_high`. Rows of evaluations have `accuracy` with such an interval.
"""

import math
import os
from typing import Any

from grpojax.runtime.files import records

_PANELS = {
  "accuracy": "held-out accuracy (greedy), 95% interval",
  "reward_mean": "mean reward (training)",
  "completion_length_mean": "completion length (tokens)",
  "entropy": "entropy (nats per token)",
  "kl": "KL to the reference (nats per token)",
  "zero_variance_groups": "groups with equal rewards (share)",
  "optimal_group_size": "best group size, 95% interval",
}


def new_figure(size: tuple[float | int, float | int]):
  """Returns an empty figure of `size` (width, height) in inches."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure  # not pyplot: it has global state

  figure = Figure(figsize=size, dpi=100, layout="constrained")
  FigureCanvasAgg(figure)
  return figure


def save_figure(figure, path: str | os.PathLike) -> None:
  """Writes a figure as PNG, whole or not at all."""
  with records.replacing(path) as temporary:
    figure.savefig(temporary, format="png")


def learning_curve(
  metrics_path: str | os.PathLike, out_png: str | os.PathLike
) -> None:
  """Draws a run's metrics over its steps, as a PNG of 1000 x 700 pixels.

  The first and largest panel is the held-out accuracy, if any. Metrics that
  never change are left out, except accuracy, reward and best group size.
  ValueError if there are no rows.
  """
  rows = [row for row in records.read_jsonl(metrics_path) if "step" in row]
  rows.sort(key=lambda row: row["step"])  # step 0 may be evaluated later
  series = {key: [row for row in rows if _has(row, key)] for key in _PANELS}
  shown = [key for key in _PANELS if _changes(series[key], key)]
  if not shown:
    raise ValueError(f"{metrics_path} has no rows to draw")
  figure = new_figure((10, 7))
  mosaic = [shown[:1] * 6]
  for i in range(1, len(shown), 3):
    keys = shown[i : i + 3]
    mosaic.append([key for key in keys for _ in range(6 // len(keys))])
  heights = [1.3] + [1] * (len(mosaic) - 1)
  panels = figure.subplot_mosaic(mosaic, height_ratios=heights)
  for key, axes in panels.items():
    _draw(axes, series[key], key)
    axes.set_title(_PANELS[key], fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
  save_figure(figure, out_png)


def _has(row: dict[str, Any], key: str) -> bool:
  # An infinite best size is null in the file, but its lower bound is finite.
  key = f"{key}_low" if key == "optimal_group_size" else key
  return isinstance(row.get(key), (int, float))


def _changes(rows: list[dict[str, Any]], key: str) -> bool:
  """Returns True if a metric varies, or is always drawn."""
  always = key in ("accuracy", "reward_mean", "optimal_group_size")
  return bool(rows) if always else len({row[key] for row in rows}) > 1


def _draw(axes, rows: list[dict[str, Any]], key: str) -> None:
  steps = [row["step"] for row in rows]
  values = [math.nan if row[key] is None else row[key] for row in rows]
  axes.plot(steps, values, marker="." if len(rows) < 30 else "")
  if key == "optimal_group_size":
    # Intervals of the best group size, and the run's group size.
    sizes = [row["group_size"] for row in rows]
    axes.plot(steps, sizes, "--", label="group size of this run")
    axes.legend(fontsize=8)
    top = max([4 * max(sizes), *(2 * row[key] for row in rows if row[key])])
    low = [row.get(f"{key}_low") for row in rows]
    high = [min(row.get(f"{key}_high") or top, top) for row in rows]
    axes.vlines(steps, low, high, alpha=0.4)
    axes.set_yscale("log", base=2)
    axes.set_ylim(1, top)
    axes.yaxis.set_major_formatter("{x:.0f}")
  elif key == "accuracy":
    axes.set_ylim(0, 1.02)
    band = [r for r in rows if r.get("accuracy_low") is not None]
    ends = ([r[f"accuracy_{end}"] for r in band] for end in ("low", "high"))
    axes.fill_between([r["step"] for r in band], *ends, alpha=0.25)
  elif key == "completion_length_mean":
    axes.set_ylim(bottom=0)
