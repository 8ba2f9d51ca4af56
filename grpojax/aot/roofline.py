"""Converts operations and bytes to seconds by a roofline for each instruction.

An instruction takes the longer of its matrix products at the chip's peak and
its HBM traffic at full bandwidth (Williams et al. 2009,
https://doi.org/10.1145/1498765.1498785). A collective takes the time of its
bytes on a link plus a hop's latency per step round the ring (scaling book, part
3, https://jax-ml.github.io/scaling-book/sharding). Assumptions:

- Rings use one link in one direction. Real ones take half the time if an axis
  of the slice wraps round (16 chips on v5e and v6e, multiples of 4 on v4, v5p
  and tpu7x) or a group spans two axes.
- A hop takes a microsecond, as in the book.
- A piece of an all-to-all passes (n + 1) / 3 chips on average in a row of n.

Not modelled: operations other than matrix products; traffic of VMEM; products
too small to fill the matrix unit; launches and loop control; hosts; networks
between slices; and the overlap of products, copies and sending.

XLA:TPU annotates most instructions with its own estimate in cycles, which
includes the vector unit and VMEM. `Estimate.xla_seconds` is their sum. If a
device has two cores, the time is halved, unless this would exceed the peak.
`Estimate.untimed_seconds` is the roofline of instructions without such cycles.

Measured times lie between the two estimates (tests/aot/test_roofline.py).
"""

from collections.abc import Callable
from typing import NamedTuple

from grpojax.aot.chips import Chip
from grpojax.aot.collectives import BETWEEN, Collective
from grpojax.aot.cost import Cost, InstructionCost

HOP_SECONDS = 1e-6


class Estimate(NamedTuple):
  """Seconds of a run of a program."""

  seconds: float  # of products, HBM traffic and sending, without overlap
  token_loop_seconds: float  # part of `seconds` in the token loop
  xla_seconds: float | None  # XLA:TPU's own estimate from cycles, if any
  untimed_seconds: float = 0.0  # part of both without cycles


def collective_seconds(collective: Collective, chip: Chip) -> float:
  """Returns the seconds of a run on a device's links; 0 between slices."""
  n = collective.group_size
  if n == 1 or collective.kind.endswith(BETWEEN):
    return 0.0
  hops = 2 * (n - 1) if collective.kind == "all-reduce" else n - 1
  sent = collective.bytes
  if collective.kind in ("all-to-all", "ragged-all-to-all"):
    sent = sent * (n + 1) / 3
  if collective.kind == "collective-permute":
    hops = 1
  return sent / chip.link_bandwidth + hops * HOP_SECONDS


def _working(i: InstructionCost, chip: Chip) -> float:
  """Returns an instruction's roofline seconds per run, without sending."""
  return max(i.flops / chip.flops, i.bytes / chip.hbm_bandwidth)


def _by_cycles(i: InstructionCost, chip: Chip) -> float:
  """Returns seconds per run by XLA's cycles or, if unknown, the roofline."""
  if not i.cycles:
    return _working(i, chip)
  seconds = i.cycles / chip.clock
  both = seconds / chip.cores
  # If sharing beats the peak, XLA's cycles (of large products) already are for
  # two cores. Below half the peak the two cases cannot be told apart.
  return both if both > i.flops / chip.flops else seconds


def estimate(cost: Cost, chip: Chip) -> Estimate:
  """Estimates the seconds of a run on a device."""

  def seconds(part: Cost, of_run: Callable) -> float:
    sending = (collective_seconds(c, chip) * c.trips for c in part.collectives)
    working = (of_run(i, chip) * i.trips for i in part.instructions)
    return sum(working, sum(sending, 0.0))

  by_cycles = None
  if chip.clock and any(i.cycles for i in cost.instructions):
    by_cycles = seconds(cost, _by_cycles)
  token_loop = seconds(cost.in_token_loop, _working)
  untimed = (i for i in cost.instructions if not i.cycles)
  untimed = sum(_working(i, chip) * i.trips for i in untimed)
  return Estimate(seconds(cost, _working), token_loop, by_cycles, untimed)
