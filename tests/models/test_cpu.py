"""Axes that are merged or left out on CPUs, and the programs XLA makes then."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from grpojax.core.logprobs import token_logprobs
from grpojax.models import lora
from grpojax.models.attention import rms_norm, two_part_attention
from grpojax.models.config import TransformerConfig
from grpojax.models.cpu import float32_einsum, matmul
from grpojax.models.transformer import transformer

SIZES = dict(b=2, g=3, k=2, r=2, s=5, e=4, c=7, p=6)
RNG = np.random.default_rng(0)


def normal(axes):
  shape = [SIZES[axis] for axis in axes]
  return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
  "product, merged",
  [
    ("bgkrse,bgkce->bgkrsc", "2x3x2x10x4"),  # r and s are one axis
    ("bkgrse,bkpe->bkgrsp", "2x2x30x4"),  # g, r and s
    ("bgkrse,bkpe->bgkrsp", None),  # k is between g and r
    ("bgrse,bgpe->bgsrp", None),  # in another order
    ("bgke,bgkce->bgkc", None),  # there is none
    ("bgse,bgce->bgsc", None),  # there is one
  ],
)
def test_products_with_merged_axes(product, merged):
  """Against NumPy's einsum, with both gradients."""
  of_x, of_y, out = product.replace("->", ",").split(",")
  x, y, toward = map(normal, (of_x, of_y, out))
  function = lambda *args: float32_einsum(product, *args)
  z, pull = jax.vjp(function, x, y)
  dx, dy = pull(toward)
  close = dict(rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(z, np.einsum(product, x, y), **close)
  np.testing.assert_allclose(
    dx, np.einsum(f"{out},{of_y}->{of_x}", toward, y), **close
  )
  np.testing.assert_allclose(
    dy, np.einsum(f"{out},{of_x}->{of_y}", toward, x), **close
  )
  assert merges(function, x, y) == (merged is not None)
  text = jax.jit(function).lower(x, y).as_text()
  factors = re.findall(r"dot_general .* : \(tensor<(.*?)x?f32>", text)
  assert factors == [merged] or merged is None


def merges(function, *args):
  """Returns True where a function would merge axes on a CPU."""
  return "platform_index" in str(jax.make_jaxpr(function)(*args))


@pytest.mark.parametrize(
  "axis, size, kind, merged",
  [
    ("data", 1, AxisType.Auto, True),
    ("data", 1, AxisType.Explicit, False),  # of an array's type at any size
    ("data", 2, AxisType.Auto, True),  # cuts the two prompts, outermost
    ("data", 3, AxisType.Auto, False),  # cuts the samples of each
    ("tensor", 2, AxisType.Auto, False),
    ("data", 2, AxisType.Explicit, False),
    ("data", 2, AxisType.Manual, True),
  ],
)
def test_what_a_mesh_cuts_keeps_its_axes(axis, size, kind, merged):
  """Merged, samples that are cut would leave their devices."""
  x, w = jnp.ones((2, 3, 5, 4)), jnp.ones((4, 6))
  q, keys = normal("bkgrse"), normal("bkpe")
  mesh = AbstractMesh((size,), (axis,), axis_types=(kind,))
  with jax.sharding.use_abstract_mesh(mesh):
    assert merges(matmul, x, w) == merged
    einsum = lambda *args: float32_einsum("bkgrse,bkpe->bkgrsp", *args)
    assert merges(einsum, q, keys) == merged


def test_one_token():
  """Without an axis of tokens, as in code that is vmapped over them."""
  x, w = normal("e"), normal("ep")
  want = np.asarray(x) @ np.asarray(w)
  np.testing.assert_allclose(matmul(x, w), want, rtol=1e-6)
  rows = jax.vmap(matmul, (0, None))(jnp.stack([x, 2 * x]), w)
  np.testing.assert_allclose(rows, [want, 2 * want], rtol=1e-6)


def test_next_tokens_keep_the_axes_of_their_rows():
  """Decoding takes no gradient, and would be traced twice."""
  assert not merges(matmul, jnp.ones((2, 3, 1, 4)), jnp.ones((4, 6)))
  einsum = lambda *args: float32_einsum("bgkrse,bgkce->bgkrsc", *args)
  assert not merges(einsum, jnp.ones((2, 3, 2, 2, 1, 4)), normal("bgkce"))


@pytest.mark.slow
def test_the_gradient_copies_no_large_array_in_another_order():
  """Logits, weights of attention or the MLP's inner values.

  XLA fuses such a copy with what it copies, which it then computes twice, once
  of them in an order that is bad for caches: a quarter of an update's time.
  """
  vocab, mlp, new, prompt = 61, 37, 13, 7
  config = TransformerConfig(vocab, 24, 2, 4, 2, 8, mlp)
  lm = transformer(config)
  params = jax.eval_shape(lm.init, jax.random.key(0))
  ids = jax.ShapeDtypeStruct((2, 3, new), jnp.int32)
  prompts = jax.ShapeDtypeStruct((2, prompt), jnp.int32)

  def total(params, prompts, ids):
    mask = jnp.ones(prompts.shape, bool)
    return jnp.sum(token_logprobs(lm, params, prompts, mask, ids)[0])

  compiled = jax.jit(jax.grad(total)).lower(params, prompts, ids).compile()
  shapes = re.findall(r" = f32\[([\d,]*)\]\S* transpose\(", compiled.as_text())
  assert shapes  # of queries, keys and values: heads come before tokens
  for shape in shapes:
    axes = [int(n) for n in shape.split(",")]
    assert not {vocab, mlp} & set(axes), shape
    of_tokens = [n for n in axes if n % new == 0 or n % prompt == 0]
    assert len(of_tokens) < 2, shape


WIDTH, MLP, VOCAB = 24, 37, 61


@pytest.fixture(scope="module")
def deep():
  """A model whose layers are scanned, and its parameters' shapes."""
  config = TransformerConfig(VOCAB, WIDTH, 9, 4, 2, 8, MLP)
  lm = transformer(config, remat="attention")
  return lm, jax.eval_shape(lm.init, jax.random.key(0))


def products(lm, params, base=None, **options):
  """Counts the matrix products of an update's gradient by their shapes."""
  ids = jax.ShapeDtypeStruct((2, 3, 13), jnp.int32)
  prompts = jax.ShapeDtypeStruct((2, 7), jnp.int32)

  def total(params, base, prompts, ids):
    model = lm if base is None else lora.adapt(lm, base, 1.0)
    mask = jnp.ones(prompts.shape, bool)
    return jnp.sum(
      token_logprobs(model, params, prompts, mask, ids, **options)[0]
    )

  compiled = (
    jax.jit(jax.grad(total)).lower(params, base, prompts, ids).compile()
  )
  shapes = re.findall(r" = f32\[([\d,]*)\]\S* dot\(", compiled.as_text())
  return collections.Counter(tuple(map(int, x.split(","))) for x in shapes)


@pytest.mark.slow
def test_no_product_is_computed_again(deep):
  """Neither an MLP's nor, where they are one chunk, that of the logits."""
  rows = 2 * 3 * 13
  found = products(*deep, chunk_size=rows)
  # Gate and up, and once more by what becomes of them.
  assert found[rows, MLP] == found[2 * 7, MLP] == 3
  assert found[rows, VOCAB] == 1
  # In several chunks logits are computed again.
  assert products(*deep, chunk_size=2 * 3 * 7)[2 * 3 * 7, VOCAB] == 2


@pytest.mark.slow
def test_no_gradient_of_a_frozen_matrix_is_computed(deep):
  lm, base = deep
  adapters = lora.abstract(base, 5, "layers/(q|k|v|o|gate|up|down)")
  found = products(lm, adapters, base)
  of_layers = {x.shape[1:] for x in base["layers"].values()}
  frozen = {*of_layers, (VOCAB, WIDTH), (WIDTH, VOCAB)}
  assert not frozen & {*found}
  assert found[WIDTH, 5] and found[5, MLP]  # those of adapters are


def sums(function, *args):
  """Returns the shapes that the gradient of a function sums to, compiled."""

  def gradient(*args):
    y, pull = jax.vjp(function, *args)
    return pull(y)

  text = jax.jit(gradient).lower(*args).compile().as_text()
  shapes = re.findall(r"= f32\[([\d,]*)\]\S* reduce\(", text)
  return {tuple(map(int, shape.split(","))) for shape in shapes if shape}


def test_norms_and_softmax_are_summed_without_axes_of_size_1():
  """With them, XLA's CPU code takes up to ten times as long."""
  norm = lambda x, scale: rms_norm(x, scale, 1e-6)
  shapes = sums(norm, jnp.ones((1, 4, 16, 32)), jnp.ones(32))
  assert (4, 16) in shapes and (1, 4, 16) not in shapes
  assert (32,) in shapes
  b, k, r, s, e, p = 3, 2, 2, 8, 4, 5
  row, prompt = jnp.ones((b, 1, k, s, e)), jnp.ones((b, k, p, e))
  mask, prompt_mask = jnp.tril(jnp.ones((s, s), bool)), jnp.ones((b, p), bool)

  def attention(q, row, prompt):
    keys, of_prompt = (row, row), (prompt, prompt)
    return two_part_attention(q, keys, mask, of_prompt, prompt_mask)

  shapes = sums(attention, jnp.ones((b, 1, k, r, s, e)), row, prompt)
  assert (b, k, r, s) in shapes
  assert not any(1 in shape[:3] for shape in shapes), shapes
