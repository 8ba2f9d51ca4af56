"""Floating-point operations of matrix products.

Only products are counted, a multiplication and an addition as two. Everything
else runs on other units at a tenth of the speed or less, but is bound by memory
in any model of ours and counted there (`aot/memory.py`).
"""

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from grpojax.aot.hlo import Computation, Instruction


def _dims(
  instruction: Instruction, computation: Computation, operand: int
) -> tuple[int, ...]:
  name = instruction.operands[operand]
  return computation.instructions[name].shapes[0].dims


class _Dimension(NamedTuple):
  """A dimension of a convolution's window; `pad` is its padding before."""

  size: int
  stride: int = 1
  pad: int = 0
  lhs_dilate: int = 1
  rhs_dilate: int = 1


def _window(instruction: Instruction) -> list[_Dimension]:
  """Dimensions of window={size=2x4 pad=0_0x1_1 ...}."""
  words = re.findall(r"(\w+)=([\w\-]+)", instruction.attribute("window"))
  columns = {
    key: [int(number.split("_")[0]) for number in values.split("x")]
    for key, values in words
    if key in _Dimension._fields
  }
  rows = zip(*columns.values(), strict=True)
  return [_Dimension(**dict(zip(columns, row, strict=True))) for row in rows]


@functools.cache
def _valid_positions(window: _Dimension, length: int, out: int) -> int:
  """Number of (output, window) positions of a dimension that meet an input.

  Neither padding nor the holes of a dilated input count, as in XLA's
  HloCostAnalysis::HandleConvolution.
  """
  base = window.lhs_dilate
  reached = np.arange(out) * window.stride - window.pad
  count = 0
  for k in range(window.size):
    at = reached + k * window.rhs_dilate
    count += int(np.sum((at % base == 0) & (at >= 0) & (at < length * base)))
  return count


def _convolution(instruction: Instruction, computation: Computation) -> int:
  """Counts a convolution. On TPU every dot is one, with windows for batches."""
  lhs_rhs, _, out_names = instruction.attribute("dim_labels").partition("->")
  lhs_names, rhs_names = lhs_rhs.split("_")
  lhs = dict(zip(lhs_names, _dims(instruction, computation, 0), strict=True))
  rhs = dict(zip(rhs_names, _dims(instruction, computation, 1), strict=True))
  out = dict(zip(out_names, instruction.shapes[0].dims, strict=True))
  positions = 1
  for d, window in enumerate(_window(instruction)):
    positions *= _valid_positions(window, lhs[str(d)], out[str(d)])
  groups = int(instruction.attribute("batch_group_count") or 1)
  # The kernel's input features are those of one feature group already.
  return 2 * rhs["i"] * rhs["o"] * lhs["b"] // groups * positions


def _dot(instruction: Instruction, computation: Computation) -> int:
  """Counts a product, or one in which a row meets the matrix of its group only.

  In the gradient of a ragged product's matrices the rows are contracted, and
  the groups are the result's first dimension: there, too, a row is in one
  group.
  """
  lhs, result = _dims(instruction, computation, 0), instruction.shapes[0]
  contracted = instruction.integers("lhs_contracting_dims")
  flops = 2 * result.elements * math.prod(lhs[d] for d in contracted)
  if set(instruction.integers("lhs_ragged_dims")) & set(contracted):
    return flops // result.dims[0]
  return flops


def _custom_call(instruction: Instruction, computation: Computation) -> int:
  """Counts a product of a CPU or GPU library; a kernel has its own estimate."""
  stated = instruction.number(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
  if stated is not None:
    return stated
  target = instruction.attribute("custom_call_target")
  result = instruction.shapes[0]
  if "triton" in target and "/grouped_" in instruction.op_name:
    # `models.grouped`: each of [N, A] rows makes a column of the result's.
    rows = math.prod(_dims(instruction, computation, -2))
    return 2 * rows * result.dims[-1]
  if re.search("matmul|gemm", target, re.IGNORECASE):
    lhs = math.prod(_dims(instruction, computation, 0))
    rows = result.elements // result.dims[-1]  # of all batches
    return 2 * result.elements * (lhs // rows)
  named = re.search(r"_flops_(\d+)", instruction.op_name)
  return int(named[1]) if named else 0


_COUNTS = {
  "convolution": _convolution,
  "dot": _dot,
  "ragged-dot": _dot,
  "custom-call": _custom_call,
}


def _groups_skipped(instruction: Instruction) -> int:
  """Factor by which a ragged product on TPU does less than its HLO says.

  There a ragged dot is a product of all rows with all groups' matrices under a
  mask, in a fusion that skips tiles outside of a row's own group. Tiles that a
  border between groups runs through are done twice: not counted.
  """
  return math.prod(
    d.size for d in _window(instruction) if d.size == d.lhs_dilate
  )


def flops(inside: Computation, instruction: Instruction) -> int:
  """Counts the operations of one run of an instruction.

  `inside` is the instruction by `memory.contents`.
  """
  total = 0
  ragged = "ITERATION_SKIPPER_MODE_GROUP_STARTS" in instruction.attributes
  for i in inside.instructions.values():
    if i.opcode in _COUNTS:
      count = _COUNTS[i.opcode](i, inside)
      total += count // (_groups_skipped(i) if ragged else 1)
  return total
