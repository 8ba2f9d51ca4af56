"""Floating-point operations of matrix products.

Only products are counted, a multiplication and an addition as two. What else a
program computes runs on other units, at a tenth of the speed or less, but is
bound by memory in any model of ours and counted there (`aot/memory.py`).
"""

import functools
import math
import re

import numpy as np

from grpojax.aot.hlo import Computation, Instruction, attribute, integers


def _dims(
  instruction: Instruction, computation: Computation, operand: int
) -> tuple[int, ...]:
  name = instruction.operands[operand]
  return computation.instructions[name].shapes[0].dims


@functools.cache
def _valid_positions(
  size: int,
  stride: int,
  low: int,
  base: int,
  window: int,
  length: int,
  out: int,
) -> int:
  """Number of (output, window) positions of one dimension that meet an input.

  Neither padding nor the holes of a dilated input count, as in XLA's
  HloCostAnalysis::HandleConvolution.
  """
  reached = np.arange(out) * stride - low
  count = 0
  for k in range(size):
    at = reached + k * window
    count += int(np.sum((at % base == 0) & (at >= 0) & (at < length * base)))
  return count


def _window(instruction: Instruction) -> dict[str, list[str]]:
  """Reads window={...} as {"size": ["2", "4"], "pad": ["0_0", "1_1"]}."""
  text = (attribute(instruction, "window") or "{}").strip("{}")
  return {
    key: value.split("x") for key, value in (p.split("=") for p in text.split())
  }


def _convolution(instruction: Instruction, computation: Computation) -> int:
  """Counts a convolution. On TPU every dot is one, with windows for batches."""
  lhs, rhs = (_dims(instruction, computation, n) for n in (0, 1))
  out = instruction.shapes[0].dims
  names = re.fullmatch(
    r"(\w+)_(\w+)->(\w+)", attribute(instruction, "dim_labels")
  ).groups()
  lhs, rhs, out = (
    dict(zip(n, dims, strict=True))
    for n, dims in zip(names, (lhs, rhs, out), strict=True)
  )
  window = _window(instruction)
  positions = 1
  for d, size in enumerate(window.get("size", ())):

    def field(key, default="1", d=d):
      return window[key][d] if key in window else default

    positions *= _valid_positions(
      size=int(size),
      stride=int(field("stride")),
      low=int(field("pad", "0_0").split("_")[0]),
      base=int(field("lhs_dilate")),
      window=int(field("rhs_dilate")),
      length=lhs[str(d)],
      out=out[str(d)],
    )
  groups = int(attribute(instruction, "batch_group_count") or 1)
  # The kernel's input features are those of one feature group already.
  return 2 * rhs["i"] * rhs["o"] * lhs["b"] // groups * positions


def _dot(instruction: Instruction, computation: Computation) -> int:
  lhs = _dims(instruction, computation, 0)
  contracted = integers(instruction, "lhs_contracting_dims")
  return (
    2 * instruction.shapes[0].elements * math.prod(lhs[d] for d in contracted)
  )


def _ragged_dot(instruction: Instruction, computation: Computation) -> int:
  """Counts a product in which a row meets the matrix of its group only.

  In the gradient of the matrices the rows are contracted, and the groups are
  the result's first dimension: there, too, a row is in one group.
  """
  flops = _dot(instruction, computation)
  contracted = integers(instruction, "lhs_contracting_dims")
  if set(integers(instruction, "lhs_ragged_dims")) & set(contracted):
    return flops // instruction.shapes[0].dims[0]
  return flops


def _custom_call(instruction: Instruction, computation: Computation) -> int:
  """Counts a product of a CPU or GPU library; a kernel has its own estimate."""
  target = attribute(instruction, "custom_call_target") or ""
  if re.search("matmul|gemm", target, re.IGNORECASE):
    lhs = math.prod(_dims(instruction, computation, 0))
    result = instruction.shapes[0]
    rows = result.elements // result.dims[-1]  # of all batches
    return 2 * result.elements * (lhs // rows)
  estimate = re.search(
    r'"cost_estimate":\{[^}]*"flops":"?(\d+)', instruction.attributes
  )
  return int(estimate[1]) if estimate else 0


_COUNTS = {
  "convolution": _convolution,
  "dot": _dot,
  "ragged-dot": _ragged_dot,
  "custom-call": _custom_call,
}


def _groups_skipped(instruction: Instruction) -> int:
  """Factor by which a ragged product on TPU does less than its HLO says.

  There a ragged dot is a product of all rows with all groups' matrices under a
  mask, in a fusion that skips tiles outside of a row's own group. Tiles that a
  border between groups runs through are done twice: not counted.
  """
  size, dilated = (_window(instruction).get(k) for k in ("size", "lhs_dilate"))
  if not dilated:
    return 1
  return math.prod(
    int(s) for s, b in zip(size, dilated, strict=True) if s == b and int(s) > 1
  )


def flops(instructions: Computation, fusion: Instruction) -> int:
  """Counts the operations of one run of an instruction.

  Args:
    instructions: Computation of the instruction, from `memory.contents`.
    fusion: Instruction itself.
  """
  total = 0
  ragged = "ITERATION_SKIPPER_MODE_GROUP_STARTS" in fusion.attributes
  for i in instructions.instructions.values():
    if i.opcode in _COUNTS:
      count = _COUNTS[i.opcode](i, instructions)
      total += count // (_groups_skipped(i) if ragged else 1)
  return total
