"""Verdict on a run: a sentence that sums up its metrics."""

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpojax.reports.curves import is_number
from grpojax.statistics.intervals import mean_interval
from grpojax.training.evaluation import best
from grpojax.training.report import progress
from grpojax.training.report.progress import STOP_CONDITIONS, Progress, Row

_NO_SIGNAL = {
  "rewards_missing": "no completion had a reward",
  "skipped_updates": "gradients were not finite",
  "zero_variance_groups": "no group's rewards differed",
}
_OFTEN = 0.05  # minimum share of steps that have a problem, to show it
_QUARTER = 4  # minimum number of steps in a quarter, to see a trend


class Facts(NamedTuple):
  """Inputs of a verdict."""

  steps: Sequence[Row]  # metrics of steps
  evaluations: Sequence[Row]  # on the prompts of the last evaluation
  planned: int | None  # number of steps in the settings
  limits: Mapping[str, int]  # `stop` settings
  finished: bool
  gain: Mapping[str, Any] | None  # from `comparisons.before_and_after`


def facts(
  rows: Sequence[Row],
  planned: int | None,
  limits: Mapping[str, int],
  finished: bool,
  gain: Mapping[str, Any] | None = None,
) -> Facts:
  """Sorts rows of metrics.jsonl into steps and evaluations.

  Uses the last row of each step, without values that are not finite numbers.
  """
  steps = {}
  evaluations = {}
  for full_row in rows:
    row = {name: x for name, x in full_row.items() if is_number(x)}
    if row.keys() >= set(best.COLUMNS):
      evaluations[row["step"]] = row
    elif "step" in row and "reward_mean" in full_row:  # may be nan
      steps[row["step"]] = row
  ordered, tested = ([x[s] for s in sorted(x)] for x in (steps, evaluations))
  tested = [row for row in tested if row["prompts"] == tested[-1]["prompts"]]
  return Facts(ordered, tested, planned, limits, finished, gain)


def _when(run: Facts) -> str:
  last = int(run.steps[-1]["step"])
  return f"step {last}" + (f" of {run.planned}" if run.planned else "")


def _ended_early(run: Facts) -> bool:
  return run.planned is not None and run.steps[-1]["step"] < run.planned


def _progress(run: Facts) -> Progress:
  absent = dict.fromkeys(STOP_CONDITIONS, 0) | {"train_seconds": 0}
  rows = (absent | row for row in run.steps)
  return functools.reduce(progress.after, rows, Progress())


def _accuracies(run: Facts) -> str:
  if len(run.evaluations) < 2:
    return ""
  first, last = (run.evaluations[i]["accuracy"] for i in (0, -1))
  return f"; held-out accuracy {first:.1%} before, {last:.1%} after"


def _stop(run: Facts) -> str | None:
  """Returns the name of the `stop` setting that ended the run, if any."""
  if run.finished or not _ended_early(run):
    return None
  return progress.stop_condition(_progress(run), run.limits)


def _no_signal_reason(row: Row) -> str:
  """Returns the reason why a step gave no signal; "" for other steps."""
  for name, why in _NO_SIGNAL.items():
    # An update with no token in the loss is skipped, too, with gradient 0.
    finite = name == "skipped_updates" and "grad_norm" in row
    if row.get(name, 0) >= 1 and not finite:
      return why
  return ""


def _learned_nothing(run: Facts) -> str | None:
  reasons = collections.Counter(map(_no_signal_reason, run.steps))
  # Some advantages compare groups, and learn even if each has equal rewards.
  rose = run.gain and run.gain["low"] > 0
  if rose or "" in reasons:
    return None
  total = len(run.steps)
  counts = [f"in {n} of {total} steps {x}" for x, n in reasons.most_common()]
  rewards = [row["reward_mean"] for row in run.steps if "reward_mean" in row]
  mean = f"; mean reward {np.mean(rewards):.3g}" if rewards else ""
  name = _stop(run)
  stopped = f". Stopped at {_when(run)} (stop.{name})" if name else ""
  return f"Learned nothing: {', '.join(counts)}{mean}{stopped}"


def _stopped(run: Facts) -> str | None:
  name = _stop(run)
  return name and (
    f"Stopped at {_when(run)} (stop.{name}): in {run.limits[name]} steps in a "
    f"row {STOP_CONDITIONS[name].meaning}{_accuracies(run)}"
  )


def _fell(run: Facts) -> str | None:
  """Returns a sentence if accuracy fell from the first or best evaluation."""
  if len(run.evaluations) < 2:
    return None
  first, *_, last = run.evaluations
  top = max(run.evaluations, key=lambda row: row["accuracy"])
  # Accuracy fell if a paired comparison with the start says so, or if the
  # intervals of the best and the last evaluation do not overlap.
  if run.gain and run.gain["high"] < 0:
    top = first
  elif top["accuracy_low"] <= last["accuracy_high"]:
    return None
  values = [f"{x['accuracy']:.1%} after step {x['step']}" for x in (top, last)]
  return f"Accuracy fell: {', '.join(values)}"


def _no_improvement(run: Facts) -> str | None:
  limit = run.limits.get("no_improvement", 0)
  if not (run.finished and limit and _ended_early(run)):
    return None
  return (
    f"Ended early at {_when(run)}: accuracy did not rise in the last {limit} "
    f"evaluations (stop.no_improvement){_accuracies(run)}"
  )


def _still_improving(run: Facts) -> str | None:
  """Returns a sentence if rewards rose in the last quarter of the steps."""
  rewards = np.array([row.get("reward_mean", np.nan) for row in run.steps])
  quarter = len(rewards) // 4
  # On a solved task all rewards are equal, so no step has a gradient.
  if quarter < _QUARTER or all(map(_no_signal_reason, run.steps[-quarter:])):
    return None
  rises = rewards[-quarter:] - rewards[-2 * quarter : -quarter]
  mean, low, _ = mean_interval(rises)
  if not low > 0:  # also for NaN
    return None
  more = "; more steps may help (--config.steps)" if run.finished else ""
  return (
    f"Still improving at {_when(run)}: mean reward {mean:+.3g} in the last "
    f"quarter of the steps{_accuracies(run)}{more}"
  )


def _rose(run: Facts) -> str | None:
  if not (run.finished and run.gain and run.gain["low"] > 0):
    return None
  return f"Finished: accuracy rose on the same prompts{_accuracies(run)}"


def _ended(run: Facts) -> str:
  if run.finished and run.gain:
    prompts = f", on {run.gain['prompts']} prompts"
    return f"Finished: no clear change in accuracy{_accuracies(run)}{prompts}"
  end = "Finished" if run.finished else "Not finished"
  return f"{end}: {_when(run)}{_accuracies(run)}"


VERDICTS = (
  ("bad", _learned_nothing),
  ("bad", _stopped),
  ("bad", _fell),
  ("", _no_improvement),
  ("good", _still_improving),
  ("good", _rose),
  ("", _ended),
)
"""Levels (colours of the page) and sentences, in order of priority."""


def verdict(run: Facts) -> dict[str, str]:
  """Returns the `level` and `text` of the first applicable verdict."""
  if not run.steps:
    done = "Finished without training." if run.finished else "No step yet."
    return {"level": "", "text": done}
  verdicts = ((level, sentence(run)) for level, sentence in VERDICTS)
  level, text = next(x for x in verdicts if x[1])
  return {"level": level, "text": f"{text}."}


def troubled_metrics(run: Facts) -> list[str]:
  """Returns the metrics that show problems, the most frequent first."""
  names = {"few_effective_samples": "rollout_effective_samples"}
  counts = _progress(run).steps_with
  often = [n for n in counts if counts[n] >= max(1, _OFTEN * len(run.steps))]
  often.sort(key=counts.__getitem__, reverse=True)
  fell = ["accuracy"] if _fell(run) else []
  return fell + [names.get(name, name) for name in often]
