"""The decode cache: keys and values of completions so far, and of prompts.

Linear layers have a `gated_delta.State` per row instead, and per prompt.

    row      [B, G, K, S, E]   tokens that pass through the layers
    slots    [B, G, K, C, E]   earlier tokens; slot i of C holds completion
                               token i (on CPUs keys are [B, G, K, E, C])
    prompt   [B, K, P, E]      once per group

Slots may hold 8-bit integers with scales [B, G, K, C] (`quantization`). Stacks
(`layer_stacks`) have a leading axis of layers. A decoding step ends by writing
the new tokens of all layers in place.

A TPU reads whole rows of 128 lanes. Narrower heads are put side by side, n in
a row: slots [B, G, K/n, C, n E]. Queries then have zeros at other heads'
channels (`attention.two_part_attention`).
"""

import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from grpojax.core.meshes import (
  activation_spec,
  constrain,
  free_axes,
)
from grpojax.models.gated_delta import Sizes, State, empty
from grpojax.models.quantization import quantize

LANES = 128  # numbers in a row of a TPU's tile

ROW_AXES = "bgkce"
PROMPT_AXES = "bkpe"
RowArray = Float[Array, "B G K C E"]
PromptArray = Float[Array, "B K P E"]


class KeysValues(NamedTuple):
  """Keys and values of rows of tokens in a layer."""

  keys: RowArray
  values: RowArray


@typing.no_type_check
@struct.dataclass
class Slots:
  """Cached keys and values of a layer or a stack; 8-bit ones have scales."""

  keys: Shaped[Array, "*layers B G K C E"]
  values: Shaped[Array, "*layers B G K C E"]
  key_scales: Float[Array, "*layers B G K C"] | None = None
  value_scales: Float[Array, "*layers B G K C"] | None = None
  # True: keys are [*layers B G K E C], which XLA:CPU multiplies faster.
  columns: bool = struct.field(pytree_node=False, default=False)

  @property
  def size(self) -> int:
    """C, the number of slots."""
    return self.values.shape[-2]


class PromptKeysValues(NamedTuple):
  """Keys and values of prompts in a layer, shared by their groups."""

  keys: PromptArray
  values: PromptArray


class ByKind(NamedTuple):
  """Values of layers of each kind, stacked over the layers of this kind."""

  attention: Any
  linear: Any


Cache = tuple[Slots | ByKind, ...]
"""Keys and values of the completions so far, of each stack of layers; with
linear layers also a `State` for each place of a linear layer in a period,
stacked over the periods: arrays of one layer are updated without copies."""

_AXES = None, "batch", "group", "kv_heads"


def _map(function: Callable[..., Array], slots: Slots, *others: Any) -> Slots:
  """Maps `function(axis of the slots, *arrays)` over the arrays of a stack."""
  leaves = zip(*map(jax.tree.leaves, (slots, *others)), strict=True)
  axes = 5 if slots.columns else 4, 4, 4, 4  # of keys, values and scales
  mapped = [
    constrain(function(axis, *arrays), *_AXES)
    for axis, arrays in zip(axes, leaves, strict=False)
  ]
  return jax.tree.unflatten(jax.tree.structure(slots), mapped)


def attention_of(x: Any) -> Any:
  """Returns the part of attention layers, if x is `ByKind`, else x."""
  return x.attention if isinstance(x, ByKind) else x


def with_attention(stack: Any, part: Any) -> Any:
  """Replaces the part of attention layers, as in `attention_of`."""
  is_pair = isinstance(stack, ByKind)
  return stack._replace(attention=part) if is_pair else part


def _map_slots(
  function: Callable[..., Array], stack: Slots | ByKind, *others: Any
) -> Slots | ByKind:
  """Applies `_map` to a stack's keys and values; states of rows stay."""
  slots = _map(function, attention_of(stack), *others)
  return with_attention(stack, slots)


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
  linear: Sizes | None = None,
  period: Sequence[bool] = (),
) -> Cache:
  """Returns an empty cache; `layers` lists the number of layers per stack.

  The layers marked in the repeated `period` are linear, of the sizes `linear`.
  """
  stacks = []
  stored = jnp.dtype(jnp.int8 if in_8_bits else dtype)
  per_row = 1
  if platform == "tpu":
    per_row = heads_per_row(kv_heads, head_dim)
    # The decode kernel reads blocks of 256 bytes per channel, or whole tiles.
    size = (256 if capacity * stored.itemsize >= 256 else 32) // stored.itemsize
    capacity = -(-capacity // size) * size
  width = head_dim * per_row
  for size in layers:
    count = size * period.count(False) // len(period) if period else size
    rows = count, batch, group_size
    shape = *rows, kv_heads // per_row, capacity, width
    keys = values = jnp.zeros(shape, stored)
    if columns := platform == "cpu":
      keys = keys.swapaxes(-2, -1)
    scales = (
      jnp.zeros((*rows, kv_heads, capacity), dtype) if in_8_bits else None
    )
    slots = Slots(keys, values, scales, scales, columns)
    stacks.append(_map(lambda axis, x: x, slots))
  if linear is None:
    return tuple(stacks)
  states = [
    (empty(linear, (count // len(period), batch, group_size), dtype),)
    * period.count(True)
    for count in layers
  ]
  states = jax.tree.map(lambda x: constrain(x, *_AXES), states)
  return tuple(map(ByKind, stacks, states))


def heads_per_row(kv_heads: int, head_dim: int) -> int:
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


def grow(cache: Cache, slots: int) -> Cache:
  """Adds room for more tokens."""
  longer = lambda axis, x: pad(x, axis, slots)
  return tuple(_map_slots(longer, stack) for stack in cache)


def map_rows(function: Callable[..., Array], cache: Cache) -> Cache:
  """Applies a function of arrays [B, G, ...] to each layer of a cache."""
  mapped = jax.vmap(function)  # layer by layer
  return jax.tree.map(lambda x: constrain(mapped(x), *_AXES), cache)


def map_prompts(
  function: Callable[..., Array], stacks: tuple[Any, ...]
) -> tuple[Any, ...]:
  """Applies a function of arrays [B, ...] to each layer of prompts' stacks."""
  mapped = jax.vmap(function)
  names = None, "batch", "kv_heads"
  return jax.tree.map(lambda x: constrain(mapped(x), *names), stacks)


def from_heads(*keys_values: Float[Array, "B G S K E"]) -> KeysValues:
  """Lays out projected keys and values as rows [B, G, K, S, E]."""
  rows = (x.transpose(0, 1, 3, 2, 4) for x in keys_values)
  return KeysValues(*(constrain(x, "batch", "group", "kv_heads") for x in rows))


def write(
  cache: Cache,
  tokens: tuple[KeysValues, ...],
  positions: Int[Array, "B G S"],
  last: Float[Array, "B G S D"],
) -> Cache:
  """Writes the next tokens of all layers into their slots, in place.

  `tokens` are keys and values of each stack, [layers, B, G, K, S, E], at
  `positions` in the completion; -1 writes nothing. `last` are the tokens'
  states after all layers; NaN in `last` writes nothing. So the write depends on
  every read of the cache, and XLA does it last instead of copying the cache (an
  `optimization_barrier` has no effect there).
  """
  real = (last[..., 0] == last[..., 0]) & (positions >= 0)  # False on NaN
  # Slots out of range are dropped.
  at = jnp.where(real, positions, attention_of(cache[0]).size)

  def write_one(axis, slots, new):
    if slots.shape[3] < new.shape[3]:  # keys and values, not scales
      new = side_by_side(new, new.shape[3] // slots.shape[3])
    return _on_devices(functools.partial(_put, axis), slots, new, at)

  written = []
  for stack, new in zip(cache, tokens, strict=True):
    if attention_of(stack).key_scales is not None:
      # (integers, scales) of keys and of values -> integers and scales of both
      integers, scales = zip(*map(quantize, new), strict=True)
      new = *integers, *scales
    written.append(_map_slots(write_one, stack, new))
  return tuple(written)


def _put(
  axis: int,
  slots: Shaped[Array, "L B G K ..."],
  new: Shaped[Array, "L B G K S ..."],
  at: Int[Array, "B G S"],
) -> Array:
  """Writes S tokens of each row at its own slots; slot C is dropped."""
  b, g, _ = at.shape
  prompt = jnp.arange(b)[:, None, None]
  sample = jnp.arange(g)[None, :, None]
  # The indexed axes come first: [B, G, S, L, K, ...].
  new = jnp.moveaxis(new.astype(slots.dtype), (1, 2, 4), (0, 1, 2))
  whole = slice(None)
  index = whole, prompt, sample, *[whole] * (axis - 3), at
  return slots.at[index].set(new, mode="drop")


def _on_devices(
  write: Callable[..., Array], slots: Array, new: Array, at: Array
) -> Array:
  """Makes each device of the mesh in context, if any, write its own rows."""
  mesh = jax.sharding.get_abstract_mesh()
  if not free_axes(mesh):
    return write(slots, new, at)
  spec = activation_spec(mesh, slots.shape, _AXES)
  return jax.shard_map(
    write,
    in_specs=(spec, spec, P(*spec[1:3])),
    out_specs=spec,
    axis_names=set(free_axes(mesh)),
  )(slots, new, at)


def of_prompt(tokens: KeysValues | State) -> PromptKeysValues | State:
  """Removes the group axis (G = 1) from what a layer stores of prompts."""
  squeeze = lambda x: constrain(x[:, 0], "batch", "kv_heads")
  prompts = jax.tree.map(squeeze, tokens)
  is_attention = isinstance(prompts, KeysValues)
  return PromptKeysValues(*prompts) if is_attention else prompts
