"""Merged and squeezed axes on CPUs, and the programs that XLA makes of them."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from small_models import normal as normal_of

from grpojax.core.logprobs import token_logprobs
from grpojax.models import lora
from grpojax.models.attention import rms_norm, two_part_attention
from grpojax.models.config import TransformerConfig
from grpojax.models.cpu import float32_einsum, matmul
from grpojax.models.transformer import transformer

SIZES = dict(b=2, g=3, k=2, r=2, s=5, e=4, c=7, p=6)
RNG = np.random.default_rng(0)


def normal(axes):
  return normal_of(RNG, *[SIZES[axis] for axis in axes])


def merges(function, *args):
  return "platform_index" in str(jax.make_jaxpr(function)(*args))


@pytest.mark.slow
@pytest.mark.parametrize(
  "product, merged",
  [
    ("bgkrse,bgkce->bgkrsc", "2x3x2x10x4"),  # r and s are merged
    ("bkgrse,bkpe->bkgrsp", "2x2x30x4"),  # g, r and s
    ("bgkrse,bkpe->bgkrsp", None),  # k is between g and r
    ("bgrse,bgpe->bgsrp", None),  # in another order
    ("bgke,bgkce->bgkc", None),  # no axis
    ("bgse,bgce->bgsc", None),  # a single axis
  ],
)
def test_products_with_merged_axes(product, merged):
  """Against NumPy's einsum, with both gradients."""
  x_axes, y_axes, out = product.replace("->", ",").split(",")
  x, y, toward = map(normal, (x_axes, y_axes, out))
  function = lambda *args: float32_einsum(product, *args)
  z, pull = jax.vjp(function, x, y)
  dx, dy = pull(toward)
  close = dict(rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(z, np.einsum(product, x, y), **close)
  expected = np.einsum(f"{out},{y_axes}->{x_axes}", toward, y)
  np.testing.assert_allclose(dx, expected, **close)
  expected = np.einsum(f"{out},{x_axes}->{y_axes}", toward, x)
  np.testing.assert_allclose(dy, expected, **close)
  assert merges(function, x, y) == (merged is not None)
  text = jax.jit(function).lower(x, y).as_text()
  factors = re.findall(r"dot_general .* : \(tensor<(.*?)x?f32>", text)
  assert factors == [merged] or merged is None


@pytest.mark.parametrize(
  "axis, size, kind, merged",
  [
    ("data", 1, AxisType.Auto, True),
    ("data", 1, AxisType.Explicit, False),  # part of an array's type
    ("data", 2, AxisType.Auto, True),  # splits the two prompts
    ("data", 3, AxisType.Auto, False),  # splits the samples
    ("tensor", 2, AxisType.Auto, False),
    ("data", 2, AxisType.Explicit, False),
    ("data", 2, AxisType.Manual, True),
  ],
)
def test_axes_split_by_a_mesh_are_not_merged(axis, size, kind, merged):
  x = jnp.ones((2, 3, 5, 4))
  w = jnp.ones((4, 6))
  q = normal("bkgrse")
  keys = normal("bkpe")
  mesh = AbstractMesh((size,), (axis,), axis_types=(kind,))
  with jax.sharding.use_abstract_mesh(mesh):
    assert merges(matmul, x, w) == merged
    einsum = lambda *args: float32_einsum("bkgrse,bkpe->bkgrsp", *args)
    assert merges(einsum, q, keys) == merged


def test_decoding_does_not_merge_axes():
  assert not merges(matmul, jnp.ones((2, 3, 1, 4)), jnp.ones((4, 6)))
  einsum = lambda *args: float32_einsum("bgkrse,bgkce->bgkrsc", *args)
  assert not merges(einsum, jnp.ones((2, 3, 2, 2, 1, 4)), normal("bgkce"))


WIDTH = 24
MLP = 37
VOCAB = 61
NEW = 13
PROMPT = 7
DEEP = TransformerConfig(VOCAB, WIDTH, 9, 4, 2, 8, MLP)
SCANNED = transformer(DEEP, remat="attention")


def compiled_gradient(lm, params, base=None, **options):
  ids = jax.ShapeDtypeStruct((2, 3, NEW), jnp.int32)
  prompts = jax.ShapeDtypeStruct((2, PROMPT), jnp.int32)

  def total(params, base, prompts, ids):
    model = lm if base is None else lora.adapt(lm, base, 1.0)
    batch = prompts, jnp.ones(prompts.shape, bool), ids
    return jnp.sum(token_logprobs(model, params, *batch, **options)[0])

  gradient = jax.jit(jax.grad(total))
  return gradient.lower(params, base, prompts, ids).compile().as_text()


def shapes_of(operation, text):
  shapes = re.findall(rf"= f32\[([\d,]*)\]\S* {operation}\(", text)
  return [tuple(map(int, shape.split(","))) for shape in shapes if shape]


def abstract(lm):
  return jax.eval_shape(lm.init, jax.random.key(0))


def products(*args, **options):
  """Counts the matrix products of an update's gradient by their shapes."""
  text = compiled_gradient(*args, **options)
  return collections.Counter(shapes_of("dot", text))


@pytest.mark.slow
def test_the_gradient_transposes_no_large_array():
  """XLA would compute such arrays twice, a quarter of an update's time."""
  lm = transformer(dataclasses.replace(DEEP, layers=2))
  shapes = shapes_of("transpose", compiled_gradient(lm, abstract(lm)))
  assert shapes  # of queries, keys and values
  for shape in shapes:
    assert not {VOCAB, MLP} & set(shape), shape
    tokens = [n for n in shape if n % NEW == 0 or n % PROMPT == 0]
    assert len(tokens) < 2, shape


@pytest.mark.slow
def test_no_product_is_computed_again():
  rows = 2 * 3 * NEW
  params = abstract(SCANNED)
  counts = products(SCANNED, params, chunk_size=rows)
  assert counts[rows, MLP] == counts[2 * PROMPT, MLP] == 3
  assert counts[rows, VOCAB] == 1
  # In several chunks logits are computed again.
  size = 2 * 3 * 7
  assert products(SCANNED, params, chunk_size=size)[size, VOCAB] == 2


@pytest.mark.slow
def test_no_gradient_of_a_frozen_matrix_is_computed():
  base = abstract(SCANNED)
  adapters = lora.abstract(base, 5, "layers/(q|k|v|o|gate|up|down)")
  counts = products(SCANNED, adapters, base)
  layers = {x.shape[1:] for x in base["layers"].values()}
  frozen = {*layers, (VOCAB, WIDTH), (WIDTH, VOCAB)}
  assert not frozen & {*counts}
  assert counts[WIDTH, 5] and counts[5, MLP]  # of adapters


def sums(function, *args):
  """Returns the shapes of sums in the compiled gradient of a function."""

  def gradient(*args):
    y, pull = jax.vjp(function, *args)
    return pull(y)

  text = jax.jit(gradient).lower(*args).compile().as_text()
  return set(shapes_of("reduce", text))


def test_norms_and_softmax_are_summed_without_axes_of_size_1():
  """With them, XLA's CPU code takes up to ten times as long."""
  norm = lambda x, scale: rms_norm(x, scale, 1e-6)
  shapes = sums(norm, jnp.ones((1, 4, 16, 32)), jnp.ones(32))
  assert (4, 16) in shapes and (1, 4, 16) not in shapes
  assert (32,) in shapes
  b = 3
  k = 2
  r = 2
  s = 8
  e = 4
  p = 5
  row = jnp.ones((b, 1, k, s, e))
  prompt = jnp.ones((b, k, p, e))
  mask = jnp.tril(jnp.ones((s, s), bool))
  prompt_mask = jnp.ones((b, p), bool)

  def attention(q, row, prompt):
    return two_part_attention(q, (row,) * 2, mask, (prompt,) * 2, prompt_mask)

  shapes = sums(attention, jnp.ones((b, 1, k, r, s, e)), row, prompt)
  assert (b, k, r, s) in shapes
  assert not any(1 in shape[:3] for shape in shapes), shapes
