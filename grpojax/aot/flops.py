"""Counts the floating-point operations of matrix products.

A multiplication and an addition count as two. Other operations are bounded by
memory traffic in these models, which `aot/memory.py` counts.
"""

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from grpojax.aot.hlo import Computation, Instruction


def _dims(i: Instruction, inside: Computation, operand: int) -> tuple[int, ...]:
  return inside.instructions[i.operands[operand]].shapes[0].dims


class _Dimension(NamedTuple):
  """A dimension of a convolution's window; `pad` is the padding in front."""

  size: int
  stride: int = 1
  pad: int = 0
  lhs_dilate: int = 1
  rhs_dilate: int = 1


def _window(i: Instruction) -> list[_Dimension]:
  """Returns the dimensions of window={size=2x4 pad=0_0x1_1 ...}."""
  words = re.findall(r"(\w+)=([\w\-]+)", i.attribute("window"))
  # One list per key, with a number per dimension: {"size": [2, 4], ...}
  # "0_1" is padding in front and behind.
  columns = {
    key: [int(number.split("_")[0]) for number in values.split("x")]
    for key, values in words
    if key in _Dimension._fields
  }
  rows = zip(*columns.values(), strict=True)
  return [_Dimension(**dict(zip(columns, row, strict=True))) for row in rows]


@functools.cache
def _valid_positions(window: _Dimension, length: int, out: int) -> int:
  """Counts the (output, window) positions of a dimension that meet an input.

  Padding and holes do not count, as in XLA's HandleConvolution.
  """
  base = window.lhs_dilate
  # Input position of each output's first window element
  reached = np.arange(out) * window.stride - window.pad
  count = 0
  for k in range(window.size):
    at = reached + k * window.rhs_dilate
    # Skip holes of a dilated input, and padding at both ends.
    count += int(np.sum((at % base == 0) & (at >= 0) & (at < length * base)))
  return count


def _convolution(i: Instruction, inside: Computation) -> int:
  """Counts a convolution's operations; on TPU, dots are convolutions too."""
  operands, _, out_names = i.attribute("dim_labels").partition("->")
  # b: batch, i and o: input and output features, digits: window dimensions
  lhs, rhs = (
    dict(zip(names, _dims(i, inside, n), strict=True))
    for n, names in enumerate(operands.split("_"))
  )
  out = dict(zip(out_names, i.shapes[0].dims, strict=True))
  positions = 1
  for d, window in enumerate(_window(i)):
    positions *= _valid_positions(window, lhs[str(d)], out[str(d)])
  groups = int(i.attribute("batch_group_count") or 1)
  # The kernel's input features are per feature group already.
  return 2 * rhs["i"] * rhs["o"] * lhs["b"] // groups * positions


def _dot(i: Instruction, inside: Computation) -> int:
  """Counts a product's operations; a ragged row only meets its group's matrix.

  The gradient with respect to the matrices contracts the rows; its first
  dimension is the group.
  """
  lhs = _dims(i, inside, 0)
  result = i.shapes[0]
  contracted = i.integers("lhs_contracting_dims")
  # Each element of the result sums over the contracted dimensions.
  flops = 2 * result.elements * math.prod(lhs[d] for d in contracted)
  # In the gradient of the matrices a row adds to its own group only.
  if set(i.integers("lhs_ragged_dims")) & set(contracted):
    return flops // result.dims[0]
  return flops


def _custom_call(i: Instruction, inside: Computation) -> int:
  """Counts a library product's operations, or reads a kernel's estimate."""
  stated = i.number(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
  if stated is not None:
    return stated
  target = i.attribute("custom_call_target")
  result = i.shapes[0]
  if "triton" in target and "/grouped_" in i.op_name:
    # `models.grouped`: rows [N, A] and F result columns take 2 N A F.
    return 2 * math.prod(_dims(i, inside, -2)) * result.dims[-1]
  if re.search("matmul|gemm", target, re.IGNORECASE):
    rows = result.elements // result.dims[-1]  # of all batches
    # lhs elements / rows = size of the contracted dimension
    return 2 * result.elements * (math.prod(_dims(i, inside, 0)) // rows)
  # Triton kernels of `flash_kernels` have the count in their name.
  named = re.search(r"_flops_(\d+)", i.op_name)
  return int(named[1]) if named else 0


_COUNTS = {
  "convolution": _convolution,
  "dot": _dot,
  "ragged-dot": _dot,
  "custom-call": _custom_call,
}


def flops(inside: Computation, instruction: Instruction) -> int:
  """Counts the operations of an instruction with contents `inside`, per run.

  A ragged dot on TPU multiplies all rows with all groups' matrices under a
  mask, but skips tiles outside of a row's group. So the count is divided by the
  number of groups (the size of a window). Tiles on a border between groups are
  computed twice but counted once.
  """
  total = 0
  ragged = "ITERATION_SKIPPER_MODE_GROUP_STARTS" in instruction.attributes
  for i in inside.instructions.values():
    if i.opcode in _COUNTS:
      count = _COUNTS[i.opcode](i, inside)
      if ragged:
        groups = [d.size for d in _window(i) if d.size == d.lhs_dilate]
        count //= math.prod(groups)
      total += count
  return total
