"""Bytes that an instruction moves to and from the device's main memory (HBM).

An instruction reads its operands and writes its result, once each. What lies
in another memory (VMEM on TPU, which XLA fills with copies of its own) is not
HBM. Of what is only sliced or gathered from, the slice is read; what is updated
in place costs the update. Tiles of TPU are moved whole, padding and all. Where
an update covers a part of a tile's 128 lanes, all of them are read first and
written (a new token in a cache whose last dimension is its slots). A Pallas
kernel moves what it says.
"""

import collections
import math
import re
from collections.abc import Sequence

from grpojax.aot.hlo import Computation, Instruction, Module, Shape
from grpojax.models.moe import ONE_OF

# These only name or arrange what is there, or run other computations.
FREE = frozenset(
  "bitcast tuple get-tuple-element parameter constant while conditional call"
  " after-all add-dependency partition-id replica-id opt-barrier domain"
  " async-start async-update".split()
)
_FREE_TARGETS = (
  '"AllocateBuffer"',
  '"ConcatBitcast"',
  '"AsyncCollectiveStart"',
  '"AsyncCollectiveDone"',
  '"Sharding"',
)
_VIEWS = ("bitcast", "reshape")
# A fusion computes no more of these than is asked for.
_ELEMENTWISE = (
  *_VIEWS,
  *"convert copy multiply transpose bitcast-convert".split(),
)


def is_free(instruction: Instruction) -> bool:
  """True for an instruction that moves nothing."""
  if instruction.opcode == "custom-call":
    target = instruction.attributes.partition("custom_call_target=")[2]
    return target.startswith(_FREE_TARGETS)
  return instruction.opcode in FREE or instruction.opcode.endswith("-done")


def _renamed(
  module: Module, computation: Computation, prefix: str, names: dict[str, str]
) -> list[Instruction]:
  """Instructions of a fused computation, fusions within it dissolved.

  `names` maps its parameters to their names outside; the names of all other
  instructions are added to it.
  """
  instructions = []
  for i in computation.instructions.values():
    if i.opcode == "parameter" and i.name in names:
      continue
    operands = tuple(names.get(n, n) for n in i.operands)
    if i.opcode == "fusion":
      inner = module.computations[dict(i.called)["calls"]]
      arguments = zip(inner.parameters, operands, strict=True)
      within = {p.name: operand for p, operand in arguments}
      instructions += _renamed(module, inner, f"{prefix}{i.name}/", within)
      names[i.name] = within[inner.root.name]
    else:
      names[i.name] = prefix + i.name
      instructions.append(i._replace(name=names[i.name], operands=operands))
  return instructions


def result(
  parameters: Sequence[Instruction], instruction: Instruction
) -> tuple[Shape, ...]:
  """Shapes of a result, without what its asynchronous form carries beside it.

  Of `copy-start` (result, operand, context); of others that end so (operands,
  results, contexts), the contexts being scalars in another memory.
  """
  shapes = instruction.shapes
  if instruction.opcode == "copy-start":
    return shapes[:1]
  if instruction.opcode.endswith("-start"):
    count = sum(len(p.shapes) for p in parameters)
    return shapes[count:] or shapes
  return shapes


def contents(
  module: Module, computation: Computation, instruction: Instruction
) -> Computation:
  """Returns an instruction as a computation without fusions.

  A fusion becomes the instructions that it fuses, anything else itself. Its
  operands are the parameters, its value is the root. An asynchronous start is
  the operation.
  """
  opcode = instruction.opcode.removesuffix("-start")
  if opcode == "fusion":
    fused = module.computations[dict(instruction.called)["calls"]]
    names = {}
    renamed = _renamed(module, fused, "", names)
    root = names[fused.root.name]
    renamed = [i._replace(is_root=i.name == root) for i in renamed]
    return Computation(fused.name, {i.name: i for i in renamed})
  parameters = []
  for n, name in enumerate(instruction.operands):
    operand = computation.instructions.get(name)
    if operand is not None:  # a new opcode may have more than names there
      parameters.append(
        operand._replace(
          opcode="parameter", literal=str(n), operands=(), is_root=False
        )
      )
  itself = instruction._replace(
    opcode=opcode, shapes=result(parameters, instruction), is_root=True
  )
  return Computation(
    instruction.name, {i.name: i for i in [*parameters, itself]}
  )


def _hbm(shapes: tuple[Shape, ...]) -> int:
  return sum(s.padded_bytes for s in shapes if s.memory_space == 0)


def _update_bytes(inside: Computation, i: Instruction, target: Shape) -> int:
  """Bytes that an update in place moves: of its target, whole rows of lanes."""
  operand = i.operands[1 if i.opcode == "dynamic-update-slice" else -1]
  part = inside.instructions[operand].shapes[0]
  if len(part.dims) != len(target.dims):  # a scatter's
    return part.bytes
  lanes = part._replace(tiles=target.tiles[:1]).padded_bytes
  return lanes if lanes == part.bytes else 2 * lanes


def _results(inside: Computation) -> list[Instruction]:
  """Instructions that make the arrays of the result, behind bitcasts."""
  root = inside.root
  names = root.operands if root.opcode == "tuple" else (root.name,)
  makers = []
  for name in names:
    i = inside.instructions[name]
    while i.opcode in _VIEWS:
      i = inside.instructions[i.operands[0]]
    makers.append(i)
  return makers


_IN_PLACE = ("dynamic-update-slice", "scatter")


def _hands_on(i: Instruction) -> bool:
  """True for an instruction that passes an array on without looking at it."""
  if i.opcode == "custom-call":
    return is_free(i)
  return i.opcode == "tuple" and i.is_root


def _read_elements(
  users: dict[str, list[tuple[Instruction, int]]],
  i: Instruction,
  in_place: frozenset[str],
  exact: bool,
) -> int | float:
  """Number of elements of an array that a computation looks at, perhaps inf."""
  total = 0
  for user, position in users[i.name]:
    if user.opcode in ("dynamic-slice", "slice", "gather") and position == 0:
      total += user.shapes[0].elements
    elif user.opcode in _IN_PLACE and position == 0:
      if not exact or user.name not in in_place:
        return math.inf
    elif user.opcode in _ELEMENTWISE and not user.is_root:
      same = exact and user.opcode in _VIEWS
      total += _read_elements(users, user, in_place, same)
    elif not _hands_on(user):
      return math.inf
  return total


def hbm_bytes(
  inside: Computation, shapes: tuple[Shape, ...], paid: frozenset[str]
) -> int:
  """Returns the bytes of HBM that one run of an instruction moves.

  `inside` is the instruction by `contents`, `shapes` are those of its result,
  and `paid` names collectives that another instruction pays for.
  """
  attributes = inside.root.attributes
  if stack := re.search(rf"{ONE_OF}(\d+).*custom_call_config", attributes):
    # At most: experts without tokens are not read.
    matrices = max(inside.parameters, key=lambda p: p.shapes[0].elements)
    idle = _hbm(matrices.shapes) - _hbm(matrices.shapes) // int(stack[1])
    return sum(_hbm(p.shapes) for p in inside.parameters) + _hbm(shapes) - idle
  if stated := re.search(r'"bytes_accessed":"(\d+)"', attributes):
    return int(stated[1])
  results = _results(inside)
  in_place = frozenset(i.name for i in results if i.opcode in _IN_PLACE)
  users = collections.defaultdict(list)
  for i in inside.instructions.values():
    if i.name not in paid:
      for position, name in enumerate(i.operands):
        users[name].append((i, position))
  total = 0
  for p in inside.parameters:
    elements = _read_elements(users, p, in_place, exact=True)
    whole = sum(s.elements for s in p.shapes)
    total += _hbm(p.shapes) * min(elements, whole) // max(whole, 1)
  if len(results) != len(shapes):  # one result that is a tuple
    # The start of a collective gives back its operand, too.
    handed = len(inside.parameters) if is_free(inside.root) else 0
    return int(total) + _hbm(shapes[handed:])
  for shape, i in zip(shapes, results, strict=True):
    if shape.memory_space == 0 and i.name not in paid and not is_free(i):
      updates = i.name in in_place
      total += _update_bytes(inside, i, shape) if updates else _hbm((shape,))
  return int(total)
