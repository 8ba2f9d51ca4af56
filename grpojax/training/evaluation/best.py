"""Best state of a run, by its greedy held-out accuracy.

The accuracy of the best of several evaluations is biased upwards; that of the
last state is unbiased.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Record = dict[str, Any]
"""JSON values in every checkpoint: "best", the row of the evaluation with the
highest accuracy; "last", the last evaluated step; "without_gain", the number of
evaluations in a row that did not raise the highest accuracy, the starting
weights' included. {} before the first evaluation."""

COLUMNS = ("step", "accuracy", "accuracy_low", "accuracy_high", "prompts")


def after(record: Record, baseline: Row | None, row: Row) -> Record:
  """Returns the record after one more evaluation, which counts once.

  The record starts again if the prompts change. `baseline` is the evaluation of
  the starting weights.
  """
  if row["step"] <= record.get("last", 0):
    return record
  best, without = record.get("best"), record.get("without_gain", 0)
  if best and best["prompts"] != row["prompts"]:
    best, without = None, 0
  before = [x["accuracy"] for x in (best, baseline) if x]
  gain = row["accuracy"] > max(before, default=-1.0)
  if best is None or row["accuracy"] > best["accuracy"]:
    best = {name: row[name] for name in COLUMNS}
  without = 0 if gain else without + 1
  return {"best": best, "last": row["step"], "without_gain": without}


def without_lost(record: Record, steps: Sequence[int]) -> Record:
  """Removes a best state that is not among the checkpoints' steps."""
  if step(record) in (None, *steps):
    return record
  return {name: value for name, value in record.items() if name != "best"}


def step(record: Record) -> int | None:
  """Returns the step of the best state; None before the first evaluation."""
  best = record.get("best")
  return best["step"] if best else None


def stopping(record: Record, limit: int) -> str | None:
  """Returns why a run ends after `limit` evaluations without gain, or None."""
  count = record.get("without_gain", 0)
  if not 0 < limit <= count:
    return None
  return (
    f"no higher held-out accuracy in {count} evaluations: the run ends early "
    f"at step {record['last']}; to go on: --config.stop.no_improvement=0"
  )
