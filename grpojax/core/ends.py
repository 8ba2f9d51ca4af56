"""Ends of completions: end-of-sequence ids and stop strings.

Stop strings are matched by an automaton over tokens, with one state per sample:
the longest suffix of the text so far that is a prefix of a stop string.

    stop string  "ab!"       tokens  x  ab  a  b!
    states       "" a ab     state   0  2   1  3 = complete
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree


class StopTable(NamedTuple):
  """Automaton of stop strings (from `runtime.text.stop_strings.build`)."""

  strings: tuple[str, ...]
  classes: Any  # of each token [V]; tokens of a class have the same transitions
  table: Any  # next state by state and class [S, C]; S: string complete


class Ends(NamedTuple):
  """End-of-sequence ids and, if any, stop strings."""

  ids: Any
  stop: StopTable | None = None


def on_device(ends: Ends) -> Ends:
  """Converts end ids and the stop table, if any, to JAX arrays."""
  ids = jnp.asarray(ends.ids, jnp.int32)
  stop = ends.stop
  if stop:
    classes, table = map(jnp.asarray, stop[1:])
    stop = stop._replace(classes=classes, table=table)
  return Ends(ids, stop)


def first_state(ends: Ends, like: Array) -> PyTree:
  """Returns the stop-string state at the start; None without stop strings."""
  return jnp.zeros(like.shape, jnp.int32) if ends.stop else None


def advance(
  ends: Ends, state: PyTree, ids: Int[Array, "*n"]
) -> tuple[Bool[Array, "*n"], PyTree]:
  """Returns True for tokens that end a completion, and the next states."""
  ended = jnp.isin(ids, ends.ids)
  if stop := ends.stop:
    classes = stop.classes[ids].astype(jnp.int32)
    state = stop.table[state, classes].astype(jnp.int32)
    ended |= state == len(stop.table)
  return ended, state


def within(
  state: PyTree, drawn: Bool[Array, "*n"] | bool, ended: Bool[Array, "*n"]
) -> PyTree:
  """Resets the state to 0 after an end and after tokens that are not drawn."""
  return jax.tree.map(lambda x: jnp.where(drawn & ~ended, x, 0), state)
