"""Verdict on a run: one sentence on how it went, computed from its rows."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpojax.reports.curves import is_number
from grpojax.statistics.intervals import mean_interval
from grpojax.training.evaluation import best
from grpojax.training.run.progress import (
  STOP_CONDITIONS,
  Progress,
  Row,
  after,
  stop_condition,
)

_UNTAUGHT = {
  "rewards_missing": "no completion had a reward",
  "skipped_updates": "gradients were not finite",
  "zero_variance_groups": "no group's rewards differed",
}
"""Reasons why a step taught nothing, by the metric that shows them."""

_OFTEN = 0.05  # share of steps from which on a trouble is worth a look
_QUARTER = 4  # least number of steps in a quarter for a trend


class Verdict(NamedTuple):
  """Sentence on a run, and its colour: `level` is "bad", "good" or ""."""

  level: str
  text: str


class Facts(NamedTuple):
  """Inputs of a verdict.

  Attributes:
    steps: Rows of metrics.jsonl with a step's metrics, in order.
    evaluations: Rows with an accuracy and its interval, in order, all on the
      prompts of the last one.
    planned: Number of steps in the settings; None if unknown.
    limits: The `stop` settings by name.
    finished: True if the run has written its summary.
    gain: Paired difference of the last and first evaluation, if known
      (`comparisons.before_and_after`).
  """

  steps: Sequence[Row]
  evaluations: Sequence[Row]
  planned: int | None
  limits: Mapping[str, int]
  finished: bool
  gain: Mapping[str, Any] | None


def facts(
  rows: Sequence[Row],
  planned: int | None,
  limits: Mapping[str, int],
  finished: bool,
  gain: Mapping[str, Any] | None = None,
) -> Facts:
  """Sorts rows of metrics.jsonl into those of steps and of evaluations.

  The last row of a step counts; values that are no finite numbers are dropped.
  """
  steps, evaluations = {}, {}
  for full_row in rows:
    row = {
      name: full_row[name] for name in full_row if is_number(full_row[name])
    }
    if row.keys() >= {"step", "accuracy_low", "accuracy_high", *best.COLUMNS}:
      evaluations[row["step"]] = row
    elif "step" in row and "reward_mean" in full_row:  # nan without rewards
      steps[row["step"]] = row
  tested = [evaluations[step] for step in sorted(evaluations)]
  tested = [row for row in tested if row["prompts"] == tested[-1]["prompts"]]
  ordered = [steps[step] for step in sorted(steps)]
  return Facts(ordered, tested, planned, limits, finished, gain)


def _at(run: Facts) -> str:
  last = int(run.steps[-1]["step"])
  return f"step {last}" + (f" of {run.planned}" if run.planned else "")


def _ended_early(run: Facts) -> bool:
  return run.planned is not None and run.steps[-1]["step"] < run.planned


def _progress(run: Facts) -> Progress:
  progress = Progress()
  absent = dict.fromkeys(STOP_CONDITIONS, 0) | {"train_seconds": 0}
  for row in run.steps:
    progress = after(progress, absent | row)
  return progress


def _accuracies(run: Facts) -> str:
  """Says the held-out accuracy before and after, if it was measured twice."""
  if len(run.evaluations) < 2:
    return ""
  first, last = (run.evaluations[i]["accuracy"] for i in (0, -1))
  return f"; held-out accuracy {first:.1%} before, {last:.1%} after"


def _stop(run: Facts) -> str | None:
  """Name of the `stop` setting that ended the run, if its rows show one."""
  if run.finished or not _ended_early(run):
    return None
  return stop_condition(_progress(run), run.limits)


def _untaught(row: Row) -> str:
  """Reason why a step taught nothing; "" if it taught something."""
  for name, why in _UNTAUGHT.items():
    # An update without tokens in the loss is skipped too: its norm is 0.
    finite = name == "skipped_updates" and "grad_norm" in row
    if row.get(name, 0) >= 1 and not finite:
      return why
  return ""


def _learned_nothing(run: Facts) -> str | None:
  if run.gain and run.gain["low"] > 0:  # advantages across groups
    return None
  reasons = collections.Counter(map(_untaught, run.steps))
  if "" in reasons:
    return None
  counts = [
    f"in {count} of {len(run.steps)} steps {why}"
    for why, count in reasons.most_common()
  ]
  rewards = [row["reward_mean"] for row in run.steps if "reward_mean" in row]
  mean = f"; mean reward {np.mean(rewards):.3g}" if rewards else ""
  sentences = [f"Learned nothing: {', '.join(counts)}{mean}"]
  if name := _stop(run):
    sentences.append(f"Stopped at {_at(run)} (stop.{name})")
  return ". ".join(sentences)


def _stopped(run: Facts) -> str | None:
  name = _stop(run)
  if name is None:
    return None
  return (
    f"Stopped at {_at(run)} (stop.{name}): in {run.limits[name]} steps in a "
    f"row {STOP_CONDITIONS[name].meaning}{_accuracies(run)}"
  )


def _fell(run: Facts) -> str | None:
  """Compares the last accuracy with the first, and with the best one."""
  if len(run.evaluations) < 2:
    return None
  first, *_, last = run.evaluations
  top = max(run.evaluations, key=lambda row: row["accuracy"])
  if run.gain and run.gain["high"] < 0:
    top = first
  elif top["accuracy_low"] <= last["accuracy_high"]:
    return None
  return (
    f"Accuracy fell: {top['accuracy']:.1%} after step {top['step']}, "
    f"{last['accuracy']:.1%} after step {last['step']}"
  )


def _no_improvement(run: Facts) -> str | None:
  if not (run.finished and run.evaluations and _ended_early(run)):
    return None
  baseline, *rest = run.evaluations
  record: best.Record = {}
  for row in rest:
    record = best.after(record, baseline, row)
  limit = run.limits.get("no_improvement", 0)
  if not best.stopping(record, limit):
    return None
  return (
    f"Ended early at {_at(run)}: accuracy did not rise in the last "
    f"{limit} evaluations (stop.no_improvement){_accuracies(run)}"
  )


def _still_improving(run: Facts) -> str | None:
  """Compares mean rewards in the last quarter of steps with the one before."""
  rewards = np.array([row.get("reward_mean", np.nan) for row in run.steps])
  quarter = len(rewards) // 4
  if quarter < _QUARTER:
    return None
  rises = rewards[-quarter:] - rewards[-2 * quarter : -quarter]
  mean, low, _ = mean_interval(rises)
  if not low > 0:  # or not a number
    return None
  more = "; more steps may help (--config.steps)" if run.finished else ""
  return (
    f"Still improving at {_at(run)}: mean reward {mean:+.3g} in the last "
    f"quarter of the steps{_accuracies(run)}{more}"
  )


def _rose(run: Facts) -> str | None:
  if not (run.finished and run.gain and run.gain["low"] > 0):
    return None
  return f"Finished: accuracy rose on the same prompts{_accuracies(run)}"


def _ended(run: Facts) -> str:
  if not run.finished:
    return f"Not finished: {_at(run)}{_accuracies(run)}"
  if not run.gain:
    return f"Finished: {_at(run)}{_accuracies(run)}"
  return (
    f"Finished: no clear change in accuracy{_accuracies(run)}, on "
    f"{run.gain['prompts']} prompts"
  )


VERDICTS: tuple[tuple[str, Callable[[Facts], str | None]], ...] = (
  ("bad", _learned_nothing),
  ("bad", _stopped),
  ("bad", _fell),
  ("", _no_improvement),
  ("good", _still_improving),
  ("good", _rose),
  ("", _ended),
)
"""Levels with their sentences; the first one that applies is the verdict."""


def verdict(run: Facts) -> Verdict:
  """Returns the first of `VERDICTS` that applies to a run."""
  if not run.steps:
    done = "Finished without training." if run.finished else "No step yet."
    return Verdict("", done)
  sentences = ((level, sentence(run)) for level, sentence in VERDICTS)
  level, text = next((level, text) for level, text in sentences if text)
  return Verdict(level, f"{text}.")


def troubled_metrics(run: Facts) -> list[str]:
  """Returns the metrics that show trouble, the most frequent trouble first."""
  names = {"few_effective_samples": "rollout_effective_samples"}
  counts = _progress(run).steps_with
  often = [n for n in counts if counts[n] >= max(1, _OFTEN * len(run.steps))]
  often.sort(key=counts.__getitem__, reverse=True)
  fell = ["accuracy"] if _fell(run) else []
  return fell + [names.get(name, name) for name in often]
