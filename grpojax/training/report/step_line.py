"""Step of a run as a line of text, and the time left."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpojax.runtime.files.records import duration
from grpojax.training.run.progress import troubles
from grpojax.training.settings.run import TrainSettings

Row = Mapping[str, Any]

SHOWN = (
  "reward_mean",
  "group_acceptance",  # with dynamic sampling
  "completion_length_mean",
  "truncated",
  "zero_variance_groups",
  "entropy",
  "grad_norm",
  "tokens_per_second",
)


class Eta(NamedTuple):
  """Times that were measured since the program was started."""

  # Number of timed steps; the first is slow, and does not count.
  steps: int = -1
  seconds: float = 0.0  # seconds that they took, but for compilations
  pauses: int = 0  # number of timed pauses between steps
  paused: float = 0.0  # seconds of these, for evaluations, saving and all else


def after_step(eta: Eta, seconds: float) -> Eta:
  """Adds a step."""
  if eta.steps < 0:
    return eta._replace(steps=0)
  return eta._replace(steps=eta.steps + 1, seconds=eta.seconds + seconds)


def after_pause(eta: Eta, seconds: float) -> Eta:
  """Adds the time between this step and the next."""
  return eta._replace(pauses=eta.pauses + 1, paused=eta.paused + seconds)


def step_seconds(eta: Eta) -> float | None:
  """Returns the seconds of a step; None before the second one."""
  return eta.seconds / eta.steps if eta.steps > 0 else None


def left(eta: Eta, steps: int) -> float | None:
  """Returns the seconds of so many more steps, with their pauses."""
  step = step_seconds(eta)
  if step is None:
    return None
  return steps * (step + eta.paused / max(eta.pauses, 1))


def line(settings: TrainSettings, row: Row, eta: Eta) -> str:
  """Names and numbers of a step to grep, and the time that is left."""
  step, steps = row["step"], settings.steps
  words = [f"step {step:>{len(str(steps))}}/{steps}"]
  words += [f"{name} {float(row[name]):.3g}" for name in SHOWN if name in row]
  # Where the step was diagnosed, and told something.
  if not math.isnan(row.get("optimal_group_size", math.nan)):
    best = [row[f"optimal_group_size{s}"] for s in ("", "_low", "_high")]
    words.append("best_group_size {:.0f} [{:.0f}, {:.0f}]".format(*best))
  if row["seconds_compile"] >= 1:
    words.append(f"compiled {row['seconds_compile']:.0f} s")
  seconds, rest = step_seconds(eta), left(eta, steps - step)
  if seconds is not None and rest is not None:
    words += [f"{seconds:.2f} s/step", f"{duration(rest)} left"]
  return "  ".join([*words, *map("! {}".format, troubles(row))])
