"""Kernels of decoding in rollouts, run by Pallas's interpreter.

Run as a program with eight devices, this file tests meshes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from small_models import (
  OTHER_FEATURES,
  config_with,
  prompts_of,
  run_python,
  sample,
)

from grpojax.core.decoding.sampling import Sampling, sample_parts, uniform
from grpojax.core.logprobs import token_logprobs
from grpojax.core.meshes import make_mesh
from grpojax.core.types import Prompts
from grpojax.models import decoding_kernels
from grpojax.models import transformer as transformer_lib
from grpojax.models.quantization import quantize
from grpojax.models.transformer import transformer

INTERPRETED = functools.partial(pl.pallas_call, interpret=True)
V = 700  # parts of 256, 256 and 188 tokens
D = 8
WIDTH = 256


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  monkeypatch.setattr(pl, "pallas_call", INTERPRETED)
  monkeypatch.setattr(decoding_kernels, "_width", lambda head: WIDTH)


def arrays(rows):
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = 2 * jax.random.normal(keys[0], (rows, D))
  head = jax.random.normal(keys[1], (D, V))
  return hidden, head, uniform(jax.random.split(keys[2], rows), 3)


@functools.partial(jax.jit, static_argnums=3)
def draw_parts(hidden, head, numbers, cap=None, scale=None):
  logits_of = lambda x: x if cap is None else cap * jnp.tanh(x / cap)
  of_parts = numbers[:, :2]
  return decoding_kernels.draw_parts(hidden, head, of_parts, logits_of, scale)


def by_hand(logits, numbers, start):
  """Draws a token of a part in float64: a lane, then a token in it."""
  part = logits[start : start + WIDTH]
  weights = np.zeros(WIDTH)
  weights[: len(part)] = np.exp(part - part.max())
  lanes = weights.reshape(-1, 128)
  sums = np.cumsum(lanes.sum(0))
  lane = np.searchsorted(sums, numbers[0] * sums[-1], side="right")
  sums = np.cumsum(lanes[:, lane])
  i = np.searchsorted(sums, numbers[1] * sums[-1], side="right")
  return start + i * 128 + lane, part.max(), weights.sum()


@pytest.mark.slow
@pytest.mark.parametrize("cap, in_8_bits", [(3.0, False), (None, True)])
def test_draws_equal_a_float64_computation(cap, in_8_bits):
  hidden, head, numbers = arrays(300)  # two blocks of rows
  head, scale = quantize(head, axis=0) if in_8_bits else (head, None)
  parts = draw_parts(hidden, head, numbers, cap, scale)
  alone = draw_parts(hidden[290:], head, numbers[290:], cap, scale)
  np.testing.assert_array_equal(alone.ids, parts.ids[290:])
  ids, logprobs = sample_parts(parts, numbers[:, 2])
  logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
  logits = logits if scale is None else logits * np.asarray(scale, np.float64)
  logits = logits if cap is None else cap * np.tanh(logits / cap)
  for row, number in enumerate(np.asarray(numbers, np.float64)):
    tokens, tops, sums = np.transpose(
      [by_hand(logits[row], number, part * WIDTH) for part in range(3)]
    )
    np.testing.assert_array_equal(parts.ids[row], tokens)
    np.testing.assert_allclose(parts.tops[row], tops, rtol=1e-5)
    np.testing.assert_allclose(parts.sums[row], sums, rtol=1e-4)
    drawn = logits[row, tokens.astype(int)]
    np.testing.assert_allclose(parts.logits[row], drawn, atol=1e-4)
    masses = np.cumsum(sums * np.exp(tops))
    part = np.searchsorted(masses, number[2] * masses[-1], side="right")
    assert ids[row] == tokens[part]
    logprob = drawn[part] - np.log(masses[-1])
    np.testing.assert_allclose(logprobs[row], logprob, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2.0**-24, 1 - 2.0**-24])
def test_uniform_numbers_at_the_ends_draw_possible_tokens(number):
  hidden, head, _ = arrays(50)
  head = head.at[:, 128:].set(0).at[:, 5:123].set(0)
  head = head.at[0].add(jnp.where(head[0] == 0, -1e3, 0))
  hidden = hidden.at[:, 0].set(1.0)
  parts = draw_parts(hidden, head, jnp.full((50, 2), number))
  first = parts.ids[:, 0]
  assert jnp.all((first < 5) | ((first >= 123) & (first < 128)))


@pytest.mark.slow
def test_nan_logits_give_nan_logprobs():
  hidden, head, numbers = arrays(8)
  hidden = hidden.at[3, 2].set(jnp.nan)
  ids, logprobs = sample_parts(draw_parts(hidden, head, numbers), numbers[:, 0])
  np.testing.assert_array_equal(jnp.isnan(logprobs), np.arange(8) == 3)
  assert jnp.all((ids >= 0) & (ids < V))


CONFIG = config_with(
  vocab_size=V,
  layers=1,
  kv_heads=2,
  mlp=8,
  logits_cap=20.0,
  logits_divisor=0.5,
  gaps=((100, 300), (V - 50, V)),
)


@pytest.mark.slow
def test_rollouts_draw_by_the_kernel(monkeypatch):
  lm = transformer(CONFIG, platform="tpu")
  params = jax.tree.map(lambda x: 4 * x, lm.init(jax.random.key(0)))
  ids = jax.random.randint(jax.random.key(1), (8, 3), 0, V)
  sampling = Sampling(temperature=0.7)
  run = lambda lm: sample(
    lm, params, Prompts(ids, ids >= 0), 2, group_size=2, sampling=sampling
  )
  plain = run(lm)
  monkeypatch.setattr(transformer_lib, "LARGE", 512)
  drawn = run(transformer(CONFIG, platform="tpu"))
  rows = ids, ids >= 0, drawn.completion_ids
  expected, _ = token_logprobs(lm, params, *rows, sampling=sampling)
  expected = jnp.where(drawn.completion_mask, expected, 0)
  np.testing.assert_allclose(drawn.logprobs, expected, atol=1e-4)
  assert np.any(drawn.completion_ids != plain.completion_ids)


def draws_of_devices():
  """Draws for [8, 2] rows on the current mesh."""
  lm = transformer(CONFIG, platform="tpu")

  @jax.jit
  def run(params, hidden, numbers):
    decoder, params = lm.prepared(params, longest=1)
    parts = decoder.draw_parts(params, hidden, numbers[..., :2], 1.0)
    ids, logprobs = sample_parts(parts, numbers[..., 2])
    expected = jax.nn.log_softmax(decoder.unembed(params, hidden))
    expected = jnp.take_along_axis(expected, ids[..., None], -1)[..., 0]
    return ids, logprobs, expected

  numbers = uniform(jax.random.split(jax.random.key(0), (8, 2)), 3)
  hidden = jax.random.normal(jax.random.key(1), (8, 2, D))
  ids, logprobs, expected = run(lm.init(jax.random.key(2)), hidden, numbers)
  np.testing.assert_allclose(logprobs, expected, atol=1e-4)
  return np.asarray(ids)


def sampled_on(platform, layers=2, format="model", batch=5, **features):
  """Returns samples of a model with a window in its first layer."""
  config = config_with(
    vocab_size=50,
    width=32,
    layers=layers,
    heads=8,
    kv_heads=4,
    head_dim=64,
    mlp=32,
    **dict(qkv_bias=True, window=9)
    | features
    | dict(local_layers=(True,) + (False,) * (layers - 1)),
  )
  lm = transformer(config, platform=platform)
  prompts = prompts_of(np.random.default_rng(1), (batch, 3), 50)
  sampling = Sampling(weights_dtype=format, cache_dtype=format)
  options = dict(max_new_tokens=18, sampling=sampling)
  return sample(lm, lm.init(jax.random.key(0)), prompts, 2, **options)


def assert_same(samples, expected):
  ids = samples.completion_ids, expected.completion_ids
  np.testing.assert_array_equal(*ids)
  np.testing.assert_allclose(samples.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize(  # scanned and unrolled layers
  "layers, format",
  [pytest.param(9, "model", marks=pytest.mark.long), (2, "int8")],
)
def test_samples_equal_those_of_cpus(layers, format, platform):
  expected = sampled_on("cpu", layers, format)
  assert_same(sampled_on(platform, layers, format), expected)


@pytest.mark.slow
def test_kernels_serve_layers_without_rope_and_scaled_queries():
  features = OTHER_FEATURES | {"window": 0}
  expected = sampled_on("cpu", **features)
  for platform in ("tpu", "gpu"):
    assert_same(sampled_on(platform, **features), expected)


@pytest.mark.slow
def test_devices_draw_and_decode_their_own_rows():
  run_python(8, __file__)


if __name__ == "__main__":
  pl.pallas_call = INTERPRETED
  decoding_kernels._width = lambda head: WIDTH
  transformer_lib.LARGE = 512
  alone = draws_of_devices()
  for tensor in (1, 2):
    with jax.set_mesh(make_mesh(tensor=tensor)):
      ids = draws_of_devices()
    # Halves of the vocabulary have different parts.
    assert np.all(ids == alone) == (tensor == 1)
  expected = sampled_on("cpu", batch=8)
  for platform in ("tpu", "gpu"):
    for tensor in (1, 2, 8):
      with jax.set_mesh(make_mesh(tensor=tensor)):
        assert_same(sampled_on(platform, batch=8), expected)
