"""Counts the bytes that devices send to each other, by instruction."""

import math
import re
from typing import NamedTuple

from grpojax.aot.hlo import Computation, Instruction, Module


class Collective(NamedTuple):
  """A collective; the kind of a sliced all-reduce is "reduce-scatter"."""

  kind: str  # opcode: "all-gather", "reduce-scatter", ...
  bytes: int  # sent by each device in a run
  trips: int  # number of runs
  group_size: int  # number of devices joined


# Number of rounds; in a round on a ring, each of n devices sends (n - 1) / n of
# an array (Chan et al. 2007, https://doi.org/10.1002/cpe.1206; scaling book,
# part 3). `roofline.collective_seconds` adds bytes forwarded in an all-to-all.
_ROUNDS = {
  "all-gather": 1,  # the array is the result; for other kinds, the operand
  "all-reduce": 2,
  "all-to-all": 1,
  "ragged-all-to-all": 1,
  "reduce-scatter": 1,
}
KINDS = (*_ROUNDS, "collective-broadcast", "collective-permute")

BETWEEN = " between slices"
"""Suffix of kinds that use the network between slices of TPUs."""


def _sent(kind: str, operand: int, result: int, n: int) -> int:
  """Returns the bytes sent by each of `n` devices."""
  if kind in _ROUNDS:
    array = result if kind == "all-gather" else operand
    return int(_ROUNDS[kind] * array * ((n - 1) / n))
  return operand if n > 1 else 0


def group_size(i: Instruction, devices: int) -> int:
  """Returns the number of devices that a collective joins.

  XLA writes `replica_groups` as lists, {{0,1},{2,3}}; as an iota,
  [groups,size]<=[2,4]T(1,0); or as axes of a mesh, mesh['x'=2,'y'=4] {'y'},
  with 'y':(2)2 for a part of an axis, its size last. A missing or empty list
  means all devices.
  """
  if i.opcode == "collective-permute":  # devices in pairs, except self-sends
    pairs = i.attribute("source_target_pairs")
    pairs = re.findall(r"\{(\d+),(\d+)\}", pairs)
    # Devices that send to others or receive from them, each once
    return max(1, len({d for a, b in pairs if a != b for d in (a, b)}))
  text = re.search(r"\breplica_groups=(.*)", i.attributes)
  text = text[1] if text else ""
  if text.startswith("{{"):
    return text[2 : text.index("}")].count(",") + 1
  if text.startswith("["):
    return int(re.match(r"\[\d+,(\d+)\]", text)[1])
  if text.startswith("mesh"):
    sizes, names = re.match(r"mesh\[(.*?)\].*?\{(.*?)\}", text).groups()
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", sizes))
    # Names of axes, with a size if only a part of the axis is used
    used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", names)
    return math.prod(int(part or sizes[axis]) for axis, part in used)
  return devices


def _between_slices(
  i: Instruction, inside: Computation, trips: int
) -> Collective | None:
  """Returns the collective between slices that a send to the host starts.

  XLA:TPU splits a collective over several slices into a collective inside each
  slice and a send to the host. Its attributes are
  _xla_megascale_transfer_type="ALL_REDUCE" and _xla_megascale_target: slices,
  {1,2}x{0:7}, or pairs of devices. None for other instructions.
  """
  kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes)
  if i.opcode != "send" or not kind:
    return None
  slices = re.search(r'_xla_megascale_target="\{([\d,]+)\}x', i.attributes)
  # Without a list of slices, the target is a pair of devices.
  size = slices[1].count(",") + 1 if slices else 2
  kind = kind[1].lower().replace("_", "-")
  array = sum(s.bytes for s in inside.shapes(i.operands[:1]))
  # A gathered result has the arrays of all slices.
  sent = _sent(kind, array, size * array, size)
  return Collective(kind + BETWEEN, sent, trips, size)


def _is_sliced(inside: Computation, name: str) -> bool:
  """Returns True if only slices of a value are used."""
  users = [i for i in inside.instructions.values() if name in i.operands]
  passed_on = ("bitcast", "reshape", "get-tuple-element")
  return bool(users) and all(
    # Each user slices it, directly or after a change of shape.
    i.opcode == "dynamic-slice"
    or (i.opcode in passed_on and _is_sliced(inside, i.name))
    for i in users
  )


def find(
  module: Module, inside: Computation, trips: int, seen: set[str]
) -> tuple[tuple[Collective, ...], frozenset[str]]:
  """Returns an instruction's collectives, and the names of parts not counted.

  XLA:TPU splits a collective that overlaps a product into fusions (start,
  product, done) that share a chain_id. The first is counted, and its id added
  to `seen`. `inside` is `memory.contents` of the instruction, and `trips` its
  number of runs.
  """
  collectives = []
  repeated = set()
  for i in inside.instructions.values():
    if between := _between_slices(i, inside, trips):
      collectives.append(between)
    if i.opcode not in KINDS:
      continue
    chain = re.search(r'chain_id="(\d+)"', i.attributes)
    if chain:
      # Later parts of a chain repeat the collective under the same ids.
      key = f"{chain[1]} {i.attribute('channel_id')}"
      if key in seen:
        repeated.add(i.name)
        continue
      seen.add(key)
    kind = i.opcode
    if kind == "all-reduce" and _is_sliced(inside, i.name):
      kind = "reduce-scatter"
    size = group_size(i, module.devices)
    operand = sum(s.bytes for s in inside.shapes(i.operands))
    sent = _sent(kind, operand, sum(s.bytes for s in i.shapes), size)
    collectives.append(Collective(kind, sent, trips, size))
  return tuple(collectives), frozenset(repeated)
