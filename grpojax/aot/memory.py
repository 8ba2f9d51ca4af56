"""Counts the bytes moved to and from the device's main memory (HBM).

An instruction reads its operands and writes its result, once each, except:

- Arrays in another memory (VMEM on TPU, which XLA fills with copies) are free.
- If an array is only sliced or gathered from, the slices count. For an update
  in place, the update counts; if it has part of a TPU tile's 128 lanes (a new
  token in a cache whose last dimension is slots), all 128 are read and written.
- TPU tiles are moved whole, with their padding.
- A Pallas kernel states its bytes: on TPU in its cost estimate, on GPU (Triton)
  as `_bytes_N` in its name. Without them, operands and results count.
"""

import collections
import math
import re
from collections.abc import Iterable

from grpojax.aot.hlo import Computation, Instruction, Module, Shape

# Instructions that only name or arrange values, or run other computations.
FREE = frozenset(
  "bitcast tuple get-tuple-element parameter constant while conditional call"
  " after-all add-dependency partition-id replica-id opt-barrier domain"
  " async-start async-update".split()
)
_FREE_TARGETS = frozenset(
  '"AllocateBuffer" "ConcatBitcast" "AsyncCollectiveStart"'
  ' "AsyncCollectiveDone" "Sharding"'.split()
)
_VIEWS = ("bitcast", "reshape")
# Elementwise operations: a fusion computes only the elements that are used.
_MAPPED = (*_VIEWS, *"convert copy multiply transpose bitcast-convert".split())
_IN_PLACE = ("dynamic-update-slice", "scatter")


def is_free(i: Instruction) -> bool:
  """Returns True for an instruction that does not move data."""
  if i.opcode == "custom-call":
    return i.attribute("custom_call_target") in _FREE_TARGETS
  return i.opcode in FREE or i.opcode.endswith("-done")


def _renamed(
  module: Module, computation: Computation, prefix: str, names: dict[str, str]
) -> list[Instruction]:
  """Returns a fused computation's instructions, with inner fusions inlined.

  `names` maps its parameters to their names outside; new names are added to it.
  """
  instructions = []
  for i in computation.instructions.values():
    if i.opcode == "parameter" and i.name in names:
      continue
    operands = tuple(names.get(n, n) for n in i.operands)
    if i.opcode == "fusion":
      inner = module.called(i, "calls")
      arguments = zip(inner.parameters, operands, strict=True)
      # The caller of the inner fusion names its parameters.
      within = {p.name: operand for p, operand in arguments}
      instructions += _renamed(module, inner, f"{prefix}{i.name}/", within)
      # After the call, `within` has the new name of the inner root: its value.
      names[i.name] = within[inner.root.name]
    else:
      names[i.name] = prefix + i.name
      instructions.append(i._replace(name=names[i.name], operands=operands))
  return instructions


def result(inputs: Iterable[Instruction], i: Instruction) -> tuple[Shape, ...]:
  """Returns the shapes of a result, even if the instruction is asynchronous.

  A `copy-start` has (result, operand, context); other starts have (operands,
  results, contexts). Contexts are scalars in another memory.
  """
  if i.opcode == "copy-start":
    return i.shapes[:1]
  if i.opcode.endswith("-start"):
    # Results follow the operands; without them the shape is the result's.
    return i.shapes[sum(len(x.shapes) for x in inputs) :] or i.shapes
  return i.shapes


def contents(
  module: Module, computation: Computation, instruction: Instruction
) -> Computation:
  """Returns an instruction as a computation without fusions.

  A fusion becomes its fused instructions, an asynchronous start the operation
  that it starts. Parameters are the operands; the root is the value.
  """
  opcode = instruction.opcode.removesuffix("-start")
  if opcode == "fusion":
    fused = module.called(instruction, "calls")
    names = {}
    renamed = _renamed(module, fused, "", names)
    root = names[fused.root.name]
    every = {i.name: i._replace(is_root=i.name == root) for i in renamed}
    return Computation(every)
  # The literal of an unknown opcode may contain other names.
  names = [n for n in instruction.operands if n in computation.instructions]
  operands = [computation.instructions[n] for n in names]
  shapes = result(operands, instruction)
  itself = instruction._replace(opcode=opcode, shapes=shapes, is_root=True)
  as_parameter = {"opcode": "parameter", "operands": (), "is_root": False}
  parameters = {
    i.name: i._replace(literal=str(n), **as_parameter)
    for n, i in enumerate(operands)
  }
  return Computation(parameters | {itself.name: itself})


def _hbm(shapes: Iterable[Shape]) -> int:
  return sum(s.padded_bytes for s in shapes if s.memory_space == 0)


def _update_bytes(inside: Computation, i: Instruction, target: Shape) -> int:
  """Returns the bytes moved by an update in place, in whole rows of lanes."""
  # dynamic-update-slice(array, update, ...), scatter(array, indices, update)
  operand = i.operands[1 if i.opcode == "dynamic-update-slice" else -1]
  part = inside.instructions[operand].shapes[0]
  if len(part.dims) != len(target.dims):  # possible in a scatter
    return part.bytes
  # Only the inner dimension counts: tiles hold whole rows of lanes.
  lanes = part._replace(tiles=target.tiles[:1]).padded_bytes
  return lanes if lanes == part.bytes else 2 * lanes


def _results(inside: Computation) -> list[Instruction]:
  """Returns the instructions that make the result's arrays, before bitcasts."""
  root = inside.root
  names = root.operands if root.opcode == "tuple" else (root.name,)
  makers = []
  for name in names:
    i = inside.instructions[name]
    while i.opcode in _VIEWS:
      i = inside.instructions[i.operands[0]]
    makers.append(i)
  return makers


def _read_elements(
  users: dict[str, list[tuple[Instruction, int]]],
  i: Instruction,
  in_place: frozenset[str],
  exact: bool = True,
) -> int | float:
  """Counts the elements read from an array; inf means the whole array."""
  total = 0
  for user, position in users[i.name]:
    # Position 0 is the array; others are indices or updates.
    if user.opcode in ("dynamic-slice", "slice", "gather") and position == 0:
      total += user.shapes[0].elements
    elif user.opcode in _IN_PLACE and position == 0:
      # An update in place does not read the array; other users read all of it.
      if not exact or user.name not in in_place:
        return math.inf
    elif user.opcode in _MAPPED and not user.is_root:
      # A view is the array itself, so an update of the view may be in place.
      same = exact and user.opcode in _VIEWS
      total += _read_elements(users, user, in_place, same)
    elif user.opcode == "custom-call" and is_free(user):
      continue
    # The result's tuple reads nothing; other users read the whole array.
    elif user.opcode != "tuple" or not user.is_root:
      return math.inf
  return total


def hbm_bytes(
  inside: Computation, shapes: tuple[Shape, ...], skipped: frozenset[str]
) -> int:
  """Counts the bytes of HBM moved in a run of an instruction.

  `inside` is what `contents` returns for the instruction, `shapes` are those of
  its result; `skipped` names collectives that another instruction accounts for.
  """
  parameters = inside.parameters
  root = inside.root
  stated = root.number(r'"bytes_accessed":"(\d+)"')
  if stated is not None:
    return stated
  if root.opcode == "custom-call":
    # Operands would count a cache that a kernel updates in place twice.
    named = re.search(r"_bytes_(\d+)", root.op_name)
    if named is not None:
      return int(named[1])
  results = _results(inside)
  in_place = frozenset(i.name for i in results if i.opcode in _IN_PLACE)
  # Users of each value, with their operand's position
  users = collections.defaultdict(list)
  for i in inside.instructions.values():
    if i.name not in skipped:
      for position, name in enumerate(i.operands):
        users[name].append((i, position))
  # Reads: the used share of each parameter
  total = 0
  for p in parameters:
    whole = max(sum(s.elements for s in p.shapes), 1)
    elements = min(_read_elements(users, p, in_place), whole)
    total += _hbm(p.shapes) * elements // whole
  if len(results) != len(shapes):  # a single result that is a tuple
    # The start of a collective also returns its operand.
    return total + _hbm(shapes[len(parameters) if is_free(root) else 0 :])
  # Writes: whole results, or the updates of results in place
  for shape, i in zip(shapes, results, strict=True):
    if shape.memory_space == 0 and i.name not in skipped and not is_free(i):
      updates = i.name in in_place
      total += _update_bytes(inside, i, shape) if updates else _hbm([shape])
  return total
