"""The TPU's write of a token into the cache, run by Pallas's interpreter.

Run as a program it tests meshes, in a process of its own with eight devices.
"""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.mesh import make_mesh
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.models import cache as cache_lib
from grpojax.models import slot_kernel
from grpojax.models.transformer import TransformerConfig, transformer

ROOT = pathlib.Path(__file__).parents[2]
LAYERS, B, G, K = 2, 4, 2, 4
CAPACITY = 24  # one tile of 16 rows of bfloat16, and a half
INTERPRETED = functools.partial(slot_kernel.pl.pallas_call, interpret=True)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  monkeypatch.setattr(slot_kernel.pl, "pallas_call", INTERPRETED)


def empty(platform, head_dim, dtype):
  return cache_lib.create(
    B,
    G,
    CAPACITY,
    layers=(LAYERS,),
    kv_heads=K,
    head_dim=head_dim,
    dtype=dtype,
    platform=platform,
  )


def written(platform, head_dim, dtype, count, rows=1):
  """Keys and values [.., K, C, E] of a cache of sevens with `count` writes."""
  cache = empty(platform, head_dim, dtype)
  cache = cache._replace(blocks=jax.tree.map(lambda x: x + 7, cache.blocks))
  last = jnp.ones((B, G, rows, 3)).at[1, 0, :, 0].set(jnp.nan)

  @jax.jit
  def write(cache, key):
    shape = LAYERS, B, G, K, rows, head_dim
    keys = jax.random.split(key)
    new = [jax.random.normal(key, shape).astype(dtype) for key in keys]
    tokens = (cache_lib.KeysValues(*new),)
    return cache_lib.write(cache, tokens, last, platform)

  for i in range(count):
    cache = write(cache, jax.random.key(i))
  ((slots,),) = cache.blocks

  def by_head(x):
    together = K // x.shape[3]
    x = x.reshape(*x.shape[:5], together, head_dim).swapaxes(4, 5)
    return x.reshape(LAYERS, B, G, K, CAPACITY, head_dim)

  arrays = by_head(slots.keys.swapaxes(4, 5)), by_head(slots.values)
  return np.asarray(arrays, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
  "head_dim, dtype",
  [
    (64, "bfloat16"),
    pytest.param(32, "float32", marks=pytest.mark.slow),
    pytest.param(128, "bfloat16", marks=pytest.mark.slow),
    pytest.param(256, "float32", marks=pytest.mark.slow),
  ],
)
def test_all_slots_are_written_as_elsewhere(head_dim, dtype):
  keys = empty("tpu", head_dim, dtype).blocks[0][0].keys
  assert keys.shape[4] == max(head_dim, cache_lib.LANES)
  for count in (17, CAPACITY):
    found = written("tpu", head_dim, dtype, count)
    expected = written("cpu", head_dim, dtype, count)
    np.testing.assert_array_equal(found, expected)
    assert np.all(found[..., count:, :] == 7)
    assert np.all(found[:, :, 1, 0, :, :count] == 0)  # the NaN's row


@pytest.mark.slow
def test_several_tokens_are_written_at_once():
  found = written("tpu", 64, "bfloat16", 3, rows=5)
  expected = written("cpu", 64, "bfloat16", 3, rows=5)
  np.testing.assert_array_equal(found, expected)


def devices_write_their_own_rows(tensor, width):
  expected = written("cpu", 64, "bfloat16", 18)
  with jax.set_mesh(make_mesh(tensor=tensor)):
    values = empty("tpu", 64, "bfloat16").blocks[0][0].values
    found = written("tpu", 64, "bfloat16", 18)
  assert values.shape[-1] == width
  assert values.sharding.shard_shape(values.shape)[1] == B * tensor // 8
  np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_devices_write_their_own_rows():
  flags = "--xla_force_host_platform_device_count=8"
  subprocess.run(
    [sys.executable, __file__],
    env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
    check=True,
  )


@pytest.mark.slow
@pytest.mark.parametrize(  # scanned, and written out
  "layers, format",
  [pytest.param(9, "model", marks=pytest.mark.long), (2, "int8")],
)
def test_samples_are_those_of_other_platforms(layers, format):
  config = TransformerConfig(
    vocab_size=50,
    width=32,
    layers=layers,
    heads=8,
    kv_heads=4,
    head_dim=64,
    mlp=32,
    qkv_bias=True,
    local_layers=(True,) + (False,) * (layers - 1),
    window=9,
  )
  params = transformer(config).init(jax.random.key(0))
  ids = jax.random.randint(jax.random.key(1), (2, 5), 0, 50)
  prompts = Prompts(ids, jnp.arange(5) < jnp.array([[5], [3]]))

  def sample(platform):
    lm = transformer(config, platform=platform)
    return rollout(
      lm,
      params,
      prompts,
      jax.random.key(2),
      group_size=3,
      max_new_tokens=18,
      eos_ids=(0,),
      sampling=Sampling(weights_dtype=format, cache_dtype=format),
    )

  found, expected = sample("tpu"), sample("cpu")
  np.testing.assert_array_equal(found.completion_ids, expected.completion_ids)
  np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


if __name__ == "__main__":
  slot_kernel.pl.pallas_call = INTERPRETED
  devices_write_their_own_rows(tensor=2, width=128)
  # Four devices have a head each, which no other can lie beside.
  devices_write_their_own_rows(tensor=4, width=64)
