"""From operations and bytes to seconds: a roofline, instruction by instruction.

An instruction takes as long as its matrix products take at the chip's peak, or
as its HBM traffic takes at full bandwidth, whichever is longer (Williams et
al. 2009, https://doi.org/10.1145/1498765.1498785); a collective takes what its
bytes take over one link, and a hop's latency for each step round the ring. The
formulas of collectives are those of the scaling book, part 3
(https://jax-ml.github.io/scaling-book/sharding). Assumed:

- Rings use one link in one direction. Where an axis of the slice wraps round
  (16 chips on v5e and v6e, multiples of 4 on v4, v5p and tpu7x) both directions
  are used, and where a group spans two axes both links: then half of it.
- A hop takes a microsecond, as the book has it.
- A piece of an all-to-all passes through the chips on its way: (n + 1) / 3
  of them on average in a row of n.

Left out: operations other than matrix products; traffic of VMEM; products too
small to fill the matrix unit; launches and loop control; hosts; networks
between slices; and that XLA runs products, copies and sending beside each
other.

XLA:TPU writes its own estimate, in cycles, beside most instructions; it knows
the vector unit and VMEM. `Estimate.by_cycles` is their sum. Of two cores that
are one device the cycles are taken for one core's, but where both would then be
faster than the peak, as in products that keep the matrix units busy.

How far they go was seen beside programs that others timed on chips
(openxla/tokamax, tokamax/data/autotuning). An output head with its loss, of
1,024 to 16,384 tokens and 128,256 to 262,144 words, takes 1.05 to 1.15 of the
roofline on v5p and 0.97 to 1.03 of the cycles, 1.2 to 1.4 and 0.8 to 0.9 on v6e
(tests/aot/test_roofline.py): the truth lies between the two. Attention in plain
JAX says less, for XLA fuses it in another way today than when it was timed:
those times are 0.9 to 1.6 of this roofline at 1,024 tokens.
"""

from typing import NamedTuple

from grpojax.aot import chips
from grpojax.aot.chips import Chip
from grpojax.aot.collectives import BETWEEN, Collective
from grpojax.aot.cost import Cost, InstructionCost

HOP_SECONDS = 1e-6


class Estimate(NamedTuple):
  """Seconds of one run of a program."""

  seconds: float  # products, HBM traffic and sending, one after another
  token_loop: float  # part of `seconds` that is the token loop's
  by_cycles: float | None  # as XLA:TPU estimates it; None if it does not


def collective_seconds(collective: Collective, chip: Chip) -> float:
  """Seconds of one run, over the links of a device; 0 between slices."""
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


def _sending(cost: Cost, chip: Chip) -> float:
  each = (collective_seconds(c, chip) * c.trips for c in cost.collectives)
  return sum(each, 0.0)


def _working(i: InstructionCost, chip: Chip) -> float:
  """Seconds of one run without sending."""
  return max(i.flops / chip.flops, i.bytes / chip.hbm_bandwidth)


def _by_cycles(i: InstructionCost, chip: Chip) -> float:
  """Seconds of one run by XLA's cycles, by the roofline if it has none."""
  if not i.cycles:
    return _working(i, chip)
  seconds = i.cycles / chip.clock
  both = seconds / chip.cores
  # Large products would be faster than the peak: XLA counts those on both
  # already. What it does with products of less than half the peak is not known.
  return both if both > i.flops / chip.flops else seconds


def estimate(cost: Cost, chip: Chip) -> Estimate:
  """Estimates the seconds of a run; a device has its share of the chip."""
  peaks = chips.device(chip)

  def roofline(part: Cost) -> float:
    working = (_working(i, peaks) * i.trips for i in part.instructions)
    return sum(working, _sending(part, peaks))

  by_cycles = None
  if chip.clock and any(i.cycles for i in cost.instructions):
    working = (_by_cycles(i, peaks) * i.trips for i in cost.instructions)
    by_cycles = sum(working, _sending(cost, peaks))
  return Estimate(roofline(cost), roofline(cost.in_token_loop), by_cycles)
