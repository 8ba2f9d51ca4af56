"""Timer of the parts of a step."""

import time


class Timer:
  """Stopwatch: `timer(name)` adds the time since its last call to `seconds`."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._last = time.perf_counter()

  def __call__(self, name: str) -> None:
    """Adds the time since the last call, or the start, to `name`."""
    now = time.perf_counter()
    self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
    self._last = now
