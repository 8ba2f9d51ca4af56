"""Seconds of steps, and of the machine's processors."""

import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

QUIET = 0.08
"""Share of the CPUs that other processes take, below which a step counts."""


def cpu_seconds() -> tuple[float, float]:
  """CPU seconds that the machine was busy, and those of this process.

  Where the system does not tell (no /proc/stat), no other process is seen.
  """
  own = sum(os.times()[:4])
  try:
    with open("/proc/stat") as file:
      ticks = [int(x) for x in file.readline().split()[1:9]]
  except OSError:
    return own, own
  idle, waiting = ticks[3:5]
  busy = (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")
  return busy, own


def timed(
  rows: Iterable[Any], count: int
) -> Iterator[tuple[Any, dict[str, float]]]:
  """Yields each of `count` items with the seconds that it took, and says so.

  These are `total` (wall), `own_cpu` (this process) and `others` (share of all
  CPUs that other processes took).
  """
  clock, (busy, own) = time.perf_counter(), cpu_seconds()
  for number, row in enumerate(rows, 1):
    now, (all_now, own_now) = time.perf_counter(), cpu_seconds()
    wall, spent = now - clock, own_now - own
    others = (all_now - busy - spent) / (wall * os.cpu_count())
    print(f"step {number}/{count}  {wall:.2f} s", file=sys.stderr, flush=True)
    yield row, {"total": wall, "own_cpu": spent, "others": max(0.0, others)}
    clock, busy, own = now, all_now, own_now


def spread(values: Iterable[float]) -> dict[str, float]:
  """Median and range."""
  values = list(values)
  return {
    function.__name__: round(float(function(values)), 4)
    for function in (statistics.median, min, max)
  }


def quiet(steps: Sequence[Any], others: Sequence[float]) -> list[Any]:
  """The steps in which other processes took little; all, if there is none."""
  pairs = zip(steps, others, strict=True)
  return [step for step, share in pairs if share < QUIET] or list(steps)


def peak_rss_mib() -> int:
  """Most memory that this process had at a time, MiB; 0 if not known."""
  try:
    import resource
  except ImportError:  # Windows
    return 0
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak // (2**20 if sys.platform == "darwin" else 2**10)
