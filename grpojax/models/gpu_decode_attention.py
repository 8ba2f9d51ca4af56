"""GPU kernel for attention in decoding: one new token per row.

A program serves a row and key head. It writes the new token's slot in place,
then reads the visible keys of the prompt and of earlier slots block by block.
The online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) starts from
the new token. Axes are named as in `cache`. Needs jax >= 0.7.1 (`triton.load`).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from grpojax.core.decoding.sampling import NEGATIVE
from grpojax.models.attention import soft_cap
from grpojax.models.cache import KeysValues, PromptKeysValues, Slots

_BYTES = 2**14  # of keys per block; shared memory holds up to six such blocks


def serves(keys: Array | jax.ShapeDtypeStruct) -> bool:
  """Returns True if the kernel can read a cache with these `Slots.keys`."""
  # Triton's offsets are signed and have 32 bits in arrays up to 2^32 bytes.
  return keys.dtype.itemsize > 1 or not 2**31 < keys.size <= 2**32


def _padded(size: int) -> int:
  """Returns the next size that Triton and tensor cores accept."""
  return max(pl.next_power_of_2(size), 16)


def _load(x, index, mask):
  return triton.load(x.at[index], mask=mask, other=0)


def _dot(x: Array, y: Array, axis: int) -> Array:
  """Multiplies matrices, summing over y's axis."""
  axes = ((1,), (axis,)), ((), ())
  return jax.lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)


def _use(q, inside, cap, block, keys_values, index, visible, state):
  """Adds keys first <= i < end to the softmax's maxima, sums, mixed values."""
  first, end = visible

  def use_block(i, state):
    top, total, mixed = state
    slots = pl.ds(i * block, block)
    numbers = i * block + jnp.arange(block)
    seen = (first <= numbers) & (numbers < end)
    matrix = *index, slots, pl.ds(0, q.shape[1])
    mask = seen[:, None] & inside[None]
    keys, values = (_load(x, matrix, mask) for x in keys_values[:2])
    scales = [
      _load(x, (*index, slots), seen).astype(jnp.float32)[None]
      for x in keys_values[2:]
    ]
    logits = _dot(q, keys.astype(q.dtype), 1)
    logits = cap(logits * scales[0] if scales else logits)
    logits = jnp.where(seen[None], logits, NEGATIVE)
    new_top = jnp.maximum(top, jnp.max(logits, axis=1))
    weights = jnp.exp(logits - new_top[:, None])
    fade = jnp.exp(top - new_top)
    total = total * fade + jnp.sum(weights, axis=1)
    weights = weights * scales[1] if scales else weights
    more = _dot(weights.astype(q.dtype), values.astype(q.dtype), 0)
    return new_top, total, mixed * fade[:, None] + more

  begin = jax.lax.div(jnp.maximum(first, 0), block)
  return jax.lax.fori_loop(begin, pl.cdiv(end, block), use_block, state)


def _kernel(block, cap, *refs):
  """Attends with a row's queries of a key head, and writes their new slot."""
  scalars, q, new, prompt, stored, _, out, caches = refs
  layer, positions, first, prompt_lengths, prompt_first = scalars
  g, head, b = (pl.program_id(i) for i in range(3))
  sample = layer[0], b, g, head
  queries, width = q.shape[3:]
  channels = pl.ds(0, _padded(width))
  inside = jnp.arange(_padded(width)) < width
  mask = (jnp.arange(_padded(queries)) < queries)[:, None] & inside[None]
  matrix = b, g, head, pl.ds(0, _padded(queries)), channels
  live = (0 <= positions[b, g]) & (positions[b, g] < caches[0].shape[4])
  position = jnp.where(live, positions[b, g], 0)

  for x, token in zip(caches, stored, strict=True):
    if x.ndim == 6:
      token = _load(token, (b, g, head, channels), inside)
      slot = x.at[*sample, position, channels]
      triton.store(slot, token, mask=inside & live)
    else:
      triton.store(x.at[*sample, position], token[b, g, head, 0], mask=live)

  q = _load(q, matrix, mask)
  key, value = (_load(x, (b, g, head, channels), inside)[None] for x in new)
  top = cap(jnp.sum(q.astype(jnp.float32) * key.astype(jnp.float32), axis=1))
  mixed = jnp.broadcast_to(value.astype(jnp.float32), q.shape)
  state = top, jnp.ones_like(top), mixed
  use = functools.partial(_use, q, inside, cap, block)
  visible = prompt_first[b, g], jnp.where(live, prompt_lengths[b], 0)
  state = use(prompt, (b, head), visible, state)
  _, total, mixed = use(caches, sample, (first[b, g], position), state)
  mixed = (mixed / total[:, None]).astype(out.dtype)
  triton.store(out.at[matrix], mixed, mask=mask)


def attend(
  q: Float[Array, "B G K R E"],
  new: KeysValues,
  stored: Slots,
  slots: Slots,
  layer: Int[Array, ""],
  positions: Int[Array, "B G"],
  first: Int[Array, "B G"],
  prompt: PromptKeysValues,
  prompt_lengths: Int[Array, "B"],
  prompt_first: Int[Array, "B G"],
  *,
  scale: float,
  cap: float | None = None,
) -> tuple[Float[Array, "B G K R E"], Slots]:
  """Attends to the prompt, the row and its new token, and stores the new.

  `new` are the new tokens' keys and values [B, G, K, E]; `stored` are the same
  as the cache holds them, with scales [B, G, K] for 8-bit integers; both may
  have an axis of one slot. `slots` is the cache of a stack, `layer` an index
  into it. A row sees slots first <= i < position and prompt_first <= i < length
  of its prompt. A row at -1 is skipped; its output is finite.
  """
  b, g, heads, _, e = q.shape
  block = max(_BYTES // (_padded(e) * q.dtype.itemsize), 16)
  tokens = lambda x: [y.reshape(b, g, heads, -1) for y in jax.tree.leaves(x)]
  scalars = layer[None], positions, first, prompt_lengths, prompt_first
  inputs = scalars, q, tokens(new), tuple(prompt), tokens(stored)
  count = len(jax.tree.leaves(inputs))
  caches, structure = jax.tree.flatten(slots)
  # For `aot`: rows that fill the cache see half of its slots on average. L2
  # serves all but the first read of a prompt.
  layers, *_, capacity, _ = slots.keys.shape
  flops = 4 * q.size * (capacity // 2 + prompt.keys.shape[2])
  moved = sum(x.nbytes for x in jax.tree.leaves((inputs, q, stored)))
  moved += sum(x.nbytes for x in caches) // (2 * layers)
  out, caches = pl.pallas_call(
    functools.partial(_kernel, block, lambda x: soft_cap(x * scale, cap)),
    grid=(g, heads, b),  # neighbours share a prompt, in the L2 cache
    out_shape=[q, caches],
    input_output_aliases={count + i: 1 + i for i in range(len(caches))},
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    name=f"decode_attention_flops_{flops}_bytes_{moved}",
  )(*inputs, caches)
  return out, jax.tree.unflatten(structure, caches)
