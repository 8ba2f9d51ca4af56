"""A run's progress, which is saved in every checkpoint, and stop conditions."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from grpojax.statistics.group_size_interval import pooled_group_size
from grpojax.training.evaluation import best

Row = Mapping[str, Any]


class Trouble(NamedTuple):
  """A reason why the policy learns little or nothing in a step."""

  stop_from: float  # smallest value that counts towards `stop.NAME`
  words: str  # text for the progress line, which formats the value
  meaning: str  # text for a stopped run
  value: Callable[[Row], float] | None = None  # None: the metric NAME
  show_from: float | None = None  # smallest to print; None: `stop_from`

  @property
  def shown(self) -> float:
    """Smallest value to print in the progress line."""
    return self.stop_from if self.show_from is None else self.show_from


_POSITIVE = 1e-9
MISMATCH = 0.02  # largest between trainer and rollout, nats per token

STOP_CONDITIONS = {
  "skipped_updates": Trouble(
    1.0,
    "{:.0f} updates skipped",
    "gradients were not finite, and updates were skipped",
  ),
  "rewards_missing": Trouble(
    1.0,
    "{:.0%} without reward",
    "no completion had a reward (see failures.jsonl)",
    show_from=_POSITIVE,
  ),
  "zero_variance_groups": Trouble(
    1.0,
    "no group's rewards differ",
    "no group's rewards differed (all prompts are solved, or none is)",
  ),
  "truncated": Trouble(
    0.5 + _POSITIVE,
    "{:.0%} cut off at sampling.max_new_tokens",
    "most completions were cut off at sampling.max_new_tokens",
  ),
  "few_effective_samples": Trouble(
    0.9,
    "{:.0%} of the samples ineffective (importance weights)",
    "importance weights left at most 10% of the samples effective "
    "(rollout_effective_samples)",
    value=lambda row: 1.0 - float(row.get("rollout_effective_samples", 1)),
  ),
  "engine_mismatch": Trouble(
    MISMATCH,
    "the engine differs by {:.2g} nats per token",
    "log-probabilities of engine and trainer differed by more than "
    f"{MISMATCH} nats per token (rollout_mismatch_mean, which with "
    "sampling.ahead includes an update)",
    # Only steps with an engine have seconds_sync.
    value=lambda row: (
      "seconds_sync" in row and float(row.get("rollout_mismatch_mean", 0))
    ),
  ),
}
"""Stop conditions by NAME, a metric unless `value` is set. A run ends after
`stop.NAME` such steps in a row, or never if this setting is 0."""


@dataclasses.dataclass(frozen=True)
class Progress:
  """Progress of a run, saved with its state; all fields are JSON values."""

  baseline: dict[str, float] | None = None  # evaluation of starting weights
  train_seconds: float = 0.0  # steps, evaluations and saves since step 0
  # Number of steps per stop condition: in total, and the latest in a row
  steps_with: dict[str, int] = dataclasses.field(default_factory=dict)
  in_a_row: dict[str, int] = dataclasses.field(default_factory=dict)
  failed_rewards: int = 0
  # Number and fingerprint of the examples of each split
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Hashes of the files of prompts and rewards, by path
  files: dict[str, str] = dataclasses.field(default_factory=dict)
  # JAX's version and numerical settings
  jax: dict[str, str] = dataclasses.field(default_factory=dict)
  frozen: str = ""  # hash of the frozen weights
  evaluations: best.Record = dataclasses.field(default_factory=dict)
  # c1 and c3 of each diagnosis
  diagnoses: list[list[float]] = dataclasses.field(default_factory=list)


def from_notes(notes: Mapping[str, Any] | None) -> Progress:
  """Returns the progress in a checkpoint's notes; ignores unknown fields."""
  names = {field.name for field in dataclasses.fields(Progress)}
  return Progress(**{k: v for k, v in (notes or {}).items() if k in names})


def _values(row: Row) -> dict[str, float]:
  """Returns the value of each stop condition in a row of metrics."""
  return {
    name: trouble.value(row) if trouble.value else float(row[name])
    for name, trouble in STOP_CONDITIONS.items()
  }


def after(progress: Progress, row: Row) -> Progress:
  """Returns the progress after one more step with these metrics."""
  steps_with, in_a_row = dict(progress.steps_with), dict(progress.in_a_row)
  for name, value in _values(row).items():
    trouble = STOP_CONDITIONS[name]
    steps_with[name] = steps_with.get(name, 0) + int(value >= trouble.shown)
    counts = value >= trouble.stop_from
    in_a_row[name] = in_a_row.get(name, 0) + 1 if counts else 0
  diagnosis = [float(row.get(name, math.nan)) for name in ("c1", "c3")]
  new = [diagnosis] if np.isfinite(diagnosis).all() else []
  return dataclasses.replace(
    progress,
    train_seconds=float(row["train_seconds"]),
    steps_with=steps_with,
    in_a_row=in_a_row,
    failed_rewards=progress.failed_rewards + int(row.get("reward_failures", 0)),
    diagnoses=progress.diagnoses + new,
  )


def with_pooled_group_size(progress: Progress, row: Row) -> dict[str, Any]:
  """Replaces G*, the best group size, by an estimate from all diagnoses.

  Removes G* from the row if its interval is uninformative, 1 to inf.
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
  """Returns the problems of a step, as texts for the progress line."""
  return [
    STOP_CONDITIONS[name].words.format(value)
    for name, value in _values(row).items()
    if value >= STOP_CONDITIONS[name].shown
  ]


def stop_condition(progress: Progress, limits: Mapping[str, int]) -> str | None:
  """Returns the first of `STOP_CONDITIONS` at its limit, or None.

  `limits` maps names to numbers of steps in a row; 0 is no limit.
  """
  for name in STOP_CONDITIONS:
    if 0 < limits.get(name, 0) <= progress.in_a_row.get(name, 0):
      return name
  return None


def stop_reason(progress: Progress, limits: Mapping[str, int]) -> str | None:
  """Returns the reason why a run should end, or None."""
  name = stop_condition(progress, limits)
  return name and (
    f"in {progress.in_a_row[name]} steps in a row "
    f"{STOP_CONDITIONS[name].meaning}; to go on anyway: --config.stop.{name}=0"
  )
