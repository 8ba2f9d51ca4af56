"""The decode cache: keys and values of completions so far, and of prompts.

    row      [B, G, K, S, E]   tokens that pass through the layers
    slots    [B, G, K, E, C]   keys of earlier tokens; before `align`, slot
                               i of C holds completion token i
             [B, G, K, C, E]   and values
    prompt   [B, K, P, E]      once per group

Slots may hold 8-bit integers with scales [B, G, K, C] (`quantization`). Stacks
(`layer_stacks`) have a leading axis of layers. A decoding step ends by writing
the new tokens of all layers in place.

A TPU writes whole rows of 128 lanes. Narrower heads are put side by side, n in
a row: slots [B, G, K/n, n E, C]. Queries then have zeros at other heads'
channels (`attention.two_part_attention`).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from grpojax.core.meshes import (
  activation_spec,
  constrain,
  free_axes,
  runs_kernels,
)
from grpojax.models.quantization import quantize

LANES = 128  # numbers in a row of a TPU's tile

ROW_AXES = "bgkce"
PROMPT_AXES = "bkpe"
SLOT_AXES = "bgkec", "bgkce"  # of keys and of values
RowArray = Float[Array, "B G K C E"]
PromptArray = Float[Array, "B K P E"]


class KeysValues(NamedTuple):
  """Keys and values of rows of tokens in a layer."""

  keys: RowArray
  values: RowArray


class Slots(NamedTuple):
  """Cached keys and values of a layer or stack; 8-bit integers have scales."""

  keys: Shaped[Array, "*layers B G K E C"]
  values: Shaped[Array, "*layers B G K C E"]
  key_scales: Float[Array, "*layers B G K C"] | None = None
  value_scales: Float[Array, "*layers B G K C"] | None = None


class PromptKeysValues(NamedTuple):
  """Keys and values of prompts in a layer, shared by their groups."""

  keys: PromptArray
  values: PromptArray


Block = tuple[Slots, ...]


class Cache(NamedTuple):
  """Keys and values of the completions so far, in blocks of slots (`grow`)."""

  index: Int[Array, ""]  # number of tokens written, and the next token's slot
  blocks: tuple[Block, ...]  # each block has the slots of each stack


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
  """Returns an empty cache; `layers` lists the number of layers per stack."""
  block = []
  per_row = _heads_per_row(kv_heads, head_dim) if platform == "tpu" else 1
  width = head_dim * per_row
  stored = jnp.int8 if in_8_bits else dtype
  for count in layers:
    shape = count, batch, group_size, kv_heads // per_row
    keys = jnp.zeros((*shape, width, capacity), stored)
    values = jnp.zeros((*shape, capacity, width), stored)
    shape = *shape[:3], kv_heads, capacity  # scales per head
    scales = [jnp.zeros(shape, dtype) for _ in range(2)]
    block.append(Slots(keys, values, *(scales if in_8_bits else ())))
  return Cache(jnp.zeros((), jnp.int32), (_constrain(tuple(block)),))


def _heads_per_row(kv_heads: int, head_dim: int) -> int:
  """Returns the number of heads per row of a TPU's lanes (1: do not share)."""
  count = max(LANES // head_dim, 1)
  mesh = jax.sharding.get_abstract_mesh()
  devices = free_axes(mesh).get("tensor", 1)
  # Lanes must be full, and heads side by side must be on the same device.
  fits = count * head_dim % LANES == 0 and kv_heads % (count * devices) == 0
  return count if fits else 1


def pad(x: Array, axis: int, more: int) -> Array:
  """Appends `more` zeros along an axis."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, more)
  return jnp.pad(x, widths)


def side_by_side(
  x: Shaped[Array, "*layers B G K S E"], heads: int
) -> Shaped[Array, "*layers B G _ S _"]:
  """Returns keys or values [.., K/n, S, n E] for n = `heads` heads per row."""
  *rows, k, s, e = x.shape
  # [.., K/n, n, S, E] -> [.., K/n, S, n, E], and n E are merged below.
  x = x.reshape(*rows, k // heads, heads, s, e).swapaxes(-3, -2)
  return x.reshape(*rows, k // heads, s, heads * e)


def _map(
  function: Callable[..., Array], *stacks: tuple[KeysValues | Slots, ...]
) -> Block:
  """Maps `function(axis of the slots, *arrays)` over keys, values, scales."""
  return tuple(
    # Axes of the slots in keys, values and their scales; without scales, `map`
    # stops after the values.
    Slots(*map(function, (5, 4, 4, 4), *map(jax.tree.leaves, same_stack)))
    for same_stack in zip(*stacks, strict=True)
  )


_AXES = None, "batch", "group", "kv_heads"


def _constrain(block: Block) -> Block:
  return jax.tree.map(lambda x: constrain(x, *_AXES), block)


def grow(cache: Cache, slots: int) -> Cache:
  """Adds `slots` slots to each row.

  A cache of one stack gets a new block, so it is never held twice. A cache of
  several stacks is copied, because small blocks cost as much as large ones.
  """
  block = cache.blocks[-1]
  if len(block) > 1:
    wider = _map(lambda axis, x: pad(x, axis, slots), block)
    return Cache(cache.index, (_constrain(wider),))
  resized = lambda axis, x: (*x.shape[:axis], slots, *x.shape[axis + 1 :])
  empty = _map(lambda axis, x: jnp.zeros(resized(axis, x), x.dtype), block)
  return Cache(cache.index, (*cache.blocks, _constrain(empty)))


def map_rows(
  function: Callable[..., Array], cache: Cache, *others: Cache
) -> Cache:
  """Applies a function of arrays [B, G, ...] to each layer of a cache."""
  mapped = jax.vmap(function)  # layer by layer
  blocks = jax.tree.map(mapped, cache.blocks, *(x.blocks for x in others))
  return Cache(cache.index, tuple(map(_constrain, blocks)))


def map_prompts(
  function: Callable[..., Array], stacks: tuple[PromptKeysValues, ...]
) -> tuple[PromptKeysValues, ...]:
  """Applies a function of arrays [B, ...] to each layer of prompts' stacks."""
  mapped = jax.vmap(function)
  names = None, "batch", "kv_heads"
  return jax.tree.map(lambda x: constrain(mapped(x), *names), stacks)


def align(
  cache: Cache, ends: Int[Array, "B G"], index: Int[Array, ""], slots: int
) -> Cache:
  """Moves the last tokens of all rows to the slots before `index`.

  A row that waited while others were written has unread slots from `ends` on.
  After the move, `ages` and `slot_positions` are valid for all rows:

      ends 3, 5   a b c - - .    index 4    - a b c . .
                  d e f g h .               e f g h . d

  `cache` has a single block; `index` is the number of tokens in the longest
  row, and `slots` the new number of slots, at least the old number.
  """
  (block,) = cache.blocks
  shifts = index - ends
  more = slots - _size(block[0])
  move = lambda axis, x: pad(_roll_rows(x, shifts, axis), axis, more)
  return Cache(index, (_constrain(_map(move, block)),))


def _roll_rows(
  x: Shaped[Array, "L B G ..."], shifts: Int[Array, "B G"], axis: int
) -> Shaped[Array, "L B G ..."]:
  """Rolls each row by its own shift in a loop, or XLA would copy all rows."""

  def roll(x, shifts):
    b, g = shifts.shape

    def body(i, x):
      # Row (i // G, i % G) in all layers: [L, 1, 1, ...]
      at = (0, i // g, i % g, *[0] * (x.ndim - 3))
      row = jax.lax.dynamic_slice(x, at, (len(x), 1, 1, *x.shape[3:]))
      row = jnp.roll(row, shifts[i // g, i % g], axis)
      return jax.lax.dynamic_update_slice(x, row, at)

    return jax.lax.fori_loop(0, b * g, body, x)

  mesh = jax.sharding.get_abstract_mesh()
  if not free_axes(mesh):
    return roll(x, shifts)
  spec = activation_spec(mesh, x.shape, _AXES)
  return jax.shard_map(
    roll,
    in_specs=(spec, P(*spec[1:3])),
    out_specs=spec,
    axis_names=set(free_axes(mesh)),
  )(x, shifts)


def _size(slots: Slots) -> int:
  return slots.values.shape[-2]


def capacity(cache: Cache) -> int:
  """Returns C, the number of completion tokens that fit in a row."""
  return sum(_size(block[0]) for block in cache.blocks)


def split(x: Array, blocks: tuple[Slots, ...]) -> list[Array]:
  """Splits an array [..., C] of all slots into an array per block."""
  ends = list(itertools.accumulate(map(_size, blocks)))
  return jnp.split(x, ends[:-1], axis=-1)


def from_heads(*keys_values: Float[Array, "B G S K E"]) -> KeysValues:
  """Lays out projected keys and values as rows [B, G, K, S, E]."""
  rows = (x.transpose(0, 1, 3, 2, 4) for x in keys_values)
  return KeysValues(*(constrain(x, "batch", "group", "kv_heads") for x in rows))


def write(
  cache: Cache,
  tokens: tuple[KeysValues, ...],
  last: Float[Array, "B G S D"],
  platform: str | None = None,
) -> Cache:
  """Writes the next tokens of all layers into their slots, in place.

  `tokens` are keys and values of each stack, [layers, B, G, K, S, E], and
  `last` the tokens' states after all layers; NaN there writes 0. So the write
  depends on every read of the cache, and XLA writes last instead of copying the
  cache (an `optimization_barrier` has no effect here).
  """
  *before, block = cache.blocks
  # New tokens go to the last block, whose slots start after all others.
  slot = cache.index - sum(_size(block[0]) for block in before)
  real = last[..., 0] == last[..., 0]  # [B, G, S]: False on NaN
  if block[0].key_scales is not None:
    # (integers, scales) of keys and of values -> integers and scales of both
    pairs = (zip(*map(quantize, x), strict=True) for x in tokens)
    tokens = tuple(Slots(*integers, *scales) for integers, scales in pairs)

  def write_one(axis, slots, new):
    if slots.shape[3] < new.shape[3]:  # keys and values, not scales
      new = side_by_side(new, new.shape[3] // slots.shape[3])
    if axis == 5:  # keys
      new = new.swapaxes(4, 5)
    # Add axes for heads and channels to `real` [B, G, S]. It has no axis of
    # layers, so its axis of tokens is `axis` - 1.
    expanded = {*range(2, new.ndim - 1)} - {axis - 1}
    mask = jnp.expand_dims(real, tuple(expanded))
    new = jnp.where(mask, new.astype(slots.dtype), 0)
    # The kernel writes a single token into keys or values, in whole lanes:
    # `9 - axis` is the axis of channels, 5 in values and 4 in keys.
    by_kernel = platform == "tpu" and last.shape[2] == 1 and slots.ndim == 6
    if by_kernel and runs_kernels() and slots.shape[9 - axis] % LANES == 0:
      return _write_row(axis, slots, new, slot)
    return jax.lax.dynamic_update_slice_in_dim(slots, new, slot, axis)

  block = _constrain(_map(write_one, block, tokens))
  return Cache(cache.index + last.shape[2], (*before, block))


def _write_row(
  axis: int, slots: Array, new: Array, slot: Int[Array, ""]
) -> Array:
  """Writes a slot of `axis` with the kernel; each device writes its rows."""
  from grpojax.models import decoding_kernels  # importing Pallas is slow

  write = decoding_kernels.write_row
  # The kernel takes [.., C, channels], the layout of values.
  as_values = lambda x: x.swapaxes(4, 5) if axis == 5 else x
  slots = as_values(slots)
  new = as_values(new)[..., 0, :]
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty:
    spec = activation_spec(mesh, slots.shape, _AXES)
    write = jax.shard_map(
      write, in_specs=(spec, spec, P()), out_specs=spec, check_vma=False
    )
  return as_values(write(slots, new, slot))


def ages(cache: Cache) -> Int[Array, "C"]:
  """Returns the number of tokens after each slot, largest for empty slots."""
  size = capacity(cache)
  # Empty slots have negative ages, which the modulus makes the largest.
  return (cache.index - 1 - jnp.arange(size)) % size


def filled(cache: Cache) -> Bool[Array, "C"]:
  """Returns True for slots with a token, if all rows are equally long."""
  return jnp.arange(capacity(cache)) < cache.index


def slot_positions(
  cache: Cache, positions: Int[Array, "B G S"]
) -> Int[Array, "B G C"]:
  """Returns the positions of cached tokens, given those of the next tokens."""
  return positions[..., :1] - 1 - ages(cache)[None, None]


def of_prompt(tokens: KeysValues) -> PromptKeysValues:
  """Removes the group axis (G = 1) from keys and values of prompts."""
  prompts = (constrain(x[:, 0], "batch", "kv_heads") for x in tokens)
  return PromptKeysValues(*prompts)
