"""Seconds of the parts of a step, by name."""

import time


class Timer:
  """Stopwatch that gives the time since its last call to a name.

      timer = Timer()
      samples = sample(...)
      timer("rollout")
      timer.seconds  # {"rollout": ...}

  Attributes:
    seconds: Seconds by name; those of a name that is called again are added.
  """

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._last = time.perf_counter()

  def __call__(self, name: str) -> None:
    """Gives the time since the last call, or the start, to `name`."""
    now = time.perf_counter()
    self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
    self._last = now
