"""Best state of a run by greedy held-out accuracy.

The highest accuracy of several evaluations is biased upwards; the accuracy of
the last state is unbiased.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Record = dict[str, Any]
"""Evaluations so far, in JSON values in every checkpoint. "best" is the row of
the highest accuracy; "last" the last evaluated step; "without_gain" the number
of evaluations in a row that did not raise the highest accuracy, which includes
that of the initial weights. {} before the first evaluation."""

COLUMNS = ("step", "accuracy", "accuracy_low", "accuracy_high", "prompts")


def after(record: Record, baseline: Row | None, row: Row) -> Record:
  """Adds an evaluation to the record, unless the record includes its step.

  The record starts again if the number of prompts changes. `baseline` is the
  evaluation of the initial weights.
  """
  if row["step"] <= record.get("last", 0):
    return record
  best = record.get("best")
  without_gain = record.get("without_gain", 0)
  if best and best["prompts"] != row["prompts"]:
    best = None
    without_gain = 0
  before = [x["accuracy"] for x in (best, baseline) if x]
  gain = row["accuracy"] > max(before, default=-1.0)
  if best is None or row["accuracy"] > best["accuracy"]:
    best = {name: row[name] for name in COLUMNS}
  without_gain = 0 if gain else without_gain + 1
  return {"best": best, "last": row["step"], "without_gain": without_gain}


def without_lost(record: Record, steps: Sequence[int]) -> Record:
  """Removes the best state from a record if its step has no checkpoint."""
  if step(record) in (None, *steps):
    return record
  return {name: value for name, value in record.items() if name != "best"}


def step(record: Record) -> int | None:
  """Returns the step of the best state; None before the first evaluation."""
  best = record.get("best")
  return best["step"] if best else None


def stopping(record: Record, limit: int) -> str | None:
  """Returns a reason to end after `limit` evaluations without gain, or None."""
  count = record.get("without_gain", 0)
  if not 0 < limit <= count:
    return None
  return (
    f"no higher held-out accuracy in {count} evaluations: the run ends early "
    f"at step {record['last']}; to continue: --config.stop.no_improvement=0"
  )
