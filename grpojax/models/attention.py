"""Attention in two parts, own row and prompt, and RMSNorm.

Axes go by their letters in `cache`, and queries are [B, G, K, R, S, E]: query
head h attends with key head h // R. Each einsum names the axes it sums over.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpojax.models import cache, cpu
from grpojax.models.cache import PromptArray, RowArray

_NEGATIVE = -1e30  # a finite stand-in for -inf: masked rows stay nan-free
_QUERY_AXES = "bgkrse"
_PROMPT_QUERY_AXES = "bkgrse"


def rms_norm(
  x: Float[Array, "*tokens D"],
  scale: Float[Array, "D"],
  eps: float,
  offset: bool = False,
) -> Float[Array, "*tokens D"]:
  """Returns x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32.

  With `offset` the scale is 1 + `scale` (gemma). It is not rounded here, so
  that the scale's gradient, a sum over all tokens, is a float32 sum.
  """

  # Recomputed in the backward pass, so that no float32 copies of x are kept.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  @cpu.on_squeezed
  def normalize(x, scale):
    x, scale = x.astype(jnp.float32), scale.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * jnp.broadcast_to(1 + scale if offset else scale, x.shape)

  return normalize(x, scale)


def soft_cap(
  x: Float[Array, "*shape"], cap: float | None
) -> Float[Array, "*shape"]:
  """Returns cap * tanh(x / cap), or x where there is no cap."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def rounded(x: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
  """Returns x in another dtype, and rounded to it for all that follows.

  Of casts to 16 bits and back to 32 XLA drops both, in one program or another:
  rollout and training would differ by what one of them did not round.
  """
  if dtype != jnp.float32:
    info = jnp.finfo(dtype)
    x = jax.lax.reduce_precision(x, info.nexp, info.nmant)
  return x.astype(dtype)


class _Keys(NamedTuple):
  """A part of the keys that a query attends to."""

  keys: Array  # with the axes `axes[0]`
  values: Array  # with the axes `axes[1]`
  mask: Array  # broadcastable to the logits, True where a query sees a key
  axes: tuple[str, str]  # letters of the axes, as in `cache`
  # Of keys and values in 8 bits (`quantization`), [B, G, K, C].
  key_scales: Array | None = None
  value_scales: Array | None = None


def _of_queries(
  scales: Float[Array, "B G K C"], logits: Float[Array, "B G k r S C"]
) -> Float[Array, "B G k r 1 C"]:
  """Returns the scales of each query's own head; heads may be side by side."""
  b, g, k, r, _, c = logits.shape
  heads = scales.shape[2] // k
  scales = scales.reshape(b, g, k, heads, 1, c)
  scales = jnp.broadcast_to(scales, (b, g, k, heads, r // heads, c))
  return scales.reshape(b, g, k, r, 1, c)


def _attend(
  q: Float[Array, "*queries E"],
  parts: list[_Keys],
  scale: float,
  cap: float | None,
  axes: str,
) -> tuple[Float[Array, "*queries E"], Float[Array, "*queries 1"]]:
  """Returns softmax(q k^T * scale) v over all parts' keys, and log-sum-exps.

  Weights are rounded to q's dtype, so they depend on what they are a softmax
  over: not on how its keys are held in parts. `axes` is the order of q's. A
  query that sees no key gets uniform weights and a log-sum-exp near
  `_NEGATIVE`: finite, and its share of a mixture is exactly 0.
  """
  (slot,) = set(parts[0].axes[0]) - set(axes)
  logits_axes = axes.replace("e", slot)

  def logits_of(part):
    product = f"{axes},{part.axes[0]}->{logits_axes}"
    logits = cpu.float32_einsum(product, q, part.keys.astype(q.dtype))
    if part.key_scales is not None:
      logits = logits * _of_queries(part.key_scales, logits)
    return jnp.where(part.mask, soft_cap(logits * scale, cap), _NEGATIVE)

  logits = [logits_of(part) for part in parts]
  # The largest logit cancels out of all results: no gradient flows through it.
  tops = [jnp.max(x, axis=-1, keepdims=True) for x in logits]
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
  weights = [jnp.exp(x - top) for x in logits]
  total = sum(jnp.sum(x, axis=-1, keepdims=True) for x in weights)
  lse = top + jnp.log(total)
  # In float32 the output is divided, not the weights: without a sum over keys
  # in the backward pass. In 16 bits that sum is of rounded gradients, whose
  # errors it cancels: what keys or values have in common adds none.
  if q.dtype != jnp.float32:
    weights, total = [w / total for w in weights], 1.0

  def out_of(weights, part):
    product = f"{logits_axes},{part.axes[1]}->{axes}"
    if part.value_scales is not None:
      weights = weights * _of_queries(part.value_scales, weights)
    weights = rounded(weights, q.dtype)
    return cpu.float32_einsum(product, weights, part.values.astype(q.dtype))

  out = functools.reduce(jnp.add, map(out_of, weights, parts))
  return rounded(out / total, q.dtype), lse


def _attend_prompt(q, prompt, mask, scale, cap, unit):
  """Returns `_attend` of the prompts' keys, which have no axis of samples.

  Samples come after the heads here, and are with them the rows of one product
  for each key head: else logits and weights would be copied in another order.
  q lacks the axes in `unit`, and so do the results.
  """
  keys, values = (cpu.squeeze(x, cache.PROMPT_AXES, unit) for x in prompt)
  if mask.ndim == 2:  # the same for all queries: [B, 1, 1, P]
    mask = mask[:, None, None]
  mask = mask[:, None, :, None]  # all heads: [B, 1, G, 1, S, P]
  mask = cpu.squeeze(mask, "bkgrsp", unit)
  axes = cpu.without(_PROMPT_QUERY_AXES, unit)
  part = _Keys(keys, values, mask, (cpu.without(cache.PROMPT_AXES, unit),) * 2)
  if "g" not in axes or "k" not in axes:
    return _attend(q, [part], scale, cap, axes)
  swap = lambda x: jnp.swapaxes(x, axes.index("g"), axes.index("k"))
  out, lse = _attend(swap(q), [part], scale, cap, axes)
  return swap(out), swap(lse)


def _side_by_side(
  q: Float[Array, "B G K R S E"], heads: int
) -> Float[Array, "B G _ _ S _"]:
  """Returns queries [B, G, K/n, n R, S, n E] of keys of n = `heads` a row.

  Each has its own head's E numbers, and zeros at the others':

      q0 q1 . .  ->  q0 0      of keys  k0 k1
                     0 q1
  """
  b, g, k, r, s, e = q.shape
  q = q.reshape(b, g, k // heads, heads, r, s, e)
  wide = [
    jnp.pad(q[:, :, :, i], [(0, 0)] * 5 + [(i * e, (heads - 1 - i) * e)])
    for i in range(heads)
  ]
  return jnp.concatenate(wide, axis=3)


def _apart(out: Float[Array, "B G k r S e"], heads: int) -> Array:
  """Returns outputs [B, G, K, R, S, E] of such queries: each its own head's."""
  b, g, k, r, s, e = out.shape
  r, e = r // heads, e // heads
  own = [
    out[:, :, :, i * r : (i + 1) * r, :, i * e : (i + 1) * e]
    for i in range(heads)
  ]
  return jnp.stack(own, axis=3).reshape(b, g, k * heads, r, s, e)


def _merge(row, prompt):
  """Merges attention over two sets of keys, each an output and a log-sum-exp.

  The softmax over both is the two softmaxes, mixed by the share of the mass
  that lies on the prompt's keys.
  """
  (out, lse), (prompt_out, prompt_lse) = row, prompt
  share = jax.nn.sigmoid(prompt_lse - lse)
  return out + share * (prompt_out - out)


def two_part_attention(
  q: Float[Array, "B G K R S E"],
  row: tuple[RowArray, RowArray],
  row_mask: Bool[Array, "..."],
  prompt: tuple[PromptArray, PromptArray] | None = None,
  prompt_mask: Bool[Array, "B P"] | Bool[Array, "B G S P"] | None = None,
  *,
  slots: tuple[cache.Slots, ...] = (),
  slot_mask: Bool[Array, "..."] | None = None,
  scale: float | None = None,
  cap: float | None = None,
) -> Float[Array, "B G K R S E"]:
  """Attends to a token's own row (its completion) and to its group's prompt.

  The two parts are merged by their log-sum-exps, so the prompt's keys are never
  copied to the samples of a group. In decoding earlier tokens of the row are in
  a cache, which is only read: the new tokens' keys are apart from it, so that a
  loop over layers need not carry it. One softmax is taken over both.

  Args:
    q: queries.
    row: keys and values of the queries' own rows.
    row_mask: broadcastable to [B, G, K, R, S, C]; at least one True for each
      query.
    prompt: keys and values of prompts, or None.
    prompt_mask: True on real prompt tokens, or on those that each query sees; a
      query without any True takes nothing from there.
    slots: blocks of the cache that has the earlier tokens of the rows.
    slot_mask: broadcastable to the logits, with all slots on its last axis; a
      query may see none.
    scale: factor of the logits; default 1 / sqrt(E).
    cap: soft cap of the logits, before they are masked.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  shape, unit, parts = q.shape, "", []
  together = 1
  if slots:
    together = q.shape[2] // slots[0].keys.shape[2]
    of_slots = zip(slots, cache.split(slot_mask, slots), strict=True)
    axes = cache.SLOT_AXES[:2]
    parts = [
      _Keys(keys, values, mask, axes, *scales)
      for (keys, values, *scales), mask in of_slots
    ]
  else:
    unit = cpu.unit_axes(q.shape[:4], _QUERY_AXES[:4])
  q = cpu.squeeze(q, _QUERY_AXES, unit)
  keys, values = (cpu.squeeze(x, cache.ROW_AXES, unit) for x in row)
  if row_mask.ndim == len(shape):
    row_mask = cpu.squeeze(row_mask, "bgkrsc", unit)
  row_q, row_axes = q, cpu.without(cache.ROW_AXES, unit)
  if together > 1:
    row_q = _side_by_side(q, together)
    keys, values = (cache.side_by_side(x, together) for x in (keys, values))
  parts.append(_Keys(keys, values, row_mask, (row_axes,) * 2))
  of_row = _attend(row_q, parts, scale, cap, cpu.without(_QUERY_AXES, unit))
  if together > 1:
    of_row = (
      _apart(of_row[0], together),
      of_row[1].reshape(*q.shape[:-1], 1),
    )
  if prompt is None:
    return of_row[0].reshape(shape)
  of_prompt = _attend_prompt(q, prompt, prompt_mask, scale, cap, unit)
  return _merge(of_row, of_prompt).astype(q.dtype).reshape(shape)
