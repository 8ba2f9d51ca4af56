"""Step of a run as a line of text, and as a row of a table."""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.runtime import records
from grpojax.training import eta as eta_lib
from grpojax.training.progress import troubles
from grpojax.training.settings.run import TrainSettings

Row = Mapping[str, Any]

SHOWN = {  # in lines by their own names; in the table by headings and formats
  "reward_mean": ("reward", "{:.3f}"),
  "group_acceptance": ("accepted", "{:.0%}"),  # with dynamic sampling
  "completion_length_mean": ("length", "{:.1f}"),
  "truncated": ("truncated", "{:.0%}"),
  "zero_variance_groups": ("no variance", "{:.0%}"),
  "entropy": ("entropy", "{:.3f}"),
  "grad_norm": ("grad norm", "{:.2g}"),
  "tokens_per_second": ("tokens/s", "{:.0f}"),
}


def _best_group_size(row: Row) -> str | None:
  """With its interval, where the step was diagnosed and told something."""
  if math.isnan(row.get("optimal_group_size", math.nan)):
    return None
  best = [row[f"optimal_group_size{s}"] for s in ("", "_low", "_high")]
  return "{:.0f} [{:.0f}, {:.0f}]".format(*best)


def line(settings: TrainSettings, row: Row, eta: eta_lib.Eta) -> str:
  """A step for a file: names and numbers to grep, and the time that is left."""
  metrics = {name: row[name] for name in SHOWN if name in row}
  if best := _best_group_size(row):
    metrics["best_group_size"] = best
  text = records.progress(
    row["step"],
    settings.steps,
    eta_lib.step_seconds(eta),
    eta_lib.left(eta, settings.steps - row["step"]),
    metrics,
  )
  return "  ".join([text, *map("! {}".format, troubles(row))])


def cells(row: Row) -> dict[str, str]:
  """A step for the table, by headings; what went wrong has none."""
  cells = {"step": f"{row['step']}"}
  for name, (heading, form) in SHOWN.items():
    if name in row:
      cells[heading] = form.format(float(row[name]))
  cells["seconds"] = f"{row['seconds_step']:.1f}"
  if best := _best_group_size(row):
    cells["best group size"] = best
  if wrong := troubles(row):
    cells[""] = ", ".join(wrong)
  return cells
