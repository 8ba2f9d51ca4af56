"""Time that the rest of a run will take, from the time of its steps."""

from typing import NamedTuple


class Eta(NamedTuple):
  """Times that were measured since the program was started.

  Attributes:
    steps: Number of timed steps; the first compiles, and does not count.
    seconds: Seconds that they took.
    pauses: Number of timed pauses between steps.
    paused: Seconds of these, for evaluations, saving and all else.
  """

  steps: int = -1
  seconds: float = 0.0
  pauses: int = 0
  paused: float = 0.0


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
