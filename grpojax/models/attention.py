"""The parts of a decoder layer: norm, rotary positions, two-part attention."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_NEGATIVE = -1e30  # a finite stand-in for -inf: masked rows stay nan-free


def rms_norm(x, scale, eps):
  """X / sqrt(mean(x^2) + eps) * scale over the last axis, inside in float32."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return scale * y.astype(x.dtype)


def rope_tables(positions: Int[Array, "..."], dim: int, theta: float):
  """Cosines and sines [..., dim / 2] of the rotary angles."""
  frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
  angle = positions[..., None].astype(jnp.float32) * frequency
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "B G S h E"], rope) -> Float[Array, "B G S h E"]:
  """Rotates the two halves of each head by the angles of `rope_tables`."""
  cos, sin = (t[:, :, :, None].astype(x.dtype) for t in rope)
  x1, x2 = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


# Rounded to bfloat16, logits would differ between sampling and scoring.
_scores = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _softmax_part(logits, mask):
  """Softmax over one part's keys, and its log-sum-exp."""
  logits = jnp.where(mask, logits, _NEGATIVE)
  top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.exp(logits - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  return weights / total, top + jnp.log(total)


def two_part_attention(q, own, own_mask, prompt=None, prompt_mask=None):
  """Attention over a completion's own tokens and its group's prompt.

  softmax over the union of both key sets equals the two separate softmaxes
  mixed by the sigmoid of the difference of their log-sum-exps, so the prompt's
  keys are never copied to the samples.

  Args:
    q: queries [B, G, K, R, S, E].
    own: keys and values, each [B, G, K, C, E].
    own_mask: broadcastable to [B, G, K, R, S, C]; at least one True in a row.
    prompt: keys and values, each [B, K, P, E], or None for no prompt part.
    prompt_mask: [B, P], True on real prompt tokens.

  Returns:
    Attention output [B, G, K, R, S, E].
  """
  scale = q.shape[-1] ** -0.5
  keys, values = own
  logits = _scores("bgkrse,bgkce->bgkrsc", q, keys) * scale
  weights, lse = _softmax_part(logits, own_mask)
  out = jnp.einsum("bgkrsc,bgkce->bgkrse", weights.astype(q.dtype), values)
  if prompt is None:
    return out
  keys, values = prompt
  logits = _scores("bgkrse,bkpe->bgkrsp", q, keys) * scale
  mask = prompt_mask[:, None, None, None, None, :]
  weights, prompt_lse = _softmax_part(logits, mask)
  prompt_out = jnp.einsum(
    "bgkrsp,bkpe->bgkrse", weights.astype(q.dtype), values
  )
  share = jax.nn.sigmoid(prompt_lse - lse).astype(q.dtype)
  return out + share * (prompt_out - out)
