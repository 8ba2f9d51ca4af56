"""The decode cache: keys and values of completions so far, and of prompts.

Each layer keeps the keys and values of the completions' tokens so far, one row
of slots a sample, and those of the prompts, once for a whole group:

    row      [B, G, K, S, E]   of tokens that pass through the layers
    slots    [B, G, K, E, C]   of earlier tokens: keys, as a product with one
                               query reads them fastest; slot i of C holds
                               completion token i
             [B, G, K, C, E]   and values
    prompt   [B, K, P, E]

In the slots they may be integers of 8 bits with scales [B, G, K, C]
(`quantization`); those of prompts, which a group shares, and those that a token
has of itself are not.

The layers of a stack (`layer_stacks`) are one array, with a leading axis. A
decoding step only reads it, and writes the new tokens of all layers at its end,
in place.

A TPU writes whole rows of 128 lanes. So there n heads narrower than that lie
side by side in a row, slots [B, G, K/n, n E, C], and queries have zeros at
their neighbours' keys (`attention.two_part_attention`); a slot is a row.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from grpojax.core.mesh import (
  activation_spec,
  constrain,
  free_axes,
  runs_kernels,
)
from grpojax.models.quantization import quantize

LANES = 128
"""Numbers in a row of a TPU's tile."""

ROW_AXES = "bgkce"
PROMPT_AXES = "bkpe"
RowArray = Float[Array, "B G K C E"]
PromptArray = Float[Array, "B K P E"]


class KeysValues(NamedTuple):
  """Keys and values of rows of tokens in one layer."""

  keys: RowArray
  values: RowArray


class Slots(NamedTuple):
  """Keys and values in a cache, of one layer or of a stack of layers.

  They have scales where they are integers.
  """

  keys: Shaped[Array, "*layers B G K E C"]
  values: Shaped[Array, "*layers B G K C E"]
  key_scales: Float[Array, "*layers B G K C"] | None = None
  value_scales: Float[Array, "*layers B G K C"] | None = None


SLOT_AXES = Slots("bgkec", "bgkce")


class PromptKeysValues(NamedTuple):
  """Keys and values of prompts in one layer, shared by their groups."""

  keys: PromptArray
  values: PromptArray


Block = tuple[Slots, ...]


class Cache(NamedTuple):
  """Keys and values of the completions so far.

  The slots lie in blocks, so that a step reads only those that have been begun
  (`grow`).
  """

  # Tokens written so far; the next one goes to the slot of this number.
  index: Int[Array, ""]
  blocks: tuple[Block, ...]  # for each block, the slots of each stack's layers


def create(
  batch: int,
  group_size: int,
  capacity: int,
  *,
  layers: Sequence[int],
  kv_heads: int,
  head_dim: int,
  dtype: Any,
  in_8_bits: bool = False,
  platform: str | None = None,
) -> Cache:
  """Returns an empty cache for C = `capacity` completion tokens a row.

  `layers` has the number of layers of each stack.
  """
  block = []
  together = _heads_together(kv_heads, head_dim) if platform == "tpu" else 1
  width, stored = head_dim * together, jnp.int8 if in_8_bits else dtype
  for count in layers:
    shape = count, batch, group_size, kv_heads // together
    keys = jnp.zeros((*shape, width, capacity), stored)
    values = jnp.zeros((*shape, capacity, width), stored)
    shape = *shape[:3], kv_heads, capacity  # each head has scales
    scales = [jnp.zeros(shape, dtype) for _ in range(2)]
    block.append(Slots(keys, values, *(scales if in_8_bits else ())))
  return Cache(jnp.zeros((), jnp.int32), (_constrain(tuple(block)),))


def _heads_together(kv_heads: int, head_dim: int) -> int:
  """Returns the number of heads that fill a TPU's lanes on each device."""
  count = max(LANES // head_dim, 1)
  mesh = jax.sharding.get_abstract_mesh()
  devices = free_axes(mesh).get("tensor", 1)
  fits = count * head_dim % LANES == 0 and kv_heads % (count * devices) == 0
  return count if fits else 1


def side_by_side(
  x: Shaped[Array, "*layers B G K S E"], heads: int
) -> Shaped[Array, "*layers B G _ S _"]:
  """Returns keys or values [.., K/n, S, n E] of n = `heads` heads a row."""
  *rows, k, s, e = x.shape
  x = x.reshape(*rows, k // heads, heads, s, e).swapaxes(-3, -2)
  return x.reshape(*rows, k // heads, s, heads * e)


def _map(
  function: Callable[..., Array], *stacks: tuple[KeysValues | Slots, ...]
) -> Block:
  """Maps `function(axis of the slots, *arrays)` over the arrays there are."""
  return tuple(
    Slots(*map(function, (5, 4, 4, 4), *map(jax.tree.leaves, of_stack)))
    for of_stack in zip(*stacks, strict=True)
  )


_AXES = None, "batch", "group", "kv_heads"


def _constrain(block: Block) -> Block:
  return jax.tree.map(lambda x: constrain(x, *_AXES), block)


def grow(cache: Cache, slots: int) -> Cache:
  """Adds room for more tokens.

  Where all layers are one stack, in a block of its own: the cache is never held
  twice. A few layers by themselves are copied to wider arrays, for each block
  that attention reads has products of its own, and small ones cost as much as
  larger ones.
  """
  block = cache.blocks[-1]

  def pad(axis, x):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, slots)
    return jnp.pad(x, widths)

  def empty(axis, x):
    shape = list(x.shape)
    shape[axis] = slots
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
    lambda x: constrain(jax.vmap(function)(x), None, "batch", "kv_heads"),
    stacks,
  )


def align(
  cache: Cache, ends: Int[Array, "B G"], index: Int[Array, ""], slots: int
) -> Cache:
  """Moves the tokens of each row to where the next ones are written.

  Rows that waited while others were written have slots that nobody reads behind
  their last token. Then the last tokens of all rows lie before slot `index`, so
  that `ages` and `slot_positions` are right for rows of any length:

      ends 3, 5   a b c - - .    index 4    - a b c . .
                  d e f g h .               e f g h . d

  Args:
    cache: Cache of one block.
    ends: Slot behind each row's last token.
    index: Slot that is written to next: as many as the longest row has tokens.
    slots: Number of slots then, no fewer than before.
  """
  (block,) = cache.blocks
  shifts, more = index - ends, slots - _size(block[0])

  def move(axis, x):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(_roll_rows(x, shifts, axis), widths)

  return Cache(index, (_constrain(_map(move, block)),))


def _roll_rows(
  x: Shaped[Array, "L B G ..."], shifts: Int[Array, "B G"], axis: int
) -> Shaped[Array, "L B G ..."]:
  """Rolls each row by its own shift, one row of each device at a time.

  All at once XLA would gather them from copies in other layouts, of six times
  the cache's bytes (v5e); in place one row is read and written.
  """

  def of_device(x, shifts):
    b, g = shifts.shape

    def body(i, x):
      at = (0, i // g, i % g, *[0] * (x.ndim - 3))
      row = jax.lax.dynamic_slice(x, at, (len(x), 1, 1, *x.shape[3:]))
      row = jnp.roll(row, shifts[i // g, i % g], axis)
      return jax.lax.dynamic_update_slice(x, row, at)

    return jax.lax.fori_loop(0, b * g, body, x)

  mesh = jax.sharding.get_abstract_mesh()
  if not free_axes(mesh):
    return of_device(x, shifts)
  spec = activation_spec(mesh, x.shape, _AXES)
  return jax.shard_map(
    of_device,
    in_specs=(spec, P(*spec[1:3])),
    out_specs=spec,
    axis_names=set(free_axes(mesh)),
  )(x, shifts)


def _size(slots: Slots) -> int:
  return slots.values.shape[-2]


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
  """Returns keys and values of the projections as a row."""
  arrays = [x.transpose(0, 1, 3, 2, 4) for x in (keys, values)]
  return KeysValues(
    *(constrain(x, "batch", "group", "kv_heads") for x in arrays)
  )


def _in_8_bits(tokens: KeysValues) -> Slots:
  """Returns keys, which are rows still, and values with their scales."""
  (keys, key_scales), (values, value_scales) = map(quantize, tokens)
  return Slots(keys, values, key_scales, value_scales)


def write(
  cache: Cache,
  tokens: tuple[KeysValues, ...],
  last: Float[Array, "B G S D"],
  platform: str | None = None,
) -> Cache:
  """Writes the next tokens of all layers into their slots, in place.

  Args:
    cache: the block that is written to is the last.
    tokens: keys and values of each stack, [layers, B, G, K, S, E].
    last: the tokens' states after all layers, computed from all that reads the
      cache before: where it is NaN, 0 is written. So a write comes after all
      reads, or XLA would copy the cache for those beside it. (Where copies are
      decided on, an `optimization_barrier` orders nothing.)
    platform: where it runs; a TPU has a kernel for one token a row.
  """
  *before, block = cache.blocks
  slot = cache.index - sum(_size(block[0]) for block in before)
  real = last[..., 0] == last[..., 0]  # [B, G, S]: False on NaN
  if block[0].key_scales is not None:
    tokens = tuple(map(_in_8_bits, tokens))

  def write_one(axis, slots, new):
    if slots.shape[3] < new.shape[3]:  # not of scales
      new = side_by_side(new, new.shape[3] // slots.shape[3])
    if axis == 5:  # keys
      new = new.swapaxes(4, 5)
    # Of a mask [B, G, S] for all heads and channels.
    others = {*range(2, new.ndim - 1)} - {axis - 1}
    mask = jnp.expand_dims(real, tuple(others))
    new = jnp.where(mask, new.astype(slots.dtype), 0)
    by_kernel = platform == "tpu" and last.shape[2] == 1 and slots.ndim == 6
    if by_kernel and runs_kernels() and slots.shape[9 - axis] % LANES == 0:
      return _write_row(axis, slots, new, slot)
    return jax.lax.dynamic_update_slice_in_dim(slots, new, slot, axis)

  block = _constrain(_map(write_one, block, tokens))
  return Cache(cache.index + last.shape[2], (*before, block))


def _write_row(
  axis: int, slots: Array, new: Array, slot: Int[Array, ""]
) -> Array:
  """Writes one slot of `axis` by the kernel, on each device its own rows."""
  from grpojax.models.slot_kernel import write_row  # Pallas is long to import

  rows = lambda x: x.swapaxes(4, 5) if axis == 5 else x
  slots, new, write = rows(slots), rows(new)[..., 0, :], write_row
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty:
    spec = activation_spec(mesh, slots.shape, _AXES)
    write = jax.shard_map(
      write, in_specs=(spec, spec, P()), out_specs=spec, check_vma=False
    )
  return rows(write(slots, new, slot))


def ages(cache: Cache) -> Int[Array, "C"]:
  """Returns the number of tokens written after each slot: 0 is the last one.

  Slots that are not yet written to have more than all that are.
  """
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
  return positions[..., :1] - 1 - ages(cache)[None, None]


def of_prompt(tokens: KeysValues) -> PromptKeysValues:
  """Returns keys and values of prompts that were rows in a layer, G = 1."""
  return PromptKeysValues(
    *(constrain(x[:, 0], "batch", "kv_heads") for x in tokens)
  )
