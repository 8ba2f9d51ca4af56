"""Rollouts in int8 against ones of numbers that were rounded beforehand.

Run as a program, with eight devices, it compares a mesh with one device.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import mesh as mesh_lib
from grpojax.core.decoding import Decoding
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.models import cache as cache_lib
from grpojax.models import lora, quantization, sharding
from grpojax.models.config import TransformerConfig
from grpojax.models.transformer import transformer

INT8 = Sampling(weights_dtype="int8", cache_dtype="int8")
WEIGHTS = Sampling(weights_dtype="int8")
RNG = np.random.default_rng(0)
PROMPTS = Prompts(
  jnp.asarray(RNG.integers(0, 11, (2, 4))),
  jnp.array([[True] * 4, [True, True, False, False]]),
)
ROOT = pathlib.Path(__file__).parents[2]


def rounded(x, axis):
  """Numbers of 8 bits, by NumPy: x as it is read."""
  x = np.asarray(x, np.float64)
  scale = np.abs(x).max(axis, keepdims=True) / 127
  x = np.round(x / np.where(scale, scale, 1)) * scale
  return jnp.asarray(x, jnp.float32)


def rounded_params(params):
  """Parameters whose matrices were rounded, in a tree for the full path."""
  names = quantization.MATRICES

  def one(path, x):
    return rounded(x, -2) if path[-1].key in names else x

  params = jax.tree_util.tree_map_with_path(one, params)
  if "head" not in params:  # the head is rounded, and the embedding is not
    params["head"] = rounded(params["embed"].T, 0)
  return params


def random_params(lm):
  return jax.tree.map(
    lambda x: jnp.asarray(RNG.normal(size=x.shape) / 2, jnp.float32),
    jax.eval_shape(lm.init, jax.random.key(0)),
  )


def drawn(lm, params, sampling):
  run = lambda params: rollout(
    lm,
    params,
    PROMPTS,
    jax.random.key(1),
    group_size=3,
    max_new_tokens=36,
    eos_ids=(0,),
    sampling=sampling,
    decoding=Decoding(compact=False),
  )
  return jax.jit(run)(params)


def mismatch(lm, params, samples):
  """Largest difference of log-probabilities by the full path."""
  compute = lambda params: token_logprobs(
    lm, params, PROMPTS.prompt_ids, PROMPTS.prompt_mask, samples.completion_ids
  )[0]
  apart = np.abs(jax.jit(compute)(params) - samples.logprobs)
  return apart[samples.completion_mask].max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype, axis", [(jnp.float32, -1), (jnp.bfloat16, -2)])
def test_a_number_is_off_by_half_a_step_at_most(dtype, axis):
  x = jnp.asarray(RNG.normal(size=(3, 40, 50)) ** 3, dtype).at[0].set(0)
  q, scale = quantization.quantize(x, axis)
  x, step = np.float64(x), np.expand_dims(np.float64(scale), axis)
  assert q.dtype == jnp.int8 and scale.dtype == dtype
  assert (np.abs(x - np.float64(q) * step) <= step * 0.5001).all()
  # A channel uses all of its range, but where all of it is 0.
  np.testing.assert_array_equal(np.abs(q[1:]).max(axis), 127)
  assert not q[0].any() and not scale[0].any()


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    pytest.param({}, marks=pytest.mark.long),
    {"tied": True, "logits_cap": 5.0, "post_norms": True},
  ],
)
def test_a_rollout_is_of_the_policy_with_rounded_matrices(tiny, changes):
  """And of no other: by the full path, on parameters rounded by NumPy."""
  config = dataclasses.replace(tiny.config, **changes)
  lm = transformer(config)
  params = random_params(lm)
  samples = drawn(lm, params, WEIGHTS)
  of_rounded = transformer(dataclasses.replace(config, tied=False))
  assert mismatch(of_rounded, rounded_params(params), samples) < 2e-5
  assert mismatch(lm, params, samples) > 1e-3  # the trainer's


@pytest.mark.slow
def test_adapters_are_not_rounded(tiny):
  adapters = lora.init(tiny.params, jax.random.key(0), 2, "layers/(q|down)")
  adapters = jax.tree.map(
    lambda x: jnp.asarray(RNG.normal(size=x.shape), jnp.float32), adapters
  )
  adapt = lambda base: lora.adapt(tiny.lm, base, 0.5)
  samples = drawn(adapt(tiny.params), adapters, WEIGHTS)
  of_rounded = adapt(rounded_params(tiny.params))
  assert mismatch(of_rounded, adapters, samples) < 2e-5


def map_slots(function, cache):
  """Maps a function of `Slots`, as keys, values and scales, to new ones."""
  blocks = (tuple(function(*x) for x in block) for block in cache.blocks)
  return cache_lib.Cache(cache.index, tuple(blocks))


def plain(cache):
  """A cache in 8 bits as one of float32 numbers."""
  return map_slots(
    lambda keys, values, key_scales, value_scales: cache_lib.Slots(
      keys * key_scales[..., None, :], values * value_scales[..., None]
    ),
    cache,
  )


def round_cache(cache):
  """A cache of float32 numbers, rounded by NumPy: a token and head at once."""
  return map_slots(
    lambda keys, values, *_: cache_lib.Slots(
      rounded(keys, -2), rounded(values, -1)
    ),
    cache,
  )


@pytest.mark.slow
@pytest.mark.parametrize(  # each by itself, and a stack
  "layers", [2, pytest.param(9, marks=pytest.mark.long)]
)
def test_a_cache_in_8_bits_is_one_of_rounded_numbers(tiny, layers):
  """Token by token, while it grows."""
  config = dataclasses.replace(tiny.config, layers=layers)
  lm = transformer(config, platform="cpu")
  params = jax.tree.map(lambda x: 0.6 * x, random_params(lm))
  ids = jnp.asarray(RNG.integers(0, 11, (2, 3, 9)))
  outputs = []
  for formats in ({"cache_dtype": "int8"}, {}):
    decoder, prepared = lm.prepared(params, longest=20, **formats)
    prefix = decoder.prefill(prepared, PROMPTS.prompt_ids, PROMPTS.prompt_mask)
    extend, states = jax.jit(decoder.extend), []
    cache = decoder.init_cache(2, 3, 5)
    for t in range(9):
      if t == 5:
        cache = decoder.grow_cache(cache, 4)
      state, cache = extend(prepared, prefix, ids[..., t : t + 1], cache)
      states.append(state)
      cache = cache if formats else round_cache(cache)
    outputs.append((np.concatenate(states, 2), cache))
  (in_8_bits, cache), (expected, _) = outputs
  assert {x.dtype.name for x in jax.tree.leaves(cache)} == {
    "int8",
    "int32",
    "float32",
  }
  np.testing.assert_allclose(in_8_bits, expected, atol=2e-5)
  assert np.abs(expected).max() > 0.1


@pytest.mark.slow
def test_rows_move_with_their_scales(tiny):
  """Aligned and mapped, a cache is the same of numbers in full."""
  decoder, _ = tiny.lm.prepared(tiny.params, longest=9, cache_dtype="int8")
  shapes = jax.eval_shape(lambda: decoder.init_cache(2, 3, 5))
  cache = jax.tree.map(
    lambda x: jnp.asarray(RNG.normal(size=x.shape) * 50, x.dtype), shapes
  )
  ends = jnp.array([[1, 5, 2], [4, 0, 3]])
  for change in (
    lambda x: cache_lib.align(x, ends, jnp.int32(5), 7),
    lambda x: cache_lib.map_rows(lambda a: a[:, ::-1], x),
  ):
    moved, expected = plain(change(cache)), change(plain(cache))
    jax.tree.map(np.testing.assert_array_equal, moved, expected)


def test_a_model_without_prepare_has_no_formats(tiny):
  with pytest.raises(ValueError, match="weights_dtype=int8 needs a model"):
    tiny.lm._replace(prepare=None).prepared({}, longest=3, **WEIGHTS.formats)


@pytest.mark.slow
def test_eight_devices_draw_what_one_does():
  done = subprocess.run(
    [sys.executable, __file__],
    env=os.environ
    | {
      "JAX_NUM_CPU_DEVICES": "8",
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": str(ROOT),
    },
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-4000:]


def main():
  """Parameters are split along fsdp and tensor; nothing else differs."""
  config = TransformerConfig(
    vocab_size=16,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp=24,
    qkv_bias=True,
    tied=False,
  )
  lm = transformer(config)
  params = random_params(lm)
  alone = drawn(lm, params, INT8)
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  placed = jax.device_put(params, sharding.shardings(params, mesh))
  with jax.set_mesh(mesh):
    together = drawn(lm, placed, INT8)
    _, prepared = jax.jit(
      lambda x: (0, lm.prepared(x, longest=44, weights_dtype="int8")[1])
    )(placed)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), alone, together
  )
  layer = prepared["layers"][0]
  shards = {
    name: layer[name].addressable_shards[0].data.shape for name in layer
  }
  assert shards["gate"] == (1, 16, 12) and shards["gate_scale"] == (1, 12)
  assert shards["down"] == (1, 12, 16) and shards["down_scale"] == (1, 16)
  assert prepared["head_scale"].addressable_shards[0].data.shape == (8,)


if __name__ == "__main__":
  main()
