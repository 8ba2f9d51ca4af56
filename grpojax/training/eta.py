"""How long the rest of a run will take, from what its steps have taken."""

from typing import NamedTuple


class Eta(NamedTuple):
  """What has been measured since the program was started.

  Attributes:
    steps: that were timed; the first compiles, and does not count.
    seconds: that they took.
    pauses: between steps, that were timed.
    paused: seconds of evaluations, saving and all else there.
  """

  steps: int = -1
  seconds: float = 0.0
  pauses: int = 0
  paused: float = 0.0


def after_step(eta: Eta, seconds: float) -> Eta:
  """After one more step."""
  if eta.steps < 0:
    return eta._replace(steps=0)
  return eta._replace(steps=eta.steps + 1, seconds=eta.seconds + seconds)


def after_pause(eta: Eta, seconds: float) -> Eta:
  """After what was between this step and the next."""
  return eta._replace(pauses=eta.pauses + 1, paused=eta.paused + seconds)


def step_seconds(eta: Eta) -> float | None:
  """Seconds of a step; None before the second one."""
  return eta.seconds / eta.steps if eta.steps > 0 else None


def left(eta: Eta, steps: int) -> float | None:
  """Seconds that so many more steps take, with their share of the pauses."""
  step = step_seconds(eta)
  if step is None:
    return None
  return steps * (step + eta.paused / max(eta.pauses, 1))
