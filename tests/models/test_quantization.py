"""int8 rollouts against rollouts with numbers rounded beforehand.

Run as a program with eight devices, it compares a mesh with a single device.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import (
  assert_close,
  config_with,
  prompts_of,
  random_params,
  run_python,
  sample,
)

from grpojax.core import meshes
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.models import cache as cache_lib
from grpojax.models import quantization, sharding
from grpojax.models.transformer import transformer

INT8 = Sampling(weights_dtype="int8", cache_dtype="int8")
WEIGHTS = Sampling(weights_dtype="int8")
RNG = np.random.default_rng(0)
PROMPTS = prompts_of(RNG, (4, 2))
BATCH = PROMPTS.prompt_ids, PROMPTS.prompt_mask


def rounded(x, axis):
  """Returns x rounded to 8 bits, by NumPy."""
  x = np.asarray(x, np.float64)
  scale = np.abs(x).max(axis, keepdims=True) / 127
  x = np.round(x / np.where(scale, scale, 1)) * scale
  return jnp.asarray(x, jnp.float32)


def rounded_params(params):
  """Returns parameters with rounded matrices, and an untied head."""
  names = quantization.MATRICES

  def round_leaf(path, x):
    return rounded(x, -2) if path[-1].key in names else x

  params = jax.tree_util.tree_map_with_path(round_leaf, params)
  if "head" not in params:  # unlike the embedding, the head is rounded
    params["head"] = rounded(params["embed"].T, 0)
  return params


def drawn(lm, params, sampling):
  options = dict(max_new_tokens=36)
  return sample(lm, params, PROMPTS, sampling=sampling, **options)


def mismatch(lm, params, samples):
  compute = lambda params: token_logprobs(
    lm, params, *BATCH, samples.completion_ids
  )[0]
  apart = np.abs(jax.jit(compute)(params) - samples.logprobs)
  return apart[samples.completion_mask].max()


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    pytest.param({}, marks=pytest.mark.long),
    {"tied": True, "logits_cap": 5.0, "post_norms": True},
  ],
)
def test_int8_rollouts_sample_the_policy_with_rounded_matrices(tiny, changes):
  config = dataclasses.replace(tiny.config, **changes)
  lm = transformer(config)
  params = random_params(lm)
  gate = params["layers"]["gate"]
  params["layers"]["gate"] = gate.at[..., 0].set(0)  # a scale of 0
  samples = drawn(lm, params, WEIGHTS)
  untied = transformer(dataclasses.replace(config, tied=False))
  assert mismatch(untied, rounded_params(params), samples) < 2e-5
  assert mismatch(lm, params, samples) > 1e-3  # the trainer's


def plain(cache):
  """Returns an 8-bit cache as floats."""

  def dequantized(slots):
    axis = -2 if slots.columns else -1  # of the channels
    keys = slots.keys * jnp.expand_dims(slots.key_scales, axis)
    values = slots.values * slots.value_scales[..., None]
    return cache_lib.Slots(keys, values, columns=slots.columns)

  return tuple(map(dequantized, cache))


def round_cache(cache):
  """Rounds a float32 cache by NumPy, per token and head."""
  return tuple(
    slots.replace(
      keys=rounded(slots.keys, -2 if slots.columns else -1),
      values=rounded(slots.values, -1),
    )
    for slots in cache
  )


@pytest.mark.slow
@pytest.mark.parametrize(  # separate layers, and a stack
  "layers", [2, pytest.param(9, marks=pytest.mark.long)]
)
def test_an_int8_cache_equals_a_rounded_cache(tiny, layers):
  config = dataclasses.replace(tiny.config, layers=layers)
  lm = transformer(config, platform="cpu")
  params = jax.tree.map(lambda x: 0.6 * x, random_params(lm))
  ids = jnp.asarray(RNG.integers(0, 11, (2, 3, 9)))
  outputs = []
  for formats in ({"cache_dtype": "int8"}, {}):
    decoder, prepared = lm.prepared(params, longest=20, **formats)
    prefix = decoder.prefill(prepared, *BATCH)
    extend = jax.jit(decoder.extend)
    states = []
    cache = decoder.init_cache(2, 3, 5)
    for t in range(9):
      if t == 5:
        cache = decoder.grow_cache(cache, 4)
      new = ids[..., t : t + 1]
      at = jnp.full_like(new, t)
      state, cache, _ = extend(prepared, prefix, new, cache, at)
      states.append(state)
      cache = cache if formats else round_cache(cache)
    outputs.append((np.concatenate(states, 2), cache))
  (in_8_bits, cache), (expected, _) = outputs
  dtypes = {x.dtype.name for x in jax.tree.leaves(cache)}
  assert dtypes == {"int8", "float32"}
  np.testing.assert_allclose(in_8_bits, expected, atol=2e-5)
  assert np.abs(expected).max() > 0.1


@pytest.mark.slow
def test_scales_move_with_their_rows(tiny):
  decoder, _ = tiny.lm.prepared(tiny.params, longest=9, cache_dtype="int8")
  shapes = jax.eval_shape(lambda: decoder.init_cache(2, 3, 5))
  cache = jax.tree.map(
    lambda x: jnp.asarray(RNG.normal(size=x.shape) * 50, x.dtype), shapes
  )
  change = lambda x: cache_lib.map_rows(lambda a: a[:, ::-1], x)
  assert_close(plain(change(cache)), change(plain(cache)), rtol=0)


def test_formats_need_a_model_with_prepare(tiny):
  with pytest.raises(ValueError, match="without weights_dtype=int8"):
    tiny.lm._replace(prepare=None).prepared({}, longest=3, **WEIGHTS.formats)


@pytest.mark.slow
def test_a_mesh_samples_like_a_single_device():
  run_python(8, __file__)


def main():
  """Compares parameters split along fsdp and tensor with whole ones."""
  config = config_with(
    vocab_size=16, width=16, heads=4, kv_heads=2, mlp=24, qkv_bias=True
  )
  lm = transformer(dataclasses.replace(config, tied=False))
  params = random_params(lm)
  alone = drawn(lm, params, INT8)
  mesh = meshes.make_mesh(data=2, fsdp=2, tensor=2)
  placed = jax.device_put(params, sharding.shardings(params, mesh))
  with jax.set_mesh(mesh):
    together = drawn(lm, placed, INT8)
    prepare = lambda x: lm.prepared(x, longest=44, weights_dtype="int8")[1]
    prepared = jax.jit(prepare)(placed)
  assert_close(alone, together, atol=1e-5)
  shard = lambda x: x.addressable_shards[0].data.shape
  shards = jax.tree.map(shard, prepared["layers"][0])
  assert shards["gate"] == (1, 16, 12) and shards["gate_scale"] == (1, 12)
  assert shards["down"] == (1, 12, 16) and shards["down_scale"] == (1, 16)
  assert shard(prepared["head_scale"]) == (8,)


if __name__ == "__main__":
  main()
