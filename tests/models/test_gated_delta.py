"""Layers of gated delta networks against plain loops and transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import assert_close, normal

from grpojax.models import gated_delta
from grpojax.models.gated_delta import Tokens

RNG = np.random.default_rng(0)
B, G, H, K, V = 2, 2, 3, 4, 5


def tokens_of(s, decay=1.0):
  """Draws tokens with long and short decays and nearly equal keys."""
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  q = unit(RNG.normal(size=(B, G, s, H, K))) * K**-0.5
  k = unit(RNG.normal(size=(B, G, s, H, K)) * 0.3 + 1)
  v = RNG.normal(size=(B, G, s, H, V))
  g = -decay * RNG.exponential(size=(B, G, s, H)) ** 3
  beta = 1 / (1 + np.exp(-RNG.normal(size=(B, G, s, H)) - 1))
  return Tokens(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)))


def plain_loop(tokens, initial, restarts=None):
  """Applies the recurrence in float64."""
  q, k, v, g, beta = (np.float64(x) for x in tokens[:5])
  memory = np.float64(initial)
  outputs = []
  for t in range(g.shape[2]):
    if restarts is not None:
      again = restarts[:, :, t, :, None, None]
      memory = np.where(again, initial, memory)
    memory = np.exp(g[:, :, t])[..., None, None] * memory
    stored = np.einsum("bghkv,bghk->bghv", memory, k[:, :, t])
    update = beta[:, :, t, :, None] * (v[:, :, t] - stored)
    memory = memory + k[:, :, t, :, :, None] * update[:, :, :, None]
    outputs.append(np.einsum("bghkv,bghk->bghv", memory, q[:, :, t]))
  return np.stack(outputs, axis=2), memory


@pytest.mark.parametrize("size", [1, 5, 64, 150])
@pytest.mark.parametrize("decay", [0.01, 50.0])
def test_chunks_agree_with_a_loop(size, decay):
  tokens = tokens_of(size, decay)
  initial = normal(RNG, B, G, H, K, V)
  got = jax.jit(gated_delta.scan)(tokens, initial)
  assert_close(got, plain_loop(tokens, initial), atol=3e-6, rtol=1e-5)


def test_steps_agree_with_a_loop():
  tokens = tokens_of(6)
  memory = normal(RNG, B, G, H, K, V)
  want = plain_loop(tokens, memory)
  outputs = []
  for t in range(6):
    part = Tokens(*(x[:, :, t : t + 1] for x in tokens[:5]))
    out, update = gated_delta.step(part, memory)
    memory = gated_delta.updated(memory, update)
    outputs.append(out)
  got = np.concatenate(outputs, axis=2), memory
  assert_close(got, want, atol=3e-6, rtol=1e-5)


def test_rows_begin_again_in_a_packed_row():
  tokens = tokens_of(150, 0.1)
  initial = normal(RNG, B, G, H, K, V)
  restarts = RNG.random((B, G, 150, 1)) < 0.05
  got = jax.jit(gated_delta.scan)(tokens._replace(restarts=restarts), initial)
  want = plain_loop(tokens, initial, restarts)
  assert_close(got, want, atol=3e-6, rtol=1e-5)


def test_gradients_of_chunks_are_those_of_steps():
  tokens = tokens_of(70)
  initial = normal(RNG, B, G, H, K, V)
  weight = normal(RNG, B, G, 70, H, V)

  def in_steps(tokens, memory):
    moved = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0)[:, :, :, None], tokens)

    def body(memory, token):
      out, update = gated_delta.step(token, memory)
      return gated_delta.updated(memory, update), out[:, :, 0]

    memory, out = jax.lax.scan(body, memory, moved)
    return jnp.moveaxis(out, 0, 2), memory

  def gradient(run):
    def total(tokens, initial):
      out, memory = run(tokens, initial)
      return jnp.sum(weight * out) + jnp.sum(jnp.sin(memory))

    return jax.jit(jax.grad(total, (0, 1)))(tokens, initial)

  got, want = gradient(gated_delta.scan), gradient(in_steps)
  for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * (1 + np.abs(b).max()))


def test_inverse_of_equal_keys_is_exact():
  """A product of powers would lose all digits here."""
  a = np.tril(np.ones((64, 64), np.float32), -1)
  want = np.eye(64) - np.eye(64, k=-1)
  np.testing.assert_array_equal(gated_delta.inverse(jnp.asarray(a)), want)


def test_scan_and_convolution_agree_with_transformers():
  torch = pytest.importorskip("torch")
  qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
  tokens = tokens_of(100, 0.1)  # its sums are inexact after strong decays
  rows = lambda x: torch.tensor(np.asarray(x).reshape(B * G, *x.shape[2:]))
  initial = normal(RNG, B, G, H, K, V)
  out, memory = gated_delta.scan(tokens, initial)
  q, *others = map(rows, tokens[:5])
  function = getattr(qwen.torch_chunk_gated_delta_rule, "__wrapped__", None)
  function = function or qwen.torch_chunk_gated_delta_rule
  options = dict(initial_state=rows(initial), output_final_state=True)
  want_out, want_memory = function(q * K**0.5, *others, **options)
  np.testing.assert_allclose(rows(out), want_out, atol=1e-5)
  np.testing.assert_allclose(rows(memory), want_memory, atol=1e-5)


def test_convolution_of_parts_equals_the_whole():
  x, weight = normal(RNG, B, G, 9, 6), normal(RNG, 6, 4)
  zero = jnp.zeros((B, G, 3, 6))
  whole = gated_delta.convolve(x, weight, zero, jnp.arange(9))
  padded = np.pad(x, [(0, 0), (0, 0), (3, 0), (0, 0)])
  want = sum(padded[:, :, i : i + 9] * weight[:, i] for i in range(4))
  np.testing.assert_allclose(whole, want, atol=1e-6)
  # The first rows have two tokens, and then padding.
  count = jnp.array([[2, 2], [5, 5]])
  before = gated_delta.last_inputs(x, zero, count)
  for b, n in enumerate((2, 5)):
    rest = x[b : b + 1, :, n:]
    args = weight, before[b : b + 1], jnp.arange(9 - n)
    got = gated_delta.convolve(rest, *args)
    np.testing.assert_allclose(got, whole[b : b + 1, :, n:], atol=1e-6)
