"""The decode cache, and all that depends on the order of its axes.

Each layer keeps the keys and values of the completions' tokens so far, one row
of slots a sample, and those of the prompts, once for a whole group:

    row      [B, G, K, C, E]   slot i of C holds completion token i
    prompt   [B, K, P, E]

The layers of a stack (see `layer_stacks`) are one array, with a leading axis. A
decoding step only reads it, and writes the new tokens of all layers at its end,
in place.

`ROW_AXES` and `PROMPT_AXES` are the only places where that order is written
down. The other modules ask here for what depends on it, and name axes by these
letters (`attention`, in its einsums).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.mesh import constrain

ROW_AXES = "bgkce"
PROMPT_AXES = "bkpe"
_NAMES = {"b": "batch", "g": "group", "k": "kv_heads"}
RowArray = Float[Array, " ".join(ROW_AXES.upper())]
PromptArray = Float[Array, " ".join(PROMPT_AXES.upper())]


class KeysValues(NamedTuple):
  """Keys and values of rows of tokens in one layer; C is S outside a cache."""

  keys: RowArray
  values: RowArray


class PromptKeysValues(NamedTuple):
  """Keys and values of prompts in one layer, shared by their groups."""

  keys: PromptArray
  values: PromptArray


class Cache(NamedTuple):
  """Keys and values of the completions so far.

  Attributes:
    index: how many slots are filled; the next token goes to this one.
    stacks: slots of each stack's layers, [layers, *ROW_AXES].
  """

  index: Int[Array, ""]
  stacks: tuple[KeysValues, ...]


def create(
  batch: int,
  group_size: int,
  capacity: int,
  *,
  layers: int,
  kv_heads: int,
  head_dim: int,
  dtype: Any,
) -> Cache:
  """An empty cache.

  Args:
    batch: B.
    group_size: G.
    capacity: C, completion tokens that a row has room for.
    layers: L.
    kv_heads: K.
    head_dim: E.
    dtype: of keys and values.
  """
  sizes = dict(b=batch, g=group_size, k=kv_heads, c=capacity, e=head_dim)
  shape = (layers, *(sizes[axis] for axis in ROW_AXES))
  return Cache(
    index=jnp.zeros((), jnp.int32),
    stacks=(
      constrain_stack(
        KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
      ),
    ),
  )


def constrain_row(row: KeysValues) -> KeysValues:
  """Lays rows out over the mesh, see `core.mesh.constrain`."""
  return jax.tree.map(lambda x: constrain(x, *map(_NAMES.get, ROW_AXES)), row)


def constrain_stack(stack: KeysValues) -> KeysValues:
  """Likewise, of the rows of several layers."""
  return jax.tree.map(
    lambda x: constrain(x, None, *map(_NAMES.get, ROW_AXES)), stack
  )


def capacity(cache: Cache) -> int:
  """C, the completion tokens that a row has room for."""
  return cache.stacks[0].keys.shape[1 + ROW_AXES.index("c")]


def from_heads(
  keys: Float[Array, "B G S K E"], values: Float[Array, "B G S K E"]
) -> KeysValues:
  """Keys and values as the projections give them, in the cache's order."""
  order = tuple("bgcke".index(axis) for axis in ROW_AXES)
  return KeysValues(keys.transpose(order), values.transpose(order))


def write(cache: Cache, tokens: tuple[KeysValues, ...], count: int) -> Cache:
  """Writes the next tokens of all layers into their slots.

  Args:
    cache: it is updated in place where XLA can.
    tokens: of each stack, [layers, *ROW_AXES] with C = count.
    count: of tokens.
  """

  def one(stack, new):
    axis = 1 + ROW_AXES.index("c")
    return jax.lax.dynamic_update_slice_in_dim(
      stack, new.astype(stack.dtype), cache.index, axis
    )

  stacks = jax.tree.map(one, cache.stacks, tokens)
  stacks = tuple(map(constrain_stack, stacks))
  return Cache(cache.index + count, stacks)


def filled(cache: Cache) -> Bool[Array, "C"]:
  """Which slots hold a token."""
  return jnp.arange(capacity(cache)) < cache.index


def slot_positions(
  cache: Cache, positions: Int[Array, "B G S"]
) -> Int[Array, "B G C"]:
  """Positions of what is in the slots, given those of the next tokens.

  Decoded tokens follow each other without a gap, so the position of the first
  of the next tokens gives all the others.
  """
  return positions[..., :1] - cache.index + jnp.arange(capacity(cache))


def of_prompt(tokens: KeysValues) -> PromptKeysValues:
  """The keys and values of prompts that went through a layer as rows, G = 1."""
  axes = ROW_AXES.replace("g", "").replace("c", "p")
  order = tuple(axes.index(axis) for axis in PROMPT_AXES)
  only_row = (slice(None),) * ROW_AXES.index("g") + (0,)
  return PromptKeysValues(
    *(
      constrain(x[only_row].transpose(order), *map(_NAMES.get, PROMPT_AXES))
      for x in tokens
    )
  )
