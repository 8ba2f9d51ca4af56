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

Left out: operations other than matrix products; padding; products too small
to fill the matrix unit; launches and loop control; hosts; networks between
slices; and, in `Estimate.seconds`, that XLA runs products, copies and sending
beside each other: the truth lies between `overlapped` and it, or above both.
"""

from typing import NamedTuple

from grpojax.aot import chips
from grpojax.aot.chips import Chip
from grpojax.aot.collectives import Collective
from grpojax.aot.cost import Cost

HOP_SECONDS = 1e-6


class Estimate(NamedTuple):
  """Seconds of one run of a program."""

  compute: float  # of instructions that their products keep busy longest
  memory: float  # of instructions that their HBM traffic keeps busy longest
  collective: float  # of sending between chips
  token_loop: float  # part of `seconds` that is the token loop's
  overlapped: float  # the longest of products, HBM traffic and sending

  @property
  def seconds(self) -> float:
    """Sum of all: products, HBM traffic and sending do not overlap."""
    return self.compute + self.memory + self.collective


def collective_seconds(collective: Collective, chip: Chip) -> float:
  """Seconds of one run, over the links of a device with these peaks."""
  n = collective.group_size
  if n == 1:
    return 0.0
  hops = 2 * (n - 1) if collective.kind == "all-reduce" else n - 1
  sent = collective.bytes
  if collective.kind in ("all-to-all", "ragged-all-to-all"):
    sent = sent * (n + 1) / 3
  if collective.kind == "collective-permute":
    hops = 1
  return sent / chip.link_bandwidth + hops * HOP_SECONDS


def _sequential(cost: Cost, chip: Chip) -> tuple[float, float, float]:
  """Seconds of compute, memory, collectives, each instruction alone."""
  compute = memory = collective = 0.0
  for i in cost.instructions:
    products, traffic = i.flops / chip.flops, i.bytes / chip.hbm_bandwidth
    if products > traffic:
      compute += products * i.trips
    else:
      memory += traffic * i.trips
    for c in i.collectives:
      collective += collective_seconds(c, chip) * c.trips
  return compute, memory, collective


def estimate(cost: Cost, chip: Chip) -> Estimate:
  """Estimates the seconds of a run; a device has its share of the chip."""
  peaks = chips.device(chip)
  compute, memory, collective = _sequential(cost, peaks)
  return Estimate(
    compute=compute,
    memory=memory,
    collective=collective,
    token_loop=sum(_sequential(cost.in_token_loop, peaks)),
    overlapped=max(
      cost.flops / peaks.flops, cost.bytes / peaks.hbm_bandwidth, collective
    ),
  )


def mfu(
  model_flops: int | float, seconds: int | float, count: int, chip: Chip
) -> float:
  """Model-FLOPs utilisation (Chowdhery et al. 2022, appendix B).

  The share of the peak of `count` whole chips that the model needs, whatever
  the program computes again.
  """
  return model_flops / (seconds * count * chip.flops)
