"""Attention of long rows in blocks of queries and keys: training's memory.

An online softmax (FlashAttention, Dao et al. 2022, arXiv 2205.14135) in plain
JAX: the logits of one block of queries and one of keys exist at a time, in the
backward pass too. What the mask would hide from a whole block is computed there
and then, from positions and segments, and blocks in the future or beyond the
window are left out. The program does not grow with the length of the rows.

The derivative is written forwards, as a sum over blocks that is linear in the
tangents, so that it can be taken in either direction: transposed, it is the
backward pass of that paper.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grpojax.core.mesh import constrain
from grpojax.models.attention import soft_cap
from grpojax.models.block_masks import (
  Queries,
  Settings,
  Sight,
  prompt_mask,
  row_mask,
)
from grpojax.models.cache import (
  PROMPT_AXES,
  ROW_AXES,
  KeysValues,
  PromptKeysValues,
)
from grpojax.models.products import float32_einsum

BLOCK = 128
"""Tokens of a block."""

WHOLE = 256
"""Rows of no more tokens than that are attended to at once, without blocks.
It is faster on CPUs, and not measured on accelerators; the logits of a row and
its prompt, [S, S + P] of each head, exist as a whole."""

LONG = 2048
"""Rows of more tokens are cut into blocks of 2 BLOCK: a block of keys takes
one turn of a loop, whose own cost would show."""

_NEGATIVE = -1e30  # a finite stand-in for -inf: masked rows stay nan-free
_QUERY_AXES = "bgkrse"


_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)
"""Keeps nothing of a block for the backward pass."""


def _tied(*trees):
  """The same arrays, none of which is known before all of them are, and a 0.

  Differentiating an outer loop, over layers say, JAX computes before it what
  does not change in it. That would be the masks of all blocks at once.
  """
  return jax.lax.optimization_barrier((*trees, jnp.zeros((), jnp.int32)))


def _split(x: Array | None, axis: int, size: int) -> Array | None:
  """Blocks along an axis, padded with zeros: their number is the first axis."""
  if x is None:
    return None
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, -x.shape[axis] % size)
  x = jnp.pad(x, widths)
  x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
  return jnp.moveaxis(x, axis, 0)


def _joined(blocks: Array, axis: int, size: int) -> Array:
  """What `_split` parted, without the padding."""
  x = jnp.moveaxis(blocks, 0, axis)
  x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
  return jax.lax.slice_in_dim(x, 0, size, axis=axis)


def _parts(settings, row, prompt, sight: Sight, start=0):
  """Blocks of keys, for each part: axes, mask function, what is scanned."""

  def blocks(arrays, axes, slot):
    return tuple(_split(x, axes.index(slot), settings.block) for x in arrays)

  keys, values = blocks(row, ROW_AXES, "c")
  positions, segments = blocks((sight.positions, sight.segments), "bgc", "c")
  about = start + jnp.arange(len(keys)), positions, segments
  parts = [(ROW_AXES, row_mask, (keys, values, about))]
  if prompt is not None:
    keys, values = blocks(prompt, PROMPT_AXES, "p")
    (mask,) = blocks((sight.prompt_mask,), "bp", "p")
    about = start + jnp.arange(len(keys)), mask
    parts.append((PROMPT_AXES, prompt_mask, (keys, values, about)))
  return parts


def _products(axes: str):
  """Queries x keys -> logits and weights x values -> out, float32 sums."""
  (slot,) = set(axes) - set(_QUERY_AXES)
  logits_axes = _QUERY_AXES.replace("e", slot)
  return (
    functools.partial(float32_einsum, f"{_QUERY_AXES},{axes}->{logits_axes}"),
    functools.partial(float32_einsum, f"{logits_axes},{axes}->{_QUERY_AXES}"),
  )


def _query_blocks(settings, q, sight: Sight):
  """What a scan over blocks of queries takes."""
  split = functools.partial(_split, size=settings.block)
  blocks = split(q, 4)
  local = jnp.broadcast_to(jnp.asarray(sight.local), len(blocks))
  about = Queries(
    jnp.arange(len(blocks)),
    split(sight.positions, 2),
    split(sight.segments, 2),
    local,
  )
  return blocks, about


def _where_seen(seen, add, carry, *operands):
  if seen is None:
    return add(carry, *operands)
  return jax.lax.cond(seen, add, lambda carry, *_: carry, carry, *operands)


def _laid_out(q):
  return constrain(q, "batch", "group", "kv_heads", "query_heads")


def _forward(settings, q, row, prompt, sight):
  """Output, and the log-sum-exps of the logits [B, G, K, R, S]."""
  arrays = q, row, prompt, sight._replace(local=None)
  q, row, prompt, tied, start = _tied(*arrays)
  sight = tied._replace(local=sight.local)
  parts = _parts(settings, row, prompt, sight, start)

  def of_queries(_, block):
    q, about = block
    q = _laid_out(q)
    carry = (
      jnp.full((*q.shape[:-1], 1), _NEGATIVE, jnp.float32),
      jnp.zeros((*q.shape[:-1], 1), jnp.float32),
      jnp.zeros(q.shape, jnp.float32),
    )
    for axes, mask_of, blocks in parts:
      logits_of, out_of = _products(axes)

      def add(carry, keys, values, mask, logits_of=logits_of, out_of=out_of):
        top, total, out = carry
        logits = soft_cap(logits_of(q, keys) * settings.scale, settings.cap)
        logits = jnp.where(mask, logits, _NEGATIVE)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1, keepdims=True))
        # Masked, also where nothing was seen yet and all logits are the same.
        weights = jnp.where(mask, jnp.exp(logits - new_top), 0)
        keep = jnp.exp(top - new_top)
        total = total * keep + jnp.sum(weights, axis=-1, keepdims=True)
        return (
          new_top,
          total,
          out * keep + out_of(weights.astype(q.dtype), values),
        )

      def step(carry, block, mask_of=mask_of, add=add):
        keys, values, keys_about = block
        mask, seen = mask_of(settings, about, keys_about)
        return _where_seen(seen, add, carry, keys, values, mask), None

      carry, _ = jax.lax.scan(step, carry, blocks)
    top, total, out = carry
    return None, ((out / total).astype(q.dtype), (top + jnp.log(total))[..., 0])

  _, (out, lse) = jax.lax.scan(
    of_queries, None, _query_blocks(settings, q, sight)
  )
  return tuple(_joined(x, 4, q.shape[4]) for x in (out, lse))


def _tangent(settings, out, lse, primals, tangents, sight):
  """Derivative of the output along tangents of queries, keys and values.

  d out = sum_j w_j (d l_j - sum_i w_i d l_i) v_j + w_j d v_j with weights w and
  logits l: two sums over all keys, linear in the tangents.
  """
  q, row, prompt = primals
  dq, *dkeys_values = tangents
  # Float32, and rounded in each block: gradients are sums over blocks.
  drow, dprompt = jax.tree.map(lambda x: x.astype(jnp.float32), dkeys_values)
  parts = _parts(settings, row, prompt, sight)
  tangent_parts = _parts(settings, drow, dprompt, sight)
  queries, about = _query_blocks(settings, q, sight)
  split = functools.partial(_split, axis=4, size=settings.block)

  @_recomputed
  def of_queries(block):
    q, dq, out, lse, about = block
    q, dq = _laid_out(q), _laid_out(dq).astype(jnp.float32)
    lse = lse[..., None]
    carry = jnp.zeros(q.shape, jnp.float32), jnp.zeros(lse.shape, jnp.float32)
    for (axes, mask_of, blocks), (_, _, dblocks) in zip(
      parts, tangent_parts, strict=True
    ):
      logits_of, out_of = _products(axes)

      def add(
        carry,
        dq,
        keys,
        values,
        dkeys,
        dvalues,
        mask,
        logits_of=logits_of,
        out_of=out_of,
      ):
        dout, dtotal = carry
        dq, dkeys, dvalues = (x.astype(q.dtype) for x in (dq, dkeys, dvalues))
        logits = soft_cap(logits_of(q, keys) * settings.scale, settings.cap)
        dlogits = logits_of(dq, keys) + logits_of(q, dkeys)
        slope = settings.scale
        if settings.cap is not None:
          slope = slope * (1 - (logits / settings.cap) ** 2)
        weights = jnp.where(mask, jnp.exp(logits - lse), 0)
        dweights = weights * slope * dlogits
        dtotal += jnp.sum(dweights, axis=-1, keepdims=True)
        dout += out_of(dweights.astype(q.dtype), values)
        dout += out_of(weights.astype(q.dtype), dvalues)
        return dout, dtotal

      @_recomputed
      def step(carry, dq, block, mask_of=mask_of, add=add):
        (keys, values, keys_about), (dkeys, dvalues, _) = block
        mask, seen = mask_of(settings, about, keys_about)
        return _where_seen(
          seen, add, carry, dq, keys, values, dkeys, dvalues, mask
        )

      carry, _ = jax.lax.scan(
        lambda carry, block, step=step: (step(carry, dq, block), None),
        carry,
        (blocks, dblocks),
      )
    dout, dtotal = carry
    return (dout - dtotal * out.astype(jnp.float32)).astype(q.dtype)

  blocks = queries, split(dq), split(out), split(lse), about
  _, dout = jax.lax.scan(lambda _, x: (None, of_queries(x)), None, blocks)
  return _joined(dout, 4, q.shape[4])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(settings, q, row, prompt, sight):
  return _forward(settings, q, row, prompt, sight)[0]


@_attention.defjvp
def _attention_jvp(settings, primals, tangents):
  *primals, sight = primals
  out, lse = _forward(settings, *primals, sight)
  along = functools.partial(_tangent, settings, out, lse, primals, sight=sight)
  # It is linear, but older versions of JAX transpose no scan that they have not
  # linearized themselves. What it is at 0 nobody reads, and XLA leaves it out.
  tangents = tangents[:3]
  _, linear = jax.linearize(along, jax.tree.map(jnp.zeros_like, tangents))
  return out, linear(tangents)


def block_attention(
  q: Float[Array, "B G K R S E"],
  row: KeysValues,
  prompt: PromptKeysValues | None,
  sight: Sight,
  *,
  window: int = 0,
  scale: float | None = None,
  cap: float | None = None,
  block: int | None = None,
) -> Float[Array, "B G K R S E"]:
  """`two_part_attention` of whole rows: causal, and with `sight`'s masks.

  Memory is a few times B G H block^2 float32 besides what goes in and out.

  Args:
    q: queries.
    row: keys and values of the queries' own tokens, C = S.
    prompt: keys and values of the prompt, or None.
    sight: which of them a query sees.
    window: of local layers, in tokens.
    scale: of the logits; default 1 / sqrt(E).
    cap: the logits are soft-capped at +-cap, before they are masked.
    block: queries, and keys, of a block; by default as many as suit S.

  Returns:
    Attention output, in q's dtype.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  if block is None:
    block = BLOCK if q.shape[-2] <= LONG else 2 * BLOCK
  settings = Settings(scale, cap, window, sight.local is not False, block)
  return _attention(settings, q, row, prompt, sight)
