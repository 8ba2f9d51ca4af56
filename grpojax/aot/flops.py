"""Floating-point operations of matrix products.

Only products are counted, a multiplication and an addition as two. What else a
program computes runs on other units, at a tenth of the speed or less, but is
bound by memory in any model of ours and counted there (`aot/memory.py`).
"""

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from grpojax.aot.hlo import Computation, Instruction, attribute, integers


def _dims(
  instruction: Instruction, computation: Computation, operand: int
) -> tuple[int, ...]:
  name = instruction.operands[operand]
  return computation.instructions[name].shapes[0].dims


class _Dimension(NamedTuple):
  """A dimension of a convolution's window; `low` is its padding before."""

  size: int
  stride: int
  low: int
  lhs_dilate: int
  rhs_dilate: int


_DEFAULTS = {"stride": "1", "pad": "0", "lhs_dilate": "1", "rhs_dilate": "1"}


def _window(instruction: Instruction) -> list[_Dimension]:
  """Dimensions of window={size=2x4 pad=0_0x1_1 ...}."""
  text = (attribute(instruction, "window") or "{}").strip("{}")
  words = dict(part.split("=") for part in text.split())
  sizes = words.get("size", "").split("x") if words else []
  columns = [sizes]
  for key, default in _DEFAULTS.items():
    values = words[key].split("x") if key in words else [default] * len(sizes)
    columns.append([value.split("_")[0] for value in values])
  return [_Dimension(*map(int, row)) for row in zip(*columns, strict=True)]


@functools.cache
def _valid_positions(window: _Dimension, length: int, out: int) -> int:
  """Number of (output, window) positions of a dimension that meet an input.

  Neither padding nor the holes of a dilated input count, as in XLA's
  HloCostAnalysis::HandleConvolution.
  """
  base = window.lhs_dilate
  reached = np.arange(out) * window.stride - window.low
  count = 0
  for k in range(window.size):
    at = reached + k * window.rhs_dilate
    count += int(np.sum((at % base == 0) & (at >= 0) & (at < length * base)))
  return count


def _convolution(instruction: Instruction, computation: Computation) -> int:
  """Counts a convolution. On TPU every dot is one, with windows for batches."""
  labels = re.fullmatch(
    r"(\w+)_(\w+)->(\w+)", attribute(instruction, "dim_labels")
  ).groups()
  arrays = (
    _dims(instruction, computation, 0),
    _dims(instruction, computation, 1),
    instruction.shapes[0].dims,
  )
  lhs, rhs, out = (
    dict(zip(names, dims, strict=True))
    for names, dims in zip(labels, arrays, strict=True)
  )
  positions = 1
  for d, window in enumerate(_window(instruction)):
    positions *= _valid_positions(window, lhs[str(d)], out[str(d)])
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
  if "triton" in target and "/grouped_" in instruction.op_name:
    # `models.grouped`: each of [N, A] rows makes a column of the result's.
    rows = math.prod(_dims(instruction, computation, -2))
    return 2 * rows * instruction.shapes[0].dims[-1]
  if re.search("matmul|gemm", target, re.IGNORECASE):
    lhs = math.prod(_dims(instruction, computation, 0))
    result = instruction.shapes[0]
    rows = result.elements // result.dims[-1]  # of all batches
    return 2 * result.elements * (lhs // rows)
  estimate = re.search(
    r'"cost_estimate":\{[^}]*"flops":"?(\d+)', instruction.attributes
  ) or re.search(r"_flops_(\d+)", instruction.op_name)
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
  return math.prod(
    d.size for d in _window(instruction) if d.size == d.lhs_dilate
  )


def flops(inside: Computation, fusion: Instruction) -> int:
  """Counts the operations of one run of an instruction.

  `inside` is the instruction by `memory.contents`, `fusion` itself. A Pallas
  kernel says how many it has.
  """
  if stated := re.search(
    r'"cost_estimate":{"flops":"(\d+)"', fusion.attributes
  ):
    return int(stated[1])
  total = 0
  ragged = "ITERATION_SKIPPER_MODE_GROUP_STARTS" in fusion.attributes
  for i in inside.instructions.values():
    if i.opcode in _COUNTS:
      count = _COUNTS[i.opcode](i, inside)
      total += count // (_groups_skipped(i) if ragged else 1)
  return total
