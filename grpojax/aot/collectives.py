"""Bytes that devices send each other, by instruction."""

import re
from typing import NamedTuple

from grpojax.aot.hlo import (
  Computation,
  Instruction,
  Module,
  attribute,
  group_size,
)


class Collective(NamedTuple):
  """Collective operation of a program.

  One that XLA fuses of an all-reduce and a slice of its result counts as a
  reduce-scatter.
  """

  kind: str  # opcode: "all-gather", "reduce-scatter", ...
  bytes: int  # that each device sends in one run
  trips: int  # number of runs
  in_token_loop: bool
  group_size: int  # number of devices that it joins
  op_name: str  # place in the traced program that it comes from
  name: str  # of the instruction
  asynchronous: bool = False  # True where other work may run beside it


def _ring(kind: str, operand: int, result: int, n: int) -> float:
  """Returns the bytes that each of `n` devices sends, on a ring.

  An array is passed round in n pieces, of which a device sends n - 1 (Chan et
  al. 2007, https://doi.org/10.1002/cpe.1206; scaling book, part 3):

    all-gather       (n - 1) / n of the gathered result
    reduce-scatter   (n - 1) / n of the operand before it is cut
    all-reduce       both: 2 (n - 1) / n of the operand
    all-to-all       (n - 1) / n of the operand, each piece to another device;
                     on a ring pieces are passed on by those between, which
                     `roofline.collective_seconds` adds
    permute, broadcast and others   the operand
  """
  share = (n - 1) / n
  if kind == "all-gather":
    return result * share
  if kind == "all-reduce":
    return 2 * operand * share
  if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
    return operand * share
  return float(operand) if n > 1 else 0.0


KINDS = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-broadcast",
  "collective-permute",
  "ragged-all-to-all",
  "reduce-scatter",
)


BETWEEN = " between slices"
"""End of the kinds that go over the network between slices of TPUs."""


def _between_slices(i: Instruction) -> tuple[str, int] | None:
  """Returns the kind of a send between slices, and the number of these.

  XLA:TPU makes of a collective over several slices one inside each of them and
  a send to the host, which does the rest: frontend_attributes have
  _xla_megascale_transfer_type="ALL_REDUCE" and _xla_megascale_target, which
  begins with the slices, {1,2}x{0:7}, or lists pairs of devices.
  """
  kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes)
  if i.opcode != "send" or not kind:
    return None
  slices = re.search(r'_xla_megascale_target="\{([\d,]+)\}x', i.attributes)
  name = kind[1].lower().replace("_", "-")
  return name + BETWEEN, slices[1].count(",") + 1 if slices else 2


def _is_sliced(inside: Computation, name: str) -> bool:
  """True where nothing but slices of a value is used."""
  users = [i for i in inside.instructions.values() if name in i.operands]
  passed_on = ("bitcast", "reshape", "get-tuple-element")
  return bool(users) and all(
    i.opcode == "dynamic-slice"
    or (i.opcode in passed_on and _is_sliced(inside, i.name))
    for i in users
  )


def find(
  module: Module, inside: Computation, seen: set[str]
) -> tuple[list[Collective], frozenset[str]]:
  """Finds the collectives of an instruction.

  XLA:TPU splits one that runs beside a product into several fusions: a start,
  the product's own, and a done. All name the same collective, by a chain_id;
  the first pays. `inside` is the instruction by `memory.contents`; chains that
  were met before are in `seen`, which is added to.

  Returns:
    The collectives with trips 1, outside of the token loop; and the names of
    those in `inside` that were paid for before.
  """
  collectives, paid = [], set()
  for i in inside.instructions.values():
    if between := _between_slices(i):
      kind, size = between
      array = sum(s.bytes for s in inside.instructions[i.operands[0]].shapes)
      sent = _ring(kind.removesuffix(BETWEEN), array, size * array, size)
      collectives.append(
        Collective(kind, int(sent), 1, False, size, i.op_name, i.name, True)
      )
    kind = i.opcode
    if kind not in KINDS:
      continue
    chain = re.search(r'chain_id="(\d+)"', i.attributes)
    if chain:
      key = f"{chain[1]} {attribute(i, 'channel_id')}"
      if key in seen:
        paid.add(i.name)
        continue
      seen.add(key)
    if kind == "all-reduce" and _is_sliced(inside, i.name):
      kind = "reduce-scatter"
    size = group_size(i, module.devices)
    if kind == "collective-permute":  # devices between which anything is moved
      pairs = attribute(i, "source_target_pairs") or ""
      pairs = re.findall(r"\{(\d+),(\d+)\}", pairs)
      moved = {device for a, b in pairs if a != b for device in (a, b)}
      size = max(1, len(moved))
    operand = sum(
      s.bytes for n in i.operands for s in inside.instructions[n].shapes
    )
    sent = _ring(kind, operand, sum(s.bytes for s in i.shapes), size)
    collectives.append(
      Collective(
        kind, int(sent), 1, False, size, i.op_name, i.name, bool(chain)
      )
    )
  return collectives, frozenset(paid)
