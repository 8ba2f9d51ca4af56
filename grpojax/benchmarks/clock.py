"""Seconds of steps, and of the machine's processors."""

import os
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.runtime import compilation

QUIET = 0.08
"""Share of the CPUs that other processes take, below which a step counts."""


def cpu_seconds() -> tuple[float, float]:
  """Busy CPU seconds of the machine (or this process), and of this process."""
  own = sum(os.times()[:4])
  try:
    with open("/proc/stat") as file:
      ticks = [int(x) for x in file.readline().split()[1:9]]
  except OSError:
    return own, own
  idle, waiting = ticks[3:5]
  busy = (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")
  return busy, own


class Step(NamedTuple):
  """One timed step."""

  number: int  # from 0; the warm-up counts
  row: Any  # metrics of the step
  # Seconds by part; `total` (wall), `own_cpu` (this process) and `others`
  # (share of all CPUs that other processes took).
  seconds: dict[str, float]
  compiled: Sequence[float]  # seconds of the programs that it compiled


def timed(
  rows: Iterable[Any], count: int, parts: Mapping[str, str]
) -> list[Step]:
  """Times `count` steps, and prints them; `parts` names metrics of seconds."""
  compiled, steps, before = compilation.seconds(), [], 0
  clock, (busy, own) = time.perf_counter(), cpu_seconds()
  for number, row in enumerate(rows):
    now, (all_now, own_now) = time.perf_counter(), cpu_seconds()
    wall, spent = now - clock, own_now - own
    others = (all_now - busy - spent) / (wall * os.cpu_count())
    text = f"step {number + 1}/{count}  {wall:.2f} s"
    print(text, file=sys.stderr, flush=True)
    seconds = {k: float(row[metric]) for k, metric in parts.items()}
    seconds |= {"total": wall, "own_cpu": spent, "others": max(0.0, others)}
    steps.append(Step(number, row, seconds, compiled[before:]))
    clock, busy, own, before = now, all_now, own_now, len(compiled)
  return steps


def spread(values: Iterable[float]) -> dict[str, float]:
  """Median and range."""
  values = list(values)
  return {
    function.__name__: round(float(function(values)), 4)
    for function in (statistics.median, min, max)
  }


def quiet(steps: Sequence[Step]) -> tuple[list[Step], int]:
  """Steps in which other processes took little (all if none); their number."""
  chosen = [step for step in steps if step.seconds["others"] < QUIET]
  return chosen or list(steps), len(chosen)


def peak_rss_mib() -> int:
  """Most memory that this process had at a time, MiB."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak // (2**20 if sys.platform == "darwin" else 2**10)
