"""Which keys of a block the queries of a block see, see `block_attention`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Sight(NamedTuple):
  """What decides which keys a query sees, besides the order of the row.

  Attributes:
    positions: of the tokens in the whole sequence; within a segment they go up
      by one from slot to slot.
    segments: tokens of a row see those of their own only, or None for one.
    prompt_mask: True on real prompt tokens, or None where there is no prompt.
    local: whether the window counts; a Python value or traced.
  """

  positions: Int[Array, "B G S"]
  segments: Int[Array, "B G S"] | None
  prompt_mask: Bool[Array, "B P"] | None
  local: Any


class Settings(NamedTuple):
  """What is fixed when attention compiles, see `block_attention`."""

  scale: float
  cap: float | None
  window: int
  local: bool  # False: nowhere, so that nothing is computed of windows
  block: int


class Queries(NamedTuple):
  """A block of queries, and what it sees by."""

  index: Int[Array, ""]
  positions: Int[Array, "B G S"]
  segments: Int[Array, "B G S"] | None
  local: Any


def _near(settings, queries: Queries, key_positions) -> Array:
  """Whether keys [., ., C] are in the window of queries: [B, G, S, C]."""
  distance = queries.positions[..., None] - key_positions[..., None, :]
  return (distance < settings.window) | ~jnp.asarray(queries.local)


def row_mask(settings, queries: Queries, keys) -> tuple[Array, Array]:
  """Of a block of the row's keys: [B, G, 1, 1, S, C], and if it sees any."""
  index, positions, segments = keys
  block = settings.block
  apart = (queries.index - index) * block  # slots between their first tokens
  at = jnp.arange(block)
  mask, seen = apart + at[:, None] >= at, apart >= 0
  if segments is not None:
    mask &= queries.segments[..., None] == segments[..., None, :]
  if settings.local:
    mask &= _near(settings, queries, positions)
    reached = apart - block + 1 < settings.window
    seen &= reached | ~jnp.asarray(queries.local)
  return mask if mask.ndim == 2 else mask[:, :, None, None], seen


def prompt_mask(settings, queries: Queries, keys) -> tuple[Array, None]:
  """Of a block of prompt keys, whose positions are their slots."""
  index, mask = keys
  mask = mask[:, None, None]
  if settings.local:
    places = index * settings.block + jnp.arange(settings.block)
    mask &= _near(settings, queries, places[None, None])
  return mask[:, :, None, None], None
