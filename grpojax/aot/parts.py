"""Needs of each program of a step: compiled, and counted."""

import re
import time
from typing import NamedTuple

import jax

from grpojax.aot import cost, hlo, roofline
from grpojax.aot.chips import Chip


class Part(NamedTuple):
  """Program on one device (a chip, or the part of one that XLA sees)."""

  memory_bytes: int  # arguments, new results and temporaries
  temporary_bytes: int = 0
  flops: int = 0  # of matrix products
  bytes: int = 0  # read from HBM and written to it
  collective_bytes: int = 0  # sent to other chips
  token_loop_collective_bytes: int = 0  # of these, sent by the token loop
  collectives: dict[str, dict[str, int]] = {}  # bytes and runs, by kind
  seconds: float = 0.0  # estimate, one thing after another
  token_loop_seconds: float = 0.0  # part of `seconds` in the token loop
  xla_seconds: float | None = None  # estimate by XLA's own cycles
  compile_seconds: float = 0.0
  error: str = ""  # reason why XLA refused to compile it


def _out_of_memory(error: Exception) -> int | None:
  """Bytes that XLA says a program needs, if it refuses it for them."""
  used = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT]?)", str(error))
  if used is None:
    return None
  unit = " KMGT".index(used[2] or " ")
  return int(float(used[1]) * 2 ** (10 * unit))


def measure(
  lowered: jax.stages.Lowered, chip: Chip, trips: int, runs: int = 1
) -> Part:
  """Compiles a program, and counts its needs.

  `trips` is the number of trips of the token loop. The program runs `runs`
  times, one run after another, in one memory.
  """
  start = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    memory = _out_of_memory(error)
    if memory is None:
      raise
    seconds = time.perf_counter() - start
    return Part(memory, compile_seconds=seconds, error="out of memory")
  compile_seconds = time.perf_counter() - start
  counted = cost.cost(hlo.parse(compiled.as_text()), trips, runs)
  estimate = roofline.estimate(counted, chip)
  memory = compiled.memory_analysis()
  ends = memory.argument_size_in_bytes + memory.output_size_in_bytes
  ends -= memory.alias_size_in_bytes
  return Part(
    memory_bytes=ends + memory.temp_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    flops=counted.flops,
    bytes=counted.bytes,
    collective_bytes=counted.collective_bytes,
    token_loop_collective_bytes=counted.in_token_loop.collective_bytes,
    collectives=cost.by_kind(counted),
    seconds=estimate.seconds,
    token_loop_seconds=estimate.token_loop,
    xla_seconds=estimate.by_cycles,
    compile_seconds=compile_seconds,
  )
