"""The decode cache, and all that depends on the order of its axes.

Each layer keeps the keys and values of the completions' tokens so far, one row
of slots a sample, and those of the prompts, once for a whole group:

    row      [B, G, K, S, E]   of tokens that pass through the layers
    slots    [B, G, K, E, C]   of earlier tokens: keys, as a product with one
                               query reads them fastest; slot i of C holds
                               completion token i
             [B, G, K, C, E]   and values
    prompt   [B, K, P, E]

The layers of a stack (`layer_stacks`) are one array, with a leading axis. A
decoding step only reads it, and writes the new tokens of all layers at its end,
in place.

`ROW_AXES`, `SLOT_AXES` and `PROMPT_AXES` are the only places where that order
is written down. Other modules ask this one for all that depends on it, and name
axes by these letters (`attention`, in its einsums).
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
_NAMES = {
  "b": "batch",
  "g": "group",
  "k": "kv_heads",
}  # as `constrain` has them
RowArray = Float[Array, " ".join(ROW_AXES.upper())]
PromptArray = Float[Array, " ".join(PROMPT_AXES.upper())]


class KeysValues(NamedTuple):
  """Keys and values of rows of tokens in one layer."""

  keys: RowArray
  values: RowArray


class Slots(NamedTuple):
  """Keys and values in a cache, of one layer or of a stack of layers."""

  keys: Float[Array, "*layers B G K E C"]
  values: Float[Array, "*layers B G K C E"]


SLOT_AXES = Slots("bgkec", "bgkce")


class PromptKeysValues(NamedTuple):
  """Keys and values of prompts in one layer, shared by their groups."""

  keys: PromptArray
  values: PromptArray


Block = tuple[Slots, ...]


class Cache(NamedTuple):
  """Keys and values of the completions so far.

  The slots lie in blocks, so that a step reads only those that have been begun
  (`grow`). A cache of one block is a ring: where a row has more tokens than
  slots, the new ones take the slots of the oldest.

      tokens 0 .. 5 in a ring of 4 slots:    4 5 2 3

  Attributes:
    index: tokens written so far; the next one goes to the slot of this number.
    blocks: for each block, the slots of each stack's layers.
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
  """Returns an empty cache for C = `capacity` completion tokens a row.

  `layers` has the number of layers of each stack.
  """
  sizes = dict(b=batch, g=group_size, k=kv_heads, c=capacity, e=head_dim)

  def empty(axes, count):
    return jnp.zeros((count, *(sizes[axis] for axis in axes)), dtype)

  block = tuple(Slots(*(empty(axes, n) for axes in SLOT_AXES)) for n in layers)
  return Cache(jnp.zeros((), jnp.int32), (_constrain(block),))


def _map(
  function: Callable[..., Array], *stacks: tuple[KeysValues | Slots, ...]
) -> Block:
  """Maps `function(axes, *arrays)` over the keys and values of stacks."""
  return tuple(
    Slots(*map(function, SLOT_AXES, *of_stack))
    for of_stack in zip(*stacks, strict=True)
  )


def _lay_out(x: Array, axes: str, *leading: None) -> Array:
  """Lays an array out over the mesh by the letters of its axes."""
  return constrain(x, *leading, *map(_NAMES.get, axes))


def _constrain(block: Block) -> Block:
  return _map(lambda axes, x: _lay_out(x, axes, None), block)


def grow(cache: Cache, slots: int) -> Cache:
  """Adds room for more tokens.

  Where all layers are one stack, in a block of its own: the cache is never held
  twice. A few layers by themselves are copied to wider arrays, for each block
  that attention reads has products of its own, and small ones cost as much as
  larger ones.
  """
  block = cache.blocks[-1]

  def pad(axes, x):
    widths = [(0, 0)] * x.ndim
    widths[1 + axes.index("c")] = (0, slots)
    return jnp.pad(x, widths)

  def empty(axes, x):
    shape = list(x.shape)
    shape[1 + axes.index("c")] = slots
    return jnp.zeros(shape, x.dtype)

  if len(block) > 1:
    return Cache(cache.index, (_constrain(_map(pad, block)),))
  return Cache(cache.index, (*cache.blocks, _constrain(_map(empty, block))))


def map_rows(
  function: Callable[..., Array], cache: Cache, *others: Cache
) -> Cache:
  """Maps a function of arrays [B, G, ...] over the rows of a cache."""
  mapped = jax.vmap(function)  # layer by layer
  blocks = jax.tree.map(mapped, cache.blocks, *(x.blocks for x in others))
  return Cache(cache.index, tuple(map(_constrain, blocks)))


def map_prompts(
  function: Callable[..., Array], stacks: tuple[PromptKeysValues, ...]
) -> tuple[PromptKeysValues, ...]:
  """Maps a function of one layer's arrays [B, ...] over stacks of layers."""
  return jax.tree.map(
    lambda x: _lay_out(jax.vmap(function)(x), PROMPT_AXES, None), stacks
  )


def constrain_row(row: KeysValues) -> KeysValues:
  """Lays rows out over the mesh."""
  return jax.tree.map(lambda x: _lay_out(x, ROW_AXES), row)


def _size(slots: Slots) -> int:
  return slots.values.shape[SLOT_AXES.values.index("c") - len(SLOT_AXES.values)]


def capacity(cache: Cache) -> int:
  """Returns C, the completion tokens that a row has room for."""
  return sum(_size(block[0]) for block in cache.blocks)


def split(
  x: Shaped[Array, "*axes C"], blocks: tuple[Slots, ...]
) -> list[Array]:
  """Splits an array whose last axis is all slots into one of each block."""
  ends = list(itertools.accumulate(map(_size, blocks)))
  return jnp.split(x, ends[:-1], axis=-1)


def from_heads(
  keys: Float[Array, "B G S K E"], values: Float[Array, "B G S K E"]
) -> KeysValues:
  """Returns keys and values of the projections in the cache's order."""
  order = tuple("bgcke".index(axis) for axis in ROW_AXES)
  return KeysValues(keys.transpose(order), values.transpose(order))


def write(
  cache: Cache,
  tokens: tuple[KeysValues, ...],
  last: Float[Array, "B G S D"],
) -> Cache:
  """Writes the next tokens of all layers into their slots, in place.

  Args:
    cache: the block that is written to is the last.
    tokens: keys and values of each stack, [layers, *ROW_AXES].
    last: the tokens' states after all layers, computed from all that reads the
      cache before: where it is NaN, 0 is written (a slot of the ring that is
      hidden from another sample must be finite). So a write comes after all
      reads, or XLA would copy the cache for those beside it. (Where copies are
      decided on, an `optimization_barrier` orders nothing.)
  """
  *before, block = cache.blocks
  count = last.shape[2]  # one, where a ring may close
  slot = cache.index - sum(_size(block[0]) for block in before)
  if not before:
    slot = slot % _size(block[0])
  real = last[..., 0] == last[..., 0]  # [B, G, S]: False on NaN

  def write_one(axes, slots, new):
    order = [1 + ROW_AXES.index(axis) for axis in axes]
    new = new.transpose(0, *order).astype(slots.dtype)
    # The mask, with its axes in the slots' order and 1 for the others.
    mask = real.transpose(["bgc".index(axis) for axis in axes if axis in "bgc"])
    absent = [i for i, axis in enumerate(axes) if axis not in "bgc"]
    new = jnp.where(jnp.expand_dims(mask, absent), new, 0)
    axis = 1 + axes.index("c")
    return jax.lax.dynamic_update_slice_in_dim(slots, new, slot, axis)

  block = _constrain(_map(write_one, block, tokens))
  return Cache(cache.index + count, (*before, block))


def ages(cache: Cache) -> Int[Array, "C"]:
  """Returns the number of tokens written after each slot: 0 is the last one."""
  size = capacity(cache)
  return (cache.index - 1 - jnp.arange(size)) % size


def filled(cache: Cache) -> Bool[Array, "C"]:
  """Returns True for slots with a token, where all rows were written alike."""
  return jnp.arange(capacity(cache)) < cache.index


def slot_positions(
  cache: Cache, positions: Int[Array, "B G S"]
) -> Int[Array, "B G C"]:
  """Returns positions of the tokens in the slots from those of the next tokens.

  Decoded tokens follow each other without a gap, so the position of the first
  of the next tokens gives all the others.
  """
  return positions[..., :1] - 1 - ages(cache)


def of_prompt(tokens: KeysValues) -> PromptKeysValues:
  """Returns keys and values of prompts that were rows in a layer, G = 1."""
  axes = ROW_AXES.replace("g", "").replace("c", "p")
  order = tuple(axes.index(axis) for axis in PROMPT_AXES)
  only_row = (slice(None),) * ROW_AXES.index("g") + (0,)

  def convert(x):
    return _lay_out(x[only_row].transpose(order), PROMPT_AXES)

  return PromptKeysValues(convert(tokens.keys), convert(tokens.values))
