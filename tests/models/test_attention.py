"""Plain attention, attention in blocks and by kernels."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import assert_close, config_with
from small_models import normal as normal_of

from grpojax.core.logprobs import logprobs_and_load
from grpojax.core.types import Tokens
from grpojax.models import block_attention as block_lib
from grpojax.models import contexts
from grpojax.models import kernel_attention as kernel_lib
from grpojax.models.attention import Visibility, two_part_attention
from grpojax.models.block_attention import BLOCK, block_attention
from grpojax.models.cache import KeysValues, PromptKeysValues
from grpojax.models.kernel_attention import kernel_attention
from grpojax.models.transformer import transformer

B = 2
G = 3
K = 2
R = 2
P = 5
E = 4
RNG = np.random.default_rng(0)
normal = functools.partial(normal_of, RNG)
on_cpu = functools.partial(kernel_attention, platform="cpu")


def by_definition(q, row, mask, prompt, prompt_mask, scale, cap):
  """A softmax over the keys of prompt and row, in float64."""
  q, *arrays = (np.asarray(x, np.float64) for x in (q, *row, *prompt))
  keys, values, prompt_keys, prompt_values = arrays

  def logits(x, spec):
    x = np.einsum(spec, q, x) * scale
    return cap * np.tanh(x / cap)

  row_logits = logits(keys, "bgkrse,bgkce->bgkrsc")
  row_logits = np.where(mask, row_logits, -np.inf)
  prompt_logits = logits(prompt_keys, "bgkrse,bkpe->bgkrsp")
  seen = prompt_mask[:, :, None, None]
  prompt_logits = np.where(seen, prompt_logits, -np.inf)
  both = np.concatenate([prompt_logits, row_logits], -1)
  weights = np.exp(both - both.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  p = prompt_logits.shape[-1]
  return np.einsum(
    "bgkrsp,bkpe->bgkrse", weights[..., :p], prompt_values
  ) + np.einsum("bgkrsc,bgkce->bgkrse", weights[..., p:], values)


def case(size, window, segments, dtype=jnp.float32, run=3, P=P):
  """Returns arrays, visibility and masks; the second prompt is shorter."""
  q = normal(B, G, K, R, size, E).astype(dtype)
  row = [normal(B, G, K, size, E).astype(dtype) for _ in "kv"]
  prompt = [normal(B, K, P, E).astype(dtype) for _ in "kv"]
  at = np.arange(size)
  lengths = np.array([P, P - 2])[:, None, None]
  ids = np.zeros((B, G, size), int)
  places = np.broadcast_to(at, ids.shape)
  if segments:  # not aligned with blocks
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


def at_once(mask, prompt_mask, **options):
  masks = jnp.asarray(mask), jnp.asarray(prompt_mask)

  def attend(q, row, prompt):
    return two_part_attention(q, row, masks[0], prompt, masks[1], **options)

  return attend


def gradients(function, arrays, toward):
  value, pull = jax.vjp(function, *arrays)
  return value, pull(toward.astype(value.dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
  "size, window, segments", [(9, 99, False), (11, 2, True)]
)
def test_plain_and_block_attention_equal_the_definition(size, window, segments):
  """A traced layer may be local or global."""
  arrays, visibility, *masks = case(size, window, segments)
  toward = normal(*arrays[0].shape)
  tangents = jax.tree.map(lambda x: normal(*x.shape), arrays)
  options = dict(scale=0.7, cap=2.0)

  def out(local, *arrays):
    seen = visibility._replace(local=local)
    return block_attention(*arrays, seen, window=2, block=4, **options)

  def derivatives(function):
    value, reverse = gradients(function, arrays, toward)
    along = jax.vmap(lambda c: jax.tree.map(lambda x: c * x, tangents))
    along = along(jnp.array([1.0, -2.0]))  # as in score_projections
    push = jax.vmap(lambda t: jax.jvp(function, arrays, t)[1])(along)
    return value, reverse, push

  run = jax.jit(lambda local: derivatives(functools.partial(out, local)))
  got = run(jnp.array(visibility.local))
  want = jax.jit(lambda: derivatives(at_once(*masks, **options)))()
  q, row, prompt = arrays
  expected = by_definition(q, row, masks[0], prompt, masks[1], 0.7, 2.0)
  for value in (got[0], want[0]):
    np.testing.assert_allclose(value, expected, atol=1e-5)
  assert_close(got, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  "size, prompt, window, run, cap",
  [
    (50, 40, 20, 21, 2.0),
    (50, 40, 99, 50, None),
    (7, 3, 99, 4, 2.0),
    (48, 16, 5, 48, None),
  ],
)
def test_kernels_equal_plain_attention(size, prompt, window, run, cap):
  """Blocks have 16 tokens; a traced layer may be local or global."""
  parts = case(size, window, run < size, run=run, P=prompt)
  arrays, visibility, *masks = parts
  toward = normal(*arrays[0].shape)

  def kernels(local, *arrays):
    seen = visibility._replace(local=local)
    return on_cpu(*arrays, seen, window=min(window, 20), cap=cap)

  run = lambda x: gradients(functools.partial(kernels, x), arrays, toward)
  got = jax.jit(run)(jnp.array(visibility.local))
  whole = at_once(*masks, cap=cap)
  expected = jax.jit(lambda: gradients(whole, arrays, toward))()
  assert_close(got, expected, atol=1e-5)


@pytest.mark.slow
def test_common_parts_of_keys_cancel_in_bfloat16():
  """Keys and values are around 8, which matters for the queries' gradient."""
  arrays, visibility, *masks = case(40, 99, False, jnp.bfloat16)
  q, row, prompt = arrays
  arrays = q, *jax.tree.map(lambda x: x + 8, (row, prompt))
  toward = jnp.cos(jnp.arange(q.size)).reshape(q.shape).astype(jnp.bfloat16)
  kernel = lambda *x: on_cpu(*x, visibility)
  whole = at_once(*masks)
  exact = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
  norm = lambda x: jnp.linalg.norm(x.astype(jnp.float32))
  sets = (gradients(f, arrays, toward)[1] for f in (kernel, whole))
  exact = gradients(whole, exact, toward)[1]
  leaves = map(jax.tree.leaves, (*sets, exact))
  for got, plain, x in zip(*leaves, strict=True):
    assert norm(got - x) < 2 * norm(plain - x) < 0.1 * norm(x)


@pytest.mark.slow
@pytest.mark.parametrize("platform, lowered", [("tpu", "tpu"), ("gpu", "cuda")])
@pytest.mark.parametrize("width, size", [(64, 1100), (96, 600), (256, 300)])
def test_lowered_programs_only_multiply_in_kernels(
  h100, platform, lowered, width, size
):
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
  keys = shape(1, 2, 2, size, width)
  prompt = shape(1, 2, 200, width)
  q = shape(1, 2, 2, 3, size, width)
  integers = jax.ShapeDtypeStruct((1, 2, size), jnp.int32)
  masks = integers, integers, jax.ShapeDtypeStruct((1, 200), bool)

  def run(q, row, prompt, masks, local):
    seen = Visibility(*masks, local)
    options = dict(platform=platform, window=70, cap=30.0)
    arrays = q, KeysValues(*row), PromptKeysValues(*prompt)
    kernels = lambda *x: kernel_attention(*x, seen, **options)
    return gradients(kernels, arrays, q)

  local = jax.ShapeDtypeStruct((), bool)
  traced = jax.jit(run).trace(q, [keys] * 2, [prompt] * 2, masks, local)
  text = traced.lower(lowering_platforms=(lowered,)).as_text()
  assert text.count("custom_call @") == 4
  assert "stablehlo.dot_general" not in text
  assert "stablehlo.while" not in text


def test_a_second_derivative_is_refused():
  (q, row, prompt), visibility, *_ = case(20, 99, False)
  squared = lambda q: jnp.sum(on_cpu(q, row, prompt, visibility) ** 2)
  slope = lambda q: jnp.sum(jax.grad(squared)(q))
  with pytest.raises(NotImplementedError, match="attention = blocks"):
    jax.eval_shape(jax.grad(slope), q)


@pytest.mark.slow
def test_block_attention_sums_bfloat16_in_float32():
  size = 512
  window = 999
  arrays, visibility, *_ = case(size, window, False, jnp.bfloat16)
  q, row, prompt = arrays
  prompt = prompt._replace(values=jnp.ones_like(prompt.values))

  def total(values):
    keys_values = KeysValues(row.keys, values)
    options = dict(scale=0.0, block=4)
    out = block_attention(q, keys_values, prompt, visibility, **options)
    return jnp.sum(out.astype(jnp.float32)), out

  run = jax.jit(jax.grad(total, has_aux=True))
  gradient, out = run(jnp.ones_like(row.values))
  assert out.dtype == gradient.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out, 1)
  # Uniform weights: with n keys of a prompt, key c gets 1 / (n + i + 1) of each
  # of the R queries i >= c.
  lengths = np.array([P, P - 2])[:, None]
  shares = np.cumsum(1 / (lengths + np.arange(size, 0, -1)), axis=-1)[:, ::-1]
  expected = np.broadcast_to(shares[:, None, None, :, None], gradient.shape) * R
  np.testing.assert_allclose(
    gradient.astype(np.float32), expected, rtol=2.0**-7
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "attention", [pytest.param("blocks", marks=pytest.mark.long), "kernel"]
)
def test_models_with_long_rows_equal_plain_ones(attention, monkeypatch):
  """With packed rows, local and global layers, values and gradients."""
  config = config_with(
    vocab_size=17,
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
  length = 140
  parts = np.array([90, 50])
  ids = jnp.asarray(RNG.integers(0, 17, (2, 2, length)))
  mask = jnp.arange(length) < jnp.array([[length], [131]])
  places = np.concatenate([np.arange(n) for n in parts])
  packed = Tokens(
    *(ids[:, 0], mask, ids),
    positions=jnp.broadcast_to(places, ids.shape),
    segments=jnp.broadcast_to(np.repeat(np.arange(2), parts), ids.shape),
  )

  def total(params):
    logprobs = logprobs_and_load(lm, params, packed).logprobs
    return jnp.sum(logprobs**2), logprobs

  def run():
    return jax.jit(jax.grad(total, has_aux=True))(params)

  assert contexts.WHOLE >= length
  whole = run()
  monkeypatch.setattr(contexts, "WHOLE", BLOCK)
  assert_close(run(), whole, rtol=1e-4, atol=1e-3)
  assert np.std(whole[1]) > 0.1 and spy.called


@pytest.mark.slow
def test_memory_at_8192_tokens_and_28_heads():
  """The backward pass holds a few arrays of the queries' size."""
  size = 8192
  heads = 4
  width = 64
  shape = jax.ShapeDtypeStruct
  q = shape((1, 1, heads, 7, size, width), jnp.bfloat16)
  row = KeysValues(*[shape((1, 1, heads, size, width), jnp.bfloat16)] * 2)
  prompt = PromptKeysValues(*[shape((1, heads, 64, width), jnp.bfloat16)] * 2)
  integers = shape((1, 1, size), jnp.int32)
  seen = integers, integers, shape((1, 64), bool), shape((), bool)

  def loss(q, row, prompt, seen):
    def layer(q, scale):  # a loop saves more for its derivative
      arrays = q * scale, row, prompt
      return block_attention(*arrays, Visibility(*seen), window=1024), None

    out, _ = jax.lax.scan(layer, q, jnp.ones(2, q.dtype))
    return jnp.sum(out.astype(jnp.float32) ** 2)

  gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
  compiled = gradient.lower(q, row, prompt, seen).compile()
  used = compiled.memory_analysis().temp_size_in_bytes
  # 28 x 8192^2 logits have 7.5e9 bytes.
  assert used < 6e8
