"""Attention in blocks of queries: the same numbers, less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.aot import hlo
from grpojax.models.attention import causal_attention

B, G, K, R, P, E = 2, 3, 2, 2, 5, 4
RNG = np.random.default_rng(0)


def normal(*shape):
  return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def by_definition(q, row, mask, prompt, prompt_mask, scale, cap):
  """One softmax over the prompt's keys and the row's, in float64."""
  q, *arrays = (np.asarray(x, np.float64) for x in (q, *row, *prompt))
  keys, values, prompt_keys, prompt_values = arrays

  def logits(x, spec):
    x = np.einsum(spec, q, x) * scale
    return cap * np.tanh(x / cap)

  own = logits(keys, "bgkrse,bgkce->bgkrsc")
  of_prompt = logits(prompt_keys, "bgkrse,bkpe->bgkrsp")
  own = np.where(mask, own, -np.inf)
  of_prompt = np.where(prompt_mask[:, :, None, None], of_prompt, -np.inf)
  both = np.concatenate([of_prompt, own], -1)
  weights = np.exp(both - both.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  p = of_prompt.shape[-1]
  return np.einsum(
    "bgkrsp,bkpe->bgkrse", weights[..., :p], prompt_values
  ) + np.einsum("bgkrsc,bgkce->bgkrse", weights[..., p:], values)


def masks(size, window, segments):
  """Of row keys and prompt keys: [B, G, 1, 1, S, S] and [B, G, S, P]."""
  at = np.arange(size)
  distance = at[:, None] - at
  mask = (distance >= 0) & (distance < window)
  mask = np.broadcast_to(mask, (B, G, 1, 1, size, size))
  if segments:
    ids = at // 4 + RNG.integers(2, size=(B, G, 1))
    same = ids[..., :, None] == ids[..., None, :]
    mask = mask & same[:, :, None, None]
  lengths = np.array([P, P - 2])[:, None, None, None]
  near = (lengths + at[:, None] - np.arange(P)) < window
  return mask, np.broadcast_to(near & (np.arange(P) < lengths), (B, G, size, P))


@pytest.mark.parametrize(
  "size, block, window, segments",
  [(11, 4, 99, False), (11, 4, 3, True), (9, 8, 4, False), (8, 4, 99, True)],
)
def test_blocks_change_nothing(size, block, window, segments):
  q = normal(B, G, K, R, size, E)
  row = normal(B, G, K, size, E), normal(B, G, K, size, E)
  prompt = normal(B, K, P, E), normal(B, K, P, E)
  mask, prompt_mask = masks(size, window, segments)
  toward = normal(*q.shape)

  def attend(block):
    def out(q, row, prompt):
      return causal_attention(
        q,
        row,
        jnp.asarray(mask),
        prompt,
        jnp.asarray(prompt_mask),
        block=block,
        scale=0.7,
        cap=2.0,
      )

    value, pull = jax.vjp(out, q, row, prompt)
    return value, pull(toward)

  value, gradients = jax.jit(attend, static_argnums=0)(block)
  expected = by_definition(q, row, mask, prompt, prompt_mask, 0.7, 2.0)
  np.testing.assert_allclose(value, expected, atol=1e-5)
  _, whole = jax.jit(attend, static_argnums=0)(size)
  for a, b in zip(*map(jax.tree.leaves, (gradients, whole)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("without_prompt", [True, False])
def test_no_array_is_as_large_as_the_logits_of_all_queries(without_prompt):
  """T = 1024 in blocks of 256, forwards and backwards."""
  size, p = 1024, 64
  shape = jax.ShapeDtypeStruct
  q = shape((1, 1, 1, 2, size, 16), jnp.bfloat16)
  row = (shape((1, 1, 1, size, 16), jnp.bfloat16),) * 2
  prompt = (shape((1, 1, p, 16), jnp.bfloat16),) * 2
  prompt_mask = shape((1, p), bool)

  def loss(q, row, prompt, prompt_mask):
    mask = jnp.tril(jnp.ones((size, size), bool))
    if without_prompt:
      prompt = prompt_mask = None
    out = causal_attention(q, row, mask, prompt, prompt_mask)
    return jnp.sum(out.astype(jnp.float32) ** 2)

  gradient = jax.jit(jax.grad(loss, (0, 1)))
  text = gradient.lower(q, row, prompt, prompt_mask).compile().as_text()
  shapes = {
    shape
    for computation in hlo.parse(text).computations.values()
    for i in computation.instructions.values()
    for shape in i.shapes
    if shape.dtype in ("f32", "bf16")
  }
  assert max(s.elements for s in shapes) == 2 * 256 * size
