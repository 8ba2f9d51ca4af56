"""Counts the costs of a compiled program on each device.

XLA's own `compiled.cost_analysis()` counts the body of a loop once. Here all
costs are multiplied by trip counts, through nested loops.
"""

from collections.abc import Iterator
from typing import NamedTuple

from grpojax.aot import collectives, flops, memory, trips
from grpojax.aot.collectives import Collective
from grpojax.aot.hlo import Computation, Instruction, Module
from grpojax.models.block_attention import CAUSAL


class InstructionCost(NamedTuple):
  """Costs of an instruction of the schedule, per run."""

  name: str
  op_name: str  # origin in the traced program
  flops: int  # of matrix products
  bytes: int  # of HBM reads and writes
  cycles: int  # estimated by XLA:TPU; 0 if unknown
  trips: int  # number of runs
  in_token_loop: bool
  collectives: tuple[Collective, ...]  # data sent to other devices


class Cost(NamedTuple):
  """Costs of a run of a program, on each device."""

  instructions: tuple[InstructionCost, ...]  # in the order of the schedule

  @property
  def flops(self) -> int:
    """Operations of matrix products."""
    return sum(i.flops * i.trips for i in self.instructions)

  @property
  def bytes(self) -> int:
    """Bytes read from HBM and written to it."""
    return sum(i.bytes * i.trips for i in self.instructions)

  @property
  def collectives(self) -> tuple[Collective, ...]:
    """All collectives, in the order of the schedule."""
    return tuple(c for i in self.instructions for c in i.collectives)

  @property
  def collective_bytes(self) -> int:
    """Bytes sent by each device."""
    return sum(c.bytes * c.trips for c in self.collectives)

  @property
  def in_token_loop(self) -> "Cost":
    """The costs of token loops."""
    return Cost(tuple(i for i in self.instructions if i.in_token_loop))


def by_kind(cost: Cost) -> dict[str, dict[str, int]]:
  """Sums bytes and runs of collectives by kind, the most bytes first."""
  kinds = {}
  for c in cost.collectives:
    sums = kinds.setdefault(c.kind, {"bytes": 0, "runs": 0})
    sums["bytes"] += c.bytes * c.trips
    sums["runs"] += c.trips
  return dict(sorted(kinds.items(), key=lambda item: -item[1]["bytes"]))


class _Walk(NamedTuple):
  """State of the walk through a program, at a computation."""

  module: Module
  token_loop_trips: int  # iterations of a loop of unknown length
  trips: int  # runs of the computation
  chains: set[str]  # output: ids of collectives that have several parts
  in_token_loop: bool = False
  constants: trips.State = {}  # known values of the enclosing loop
  op_name: str = ""  # the caller's, for instructions without an op_name
  loop: int = 1  # trips of the innermost loop


def _loop(
  walk: _Walk, computation: Computation, loop: Instruction
) -> Iterator[InstructionCost]:
  """Yields the costs of all iterations of a `while`, body and condition."""
  counted = trips.trip_count(walk.module, computation, loop, walk.constants)
  count = counted.most
  in_token_loop = walk.in_token_loop
  # Only token loops can end before their counter reaches its limit.
  if not counted.exact:
    if count is None:
      count = 1 if in_token_loop else walk.token_loop_trips
    in_token_loop = True
  inner = walk._replace(
    constants=counted.constants,
    in_token_loop=in_token_loop,
    trips=walk.trips * count,
    loop=count,
  )
  for key in ("condition", "body"):
    yield from _walk(inner, walk.module.called(loop, key))


def _instruction(
  walk: _Walk, computation: Computation, i: Instruction
) -> InstructionCost:
  inside = memory.contents(walk.module, computation, i)
  sent, repeated = collectives.find(
    walk.module, inside, walk.trips, walk.chains
  )
  shapes = memory.result(inside.parameters, i)
  cycles = i.number(r'"estimated_cycles":"(\d+)"') or 0
  return InstructionCost(
    name=i.name,
    op_name=i.op_name or walk.op_name,
    flops=flops.flops(inside, i),
    bytes=memory.hbm_bytes(inside, shapes, repeated),
    # XLA gives some copies on tpu7x 2^63 - 1 cycles, and ragged products those
    # of all rows with all matrices.
    cycles=cycles if cycles < 2**40 and flops.RAGGED not in i.attributes else 0,
    trips=walk.trips,
    in_token_loop=walk.in_token_loop,
    collectives=sent,
  )


def _walk(walk: _Walk, computation: Computation) -> Iterator[InstructionCost]:
  """Yields the costs of a computation's instructions, and of their callees."""
  for i in computation.instructions.values():
    called = [walk.module.computations[name] for _, name in i.called]
    op_name = i.op_name or walk.op_name
    # "call-start" and "async-start" run a computation asynchronously.
    opcode = i.opcode.removesuffix("-start")
    if opcode == "while":
      yield from _loop(walk, computation, i)
    elif opcode == "conditional":
      taken = walk.trips
      if CAUSAL in op_name:
        # The n blocks of queries see 1, 2, ..., n of n blocks of keys.
        taken = walk.trips * (walk.loop + 1) // (2 * walk.loop)
      inner = walk._replace(trips=taken)
      branches = [Cost(tuple(_walk(inner, c))) for c in called]
      heaviest = max(branches, key=lambda branch: (branch.flops, branch.bytes))
      yield from heaviest.instructions
    elif opcode in ("call", "async"):
      for c in called:
        yield from _walk(walk._replace(op_name=op_name), c)
    elif not memory.is_free(i):
      yield _instruction(walk, computation, i)


def cost(module: Module, token_loop_trips: int, runs: int = 1) -> Cost:
  """Counts the costs of `runs` runs of a program, on each device.

  The heaviest branch of a conditional counts; in `block_attention` it counts as
  often as it would run without windows. A loop that can end before its counter
  reaches its limit is taken for a token loop, which decodes until all samples
  end. It counts as many trips as the limit allows; if the limit is unknown,
  `token_loop_trips` (tokens of a completion), or 1 within another token loop.
  """
  walk = _Walk(module, token_loop_trips, runs, set())
  return Cost(tuple(_walk(walk, module.computations[module.entry])))
