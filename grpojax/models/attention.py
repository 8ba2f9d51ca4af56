"""Attention in two parts, own row and prompt, and RMSNorm."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Float

from grpojax.models import cache
from grpojax.models.cache import PromptArray, RowArray
from grpojax.models.products import float32_einsum

_NEGATIVE = -1e30  # a finite stand-in for -inf: masked rows stay nan-free
_QUERY_AXES = "bgkrse"
_PROMPT_QUERY_AXES = "bkgrse"
_NAMES = "abcdefgh"  # of axes, whatever they are


def rms_norm(
  x: Float[Array, "*tokens D"],
  scale: Float[Array, "D"],
  eps: float,
  offset: bool = False,
) -> Float[Array, "*tokens D"]:
  """X / sqrt(mean(x^2) + eps) * scale over the last axis, in float32.

  The caller rounds the result, where it does (transformers rounds before the
  scale already, but for gemma). So the scale's gradient, a sum over all tokens,
  is a float32 sum.

  Args:
    x: [..., D].
    scale: [D].
    eps: added to the mean square.
    offset: the scale is 1 + `scale` (gemma).
  """

  # Recomputed in the backward pass, so that no float32 copies of x are kept.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def normalize(x, scale):
    axes = _NAMES[: x.ndim]
    y = _without(x, axes, _useless(x.shape[:-1], axes[:-1]))
    y, scale = y.astype(jnp.float32), scale.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * (1 + scale if offset else scale)).reshape(x.shape)

  return normalize(x, scale)


def _useless(shape: Sequence[int], axes: str) -> str:
  """Those of the axes that have size 1, where these carry no sharding.

  Gradients of norms and of softmax are sums of products, for which XLA's CPU
  code is up to ten times as fast without them.
  """
  if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
    return ""
  return "".join(a for a, n in zip(axes, shape, strict=True) if n == 1)


def _left(axes: str, useless: str) -> str:
  return "".join(axis for axis in axes if axis not in useless)


def _without(x: Array, axes: str, useless: str) -> Array:
  """An array without some axes of size 1."""
  sizes = dict(zip(axes, x.shape, strict=True))
  return x.reshape([sizes[axis] for axis in _left(axes, useless)])


def _exponentials(
  parts: list[Float[Array, "*queries _"]],
) -> tuple[
  list[Float[Array, "*queries _"]],
  Float[Array, "*queries 1"],
  Float[Array, "*queries 1"],
]:
  """Weights of one softmax over the keys of all parts, and what they sum to.

  The largest logit is subtracted before exp, which then cannot overflow. It
  cancels out of all results, so no gradient flows through it. A query that
  sees no key gets uniform weights and a log-sum-exp near `_NEGATIVE`: finite,
  and its share of a mixture is exactly 0.

  Args:
    parts: logits.

  Returns:
    The weights, largest 1, their sum, and the logits' log-sum-exp.
  """
  tops = [jnp.max(logits, axis=-1, keepdims=True) for logits in parts]
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
  weights = [jnp.exp(logits - top) for logits in parts]
  total = sum(jnp.sum(x, axis=-1, keepdims=True) for x in weights)
  return weights, total, top + jnp.log(total)


def _rounded(x: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
  """X in another dtype, and rounded to it for all that follows.

  Of casts to 16 bits and back to 32 XLA drops both, here or there: sampling and
  scoring would differ by what one of them did not round.
  """
  if dtype != jnp.float32:
    info = jnp.finfo(dtype)
    x = jax.lax.reduce_precision(x, info.nexp, info.nmant)
  return x.astype(dtype)


def soft_cap(
  x: Float[Array, "*shape"], cap: float | None
) -> Float[Array, "*shape"]:
  """Cap * tanh(x / cap), or x where there is no cap."""
  return x if cap is None else cap * jnp.tanh(x / cap)


class _Part(NamedTuple):
  """Some of the keys that a query attends to.

  Attributes:
    keys: with the axes `axes[0]`.
    values: with the axes `axes[1]`.
    mask: broadcastable to the logits.
    axes: names as in `cache`.
  """

  keys: Array
  values: Array
  mask: Array
  axes: tuple[str, str]


def _of_rows(row: tuple[RowArray, RowArray], mask: Array) -> _Part:
  return _Part(*row, mask, (cache.ROW_AXES,) * 2)


def _attend(
  q: Float[Array, "*queries E"],
  parts: list[_Part],
  scale: float,
  cap: float | None,
  axes: str = _QUERY_AXES,
) -> tuple[Float[Array, "*queries E"], Float[Array, "*queries 1"]]:
  """Output over the keys of some parts, and its log-sum-exp.

  Weights are rounded to q's dtype, so they depend on what they are a softmax
  over: not on how its keys are held in parts. `axes` is the order of q's.
  """
  (slot,) = set(parts[0].axes[0]) - set(axes)
  logits_axes = axes.replace("e", slot)

  def logits_of(part):
    product = f"{axes},{part.axes[0]}->{logits_axes}"
    logits = float32_einsum(product, q, part.keys)
    return jnp.where(part.mask, soft_cap(logits * scale, cap), _NEGATIVE)

  weights, total, lse = _exponentials([logits_of(part) for part in parts])
  # In float32 the output is divided, not the weights: without a sum over keys
  # in the backward pass. In 16 bits that sum is of rounded gradients, whose
  # errors it cancels: what keys or values have in common adds none.
  if q.dtype != jnp.float32:
    weights, total = [w / total for w in weights], 1.0
  outs = (
    float32_einsum(
      f"{logits_axes},{part.axes[1]}->{axes}",
      _rounded(w, q.dtype),
      part.values,
    )
    for w, part in zip(weights, parts, strict=True)
  )
  return _rounded(functools.reduce(jnp.add, outs) / total, q.dtype), lse


def _merge(part, other):
  """Attention over the keys of two parts, of their outputs and log-sum-exps.

  softmax over the union of two key sets equals the two separate softmaxes mixed
  by the sigmoid of the difference of their log-sum-exps.
  """
  (out, lse), (other_out, other_lse) = part, other
  # exp(other_lse) / (exp(other_lse) + exp(lse)): the part of the whole
  # softmax's mass that lies on the other keys.
  share = jax.nn.sigmoid(other_lse - lse)
  return out + share * (other_out - out)


def _attend_prompt(q, prompt, mask, scale, cap, useless=""):
  """`_attend` of one part: the prompts' keys, which have no axis of samples.

  Samples come after the heads here, and are with them the rows of one product
  for each key head: else logits and weights would be copied in another order.
  """
  if mask.ndim == 2:  # the same for all queries: [B, 1, 1, P]
    mask = mask[:, None, None]
  mask = mask[:, None, :, None]  # all heads: [B, 1, G, 1, S, P]
  mask = _without(mask, "bkgrsp", useless)
  axes = _left(_PROMPT_QUERY_AXES, useless)
  keys_axes = _left(cache.PROMPT_AXES, useless)
  part = _Part(*prompt, mask, (keys_axes,) * 2)
  if "g" not in axes or "k" not in axes:
    return _attend(q, [part], scale, cap, axes)
  swap = lambda x: jnp.swapaxes(x, axes.index("g"), axes.index("k"))
  out, lse = _attend(swap(q), [part], scale, cap, axes)
  return swap(out), swap(lse)


def two_part_attention(
  q: Float[Array, "B G K R S E"],
  row: tuple[RowArray, RowArray],
  row_mask: Bool[Array, "..."],
  prompt: tuple[PromptArray, PromptArray] | None = None,
  prompt_mask: Bool[Array, "B P"] | Bool[Array, "B G S P"] | None = None,
  *,
  scale: float | None = None,
  cap: float | None = None,
) -> Float[Array, "B G K R S E"]:
  """Attention over a token's own row (its completion) and its group's prompt.

  The two parts are merged by their log-sum-exps, so the prompt's keys are never
  copied to the samples of a group.

  Args:
    q: queries [B, G, K, R, S, E].
    row: keys and values of the queries' own rows, each [B, G, K, C, E].
    row_mask: broadcastable to [B, G, K, R, S, C]; at least one True for each
      query.
    prompt: keys and values, each [B, K, P, E], or None for no prompt part.
    prompt_mask: [B, P], True on real prompt tokens, or [B, G, S, P] where each
      query sees other ones; a query without any True takes nothing from there.
    scale: of the logits; default 1 / sqrt(E).
    cap: the logits are soft-capped at +-cap, before they are masked.

  Returns:
    Attention output [B, G, K, R, S, E].
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  shape, useless = q.shape, _useless(q.shape[:4], _QUERY_AXES[:4])
  axes, row_axes = (_left(x, useless) for x in (_QUERY_AXES, cache.ROW_AXES))
  q = _without(q, _QUERY_AXES, useless)
  row = [_without(x, cache.ROW_AXES, useless) for x in row]
  if row_mask.ndim == len(shape):
    row_mask = _without(row_mask, "bgkrsc", useless)
  part = _attend(q, [_Part(*row, row_mask, (row_axes,) * 2)], scale, cap, axes)
  if prompt is None:
    return part[0].reshape(shape)
  prompt = [_without(x, cache.PROMPT_AXES, useless) for x in prompt]
  of_prompt = _attend_prompt(q, prompt, prompt_mask, scale, cap, useless)
  return _merge(part, of_prompt).astype(q.dtype).reshape(shape)


def cached_attention(
  q: Float[Array, "B G K R S E"],
  row: cache.KeysValues,
  slots: tuple[cache.Slots, ...],
  prompt: tuple[PromptArray, PromptArray] | None,
  masks: Any,
  *,
  scale: float | None = None,
  cap: float | None = None,
) -> Float[Array, "B G K R S E"]:
  """As `two_part_attention`, and over earlier tokens of the rows in a cache.

  The cache is only read: the new tokens' keys are apart from it, so that a loop
  over layers need not carry the cache. One softmax is taken over both.

  Args:
    q: queries of the new tokens.
    row: keys and values of the new tokens, C = S.
    slots: those of the cache, in its blocks.
    prompt: see `two_part_attention`.
    masks: `row`, `slots` and `prompt`, each of the keys of that name; a query
      may see no slot.
    scale: see `two_part_attention`.
    cap: see `two_part_attention`.
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  of_slots = zip(slots, cache.split(masks.slots, slots), strict=True)
  parts = [_Part(*x, mask, cache.SLOT_AXES) for x, mask in of_slots]
  parts.append(_of_rows(row, masks.row))
  part = _attend(q, parts, scale, cap)
  if prompt is None:
    return part[0]
  of_prompt = _attend_prompt(q, prompt, masks.prompt, scale, cap)
  return _merge(part, of_prompt).astype(q.dtype)
