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

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

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


Block = tuple[KeysValues, ...]


class Cache(NamedTuple):
  """Keys and values of the completions so far.

  The slots lie in blocks, so that a step reads only those that have been begun
  (see `grow`). A cache of one block is a ring: where a row has more tokens than
  slots, the new ones take the places of the oldest.

  Attributes:
    index: tokens written so far; the next one goes to the slot of this number.
    blocks: of each, the slots of each stack's layers, [layers, *ROW_AXES].
  """

  index: Int[Array, ""]
  blocks: tuple[Block, ...]


def create(
  batch: int,
  group_size: int,
  capacity: int,
  *,
  layers: Sequence[int],
  kv_heads: int,
  head_dim: int,
  dtype: Any,
) -> Cache:
  """An empty cache.

  Args:
    batch: B.
    group_size: G.
    capacity: C, completion tokens that a row has room for.
    layers: of each stack; L in all.
    kv_heads: K.
    head_dim: E.
    dtype: of keys and values.
  """
  sizes = dict(b=batch, g=group_size, k=kv_heads, c=capacity, e=head_dim)
  row = [sizes[axis] for axis in ROW_AXES]
  block = tuple(
    KeysValues(*(jnp.zeros((count, *row), dtype) for _ in range(2)))
    for count in layers
  )
  return Cache(jnp.zeros((), jnp.int32), (constrain_stacks(block),))


def grow(cache: Cache, slots: int) -> Cache:
  """Adds room for more tokens: a block of their own."""

  def empty(x):
    shape = list(x.shape)
    shape[1 + ROW_AXES.index("c")] = slots
    return jnp.zeros(shape, x.dtype)

  block = constrain_stacks(jax.tree.map(empty, cache.blocks[0]))
  return Cache(cache.index, (*cache.blocks, block))


def map_rows(
  function: Callable[..., Array], cache: Cache, *others: Cache
) -> Cache:
  """Maps a function of arrays [B, G, ...] over the rows of a cache."""
  mapped = jax.vmap(function)  # layer by layer
  blocks = jax.tree.map(mapped, cache.blocks, *(x.blocks for x in others))
  return Cache(cache.index, tuple(map(constrain_stack, blocks)))


def constrain_row(row: KeysValues) -> KeysValues:
  """Lays rows out over the mesh, see `core.mesh.constrain`."""
  return jax.tree.map(lambda x: constrain(x, *map(_NAMES.get, ROW_AXES)), row)


def constrain_stacks(stacks: Block) -> Block:
  """Likewise, of the rows of stacks of layers."""
  return jax.tree.map(
    lambda x: constrain(x, None, *map(_NAMES.get, ROW_AXES)), stacks
  )


def _slots(block: Block) -> int:
  """How many slots a block has."""
  return block[0].keys.shape[1 + ROW_AXES.index("c")]


def capacity(cache: Cache) -> int:
  """C, the completion tokens that a row has room for."""
  return sum(map(_slots, cache.blocks))


def split(
  x: Shaped[Array, "*axes C"], blocks: tuple[KeysValues, ...]
) -> list[Array]:
  """Takes what is known of all slots apart into that of each block.

  Args:
    x: the slots are its last axis.
    blocks: of one layer.
  """
  sizes = (block.keys.shape[ROW_AXES.index("c")] for block in blocks)
  ends = list(itertools.accumulate(sizes))
  return jnp.split(x, ends[:-1], axis=-1)


def from_heads(
  keys: Float[Array, "B G S K E"], values: Float[Array, "B G S K E"]
) -> KeysValues:
  """Keys and values as the projections give them, in the cache's order."""
  order = tuple("bgcke".index(axis) for axis in ROW_AXES)
  return KeysValues(keys.transpose(order), values.transpose(order))


def next_slot(cache: Cache) -> Int[Array, ""]:
  """The slot of the last block that the next token goes to."""
  *before, block = cache.blocks
  if not before:
    return cache.index % _slots(block)
  return cache.index - sum(map(_slots, before))


def after(slot: Int[Array, ""], x: Float[Array, "*shape"]) -> Int[Array, ""]:
  """The same slot, known no sooner than x is.

  Whoever writes there then comes after all that x was computed from, and XLA
  need not copy the cache for those who read it. (An `optimization_barrier`
  orders nothing where copies are decided on.)
  """
  first = x.ravel()[0]
  return jnp.minimum(slot, slot + (first == first))  # no compiler sees through


def write(
  slots: tuple[KeysValues, ...], tokens: KeysValues, slot: Int[Array, ""]
) -> tuple[KeysValues, ...]:
  """Writes the next tokens of a stack of layers.

  Args:
    slots: of each block; the last is updated in place where XLA can.
    tokens: [layers, *ROW_AXES], with C as many as there are; one where a ring
      may close.
    slot: see `next_slot`.
  """

  def one(slots, new):
    new = new.astype(slots.dtype)
    axis = 1 + ROW_AXES.index("c")
    return jax.lax.dynamic_update_slice_in_dim(slots, new, slot, axis)

  *before, block = slots
  return (*before, jax.tree.map(one, block, tokens))


def first_slots(
  x: Float[Array, "B G K slots E"], count: int
) -> Float[Array, "B G K {count} E"]:
  """The first `count` slots of keys or values."""
  return jax.lax.slice_in_dim(x, 0, count, axis=ROW_AXES.index("c"))


def ages(cache: Cache) -> Int[Array, "C"]:
  """How many tokens ago each slot was written: 0 is the last one."""
  size = capacity(cache)
  return (cache.index - 1 - jnp.arange(size)) % size


def filled(cache: Cache) -> Bool[Array, "C"]:
  """Which slots hold a token, where all rows have been written alike."""
  return jnp.arange(capacity(cache)) < cache.index


def slot_positions(
  cache: Cache, positions: Int[Array, "B G S"]
) -> Int[Array, "B G C"]:
  """Positions of what is in the slots, given those of the next tokens.

  Decoded tokens follow each other without a gap, so the position of the first
  of the next tokens gives all the others.
  """
  return positions[..., :1] - 1 - ages(cache)


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
