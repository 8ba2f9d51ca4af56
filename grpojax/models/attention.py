"""Attention in two parts, own completion and prompt, and RMSNorm."""

import functools

import jax
import jax.numpy as jnp

_NEGATIVE = -1e30  # a finite stand-in for -inf: masked rows stay nan-free


def rms_norm(x, scale, eps, offset: bool = False):
  """X / sqrt(mean(x^2) + eps) * scale over the last axis, inside in float32.

  Args:
    x: [..., D].
    scale: [D].
    eps: added to the mean square.
    offset: the scale is 1 + `scale`, and is applied in float32 too (gemma).
  """
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  if offset:
    return (y * (1 + scale.astype(jnp.float32))).astype(x.dtype)
  return scale * y.astype(x.dtype)


# Rounded to bfloat16, logits would differ between sampling and scoring.
_scores = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _softmax_part(logits, mask):
  """Softmax over one part's keys, and its log-sum-exp."""
  logits = jnp.where(mask, logits, _NEGATIVE)
  top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.exp(logits - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  return weights / total, top + jnp.log(total)


def soft_cap(x, cap: float | None):
  """Cap * tanh(x / cap), or x where there is no cap."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def two_part_attention(
  q,
  own,
  own_mask,
  prompt=None,
  prompt_mask=None,
  *,
  scale: float | None = None,
  cap: float | None = None,
):
  """Attention over a completion's own tokens and its group's prompt.

  softmax over the union of both key sets equals the two separate softmaxes
  mixed by the sigmoid of the difference of their log-sum-exps, so the prompt's
  keys are never copied to the samples.

  Args:
    q: queries [B, G, K, R, S, E].
    own: keys and values, each [B, G, K, C, E].
    own_mask: broadcastable to [B, G, K, R, S, C]; at least one True in a row.
    prompt: keys and values, each [B, K, P, E], or None for no prompt part.
    prompt_mask: [B, P], True on real prompt tokens, or [B, G, S, P] where each
      query sees other ones; a row without any True takes nothing from there.
    scale: of the logits; default 1 / sqrt(E).
    cap: the logits are soft-capped at +-cap, before they are masked.

  Returns:
    Attention output [B, G, K, R, S, E].
  """
  scale = q.shape[-1] ** -0.5 if scale is None else scale

  def attend(scores, sums, keys, values, mask):
    logits = soft_cap(_scores(scores, q, keys) * scale, cap)
    weights, lse = _softmax_part(logits, mask)
    return jnp.einsum(sums, weights.astype(q.dtype), values), lse

  out, lse = attend(
    "bgkrse,bgkce->bgkrsc", "bgkrsc,bgkce->bgkrse", *own, own_mask
  )
  if prompt is None:
    return out
  if prompt_mask.ndim == 2:
    prompt_mask = prompt_mask[:, None, None]
  mask = prompt_mask[:, :, None, None]
  prompt_out, prompt_lse = attend(
    "bgkrse,bkpe->bgkrsp", "bgkrsp,bkpe->bgkrse", *prompt, mask
  )
  share = jax.nn.sigmoid(prompt_lse - lse).astype(q.dtype)
  return out + share * (prompt_out - out)
