"""The TPU's write of a token into the cache, run by Pallas's interpreter.

Run as a program it tests meshes, in a process of its own with eight devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import config_with, prompts_of, run_python
from small_models import sample as sample_of

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.mesh import make_mesh
from grpojax.models import cache as cache_lib
from grpojax.models import slot_kernel
from grpojax.models.transformer import transformer

LAYERS, B, G, K = 2, 4, 2, 4
CAPACITY = 24  # one tile of 16 rows of bfloat16, and a half
INTERPRETED = functools.partial(slot_kernel.pl.pallas_call, interpret=True)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
  monkeypatch.setattr(slot_kernel.pl, "pallas_call", INTERPRETED)


def empty(platform, head_dim, dtype):
  options = dict(head_dim=head_dim, dtype=dtype, platform=platform)
  sizes = B, G, CAPACITY
  return cache_lib.create(*sizes, layers=(LAYERS,), kv_heads=K, **options)


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
  [(64, "bfloat16"), (32, "float32"), (128, "bfloat16"), (256, "float32")],
)
def test_all_slots_are_written_as_elsewhere(head_dim, dtype):
  keys = empty("tpu", head_dim, dtype).blocks[0][0].keys
  assert keys.shape[4] == max(head_dim, cache_lib.LANES)
  for count, rows in ((17, 1), (CAPACITY, 1), (3, 5)):
    by_kernel = written("tpu", head_dim, dtype, count, rows)
    expected = written("cpu", head_dim, dtype, count, rows)
    np.testing.assert_array_equal(by_kernel, expected)
    slots = count * rows
    assert np.all(by_kernel[..., slots:, :] == 7)
    assert np.all(by_kernel[:, :, 1, 0, :, :slots] == 0)  # the NaN's row


def devices_write_their_own_rows(tensor, width):
  expected = written("cpu", 64, "bfloat16", 18)
  with jax.set_mesh(make_mesh(tensor=tensor)):
    values = empty("tpu", 64, "bfloat16").blocks[0][0].values
    by_kernel = written("tpu", 64, "bfloat16", 18)
  assert values.shape[-1] == width
  assert values.sharding.shard_shape(values.shape)[1] == B * tensor // 8
  np.testing.assert_array_equal(by_kernel, expected)


@pytest.mark.slow
def test_devices_write_their_own_rows():
  run_python(8, __file__)


@pytest.mark.slow
@pytest.mark.parametrize(  # scanned, and written out
  "layers, format",
  [pytest.param(9, "model", marks=pytest.mark.long), (2, "int8")],
)
def test_samples_are_those_of_other_platforms(layers, format):
  config = config_with(
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
  prompts = prompts_of(np.random.default_rng(1), (5, 3), 50)
  sampling = Sampling(weights_dtype=format, cache_dtype=format)

  def sample(platform):
    lm = transformer(config, platform=platform)
    options = dict(max_new_tokens=18, sampling=sampling)
    return sample_of(lm, params, prompts, 2, **options)

  by_kernel, expected = sample("tpu"), sample("cpu")
  ids = by_kernel.completion_ids, expected.completion_ids
  np.testing.assert_array_equal(*ids)
  np.testing.assert_allclose(by_kernel.logprobs, expected.logprobs, atol=1e-5)


if __name__ == "__main__":
  slot_kernel.pl.pallas_call = INTERPRETED
  devices_write_their_own_rows(tensor=2, width=128)
  # Four devices have a head each, which no other can lie beside.
  devices_write_their_own_rows(tensor=4, width=64)
