"""The text of an optimised HLO module, as XLA prints it, into NamedTuples.

Reads what `compiled.as_text()` gives on CPU, TPU and GPU. Nothing here knows
what an opcode means: an unknown one is an instruction like any other. Grammar:
https://openxla.org/xla/operation_semantics and xla/hlo/parser/hlo_parser.cc.
"""

import math
import re
from typing import NamedTuple


class Shape(NamedTuple):
  """Array of a value; a tuple's value has several, nesting dropped.

  Memory 0 is the device's main memory (HBM); on TPU others are VMEM (1), SMEM,
  semaphores, the host's memory (5).

  On TPU an array lies in tiles, of which the last are filled up: in the layout
  {1,0:T(8,128)} the inner dimensions of f32[10,64] take 16 x 128 elements.
  """

  dtype: str  # as HLO spells it: "bf16", "pred", "token"
  dims: tuple[int, ...]  # on one device; of a dynamic size the bound
  memory_space: int = 0
  tiles: tuple[tuple[int, int], ...] = ()  # dimensions, and sizes of a tile

  @property
  def elements(self) -> int:
    """Number of elements on one device."""
    return math.prod(self.dims)

  @property
  def bytes(self) -> int:
    """Bytes of the elements."""
    return math.ceil(self.elements * _bits(self.dtype) / 8)

  @property
  def padded_bytes(self) -> int:
    """Bytes with the padding of a tiled layout."""
    sizes = list(self.dims)
    for dim, tile in self.tiles:
      sizes[dim] = -(-sizes[dim] // tile) * tile
    return math.ceil(math.prod(sizes) * _bits(self.dtype) / 8)


class Instruction(NamedTuple):
  """Line of a computation: NAME = SHAPES OPCODE(LITERAL), ATTRIBUTES."""

  name: str  # without the percent sign
  opcode: str  # "fusion", "convolution", "all-gather-start", ...
  shapes: tuple[Shape, ...]  # arrays of its result, in order
  # Names of instructions of the same computation; a constant or a parameter has
  # none, but a `literal`.
  operands: tuple[str, ...]
  literal: str  # text in the parentheses
  attributes: str  # text behind the parentheses
  # Computations that it runs or applies, ("body", "region_1") for one.
  called: tuple[tuple[str, str], ...]
  op_name: str  # place in the traced program that it comes from, "" if unknown
  is_root: bool  # True where its value is the computation's result

  @property
  def cycles(self) -> int:
    """Cycles of one run that XLA:TPU estimates; 0 where it says none."""
    cycles = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
    # Of some copies on tpu7x it says 2^63 - 1.
    return int(cycles[1]) if cycles and int(cycles[1]) < 2**40 else 0


class Computation(NamedTuple):
  """Instructions by name, in the order of the text, which is the schedule."""

  name: str
  instructions: dict[str, Instruction]

  @property
  def root(self) -> Instruction:
    """The instruction whose value is the computation's."""
    return next(i for i in self.instructions.values() if i.is_root)

  @property
  def parameters(self) -> tuple[Instruction, ...]:
    """Parameters, in the order of the arguments."""
    every = [i for i in self.instructions.values() if i.opcode == "parameter"]
    return tuple(sorted(every, key=lambda i: int(i.literal)))


class Module(NamedTuple):
  """Program of one device."""

  computations: dict[str, Computation]
  entry: str  # name of the computation that the program starts with
  devices: int  # that run the program together


def _bits(dtype: str) -> int:
  if dtype == "pred":
    return 8
  width = re.match(r"(?:bf|f|s|u|c)(\d+)", dtype)
  return int(width[1]) if width else 0  # token, opaque


_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")


def parse_shapes(text: str) -> tuple[Shape, ...]:
  """Parses all arrays of a shape: "(f32[2,3]{1,0:T(8,128)S(1)}, u32[])"."""
  shapes = []
  for dtype, dims, layout in _SHAPE.findall(text):
    sizes = tuple(int(d.strip(" <=")) for d in dims.split(",") if d.strip())
    space = re.search(r"S\((\d+)\)", layout)
    space = int(space[1]) if space else 0
    shapes.append(Shape(dtype, sizes, space, _tiles(layout, len(sizes))))
  return tuple(shapes)


def _tiles(layout: str, rank: int) -> tuple[tuple[int, int], ...]:
  """Reads the first tile of a layout, whose dimensions come inner first."""
  tiled = re.match(r"\{([\d,]*):T\(([\d,]+)\)", layout)
  if not tiled or not tiled[1]:
    return ()
  inner_first = map(int, tiled[1].split(","))
  sizes = reversed([int(size) for size in tiled[2].split(",")])
  return tuple(zip(inner_first, sizes, strict=False))[:rank]


def _closing(text: str, start: int) -> int:
  """Index of the bracket that closes the one at `start`."""
  depth = 0
  for match in re.compile(r"[()\[\]{}]").finditer(text, start):
    depth += 1 if match[0] in "([{" else -1
    if depth == 0:
      return match.start()
  raise ValueError(f"no bracket closes {text[start : start + 40]!r}")


def _split(text: str) -> list[str]:
  """Splits at the commas that stand in no bracket."""
  parts, depth, last = [], 0, 0
  for match in re.finditer(r"[()\[\]{},]", text):
    if match[0] != ",":
      depth += 1 if match[0] in "([{" else -1
    elif depth == 0:
      parts.append(text[last : match.start()])
      last = match.end()
  return [*parts, text[last:]] if text.strip() else []


_START = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(
  r"\b(calls|to_apply|body|condition|branch_computations|called_computations"
  r"|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)


def _called(attributes: str) -> tuple[tuple[str, str], ...]:
  return tuple(
    (key, name)
    for key, names in _CALLED.findall(attributes)
    for name in re.findall(r"[\w.\-]+", names)
  )


def parse_instruction(line: str) -> Instruction | None:
  """Parses an instruction; None where the line holds none."""
  start = _START.match(line)
  if not start:
    return None
  rest = re.sub(r"/\*.*?\*/", "", line[start.end() :])
  end = _closing(rest, 0) + 1 if rest[0] == "(" else rest.index(" ")
  opening = rest.index("(", end)
  closing = _closing(rest, opening)
  opcode = rest[end:opening].strip()
  literal, attributes = rest[opening + 1 : closing], rest[closing + 1 :]
  operands = ()
  if opcode not in ("constant", "parameter", "iota"):
    # Older versions print an operand's shape before its name.
    words = [part.split() for part in _split(literal)]
    operands = tuple(w[-1].lstrip("%") for w in words if w)
  op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', attributes)
  return Instruction(
    name=start[2],
    opcode=opcode,
    shapes=parse_shapes(rest[:end]),
    operands=operands,
    literal=literal,
    attributes=attributes,
    called=_called(attributes.split(", metadata=")[0]),
    op_name=op_name[1] if op_name else "",
    is_root=bool(start[1]),
  )


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{\s*$")


def parse(text: str) -> Module:
  """Parses a module.

  Raises:
    ValueError: the text is no HLO module, or breaks off.
  """
  name = re.match(r"\s*HloModule ([\w.\-]+)", text)
  if not name:
    raise ValueError(f"not the text of an HLO module: {text[:60]!r}")
  computations, entry, current = {}, None, None
  for line in text.splitlines():
    if line.startswith("}"):
      current = None
    elif not line.startswith(" ") and (header := _HEADER.match(line)):
      current = {}
      computations[header[2]] = Computation(header[2], current)
      entry = header[2] if header[1] else entry
    elif current is not None and (instruction := parse_instruction(line)):
      current[instruction.name] = instruction
  if entry is None:
    raise ValueError(f"HLO module {name[1]} has no ENTRY computation")
  first = text.split("\n", 1)[0]
  counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", first)
  return Module(computations, entry, math.prod(map(int, counts)))


def attribute(instruction: Instruction, key: str) -> str | None:
  """Text of one attribute: `window`, `dim_labels`, `direction`, ..."""
  start = re.search(rf"(?:^|, ){key}=", instruction.attributes)
  if not start:
    return None
  rest = instruction.attributes[start.end() :]
  if rest[:1] in ("{", "["):
    return rest[: _closing(rest, 0) + 1]
  return re.match(r"[^,\s]*", rest)[0]


def integers(instruction: Instruction, key: str) -> tuple[int, ...]:
  """Integers of an attribute: (1, 2) of `lhs_contracting_dims={1,2}`."""
  return tuple(map(int, re.findall(r"\d+", attribute(instruction, key) or "")))


def group_size(instruction: Instruction, devices: int) -> int:
  """Number of devices that a collective joins.

  XLA writes `replica_groups` as lists, {{0,1},{2,3}}; as an iota,
  [groups,size]<=[2,4]T(1,0); or as axes of a mesh, mesh['x'=2,'y'=4] {'y'},
  where 'y':(2)2 is a part of an axis, of the size that comes last. None or an
  empty list is all devices.
  """
  text = re.search(r"\breplica_groups=(.*)", instruction.attributes)
  text = text[1] if text else ""
  if text.startswith("{{"):
    return text[2 : text.index("}")].count(",") + 1
  if text.startswith("["):
    return int(re.match(r"\[\d+,(\d+)\]", text)[1])
  if text.startswith("mesh"):
    sizes, names = re.match(r"mesh\[(.*?)\].*?\{(.*?)\}", text).groups()
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", sizes))
    used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", names)
    return math.prod(int(part or sizes[axis]) for axis, part in used)
  return devices
