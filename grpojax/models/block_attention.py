"""Attention of long rows in blocks of queries and keys, to save memory.

An online softmax (FlashAttention, Dao et al. 2022, arXiv 2205.14135) in plain
JAX: at any time, logits exist for one block of queries and one block of keys.
Blocks in the future or beyond the window are left out:

              keys 0  1  2  3
    queries 0      m  -  -  -      m: computed, with a mask
            1      m  m  -  -      -: left out
            2      -  m  m  -      (2, 0) is beyond the window
            3      -  -  m  m

The derivative is written in forward mode, as a sum over blocks that is linear
in the tangents; JAX transposes it to the backward pass of the paper.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grpojax.core.decoding.sampling import NEGATIVE
from grpojax.core.meshes import constrain
from grpojax.models.attention import Visibility, rounded, soft_cap
from grpojax.models.cache import (
  PROMPT_AXES,
  ROW_AXES,
  KeysValues,
  PromptKeysValues,
  pad,
)
from grpojax.models.cpu import float32_einsum

ATTENTION = ("auto", "plain", "blocks", "kernel")
"""Attention of long rows: "plain" holds all logits of a row, "blocks" is
`block_attention`, "kernel" is `kernel_attention`, and "auto" uses kernels on
TPUs and GPUs and blocks on CPUs."""

WHOLE = 256  # rows of at most this many tokens always use plain attention
BLOCK = 128  # tokens of a block

LONG = 2048
"""Rows of more tokens have blocks of 2 BLOCK tokens, to shorten the loop over
key blocks."""

CAUSAL = "causal_block"  # name scope of key blocks that may be skipped

RowAttention = Callable[..., Array]  # with the arguments of `block_attention`

_QUERY_AXES = "bgkrse"

# Recompute a block in the backward pass.
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


class _Settings(NamedTuple):
  scale: float
  cap: float | None
  window: int
  any_local: bool  # False: no layer has a window
  block: int


def _in_window(settings, positions, local, key_positions) -> Array:
  """Returns a mask [B, G, S, C], True for keys in the window of a query."""
  distance = positions[..., None] - key_positions[..., None, :]
  return (distance < settings.window) | ~jnp.asarray(local)


def _row_mask(settings, queries, keys) -> tuple[Array, Array]:
  """Returns a row's mask for a block of keys, and False to skip the block."""
  index, positions, segments = keys
  query_index, query_positions, query_segments, local = queries
  block = settings.block
  offset = (query_index - index) * block  # slots from first key to first query
  slot = jnp.arange(block)
  mask = offset + slot[:, None] >= slot
  # A block with only later keys is skipped.
  seen = offset >= 0
  if segments is not None:
    mask &= query_segments[..., None] == segments[..., None, :]
  if settings.any_local:
    mask &= _in_window(settings, query_positions, local, positions)
    # The closest pair is the first query and the last key of the blocks.
    reached = offset - block + 1 < settings.window
    seen &= reached | ~jnp.asarray(local)
  # Broadcast over heads: [B, G, 1, 1, S, C].
  return mask if mask.ndim == 2 else mask[:, :, None, None], seen


def _prompt_mask(settings, queries, keys) -> tuple[Array, None]:
  """Returns a prompt's mask for a block of keys, and None: never skipped."""
  index, mask = keys
  _, positions, _, local = queries
  # [B, C] -> [B, 1, 1, C]; prompts precede all queries, so no order is needed.
  mask = mask[:, None, None]
  if settings.any_local:
    key_positions = index * settings.block + jnp.arange(settings.block)
    mask &= _in_window(settings, positions, local, key_positions[None, None])
  return mask[:, :, None, None], None


def _split(x: Array | None, axis: int, size: int) -> Array | None:
  """Splits an axis into zero-padded blocks; adds a leading axis of blocks."""
  if x is None:
    return None
  x = pad(x, axis, -x.shape[axis] % size)
  x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
  return jnp.moveaxis(x, axis, 0)


def _join(blocks: Array, axis: int, size: int) -> Array:
  x = jnp.moveaxis(blocks, 0, axis)
  x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
  return jax.lax.slice_in_dim(x, 0, size, axis=axis)


def _key_blocks(settings, row, prompt, visibility: Visibility, start=0):
  """Lists (axes, mask function, key blocks) of row and, if any, prompt."""

  def blocks(arrays, axes, slot):
    return tuple(_split(x, axes.index(slot), settings.block) for x in arrays)

  keys, values = blocks(row, ROW_AXES, "c")
  tokens = visibility.positions, visibility.segments
  positions, segments = blocks(tokens, "bgc", "c")
  # `_forward` passes an array, 0, so that JAX does not make masks constants.
  masked_by = start + jnp.arange(len(keys)), positions, segments
  parts = [(ROW_AXES, _row_mask, (keys, values, masked_by))]
  if prompt is not None:
    keys, values = blocks(prompt, PROMPT_AXES, "p")
    (mask,) = blocks((visibility.prompt_mask,), "bp", "p")
    masked_by = start + jnp.arange(len(keys)), mask
    parts.append((PROMPT_AXES, _prompt_mask, (keys, values, masked_by)))
  return parts


def _query_blocks(settings, q, visibility: Visibility):
  """Returns blocks of q, and their indices, positions, segments and `local`."""
  split = functools.partial(_split, size=settings.block)
  blocks = split(q, 4)
  # A scan over blocks needs `local` once per block; it may be a Python bool.
  local = jnp.broadcast_to(jnp.asarray(visibility.local), len(blocks))
  index = jnp.arange(len(blocks))
  positions = split(visibility.positions, 2)
  segments = split(visibility.segments, 2)
  return blocks, (index, positions, segments, local)


def _products(axes: str):
  """Returns two float32 products: of q and k, and of weights and v."""
  # As in `attention._attend`: the slots' letter replaces that of channels.
  (slot,) = set(axes) - set(_QUERY_AXES)
  logits_axes = _QUERY_AXES.replace("e", slot)
  return (
    functools.partial(float32_einsum, f"{_QUERY_AXES},{axes}->{logits_axes}"),
    functools.partial(float32_einsum, f"{logits_axes},{axes}->{_QUERY_AXES}"),
  )


def _add_if(seen, add, carry, *operands):
  """Returns `add(carry, *operands)`, or the carry if `seen` is False."""
  if seen is None:
    return add(carry, *operands)
  with jax.named_scope(CAUSAL):
    return jax.lax.cond(seen, add, lambda carry, *_: carry, carry, *operands)


def _constrain_queries(q):
  return constrain(q, "batch", "group", "kv_heads", "query_heads")


def _forward(settings, q, row, prompt, visibility):
  """Returns the output, float32, and log-sum-exps [B, G, K, R, S]."""
  # Without the barrier, JAX would hoist the masks of all blocks, as constants,
  # out of the loop over layers that it differentiates.
  # `local` may be a Python bool, which the barrier would turn into an array.
  local = visibility.local
  start = jnp.zeros((), jnp.int32)
  q, row, prompt, visibility, start = jax.lax.optimization_barrier(
    (q, row, prompt, visibility._replace(local=None), start)
  )
  visibility = visibility._replace(local=local)
  parts = _key_blocks(settings, row, prompt, visibility, start)

  def attend_block(_, block):
    q, queries = block
    q = _constrain_queries(q)
    # The largest logit so far, the sum of weights exp(logit - largest), and the
    # sum of weights times values. A larger logit rescales both sums.
    carry = (
      jnp.full((*q.shape[:-1], 1), NEGATIVE, jnp.float32),
      jnp.zeros((*q.shape[:-1], 1), jnp.float32),
      jnp.zeros(q.shape, jnp.float32),
    )

    def add_part(carry, axes, mask_of, blocks):
      logits_of, out_of = _products(axes)

      def add(carry, keys, values, mask):
        top, total, out = carry
        logits = soft_cap(logits_of(q, keys) * settings.scale, settings.cap)
        logits = jnp.where(mask, logits, NEGATIVE)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1, keepdims=True))
        # Mask again: until a key is visible, all logits equal the largest.
        weights = jnp.where(mask, jnp.exp(logits - new_top), 0)
        rescale = jnp.exp(top - new_top)
        # The sum of rounded weights makes an average of equal values exact.
        weights = rounded(weights, q.dtype)
        added = jnp.sum(weights.astype(jnp.float32), axis=-1, keepdims=True)
        total = total * rescale + added
        out = out * rescale + out_of(weights, values)
        return new_top, total, out

      def step(carry, block):
        keys, values, masked_by = block
        mask, seen = mask_of(settings, queries, masked_by)
        return _add_if(seen, add, carry, keys, values, mask), None

      return jax.lax.scan(step, carry, blocks)[0]

    # Row and prompt share a softmax: the second part continues the sums.
    for part in parts:
      carry = add_part(carry, *part)
    top, total, out = carry
    return None, (out / total, (top + jnp.log(total))[..., 0])

  blocks = _query_blocks(settings, q, visibility)
  _, (out, lse) = jax.lax.scan(attend_block, None, blocks)
  return tuple(_join(x, 4, q.shape[4]) for x in (out, lse))


def _tangent(settings, out, lse, primals, tangents, visibility):
  """Returns the derivative of the output along the tangents of q, k and v.

  d out = sum_j w_j (d l_j - sum_i w_i d l_i) v_j + w_j d v_j with weights w and
  logits l: two sums over all keys, linear in the tangents.
  """
  q, row, prompt = primals
  dq, *dkeys_values = tangents
  # Gradients are float32 sums over blocks; each block's addend is rounded.
  drow, dprompt = jax.tree.map(lambda x: x.astype(jnp.float32), dkeys_values)
  parts = _key_blocks(settings, row, prompt, visibility)
  tangent_parts = _key_blocks(settings, drow, dprompt, visibility)
  queries, masked_by = _query_blocks(settings, q, visibility)
  split = functools.partial(_split, axis=4, size=settings.block)

  @_recomputed
  def tangent_block(block):
    q, dq, out, lse, queries = block
    q = _constrain_queries(q)
    dq = _constrain_queries(dq).astype(jnp.float32)
    lse = lse[..., None]
    # Two sums over keys: of w d l v + w d v, and of w d l
    carry = jnp.zeros(q.shape, jnp.float32), jnp.zeros(lse.shape, jnp.float32)

    def add_part(carry, part, tangent_part):
      axes, mask_of, blocks = part
      logits_of, out_of = _products(axes)

      def add(carry, dq, keys, values, dkeys, dvalues, mask):
        dout, dtotal = carry
        dq, dkeys, dvalues = (x.astype(q.dtype) for x in (dq, dkeys, dvalues))
        logits = soft_cap(logits_of(q, keys) * settings.scale, settings.cap)
        # Product rule for q k; the cap's derivative is 1 - tanh^2.
        dlogits = logits_of(dq, keys) + logits_of(q, dkeys)
        slope = settings.scale
        if settings.cap is not None:
          slope = slope * (1 - (logits / settings.cap) ** 2)
        # The final log-sum-exp gives the weights of the whole softmax.
        weights = jnp.where(mask, jnp.exp(logits - lse), 0)
        dweights = weights * slope * dlogits
        dtotal += jnp.sum(dweights, axis=-1, keepdims=True)
        dout += out_of(dweights.astype(q.dtype), values)
        dout += out_of(weights.astype(q.dtype), dvalues)
        return dout, dtotal

      @_recomputed
      def step(carry, dq, block):
        (keys, values, masked_by), (dkeys, dvalues, _) = block
        mask, seen = mask_of(settings, queries, masked_by)
        return _add_if(seen, add, carry, dq, keys, values, dkeys, dvalues, mask)

      return jax.lax.scan(
        lambda carry, block: (step(carry, dq, block), None),
        carry,
        (blocks, tangent_part[2]),
      )[0]

    for part, tangent_part in zip(parts, tangent_parts, strict=True):
      carry = add_part(carry, part, tangent_part)
    dout, dtotal = carry
    # `out` is not rounded, so that parts common to all keys or values cancel.
    return (dout - dtotal * out).astype(q.dtype)

  blocks = queries, split(dq), split(out), split(lse), masked_by
  _, dout = jax.lax.scan(lambda _, x: (None, tangent_block(x)), None, blocks)
  return _join(dout, 4, q.shape[4])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(settings, q, row, prompt, visibility):
  return _forward(settings, q, row, prompt, visibility)[0].astype(q.dtype)


@_attention.defjvp
def _attention_jvp(settings, primals, tangents):
  *primals, visibility = primals
  out, lse = _forward(settings, *primals, visibility)
  derivative = functools.partial(
    _tangent, settings, out, lse, primals, visibility=visibility
  )
  # `derivative` is linear, but older versions of JAX only transpose a scan that
  # they have linearized. The value at 0 is not used.
  # Masks and positions have no tangents.
  tangents = tangents[:3]
  _, linear = jax.linearize(derivative, jax.tree.map(jnp.zeros_like, tangents))
  return out.astype(primals[0].dtype), linear(tangents)


def block_attention(
  q: Float[Array, "B G K R S E"],
  row: KeysValues,
  prompt: PromptKeysValues | None,
  visibility: Visibility,
  *,
  window: int = 0,
  scale: float | None = None,
  cap: float | None = None,
  block: int | None = None,
) -> Float[Array, "B G K R S E"]:
  """Computes causal `two_part_attention` of whole rows (C = S) in blocks.

  Besides arguments and result, it stores a few times B G H block^2 float32
  numbers. `window` applies to local layers. A block has `block` tokens.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  if block is None:
    block = BLOCK if q.shape[-2] <= LONG else 2 * BLOCK
  any_local = visibility.local is not False
  settings = _Settings(scale, cap, window, any_local, block)
  return _attention(settings, q, row, prompt, visibility)


def choose(attention: str, platform: str | None) -> RowAttention | None:
  """Returns the function for attention of long rows, or None for "plain".

  Blocks replace kernels that cannot run (`kernel_attention.is_usable`).
  """
  if attention in ("plain", "blocks"):
    return block_attention if attention == "blocks" else None

  def row_attention(q, row, prompt, visibility, **options):
    from grpojax.models import kernel_attention  # importing Pallas is slow

    runs_on = platform or jax.default_backend()
    attend = block_attention
    if attention == "kernel" or runs_on != "cpu":
      if kernel_attention.is_usable(runs_on, q, prompt):
        attend = kernel_attention.kernel_attention
        options["platform"] = runs_on
    return attend(q, row, prompt, visibility, **options)

  return row_attention
