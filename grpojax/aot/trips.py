"""Trip counts of the loops of a program, where the program says them."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from grpojax.aot.hlo import Computation, Instruction, Module

Constants = dict[int, int]
"""Elements of a loop's state that are the same in all its iterations."""


class _State(NamedTuple):
  """Element of the state that is an argument of a loop's body or condition."""

  index: int


class _Scope(NamedTuple):
  """Computation in which values are looked up."""

  module: Module
  computation: Computation
  arguments: tuple[Callable[[], Any], ...] = ()  # of a fused computation
  constants: Constants = {}  # of a loop's body


def _inside(scope: _Scope, fusion: Instruction) -> _Scope:
  """The scope of what a fusion computes."""
  inner = scope.module.computations[dict(fusion.called)["calls"]]
  return _Scope(
    scope.module,
    inner,
    tuple((lambda name=n: _value(scope, name)) for n in fusion.operands),
  )


def _element(scope: _Scope, name: str, index: int) -> Any:
  """The value of one element of a tuple."""
  source = scope.computation.instructions[name]
  if source.opcode == "tuple":
    return _value(scope, source.operands[index])
  if source.opcode == "parameter" and not scope.arguments:
    return scope.constants.get(index, _State(index))
  if source.opcode == "fusion":
    inner = _inside(scope, source)
    if inner.computation.root.opcode == "tuple":
      return _value(inner, inner.computation.root.operands[index])
  if source.opcode in ("copy", "opt-barrier"):
    return _element(scope, source.operands[0], index)
  return None


def _value(scope: _Scope, name: str) -> Any:
  """Expression of a scalar: an int, a `_State`, (opcode, *parts) or None.

  For example, i + 1 of a loop's counter is ("add", _State(0), 1).
  """
  i = scope.computation.instructions[name]
  if i.opcode == "parameter" and scope.arguments:
    return scope.arguments[int(i.literal)]()
  if i.opcode == "constant":
    return int(i.literal) if re.fullmatch(r"-?\d+", i.literal) else None
  if i.opcode == "get-tuple-element":
    index = int(re.search(r"\bindex=(\d+)", i.attributes)[1])
    return _element(scope, i.operands[0], index)
  if i.opcode in ("copy", "bitcast", "convert", "reshape"):
    return _value(scope, i.operands[0])
  if i.opcode == "fusion":
    inner = _inside(scope, i)
    return _value(inner, inner.computation.root.name)
  if i.opcode in ("add", "subtract", "and"):
    return (i.opcode, *(_value(scope, n) for n in i.operands))
  if i.opcode == "compare":
    direction = re.search(r"direction=(\w+)", i.attributes)[1]
    return (direction, *(_value(scope, n) for n in i.operands))
  return None


def constants(
  module: Module, computation: Computation, loop: Instruction, outer: Constants
) -> Constants:
  """Finds elements of a loop's state that its body keeps, of a known start."""
  body = module.computations[dict(loop.called)["body"]]
  start = _Scope(module, computation, constants=outer)
  known = {}
  for index, name in enumerate(body.root.operands):
    if _value(_Scope(module, body), name) == _State(index):
      value = _element(start, loop.operands[0], index)
      if isinstance(value, int):
        known[index] = value
  return known


_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def _step(value: Any, counter: _State) -> int | None:
  """Number that an iteration adds to the counter; None for anything else."""
  match value:
    case ("add", a, int(n)) | ("add", int(n), a) if a == counter:
      return n
    case ("subtract", a, int(n)) if a == counter:
      return -n
  return None


def _count(direction: str, start: int, limit: int, step: int) -> int | None:
  """Iterations of `for i = start; i DIRECTION limit; i += step`."""
  sign = 1 if step > 0 else -1
  if direction == "NE":
    distance = limit - start
    return distance // step if distance % step == 0 else None
  if direction[0] != ("L" if sign > 0 else "G"):
    return None
  distance = sign * (limit - start) + (direction[1] == "E")
  return max(0, -(-distance // abs(step)))


def _counted(
  condition: Any, loop: Instruction, outer: _Scope, body: _Scope
) -> int | None:
  """Trip count of a loop whose condition is one comparison."""
  match condition:
    case (direction, _State() as counter, int(limit)):
      pass
    case (direction, int(limit), _State() as counter):
      direction = _FLIPPED.get(direction, direction)
    case _:
      return None
  if direction not in _FLIPPED:
    return None
  start = _element(outer, loop.operands[0], counter.index)
  after = body.computation.root.operands[counter.index]
  step = _step(_value(body, after), counter)
  if not isinstance(start, int) or not step:
    return None
  return _count(direction, start, limit, step)


class Trips(NamedTuple):
  """Number of times that a loop runs."""

  most: int | None  # iterations; None if the condition does not say
  exact: bool  # nothing else can end the loop


def trip_count(
  module: Module, computation: Computation, loop: Instruction, outer: Constants
) -> Trips:
  """Finds how often a `while` of `computation` runs.

  XLA:CPU and XLA:GPU write known_trip_count into the backend_config, XLA:TPU
  does not. There the count is known where the condition is a comparison of a
  counter with a constant, the counter starts at a constant and each iteration
  adds a constant to it. Where it is that and something else, that is the most.
  `outer` are the constants of the loop around it.
  """
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
  if known:
    return Trips(int(known[1]), True)
  fixed = constants(module, computation, loop, outer)
  called = dict(loop.called)
  condition = module.computations[called["condition"]]
  body = _Scope(module, module.computations[called["body"]], constants=fixed)
  around = _Scope(module, computation, constants=outer)
  scope = _Scope(module, condition, constants=fixed)
  compared = _value(scope, condition.root.name)
  if compared is None or compared[0] != "and":
    most = _counted(compared, loop, around, body)
    return Trips(most, most is not None)
  counts = (_counted(part, loop, around, body) for part in compared[1:])
  return Trips(min((n for n in counts if n is not None), default=None), False)
