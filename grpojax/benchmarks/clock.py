"""Measures seconds of steps, CPU time and peak memory."""

import os
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.runtime import compilation

QUIET = 0.08
"""Largest share of the CPUs used by other processes in a step that counts."""


def cpu_seconds() -> tuple[float, float]:
  """Returns busy CPU seconds of the machine, if known, and of this process."""
  process = sum(os.times()[:4])
  try:
    with open("/proc/stat") as file:
      ticks = [int(x) for x in file.readline().split()[1:9]]
  except OSError:
    return process, process
  idle, waiting = ticks[3:5]
  busy = (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")
  return busy, process


class Step(NamedTuple):
  """Measurements of a step."""

  number: int  # from 0, including the warm-up
  row: Any  # metrics of the step
  # Seconds of each part, of the step (`total`) and of this process's CPU time
  # (`own_cpu`); `others` is the share of all CPUs that other processes used.
  seconds: dict[str, float]
  compiled: Sequence[float]  # seconds of each compilation


def timed(
  rows: Iterable[Any], count: int, parts: Mapping[str, str]
) -> list[Step]:
  """Times `count` steps; `parts` maps a step's parts to metrics in seconds."""
  compiled = compilation.seconds()
  steps = []
  before = 0
  clock = time.perf_counter()
  all_cpu, own_cpu = cpu_seconds()
  for number, row in enumerate(rows):
    now = time.perf_counter()
    all_now, own_now = cpu_seconds()
    wall = now - clock
    spent = own_now - own_cpu
    others = (all_now - all_cpu - spent) / (wall * os.cpu_count())
    text = f"step {number + 1}/{count}  {wall:.2f} s"
    print(text, file=sys.stderr, flush=True)
    seconds = {k: float(row[metric]) for k, metric in parts.items()}
    seconds |= {"total": wall, "own_cpu": spent, "others": max(0.0, others)}
    steps.append(Step(number, row, seconds, compiled[before:]))
    clock = now
    all_cpu, own_cpu = all_now, own_now
    before = len(compiled)
  return steps


def spread(values: Iterable[float]) -> dict[str, float]:
  """Returns median, minimum and maximum."""
  values = list(values)
  return {
    function.__name__: round(float(function(values)), 4)
    for function in (statistics.median, min, max)
  }


def quiet(steps: Sequence[Step]) -> tuple[list[Step], int]:
  """Returns (quiet steps, their number), or (all steps, 0) if none is quiet."""
  chosen = [step for step in steps if step.seconds["others"] < QUIET]
  return chosen or list(steps), len(chosen)


def peak_rss_mib() -> int:
  """Returns the peak memory of this process, MiB."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak // (2**20 if sys.platform == "darwin" else 2**10)
