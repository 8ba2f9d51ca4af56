"""Counts the trips of loops by following the program's scalars."""

import functools
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

from grpojax.aot.hlo import Computation, Instruction, Module

State = dict[int, int]  # known elements of a loop's state, by index

MOST = 2**20  # maximum number of iterations to follow
_KNOWN = r'"known_trip_count":\{"n":"(\d+)"\}'
_SAME = ("copy", "bitcast", "convert", "reshape", "opt-barrier")
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub}

Value = Callable[..., int | None]
"""`(name, index) -> integer`: value of a scalar, or of a tuple's element."""


def _values(
  module: Module,
  computation: Computation,
  state: State,
  arguments: tuple[Value, ...] = (),
) -> Value:
  """Returns a function that computes a scalar, or None if it is unknown.

  `state` belongs to the loop around the computation, `arguments` to a fusion.
  """

  def value(name: str, index: int | None = None) -> int | None:
    i = computation.instructions[name]
    operands = tuple(functools.partial(value, n) for n in i.operands)
    match i.opcode:
      case "parameter" if arguments:
        # A fusion's parameters are its caller's operands.
        return arguments[int(i.literal)](index)
      case "parameter":
        # A loop's only parameter is its state, a tuple.
        return state.get(index)
      case "constant":
        return int(i.literal) if re.fullmatch(r"-?\d+", i.literal) else None
      case "tuple":
        return operands[index]()
      case "get-tuple-element":
        return operands[0](i.number(r"\bindex=(\d+)"))
      case opcode if opcode in _SAME:
        return operands[0](index)
      case "fusion":
        inner = module.called(i, "calls")
        return _values(module, inner, {}, operands)(inner.root.name, index)
      case "and" if i.shapes[0].dtype == "pred":
        # False if an operand is false; else unknown if an operand is unknown.
        known = [operand() for operand in operands]
        return 0 if 0 in known else None if None in known else 1
      case "compare" | "add" | "subtract":
        known = [operand() for operand in operands]
        if None in known:
          return None
        if i.opcode in _ARITHMETIC:
          return _ARITHMETIC[i.opcode](*known)
        return int(getattr(operator, i.attribute("direction").lower())(*known))
    return None

  return value


class Trips(NamedTuple):
  """Number of iterations of a loop."""

  most: int | None  # upper bound; None if unknown
  exact: bool  # True if the loop cannot end earlier
  constants: State  # elements that are the same in all iterations


def trip_count(
  module: Module, computation: Computation, loop: Instruction, outer: State
) -> Trips:
  """Counts the iterations of a `while` of `computation`.

  XLA:CPU and XLA:GPU write known_trip_count. For XLA:TPU the loop's counter is
  followed until the condition is false: an upper bound if the condition also
  depends on unknown values. `outer` has the enclosing loop's constants.
  """
  body = module.called(loop, "body")
  condition = module.called(loop, "condition")

  def after(state: State) -> State:
    """Returns the known elements after an iteration."""
    value = _values(module, body, state)
    values = {k: value(body.root.operands[k]) for k in state}
    return {k: v for k, v in values.items() if v is not None}

  # Known elements of the initial state
  around = _values(module, computation, outer)
  start = {
    index: value
    for index in range(len(body.root.operands))
    if (value := around(loop.operands[0], index)) is not None
  }
  # Assume that all of these are constant, and drop those that an iteration
  # changes or makes unknown, until none is dropped.
  constants = start
  last = None
  while constants != last:
    last = constants
    later = after(last)
    constants = {k: v for k, v in last.items() if later.get(k) == v}
  known = loop.number(_KNOWN)
  if known is not None:
    return Trips(known, True, constants)
  # Follow the state until the condition is false
  state = start
  exact = True
  count = 0
  while count < MOST:
    continues = _values(module, condition, state)(condition.root.name)
    if continues == 0:
      return Trips(count, exact, constants)
    # Unknown: the loop may end here, so the count is an upper bound.
    exact = exact and continues is not None
    later = after(state)
    if later == state:  # the known elements cannot end the loop
      break
    state = later
    count += 1
  return Trips(None, False, constants)
