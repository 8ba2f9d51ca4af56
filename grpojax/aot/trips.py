"""Trip counts of the loops of a program, if the program says them."""

import functools
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

from grpojax.aot.hlo import Computation, Instruction, Module

State = dict[int, int]
"""Known elements of a loop's state, by their index."""

MOST = 2**20  # iterations that are counted
_KNOWN = r'"known_trip_count":\{"n":"(\d+)"\}'
_SAME = ("copy", "bitcast", "convert", "reshape", "opt-barrier")
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub}
_COMPARISONS = {
  "LT": operator.lt,
  "LE": operator.le,
  "GT": operator.gt,
  "GE": operator.ge,
  "EQ": operator.eq,
  "NE": operator.ne,
}


class _Scope(NamedTuple):
  """Computation in which values are looked up."""

  module: Module
  computation: Computation
  state: State  # of a loop, if the computation is its body or condition
  arguments: tuple[Callable[..., int | None], ...] = ()  # of a fusion


def _value(scope: _Scope, name: str, index: int | None = None) -> int | None:
  """Returns a scalar, or element `index` of a tuple; None if it is unknown."""
  i = scope.computation.instructions[name]
  operands = tuple(functools.partial(_value, scope, n) for n in i.operands)
  if i.opcode == "parameter":
    if scope.arguments:
      return scope.arguments[int(i.literal)](index)
    return scope.state.get(index)
  if i.opcode == "constant":
    return int(i.literal) if re.fullmatch(r"-?\d+", i.literal) else None
  if i.opcode == "tuple":
    return operands[index]()
  if i.opcode == "get-tuple-element":
    return operands[0](i.number(r"\bindex=(\d+)"))
  if i.opcode in _SAME:
    return operands[0](index)
  if i.opcode == "fusion":
    inner = scope.module.called(i, "calls")
    inside = _Scope(scope.module, inner, {}, operands)
    return _value(inside, inner.root.name, index)
  if i.opcode not in ("and", "compare", *_ARITHMETIC):
    return None
  values = [operand() for operand in operands]
  if i.opcode == "and" and i.shapes[0].dtype == "pred":
    return 0 if 0 in values else None if None in values else 1
  if None in values or i.opcode == "and":
    return None
  if i.opcode == "compare":
    return int(_COMPARISONS[i.attribute("direction")](*values))
  return _ARITHMETIC[i.opcode](*values)


def _after(body: _Scope) -> State:
  """Known elements of the state after an iteration from those before it."""
  names = body.computation.root.operands
  values = {k: _value(body, names[k]) for k in body.state}
  return {k: value for k, value in values.items() if value is not None}


class Trips(NamedTuple):
  """Number of times that a loop runs."""

  most: int | None  # iterations; None if the condition does not say
  exact: bool  # nothing else can end the loop
  constants: State  # elements that are the same in all iterations


def trip_count(
  module: Module, computation: Computation, loop: Instruction, outer: State
) -> Trips:
  """Counts how often a `while` of `computation` runs.

  XLA:CPU and XLA:GPU write known_trip_count into the backend_config, XLA:TPU
  does not. There the loop's counter is followed from its start until the
  condition is false. If the condition has another part, that is the most.
  `outer` are the constants of the loop around it.
  """
  around = _Scope(module, computation, outer)
  body = _Scope(module, module.called(loop, "body"), {})
  condition = module.called(loop, "condition")
  start = {
    index: value
    for index in range(len(body.computation.root.operands))
    if (value := _value(around, loop.operands[0], index)) is not None
  }
  constants, last = start, None
  while constants != last:
    last = constants
    after = _after(body._replace(state=last))
    constants = {k: v for k, v in last.items() if after.get(k) == v}
  known = loop.number(_KNOWN)
  if known is not None:
    return Trips(known, True, constants)
  state, exact, count = start, True, 0
  while count < MOST:
    goes_on = _value(_Scope(module, condition, state), condition.root.name)
    if goes_on == 0:
      return Trips(count, exact, constants)
    exact = exact and goes_on is not None
    after = _after(body._replace(state=state))
    if after == state:  # nothing known would end it
      break
    state, count = after, count + 1
  return Trips(None, False, constants)
