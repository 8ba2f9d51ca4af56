"""Progress of a run beside its state, and signs that it goes nowhere.

It is in every checkpoint, so that a summary does not depend on metrics.jsonl,
which may be lost or cut.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from grpojax.statistics.group_size_interval import pooled_group_size
from grpojax.training.evaluation import best

Row = Mapping[str, Any]


class Trouble(NamedTuple):
  """A sign that a step has taught the policy nothing, or little."""

  shown: float  # metric's value from which on it is in the progress line
  whole: float  # value from which on so many such steps in a row end the run
  words: str  # text for the progress line, with the value put in
  meaning: str  # text for a run that ends
  value: Callable[[Row], float] | None = None  # of a row; None: its metric


_SOME = 1e-9  # more than none

STOP_CONDITIONS = {
  "skipped_updates": Trouble(
    shown=1,
    whole=1,
    words="{:.0f} updates skipped",
    meaning="gradients were not finite, and updates were skipped",
  ),
  "rewards_missing": Trouble(
    shown=_SOME,
    whole=1,
    words="{:.0%} without reward",
    meaning="no completion had a reward (see failures.jsonl)",
  ),
  "zero_variance_groups": Trouble(
    shown=1,
    whole=1,
    words="no group's rewards differ",
    meaning="no group's rewards differed (all prompts are solved, or none is)",
  ),
  "truncated": Trouble(
    shown=0.5 + _SOME,
    whole=0.5 + _SOME,
    words="{:.0%} cut off at sampling.max_new_tokens",
    meaning="most completions were cut off at sampling.max_new_tokens",
  ),
  "few_effective_samples": Trouble(
    shown=0.9,
    whole=0.9,
    words="{:.0%} of the samples without weight",
    meaning="the samples were so far from the policy that their weights left "
    "less than a tenth of them (rollout_effective_samples)",
    value=lambda row: 1.0 - float(row.get("rollout_effective_samples", 1)),
  ),
}
"""By the metric that shows them, where `value` is None; `stop.NAME` says how
many steps in a row end a run, 0 for never."""


@dataclasses.dataclass(frozen=True)
class Progress:
  """Progress of a run beside its state, in JSON's types.

  Attributes:
    baseline: Accuracy of the starting weights, with its interval and the number
      of prompts; None where it is not known yet.
    train_seconds: Time of steps, and of evaluations and saves between them,
      over all the times the run was started.
    steps_with: Number of steps with each of `STOP_CONDITIONS`.
    in_a_row: Number of the last steps that were wholly of each kind.
    failed_rewards: Rewards of all steps that could not be computed.
    data: Fingerprints of the examples, by split.
    files: Hashes of the files that decide prompts and rewards, by path: the
      user's reward functions, the tokenizer, the reward model.
    jax: Version of JAX, and its settings that decide a run's bits, by name.
    frozen: Checksum of the weights that adapters are on; empty without any.
    evaluations: Record of the best evaluation (`training.evaluation.best`).
    diagnoses: c1 and c3 of each diagnosis of the gradient so far.
  """

  baseline: dict[str, float] | None = None
  train_seconds: float = 0.0
  steps_with: dict[str, int] = dataclasses.field(default_factory=dict)
  in_a_row: dict[str, int] = dataclasses.field(default_factory=dict)
  failed_rewards: int = 0
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  files: dict[str, str] = dataclasses.field(default_factory=dict)
  jax: dict[str, str] = dataclasses.field(default_factory=dict)
  frozen: str = ""
  evaluations: best.Record = dataclasses.field(default_factory=dict)
  diagnoses: list[list[float]] = dataclasses.field(default_factory=list)


def from_notes(notes: Mapping[str, Any] | None) -> Progress:
  """Returns the progress of a checkpoint's notes; the rest is not known."""
  names = {field.name for field in dataclasses.fields(Progress)}
  return Progress(**{k: v for k, v in (notes or {}).items() if k in names})


def _values(row: Row) -> dict[str, float]:
  """Returns how large each trouble is in a step."""
  return {
    name: trouble.value(row) if trouble.value else float(row[name])
    for name, trouble in STOP_CONDITIONS.items()
  }


def after(progress: Progress, row: Row) -> Progress:
  """Returns the progress after one more step with these metrics."""
  steps_with, in_a_row = dict(progress.steps_with), dict(progress.in_a_row)
  for name, value in _values(row).items():
    trouble = STOP_CONDITIONS[name]
    shown, whole = value >= trouble.shown, value >= trouble.whole
    steps_with[name] = steps_with.get(name, 0) + bool(shown)
    in_a_row[name] = in_a_row.get(name, 0) + 1 if whole else 0
  diagnosis = [float(row.get(name, math.nan)) for name in ("c1", "c3")]
  return dataclasses.replace(
    progress,
    train_seconds=float(row["train_seconds"]),
    steps_with=steps_with,
    in_a_row=in_a_row,
    failed_rewards=progress.failed_rewards + int(row.get("reward_failures", 0)),
    diagnoses=progress.diagnoses
    + ([diagnosis] if np.isfinite(diagnosis).all() else []),
  )


def with_pooled_group_size(progress: Progress, row: Row) -> dict[str, Any]:
  """Returns a diagnosed step's row with G* of all the run's diagnoses so far.

  The row has no G* if nothing is known of it, that is an interval of 1 to inf.
  """
  names = [f"optimal_group_size{end}" for end in ("", "_low", "_high")]
  *_, low, high = (float(row[name]) for name in names)
  row = {name: value for name, value in row.items() if name not in names}
  if not progress.diagnoses or math.isnan(low):
    return row
  c1, c3 = np.transpose(progress.diagnoses)
  pooled = pooled_group_size(c1, c3, (low, high))
  if pooled[1:] == (1.0, math.inf):
    return row
  return row | dict(zip(names, pooled, strict=True))


def troubles(row: Row) -> list[str]:
  """Describes the troubles that a step's metrics show."""
  return [
    STOP_CONDITIONS[name].words.format(value)
    for name, value in _values(row).items()
    if value >= STOP_CONDITIONS[name].shown
  ]


def stop_condition(progress: Progress, limits: Mapping[str, int]) -> str | None:
  """Returns the first of `STOP_CONDITIONS` beyond its limit, or None."""
  for name in STOP_CONDITIONS:
    if 0 < limits.get(name, 0) <= progress.in_a_row.get(name, 0):
      return name
  return None


def stop_reason(progress: Progress, limits: Mapping[str, int]) -> str | None:
  """Returns the reason why a run should end, or None.

  `limits` are steps in a row by `STOP_CONDITIONS`' names; 0 is no limit.
  """
  name = stop_condition(progress, limits)
  return name and (
    f"in {progress.in_a_row[name]} steps in a row "
    f"{STOP_CONDITIONS[name].meaning}; to go on all the same: "
    f"--config.stop.{name}=0"
  )
