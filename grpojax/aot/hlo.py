"""Parses the text of an optimised HLO module into NamedTuples.

It reads `compiled.as_text()` of CPU, TPU and GPU, with any opcodes. Grammar:
xla/hlo/parser/hlo_parser.cc and https://openxla.org/xla/operation_semantics.
"""

import functools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple


class Shape(NamedTuple):
  """Shape of an array; a tuple has a `Shape` for each of its arrays.

  Memory 0 is HBM; a TPU also has VMEM (1), SMEM, semaphores and the host's
  memory (5). TPUs store arrays in whole tiles: with layout {1,0:T(8,128)} the
  inner dimensions of f32[10,64] take 16 x 128 elements.
  """

  dtype: str  # as HLO spells it: "bf16", "pred", "token"
  dims: tuple[int, ...]  # on one device; the bound of a dynamic size
  memory_space: int = 0
  tiles: tuple[tuple[int, int], ...] = ()  # dimensions, and sizes of a tile

  @property
  def elements(self) -> int:
    """Number of elements on one device."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Bytes of the elements."""
    return self._replace(tiles=()).padded_bytes

  @property
  def padded_bytes(self) -> int:
    """Bytes with the padding of a tiled layout."""
    sizes = list(self.dims)
    # Each tile covers the innermost dimensions; whole tiles are stored.
    for dim, tile in self.tiles:
      sizes[dim] = -(-sizes[dim] // tile) * tile
    # The name's first number is the bits: 16 in "bf16"; "token" has 0 bits.
    width = re.match(r"(?:bf|f|s|u|c)(\d+)", self.dtype)
    bits = int(width[1]) if width else 8 * (self.dtype == "pred")
    return math.ceil(math.prod(sizes) * bits / 8)


class Instruction(NamedTuple):
  """Line of a computation: NAME = SHAPES OPCODE(LITERAL), ATTRIBUTES."""

  name: str  # without the percent sign
  opcode: str  # "fusion", "convolution", "all-gather-start", ...
  shapes: tuple[Shape, ...]  # arrays of its result, in order
  operands: tuple[str, ...]  # names of instructions of the same computation
  literal: str  # text in the parentheses
  attributes: str  # text after the parentheses
  called: tuple[tuple[str, str], ...]  # such as ("body", "region_1")
  op_name: str  # origin in the traced program, "" if unknown
  is_root: bool  # True if its value is the computation's result

  def attribute(self, key: str) -> str:
    """Text of an attribute ("window", "dim_labels", ...); "" if missing."""
    # A value is {{..}}, {..} or [..] with commas, or ends at a comma or blank.
    value = r"(\{\{.*?\}\}|\{[^}]*\}|\[[^\]]*\]|[^,\s]*)"
    match = re.search(rf"(?:^|, ){key}={value}", self.attributes)
    return match[1] if match else ""

  def integers(self, key: str) -> tuple[int, ...]:
    """Integers of an attribute: (1, 2) of `lhs_contracting_dims={1,2}`."""
    return tuple(map(int, re.findall(r"\d+", self.attribute(key))))

  def number(self, pattern: str) -> int | None:
    """Integer in the pattern's group; None if the attributes do not match."""
    match = re.search(pattern, self.attributes)
    return int(match[1]) if match else None


class Computation(NamedTuple):
  """Instructions by name, in the order of the text, which is the schedule."""

  instructions: dict[str, Instruction]

  @property
  def root(self) -> Instruction:
    """The instruction with the value of the computation."""
    return next(i for i in self.instructions.values() if i.is_root)

  @property
  def parameters(self) -> tuple[Instruction, ...]:
    """Parameters, in the order of the arguments."""
    every = [i for i in self.instructions.values() if i.opcode == "parameter"]
    return tuple(sorted(every, key=lambda i: int(i.literal)))

  def shapes(self, names: Iterable[str]) -> list[Shape]:
    """Shapes of all arrays of the values with these names."""
    return [s for name in names for s in self.instructions[name].shapes]


class Module(NamedTuple):
  """Program of a device."""

  computations: dict[str, Computation]
  entry: str  # name of the first computation
  devices: int  # number of devices that run the program together

  def called(self, instruction: Instruction, key: str) -> Computation:
    """The computation that an instruction calls as its "body", "calls", ..."""
    return self.computations[dict(instruction.called)[key]]


# bf16[8,<=128]{1,0:T(8,128)}: dtype, dimensions, layout
_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
# ROOT %add.3 = f32[8]{0} add(%a, %b): root, name, shapes, opcode, literal
_START = re.compile(
  r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ?([a-z][\w\-]*)\(([^)]*)\)"
)
# body=%region_1 or branch_computations={%a, %b}
_CALLED = re.compile(
  r"\b(calls|to_apply|body|condition|branch_computations|called_computations"
  r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
# ENTRY %main.5 (x: f32[8]) -> f32[8] {
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{\s*$")


@functools.cache
def parse_shapes(text: str) -> tuple[Shape, ...]:
  """Parses all arrays of a shape: "(f32[2,3]{1,0:T(8,128)S(1)}, u32[])"."""
  shapes = []
  for dtype, dims, layout in _SHAPE.findall(text):
    sizes = tuple(int(d.strip(" <=")) for d in dims.split(",") if d.strip())
    space = re.search(r"S\((\d+)\)", layout)
    tiles = ()
    # {1,0:T(8,128)} lists dimensions from the innermost, a tile from the
    # outermost; further tiles, T(8,128)(2,1), only pack 16-bit elements.
    if tiled := re.match(r"\{([\d,]+):T\(([\d,]+)\)", layout):
      inner_first = map(int, tiled[1].split(","))
      tile = reversed([int(size) for size in tiled[2].split(",")])
      tiles = tuple(zip(inner_first, tile, strict=False))
    shapes.append(Shape(dtype, sizes, int(space[1]) if space else 0, tiles))
  return tuple(shapes)


def parse_instruction(line: str) -> Instruction | None:
  """Parses an instruction; None for other lines."""
  # XLA comments long tuples: /*index=5*/.
  line = re.sub(r"/\*.*?\*/", "", line)
  start = _START.match(line)
  if not start:
    return None
  root, name, shapes, opcode, literal = start.groups()
  attributes = line[start.end() :]
  op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', attributes)
  # Metadata may quote source text that looks like a call.
  called = _CALLED.findall(attributes.split(", metadata=")[0])
  return Instruction(
    name=name,
    opcode=opcode,
    shapes=parse_shapes(shapes),
    operands=tuple(re.findall(r"%([\w.\-]+)", literal)),
    literal=literal,
    attributes=attributes,
    called=tuple(
      (key, c) for key, names in called for c in re.findall(r"[\w.\-]+", names)
    ),
    op_name=op_name[1] if op_name else "",
    is_root=bool(root),
  )


def parse(text: str) -> Module:
  """Parses a module."""
  lines = text.splitlines()
  computations = {}
  entry = ""
  current = None
  for line in lines:
    if line.startswith("}"):
      current = None
    # Only headers of computations are not indented.
    elif not line.startswith(" ") and (header := _HEADER.match(line)):
      current = {}
      computations[header[2]] = Computation(current)
      entry = header[2] if header[1] else entry
    elif current is not None and (instruction := parse_instruction(line)):
      current[instruction.name] = instruction
  counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", lines[0])
  return Module(computations, entry, math.prod(map(int, counts)))
