"""The GPU's decode attention: interpreted, and compiled without a GPU."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.aot import topology
from grpojax.models.cache import KeysValues, PromptKeysValues, Slots
from grpojax.models.gpu_decode_attention import attend, serves
from grpojax.models.quantization import quantize

CAPACITY = 150  # no multiple of a block
# Finished rows, first and last slots, and both sides of blocks' ends.
POSITIONS = np.int32([[0, 31, CAPACITY - 1], [16, -1, 33], [63, 64, 128]])
LIVE = POSITIONS >= 0
B, G = POSITIONS.shape
LENGTHS = np.int32([[0], [70], [33]])  # of prompts
Case = collections.namedtuple("Case", "k r e dtype cap window bits")
CASES = [
  Case(1, 1, 80, jnp.float32, None, 40, 32),
  Case(2, 17, 96, jnp.float32, 1.0, 999, 32),
  Case(3, 3, 112, jnp.bfloat16, None, 100, 16),
  Case(1, 32, 128, jnp.bfloat16, None, 999, 16),
  Case(2, 7, 64, jnp.bfloat16, 2.0, 70, 8),
  Case(2, 2, 192, jnp.float32, 3.0, 999, 8),
  Case(2, 2, 256, jnp.float32, None, 5, 32),
]


def arrays(case):
  keys = iter(jax.random.split(jax.random.key(case.e), 7))
  normal = lambda *x: jax.random.normal(next(keys), (*x, case.e), case.dtype)
  rows = B, G, case.k
  new = KeysValues(normal(*rows, 1), normal(*rows, 1))
  slots = normal(1, *rows, CAPACITY), normal(1, *rows, CAPACITY)
  # 8 bits: (integers, scales) of both -> integers, scales
  split = lambda x: sum(zip(*map(quantize, x), strict=True), ())
  stored, slots = map(split, (new, slots)) if case.bits == 8 else (new, slots)
  prompt = PromptKeysValues(*(normal(B, case.k, LENGTHS.max()) for _ in new))
  return normal(*rows, case.r), new, Slots(*stored), Slots(*slots), prompt


def expected_of(case, seen, q, new, slots, prompt):
  """Computes outputs in float64."""
  slots = [x[0].astype(jnp.float32) for x in jax.tree.leaves(slots)]
  if case.bits == 8:
    slots = [slots[i] * slots[i + 2][..., None] for i in range(2)]
  keys, values = (
    np.concatenate([np.stack([x] * G, axis=1), y, z], axis=3, dtype=np.float64)
    for x, y, z in zip(prompt, slots, new, strict=True)
  )
  logits = np.einsum("bgkre,bgkce->bgkrc", np.float64(q), keys) / 5
  cap = case.cap or 1e9
  weights = np.exp(cap * np.tanh(logits / cap)) * seen[:, :, None, None]
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum("bgkrc,bgkce->bgkre", weights, values)


@pytest.mark.parametrize("case", CASES)
def test_equals_a_softmax_in_float64(case, interpreted):
  q, new, stored, slots, prompt = arrays(case)
  first = POSITIONS - case.window
  between = lambda x, y, n: (x[..., None] <= np.arange(n)) & (np.arange(n) < y)
  seen = between(first, POSITIONS[..., None], CAPACITY)
  mine = between(LENGTHS + first, LENGTHS[..., None], LENGTHS.max())
  visible = lambda x: np.expand_dims(seen, [2, *range(4, x.ndim - 1)])
  with_nan = lambda x: jnp.where(visible(x), x, jnp.nan)
  of_floats = lambda x: x if x.dtype == jnp.int8 else with_nan(x)
  before = jax.tree.map(of_floats, slots)
  groups = np.any(mine & LIVE[..., None], axis=1)[:, None, :, None]
  earlier = jax.tree.map(lambda x: jnp.where(groups, x, jnp.nan), prompt)
  rows = POSITIONS, first, earlier, LENGTHS[:, 0], LENGTHS + first
  run = jax.jit(functools.partial(attend, scale=0.2, cap=case.cap))
  out, after = run(q, new, stored, before, jnp.int32(0), *rows)
  assert jnp.all(jnp.isfinite(out)), "a row read a slot that it does not see"
  seen = np.concatenate([mine, seen, np.full((B, G, 1), True)], axis=2)
  expected = expected_of(case, seen, q, new, slots, prompt)
  tolerance = 1e-5 if case.dtype == jnp.float32 else 1e-2
  np.testing.assert_allclose(out[LIVE], expected[LIVE], atol=tolerance)
  # No other slot has changed.
  index = 0, *np.nonzero(LIVE), slice(None), POSITIONS[LIVE]
  put = lambda x, y: x.at[index].set(y[LIVE][:, :, 0])
  expected = jax.tree.map(put, before, stored)
  pairs = zip(*map(jax.tree.leaves, (after, expected)), strict=True)
  assert all(jnp.array_equal(*pair, equal_nan=True) for pair in pairs)


def test_serves_arrays_within_reach_of_offsets():
  served = lambda n, dtype: serves(jax.ShapeDtypeStruct((n,), dtype))
  assert served(2**31, jnp.int8) and served(2**32, jnp.bfloat16)
  assert not served(2**31 + 1, jnp.int8)


@pytest.mark.parametrize("case", CASES)
def test_a_token_loop_does_not_copy_the_cache(case, h100):
  pytest.importorskip("jax_plugins.xla_cuda13")
  (device,) = topology.machine("h100:1").devices
  place = jax.sharding.SingleDeviceSharding(device)
  on_gpu = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
  q, new, stored, slots, prompt = arrays(case)
  cache, structure = jax.tree.flatten(slots)

  def token(state):
    slots, at = state
    row = q, new, stored, slots, jnp.int32(0), at, at, prompt, at[:, 0], at
    return attend(*row, scale=0.2, cap=case.cap)[1], at + 1

  def tokens(*cache):
    state = jax.tree.unflatten(structure, cache), 0 * POSITIONS
    unfinished = lambda state: jnp.any(state[1] < CAPACITY)
    return jax.lax.while_loop(unfinished, token, state)

  jitted = jax.jit(tokens, donate_argnums=range(len(cache)))
  memory = jitted.lower(*map(on_gpu, cache)).compile().memory_analysis()
  assert memory.alias_size_in_bytes >= sum(x.nbytes for x in cache)
  assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 4
