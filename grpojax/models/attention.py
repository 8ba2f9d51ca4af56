"""Attention to a token's own row and to its prompt, and RMSNorm.

Axes are named as in `cache`. Queries are [B, G, K, R, S, E]: query head h reads
key head h // R.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.decoding.sampling import NEGATIVE
from grpojax.models import cache, cpu
from grpojax.models.cache import PromptArray, RowArray

_QUERY_AXES = "bgkrse"
_PROMPT_QUERY_AXES = "bkgrse"


class Visibility(NamedTuple):
  """Arrays that decide, along with causal order, which keys a query sees."""

  # Positions in the whole sequence, consecutive within a segment.
  positions: Int[Array, "B G S"]
  # Index of each token's completion if several share a row: a token sees only
  # its own segment. None: one completion per row.
  segments: Int[Array, "B G S"] | None
  prompt_mask: Bool[Array, "B P"] | None  # True on real tokens of a prompt
  local: Any  # True if the window applies; a Python value or traced


def rms_norm(
  x: Float[Array, "*tokens D"],
  scale: Float[Array, "D"],
  eps: float,
  offset: bool = False,
) -> Float[Array, "*tokens D"]:
  """Returns x / sqrt(mean(x^2) + eps) * scale (1 + scale with `offset`)."""

  # Recompute in the backward pass, instead of storing float32 copies of x.
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
  """Returns cap * tanh(x / cap), or x if `cap` is None."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def rounded(x: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
  """Casts x with a rounding that XLA cannot remove.

  If XLA removed it in training only, rollout and training would differ.
  """
  if dtype != jnp.float32:
    info = jnp.finfo(dtype)
    x = jax.lax.reduce_precision(x, info.nexp, info.nmant)
  return x.astype(dtype)


class _Keys(NamedTuple):
  """Keys and values of one source: the row, its cached slots or the prompt."""

  keys: Array
  values: Array
  mask: Array  # broadcastable to the logits, True if a query sees a key
  axes: tuple[str, str]  # letters of the axes of keys and of values
  # [B, G, K, C], if keys and values are 8-bit integers (`quantization`)
  key_scales: Array | None = None
  value_scales: Array | None = None


def _query_scales(
  scales: Float[Array, "B G K C"], logits: Float[Array, "B G k r S C"]
) -> Float[Array, "B G k r 1 C"]:
  """Repeats the scales of key heads for the queries that read them."""
  b, g, k, r, _, c = logits.shape
  # A row of several heads lists its queries head by head (`_side_by_side`).
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

  Weights are rounded after the softmax over all parts, so results do not depend
  on the split. A query without visible keys gets a log-sum-exp near `NEGATIVE`.
  `axes` are the letters of q's axes.
  """
  # In the logits, the letter of the keys' slots replaces that of channels.
  (slot,) = set(parts[0].axes[0]) - set(axes)
  logits_axes = axes.replace("e", slot)

  def logits_of(part):
    product = f"{axes},{part.axes[0]}->{logits_axes}"
    logits = cpu.float32_einsum(product, q, part.keys.astype(q.dtype))
    # A key has one scale for all its channels, so it can scale the logit.
    if part.key_scales is not None:
      logits = logits * _query_scales(part.key_scales, logits)
    return jnp.where(part.mask, soft_cap(logits * scale, cap), NEGATIVE)

  logits = [logits_of(part) for part in parts]
  # The largest logit cancels out of all results, so it needs no gradient.
  tops = [jnp.max(x, axis=-1, keepdims=True) for x in logits]
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
  weights = [jnp.exp(x - top) for x in logits]
  total = sum(jnp.sum(x, axis=-1, keepdims=True) for x in weights)
  lse = top + jnp.log(total)
  # In float32 the output is divided instead of the weights, which saves the
  # backward pass a sum over keys. In 16 bits this sum of rounded gradients is
  # needed: it cancels the errors common to all keys or values.
  if q.dtype != jnp.float32:
    weights = [w / total for w in weights]
    total = 1.0

  def out_of(weights, part):
    product = f"{logits_axes},{part.axes[1]}->{axes}"
    # A value has one scale for all its channels, so it can scale the weight.
    if part.value_scales is not None:
      weights = weights * _query_scales(part.value_scales, weights)
    weights = rounded(weights, q.dtype)
    return cpu.float32_einsum(product, weights, part.values.astype(q.dtype))

  out = functools.reduce(jnp.add, map(out_of, weights, parts))
  return rounded(out / total, q.dtype), lse


def attend_prompt(q, prompt, mask, scale, cap, unit):
  """Attends to the prompts' keys; q and the results lack the axes in `unit`.

  Each key head takes a single product, whose rows are all samples and query
  heads; otherwise XLA would copy logits and weights.
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
  # [B, G, K, R, S, E] x [B, K, P, E] is batched over B and K, so they lead.
  swap = lambda x: jnp.swapaxes(x, axes.index("g"), axes.index("k"))
  out, lse = _attend(swap(q), [part], scale, cap, axes)
  return swap(out), swap(lse)


def _side_by_side(
  q: Float[Array, "B G K R S E"], heads: int
) -> Float[Array, "B G _ _ S _"]:
  """Returns queries [B, G, K/n, n R, S, n E] for rows of n = `heads` keys.

  Each query has its E numbers at its own key's channels, and zeros elsewhere:

      q0 q1  ->  q0 0      for the row of keys  k0 k1
                 0 q1
  """
  b, g, k, r, s, e = q.shape
  q = q.reshape(b, g, k // heads, heads, r, s, e)
  # Head i of a row fills the channels from i E on.
  wide = [
    jnp.pad(q[:, :, :, i], [(0, 0)] * 5 + [(i * e, (heads - 1 - i) * e)])
    for i in range(heads)
  ]
  return jnp.concatenate(wide, axis=3)


def _separate_heads(out: Float[Array, "B G k r S e"], heads: int) -> Array:
  """Undoes `_side_by_side` for outputs: returns [B, G, K, R, S, E]."""
  b, g, k, r, s, e = out.shape
  r, e = r // heads, e // heads
  part = lambda i, size: slice(i * size, (i + 1) * size)
  # Take the rows and channels of head i, without products with other heads'
  # values.
  outputs = [out[:, :, :, part(i, r), :, part(i, e)] for i in range(heads)]
  return jnp.stack(outputs, axis=3).reshape(b, g, k * heads, r, s, e)


def two_part_attention(
  q: Float[Array, "B G K R S E"],
  row: tuple[RowArray, RowArray],
  row_mask: Bool[Array, "..."],
  prompt: tuple[PromptArray, PromptArray] | None = None,
  prompt_mask: Bool[Array, "B P"] | Bool[Array, "B G S P"] | None = None,
  *,
  slots: cache.Slots | None = None,
  slot_mask: Bool[Array, "..."] | None = None,
  scale: float | None = None,
  cap: float | None = None,
) -> Float[Array, "B G K R S E"]:
  """Attends to a token's own row (its completion) and to its group's prompt.

  `row` and `prompt` are keys and values. The two parts are merged by their
  log-sum-exps, so the prompt's keys are never copied per sample. In decoding,
  `slots` hold the row's earlier tokens; a single softmax covers these and the
  new tokens.

  Masks are True on visible keys. Each query must see a key of its row; it need
  not see any of the prompt or the slots. `row_mask` is broadcastable to
  [B, G, K, R, S, C], `slot_mask` to the logits of all slots. `scale` is the
  factor of the logits, 1 / sqrt(E) by default; they are capped before masking.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  shape = q.shape
  # Squeezing makes gradients faster (`cpu`), and decoding has none.
  unit = "" if slots else cpu.unit_axes(shape[:4], _QUERY_AXES[:4])
  per_row = 1
  parts = []
  # The cache has n heads per row of slots; queries and the row need the same
  # layout.
  if slots:
    per_row = q.shape[2] // slots.keys.shape[2]
    axes = "bgkec" if slots.columns else "bgkce", "bgkce"
    scales = slots.key_scales, slots.value_scales
    parts = [_Keys(slots.keys, slots.values, slot_mask, axes, *scales)]
  q = cpu.squeeze(q, _QUERY_AXES, unit)
  keys, values = (cpu.squeeze(x, cache.ROW_AXES, unit) for x in row)
  if row_mask.ndim == len(shape):
    row_mask = cpu.squeeze(row_mask, "bgkrsc", unit)
  row_q = q
  row_axes = cpu.without(cache.ROW_AXES, unit)
  if per_row > 1:
    row_q = _side_by_side(q, per_row)
    keys, values = (cache.side_by_side(x, per_row) for x in (keys, values))
  # Take one softmax over the cached slots and the row itself.
  parts.append(_Keys(keys, values, row_mask, (row_axes,) * 2))
  out, lse = _attend(row_q, parts, scale, cap, cpu.without(_QUERY_AXES, unit))
  if per_row > 1:
    out = _separate_heads(out, per_row)
    # [B, G, K/n, n R, S] lists heads in the same order as [B, G, K, R, S].
    lse = lse.reshape(*q.shape[:-1], 1)
  # Take a second softmax over the prompt, and merge it with the first.
  if prompt is not None:
    prompt_out, prompt_lse = attend_prompt(
      q, prompt, prompt_mask, scale, cap, unit
    )
    # The softmax over all keys is a mixture of the two, weighted by their mass.
    share = jax.nn.sigmoid(prompt_lse - lse)
    out = (out + share * (prompt_out - out)).astype(q.dtype)
  return out.reshape(shape)
