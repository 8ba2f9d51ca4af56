"""Kernels of a gated delta network: interpreted, and compiled for chips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.aot import topology
from grpojax.core.meshes import make_mesh
from grpojax.models import delta_kernels

L, B, G = 3, 2, 3
BEGINS = np.array([[True, False, False], [False, True, True]])


def arguments(heads, k, v):
  """Draws tokens, prompts' and rows' memories; unread memories are NaN."""
  rng = np.random.default_rng(k)
  normal = lambda *x: jnp.asarray(rng.normal(size=x), jnp.float32)
  each = B, G, heads
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  tokens = unit(normal(*each, k)), unit(normal(*each, k)), normal(*each, v)
  # A row without a token: no decay and no update.
  g = -jnp.abs(normal(*each)).at[1, 0].set(0)
  beta = jax.nn.sigmoid(normal(*each)).at[1, 0].set(0)
  memory = normal(L, *each, k, v).at[:, BEGINS].set(jnp.nan)
  return (*tokens, g, beta), BEGINS, normal(B, heads, k, v), memory


def expected(tokens, begins, prompt, memory):
  """Computes the recurrence in float64."""
  q, k, v, g, beta = (np.float64(x) for x in tokens)
  old = np.where(begins[..., None, None, None], prompt[:, None], memory[1])
  old = np.exp(g)[..., None, None] * np.float64(old)
  stored = np.einsum("bghkv,bghk->bghv", old, k)
  update = beta[..., None] * (v - stored)
  new = old + k[..., None] * update[..., None, :]
  return np.einsum("bghkv,bghk->bghv", new, q), new


def check(platform, sizes):
  args = arguments(*sizes)
  memory = args[-1]
  assert delta_kernels.serves(platform, memory)
  run = jax.jit(functools.partial(delta_kernels.step, platform))
  out, after = run(*args, jnp.int32(1))
  want, new = expected(*args)
  np.testing.assert_allclose(out, want, atol=1e-5)
  np.testing.assert_allclose(after[1], new, atol=1e-5)
  # A row that waits, and other layers, stay as they are.
  np.testing.assert_array_equal(after[1, 1, 0], memory[1, 1, 0])
  np.testing.assert_array_equal(after[::2], memory[::2])


@pytest.mark.parametrize(
  "platform, sizes",
  [
    ("gpu", (3, 4, 5)),
    ("gpu", (2, 96, 130)),
    ("tpu", (3, 128, 128)),
    ("tpu", (20, 128, 256)),  # two groups of heads
  ],
)
def test_a_step_equals_the_recurrence_in_float64(platform, sizes, interpreted):
  check(platform, sizes)


def test_served_widths():
  memory = lambda k, v: jax.ShapeDtypeStruct((1, 2, 2, 2, k, v), jnp.float32)
  assert delta_kernels.serves("gpu", memory(4, 5))
  assert delta_kernels.serves("tpu", memory(128, 256))
  assert not delta_kernels.serves("tpu", memory(64, 128))
  assert not delta_kernels.serves("tpu", memory(128, 64))
  assert not delta_kernels.serves("cpu", memory(128, 128))


def check_loop(platform, machine):
  """A loop over tokens and layers updates the memories in place."""
  mesh = make_mesh(tensor=2, devices=machine.devices[:2])
  *others, memory = arguments(32, 128, 128)

  def tokens(tokens, begins, prompt, memory):
    def layer(i, state):
      out, memory = state
      args = (*tokens[:2], out, *tokens[3:]), begins, prompt, memory, i
      return delta_kernels.step(platform, *args)

    token = lambda _, state: jax.lax.fori_loop(0, L, layer, state)
    return jax.lax.fori_loop(0, 9, token, (tokens[2], memory))

  with jax.set_mesh(mesh):
    spec = jax.sharding.PartitionSpec
    place = lambda x, *axes: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec(*axes))
    )
    rows, begins, prompt = others
    rows = tuple(place(x, None, None, "tensor") for x in rows)
    args = rows, place(begins), place(prompt, None, "tensor")
    memory = place(memory, None, None, None, "tensor")
    jitted = jax.jit(tokens, donate_argnums=3)
    return jitted.lower(*args, memory).compile(), memory


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1", "h100:2"])
def test_a_token_loop_does_not_copy_memories(chip, request):
  gpu = chip.startswith("h100")
  if gpu:
    request.getfixturevalue("h100")
    pytest.importorskip("jax_plugins.xla_cuda13")
  else:
    pytest.importorskip("libtpu")
  machine = topology.machine(chip)
  compiled, memory = check_loop("gpu" if gpu else "tpu", machine)
  size = memory.size * memory.dtype.itemsize // 2
  about = compiled.memory_analysis()
  assert about.alias_size_in_bytes >= size
  assert about.temp_size_in_bytes < size / 8
  assert "delta_step" in compiled.as_text()
