"""Needs of each program of a step: compiled, counted, and remembered.

A result is kept under the digest of what was compiled (the lowered program and
its shardings, the machine, the versions of JAX and libtpu, the compiler's
flags), so that the same program is compiled once, whichever configuration asks
for it.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import time
from typing import Any

import jax

from grpojax.aot import cost, hlo, roofline
from grpojax.aot.chips import Chip
from grpojax.aot.topology import Machine
from grpojax.runtime.files import disk, records

VERSION = 3  # of what is kept; count up when the counting changes
# Environment variables that change what XLA makes of a program.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")


@dataclasses.dataclass(frozen=True)
class Part:
  """Program on one device (a chip, or the part of one that XLA sees)."""

  memory_bytes: int  # arguments, new results and temporaries
  temporary_bytes: int = 0
  flops: int = 0  # of matrix products
  bytes: int = 0  # read from HBM and written to it
  collective_bytes: int = 0  # sent to other chips
  token_loop_collective_bytes: int = 0  # those that the token loop sends
  collectives: dict[str, dict[str, int]] = dataclasses.field(
    default_factory=dict
  )  # bytes and runs, by kind
  seconds: float = 0.0  # estimate, one thing after another
  overlapped_seconds: float = 0.0  # estimate, if what can ran side by side
  xla_seconds: float | None = None  # estimate by XLA's own cycles
  token_loop_seconds: float = 0.0  # part of `seconds` in the token loop
  compile_seconds: float = 0.0
  heaviest: list[tuple[int, str]] = dataclasses.field(
    default_factory=list
  )  # instructions that move most: bytes, place in the code
  error: str = ""  # reason why XLA refused to compile it


_ADDED = (
  "flops bytes collective_bytes token_loop_collective_bytes seconds "
  "overlapped_seconds token_loop_seconds"
).split()


def repeated(part: Part, runs: int) -> Part:
  """Returns the needs of several runs, one after another, in one memory."""
  return dataclasses.replace(
    part,
    **{name: runs * getattr(part, name) for name in _ADDED},
    xla_seconds=part.xla_seconds and runs * part.xla_seconds,
    collectives={
      kind: {name: runs * count for name, count in of.items()}
      for kind, of in part.collectives.items()
    },
    heaviest=[(runs * size, where) for size, where in part.heaviest],
  )


def cache_directory() -> pathlib.Path:
  """Directory of the results."""
  return disk.user_cache() / "compiled"


def _versions() -> str:
  versions = []
  for name in ("jax", "jaxlib", "libtpu"):
    try:
      versions.append(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
      versions.append(f"no {name}")
  return ", ".join(versions)


def _out_of_memory(error: Exception) -> int | None:
  """Bytes that XLA says a program needs, where it refuses it for them."""
  used = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", str(error))
  if used is None:
    return None
  unit = " KMGT".index(used[2] or " ")
  return int(float(used[1]) * 2 ** (10 * unit))


def _count(compiled: Any, chip: Chip, trips: int) -> Part:
  counted = cost.cost(hlo.parse(compiled.as_text()), token_loop_trips=trips)
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
    overlapped_seconds=estimate.overlapped,
    xla_seconds=estimate.by_cycles,
    token_loop_seconds=estimate.token_loop,
    heaviest=[
      (i.bytes * i.trips, i.op_name or i.name)
      for i in cost.heaviest(counted, 8)
    ],
  )


def _compile(lowered: jax.stages.Lowered, chip: Chip, trips: int) -> Part:
  start = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    memory = _out_of_memory(error)
    if memory is None:
      raise
    seconds = time.perf_counter() - start
    return Part(memory, compile_seconds=seconds, error="out of memory")
  seconds = time.perf_counter() - start
  part = _count(compiled, chip, trips)
  return dataclasses.replace(part, compile_seconds=seconds)


def measure(
  lowered: jax.stages.Lowered, machine: Machine, trips: int
) -> tuple[Part, bool]:
  """Compiles a program, or takes the result of the last time, which is said.

  `trips` is the number of trips of the token loop.
  """
  text = lowered.as_text()
  flags = [f"{name}={os.environ.get(name, '')}" for name in _FLAGS]
  chip = machine.chip
  key = f"{VERSION}|{_versions()}|{flags}|{machine.name}|{trips}|{chip}|{text}"
  name = hashlib.sha256(key.encode()).hexdigest()
  file = cache_directory() / f"{name}.json"
  # There may be none, or a damaged one.
  with contextlib.suppress(OSError, ValueError, TypeError):
    values = json.loads(file.read_text())
    if len(values) == len(dataclasses.fields(Part)):
      return Part(**values), True
  part = _compile(lowered, chip, trips)
  with contextlib.suppress(OSError):  # it only saves time
    file.parent.mkdir(parents=True, exist_ok=True)
    records.write_text(file, json.dumps(dataclasses.asdict(part)))
  return part, False
