"""Attention at once, in blocks and by kernels: the same numbers; and norms."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from grpojax.core.logprobs import token_logprobs
from grpojax.models import block_attention as block_lib
from grpojax.models import kernel_attention as kernel_lib
from grpojax.models import passes
from grpojax.models.attention import rms_norm, two_part_attention
from grpojax.models.block_attention import BLOCK, Visibility, block_attention
from grpojax.models.cache import KeysValues, PromptKeysValues
from grpojax.models.config import TransformerConfig
from grpojax.models.kernel_attention import kernel_attention
from grpojax.models.transformer import transformer

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


def case(size, window, segments, dtype=jnp.float32, run=3, P=P):
  """Queries, keys and values; positions and segments; and the masks of these.

  The second prompt is shorter than the first.
  """
  q = normal(B, G, K, R, size, E).astype(dtype)
  row = [normal(B, G, K, size, E).astype(dtype) for _ in "kv"]
  prompt = [normal(B, K, P, E).astype(dtype) for _ in "kv"]
  at, lengths = np.arange(size), np.array([P, P - 2])[:, None, None]
  ids = np.zeros((B, G, size), int)
  places = np.broadcast_to(at, ids.shape)
  if segments:  # their borders lie elsewhere than those of blocks
    ids = np.broadcast_to(at // run, ids.shape)
    places = places % run
  positions = lengths + places
  distance = positions[..., None] - positions[..., None, :]
  same = ids[..., None] == ids[..., None, :]
  mask = same & (at[:, None] >= at) & (distance < window)
  near = positions[..., None] - np.arange(P) < window
  prompt_mask = np.arange(P) < lengths[..., 0]
  visibility = Visibility(
    jnp.asarray(positions),
    jnp.asarray(ids) if segments else None,
    jnp.asarray(prompt_mask),
    window < 99,
  )
  prompt_mask = near & prompt_mask[:, None, None]
  arrays = q, KeysValues(*row), PromptKeysValues(*prompt)
  return arrays, visibility, mask[:, :, None, None], prompt_mask


@pytest.mark.slow
@pytest.mark.parametrize(
  "size, block, window, segments",
  [
    pytest.param(9, 4, 99, False, marks=pytest.mark.slow),
    (11, 4, 2, True),
  ],
)
def test_blocks_change_nothing(size, block, window, segments):
  """Both against the definition in float64, and their derivatives."""
  arrays, visibility, mask, prompt_mask = case(size, window, segments)
  toward = normal(*arrays[0].shape)
  tangents = jax.tree.map(lambda x: normal(*x.shape), arrays)

  def out(*arrays):
    return block_attention(
      *arrays, visibility, window=window, block=block, scale=0.7, cap=2.0
    )

  def dense(q, row, prompt):
    masks = jnp.asarray(mask), prompt, jnp.asarray(prompt_mask)
    return two_part_attention(q, row, *masks, scale=0.7, cap=2.0)

  def derivatives(function):
    value, pull = jax.vjp(function, *arrays)
    along = jax.vmap(lambda c: jax.tree.map(lambda x: c * x, tangents))
    along = along(jnp.array([1.0, -2.0]))  # vmapped, as score_projections is
    push = jax.vmap(lambda t: jax.jvp(function, arrays, t)[1])(along)
    return value, pull(toward), push

  value, *got = jax.jit(lambda: derivatives(out))()
  q, row, prompt = arrays
  expected = by_definition(q, row, mask, prompt, prompt_mask, 0.7, 2.0)
  np.testing.assert_allclose(value, expected, atol=1e-5)
  dense_value, *whole = jax.jit(lambda: derivatives(dense))()
  np.testing.assert_allclose(dense_value, expected, atol=1e-5)
  for a, b in zip(*map(jax.tree.leaves, (got, whole)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  "size, prompt, window, run, cap",
  [
    (50, 40, 20, 21, 2.0),
    pytest.param(50, 40, 99, 50, None, marks=pytest.mark.slow),
    pytest.param(7, 3, 99, 4, 2.0, marks=pytest.mark.slow),
    pytest.param(48, 16, 5, 48, None, marks=pytest.mark.slow),
  ],
)
def test_kernels_compute_attention(size, prompt, window, run, cap):
  """Values and gradients, over several blocks of 16 tokens, by one softmax."""
  parts = case(size, window, run < size, run=run, P=prompt)
  arrays, visibility, mask, prompt_mask = parts
  toward = normal(*arrays[0].shape)

  def by_kernels(*arrays):
    return kernel_attention(
      *arrays, visibility, platform="cpu", window=window, cap=cap
    )

  def dense(q, row, prompt):
    masks = jnp.asarray(mask), prompt, jnp.asarray(prompt_mask)
    return two_part_attention(q, row, *masks, cap=cap)

  def gradients(function):
    value, pull = jax.vjp(function, *arrays)
    return value, pull(toward)

  got = jax.jit(lambda: gradients(by_kernels))()
  expected = jax.jit(lambda: gradients(dense))()
  for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.long
def test_kernels_without_prompts_or_segments_in_bfloat16():
  arrays, visibility, mask, _ = case(40, 99, False, jnp.bfloat16)
  q, row, _ = arrays
  toward = normal(*q.shape).astype(q.dtype)
  visibility = visibility._replace(prompt_mask=None)
  seen = jnp.asarray(mask)

  def gradients(function, *arrays):
    value, pull = jax.vjp(function, *arrays)
    return value, pull(toward.astype(value.dtype))

  kernel = lambda q, row: kernel_attention(
    q, row, None, visibility, platform="cpu"
  )
  got = gradients(kernel, q, row)
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), (q, row))
  expected = gradients(lambda q, row: two_part_attention(q, row, seen), *exact)
  for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
    assert a.dtype == jnp.bfloat16
    np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.05, rtol=0.02)


@pytest.mark.slow
def test_what_keys_have_in_common_cancels_in_bfloat16():
  """Gradients of queries, where keys and values lie around 8 and not 0."""
  arrays, visibility, mask, prompt_mask = case(40, 99, False, jnp.bfloat16)
  q, row, prompt = arrays
  row, prompt = jax.tree.map(lambda x: x + 8, (row, prompt))

  def kernel(*x):
    return kernel_attention(*x, visibility, platform="cpu")

  def gradient(function, *arrays):
    value, pull = jax.vjp(function, *arrays)
    weights = jnp.cos(jnp.arange(value.size)).reshape(value.shape)
    return pull(weights.astype(jnp.bfloat16).astype(value.dtype))[0]

  def whole(q, row, prompt):
    masks = jnp.asarray(mask), jnp.asarray(prompt_mask)
    return two_part_attention(q, row, masks[0], prompt, masks[1])

  exact = jax.tree.map(lambda x: x.astype(jnp.float32), (q, row, prompt))
  exact = gradient(whole, *exact)
  error, of_whole = (
    jnp.linalg.norm(gradient(f, q, row, prompt).astype(jnp.float32) - exact)
    for f in (kernel, whole)
  )
  assert error < 2 * of_whole


@pytest.mark.slow
@pytest.mark.parametrize("platform, lowered", [("tpu", "tpu"), ("gpu", "cuda")])
@pytest.mark.parametrize(
  "width, size",
  [
    (64, 1100),
    pytest.param(96, 600, marks=pytest.mark.slow),
    pytest.param(256, 300, marks=pytest.mark.slow),
  ],
)
def test_kernels_lower_for(h100, platform, lowered, width, size):
  """Four kernels with their operations, and nothing else is multiplied."""
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
  keys = shape(1, 2, 2, size, width)
  prompt = shape(1, 2, 200, width)
  q = shape(1, 2, 2, 3, size, width)
  integers = jax.ShapeDtypeStruct((1, 2, size), jnp.int32)
  masks = integers, integers, jax.ShapeDtypeStruct((1, 200), bool)

  def gradients(q, row, prompt, masks, local):
    positions, segments, prompt_mask = masks
    visibility = Visibility(positions, segments, prompt_mask, local)
    out, pull = jax.vjp(
      lambda *x: kernel_attention(
        *x, visibility, platform=platform, window=70, cap=30.0
      ),
      q,
      KeysValues(*row),
      PromptKeysValues(*prompt),
    )
    return out, pull(q)

  local = jax.ShapeDtypeStruct((), bool)
  traced = jax.jit(gradients).trace(q, [keys] * 2, [prompt] * 2, masks, local)
  text = traced.lower(lowering_platforms=(lowered,)).as_text()
  assert text.count("custom_call @") == 4
  assert "stablehlo.dot_general" not in text
  assert "stablehlo.while" not in text


def test_a_second_derivative_is_refused():
  (q, row, prompt), visibility, *_ = case(20, 99, False)

  def squared(q):
    out = kernel_attention(q, row, prompt, visibility, platform="cpu")
    return jnp.sum(out**2)

  slope = lambda q: jnp.sum(jax.grad(squared)(q))
  with pytest.raises(NotImplementedError, match="attention = blocks"):
    jax.eval_shape(jax.grad(slope), q)


@pytest.mark.slow
@pytest.mark.parametrize("local", [True, False])
def test_a_layer_may_be_local_or_not_at_run_time(local):
  """In a scan over layers of both kinds."""
  arrays, visibility, mask, prompt_mask = case(11, 3 if local else 99, False)

  def out(local, attention, **options):
    seen = visibility._replace(local=local)
    return attention(*arrays, seen, window=3, scale=1.0, cap=9.0, **options)

  q, row, prompt = arrays
  expected = by_definition(q, row, mask, prompt, prompt_mask, 1.0, 9.0)
  for attention, options in (
    (block_attention, {"block": 4}),
    (kernel_attention, {"platform": "cpu"}),
  ):
    run = jax.jit(functools.partial(out, attention=attention, **options))
    np.testing.assert_allclose(run(jnp.array(local)), expected, atol=1e-5)


@pytest.mark.slow
def test_bfloat16_is_summed_in_float32():
  """As exact as rounding the weights, and then the sum, leaves it."""
  size, window = 512, 999
  arrays, visibility, mask, _ = case(size, window, False, jnp.bfloat16)
  q, row, _ = arrays
  row = KeysValues(row.keys, jnp.ones_like(row.values))

  def total(values):
    out = block_attention(
      q, KeysValues(row.keys, values), None, visibility, scale=0.0, block=4
    )
    return jnp.sum(out.astype(jnp.float32)), out

  gradient, out = jax.jit(jax.grad(total, has_aux=True))(row.values)
  assert out.dtype == gradient.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out, 1)
  # Uniform weights: key c gets 1 / (i + 1) of each of the R queries i >= c.
  shares = np.cumsum(1 / np.arange(size, 0, -1))[::-1]
  expected = R * np.broadcast_to(shares[:, None], gradient.shape)
  np.testing.assert_allclose(
    gradient.astype(np.float32), expected, rtol=2.0**-7
  )


def test_bfloat16_with_prompts_in_blocks():
  """It runs: a CPU has not every product of 16-bit floats."""
  arrays, visibility, mask, prompt_mask = case(11, 99, False, jnp.bfloat16)
  out = jax.jit(
    lambda *arrays: block_attention(
      *arrays, visibility, block=4, scale=0.7, cap=2.0
    )
  )(*arrays)
  q, row, prompt = arrays
  expected = by_definition(q, row, mask, prompt, prompt_mask, 0.7, 2.0)
  np.testing.assert_allclose(out.astype(np.float32), expected, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
  "attention", [pytest.param("blocks", marks=pytest.mark.long), "kernel"]
)
def test_a_model_in_blocks_is_the_model_at_once(attention, monkeypatch):
  """Long prompts and packed rows, local and global layers, and the gradient."""
  config = TransformerConfig(
    vocab_size=17,
    width=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    mlp=8,
    local_layers=(True, False),
    window=70,  # shorter than a block
  )
  module = {"blocks": block_lib, "kernel": kernel_lib}[attention]
  name = f"{attention.removesuffix('s')}_attention"
  spy = mock.Mock(wraps=getattr(module, name))
  monkeypatch.setattr(module, name, spy)
  lm = transformer(config, attention=attention)
  params = jax.tree.map(lambda x: x * 4, lm.init(jax.random.key(0)))
  length, parts = 140, np.array([90, 50])
  ids = jnp.asarray(RNG.integers(0, 17, (2, 2, length)))
  mask = jnp.arange(length) < jnp.array([[length], [131]])
  segments = jnp.broadcast_to(np.repeat(np.arange(2), parts), ids.shape)
  places = np.concatenate([np.arange(n) for n in parts])

  def total(params):
    logprobs, _ = token_logprobs(
      lm,
      params,
      ids[:, 0],  # any prompts
      mask,
      ids,
      positions=jnp.broadcast_to(places, ids.shape),
      segments=segments,
    )
    return jnp.sum(logprobs**2), logprobs

  def run():
    return jax.jit(jax.grad(total, has_aux=True))(params)

  assert passes.WHOLE >= length
  whole = run()
  monkeypatch.setattr(passes, "WHOLE", BLOCK)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3),
    run(),
    whole,
  )
  assert np.std(whole[1]) > 0.1 and spy.called


@pytest.mark.slow
def test_memory_at_8192_tokens_and_28_heads():
  """The backward pass holds a few arrays as large as the queries."""
  size, heads, width = 8192, 4, 64
  shape = jax.ShapeDtypeStruct
  q = shape((1, 1, heads, 7, size, width), jnp.bfloat16)
  row = KeysValues(*[shape((1, 1, heads, size, width), jnp.bfloat16)] * 2)
  prompt = PromptKeysValues(*[shape((1, heads, 64, width), jnp.bfloat16)] * 2)
  visibility = Visibility(
    shape((1, 1, size), jnp.int32),
    shape((1, 1, size), jnp.int32),
    shape((1, 64), bool),
    shape((), bool),
  )

  def loss(q, row, prompt, visibility):
    def layer(q, scale):  # differentiated, a loop keeps more than its body
      return block_attention(
        q * scale, row, prompt, visibility, window=1024
      ), None

    out, _ = jax.lax.scan(layer, q, jnp.ones(2, q.dtype))
    return jnp.sum(out.astype(jnp.float32) ** 2)

  gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
  compiled = gradient.lower(q, row, prompt, visibility).compile()
  used = compiled.memory_analysis().temp_size_in_bytes
  # 28 x 8192^2 logits are 7.5e9 bytes, and their mask is 6.7e7 at the least.
  assert used < 6e8


@pytest.mark.parametrize("offset", [False, True])
def test_a_norm_and_its_gradients_by_their_formulas(offset):
  x, toward, scale = normal(2, 3, 5, 8), normal(2, 3, 5, 8), normal(8)
  norm = lambda x, scale: rms_norm(x, scale, 0.1, offset)
  y, pull = jax.vjp(norm, x, scale)
  dx, dscale = pull(toward)
  x, toward, scale = (np.asarray(a, np.float64) for a in (x, toward, scale))
  scale = scale + offset
  root = np.sqrt(np.mean(x * x, -1, keepdims=True) + 0.1)
  along = np.mean(toward * scale * x, -1, keepdims=True) / root**2
  close = dict(rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(y, x / root * scale, **close)
  np.testing.assert_allclose(dx, (toward * scale - x * along) / root, **close)
  np.testing.assert_allclose(
    dscale, (toward * x / root).sum((0, 1, 2)), **close
  )


@pytest.mark.slow
def test_a_norm_of_one_row_on_an_explicit_axis():
  """Its type says where it lies, and so does that of its gradient."""
  mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
  with jax.set_mesh(mesh):
    x = jax.device_put(
      normal(1, 2, 3, 4), NamedSharding(mesh, PartitionSpec("data"))
    )
    norm = lambda x: x + rms_norm(x, jnp.ones(4), 0.1)
    y, pull = jax.vjp(norm, x)
    assert jax.typeof(y) == jax.typeof(pull(y)[0]) == jax.typeof(x)
