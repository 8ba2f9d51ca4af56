"""How long the rest of a run will take, from what its steps have taken."""

from typing import NamedTuple


class Pace(NamedTuple):
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


def after_step(pace: Pace, seconds: float) -> Pace:
  """After one more step."""
  if pace.steps < 0:
    return pace._replace(steps=0)
  return pace._replace(steps=pace.steps + 1, seconds=pace.seconds + seconds)


def after_pause(pace: Pace, seconds: float) -> Pace:
  """After what was between this step and the next."""
  return pace._replace(pauses=pace.pauses + 1, paused=pace.paused + seconds)


def step_seconds(pace: Pace) -> float | None:
  """Seconds of a step; None before the second one."""
  return pace.seconds / pace.steps if pace.steps > 0 else None


def left(pace: Pace, steps: int) -> float | None:
  """Seconds that so many more steps take, with their share of the pauses."""
  step = step_seconds(pace)
  if step is None:
    return None
  return steps * (step + pace.paused / max(pace.pauses, 1))
