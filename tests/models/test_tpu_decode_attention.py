"""The TPU's decode attention: interpreted, and compiled without a chip."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.aot import topology
from grpojax.models import tpu_decode_attention
from grpojax.models.cache import KeysValues, Slots, side_by_side
from grpojax.models.quantization import quantize
from grpojax.models.tpu_decode_attention import attend, serves

LAYERS = 2
B = 2
G = 4
SCALE = 0.2
CAPACITY = 512
BF16 = jnp.bfloat16
WINDOW = 140


class Case(NamedTuple):
  k: int
  r: int
  e: int
  dtype: Any = BF16
  cap: float | None = None
  window: int = CAPACITY
  in_8_bits: bool = False

  @property
  def heads(self):  # side by side
    return 128 // self.e if self.e < 128 else 1

  @property
  def block(self):
    return 256 if self.in_8_bits else 256 // jnp.dtype(self.dtype).itemsize

  @property
  def positions(self):
    """Positions of four groups of two rows; the second group is finished."""
    ends = self.block - 1, self.block, CAPACITY - 1
    return np.reshape([300, 0, -1, -1, -1, *ends], (B, G))


CASES = {
  "grouped, 64 channels": Case(2, 7, 64, cap=2.0),
  "grouped, 64 channels, window": Case(4, 3, 64, jnp.float32, window=WINDOW),
  "32 channels": Case(4, 1, 32, jnp.float32, cap=1.0),
  "one key head, 256 channels": Case(1, 32, 256, window=WINDOW),
  "every query its key": Case(3, 1, 128),
  "8 bits, 64 channels": Case(4, 2, 64, in_8_bits=True, window=WINDOW),
  "8 bits, 128 channels": Case(2, 4, 128, jnp.float32, in_8_bits=True),
  "8 bits, one key head": Case(1, 1, 256, in_8_bits=True, cap=3.0),
}


def stored_by_head(case, key):
  """Returns `Slots` of all layers, [LAYERS, B, G, K, CAPACITY, E]."""
  shape = LAYERS, B, G, case.k, CAPACITY, case.e
  arrays = [jax.random.normal(k, shape) for k in jax.random.split(key)]
  return as_stored(case, *arrays)


def as_stored(case, *keys_values):
  keys_values = [x.astype(case.dtype) for x in keys_values]
  if not case.in_8_bits:
    return Slots(*keys_values)
  (keys, key_scales), (values, value_scales) = map(quantize, keys_values)
  return Slots(keys, values, key_scales, value_scales)


def in_cache(case, slots):
  keys, values = (
    side_by_side(x, case.heads) for x in (slots.keys, slots.values)
  )
  return slots.replace(keys=keys, values=values)


def with_nan(case, first, x):
  """Puts NaN in other layers and in the blocks that no row may read."""
  if x.dtype == jnp.int8:  # their scales are NaN
    return x
  position = case.positions[..., None]
  block = np.arange(CAPACITY) // case.block
  read = (position >= 0) & (first[..., None] // case.block <= block)
  read &= block <= position // case.block
  read = np.expand_dims(read, [2, *range(4, x.ndim - 1)])
  return jnp.where(read, x, jnp.nan).at[0].set(jnp.nan)


def expected_of(case, q, new, slots, first, row):
  """Computes a row's outputs and log-sum-exps in float64."""
  float64 = lambda x: np.asarray(x, np.float64)
  arrays = jax.tree.leaves(slots)
  keys, values, *scales = (float64(x[1][row]) for x in arrays)
  if case.in_8_bits:
    keys, values = keys * scales[0][..., None], values * scales[1][..., None]
  visible = slice(first[row], case.positions[row])
  rows = zip((keys, values), new, strict=True)
  keys, values = (
    np.concatenate([x[:, visible], float64(y[row])[:, None]], axis=1)
    for x, y in rows
  )
  logits = np.einsum("kre,kce->krc", float64(q[row]), keys) * SCALE
  if case.cap is not None:
    logits = case.cap * np.tanh(logits / case.cap)
  total = np.exp(logits).sum(-1, keepdims=True)
  out = np.einsum("krc,kce->kre", np.exp(logits) / total, values)
  return out, np.log(total[..., 0])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_a_softmax_in_float64(case, monkeypatch, interpreted):
  monkeypatch.setattr(tpu_decode_attention, "_ROWS", 2)
  keys = jax.random.split(jax.random.key(case.e), 4)
  shape = B, G, case.k, case.e
  q = jax.random.normal(keys[0], (B, G, case.k, case.r, case.e), case.dtype)
  new = KeysValues(*(jax.random.normal(k, shape, case.dtype) for k in keys[:2]))
  stored = as_stored(case, *new)
  positions = case.positions
  first = np.maximum(positions - case.window, 0)
  slots = stored_by_head(case, keys[3])
  poison = functools.partial(with_nan, case, first)
  poisoned = jax.tree.map(poison, in_cache(case, slots))
  run = jax.jit(functools.partial(attend, scale=SCALE, cap=case.cap))
  layer = jnp.int32(1)
  out, lse, written = run(q, new, stored, poisoned, layer, positions, first)
  assert jnp.all(jnp.isfinite(out)), "a row read another's blocks, or its own"
  tolerance = 1e-5 if case.dtype == jnp.float32 else 1e-2
  expected = slots
  for row in np.argwhere(positions >= 0):
    b, g = row
    at = positions[b, g]
    results = expected_of(case, q, new, slots, first, (b, g))
    np.testing.assert_allclose(out[b, g], results[0], atol=tolerance)
    np.testing.assert_allclose(lse[b, g], results[1], atol=1e-5)
    put = lambda x, new, b=b, g=g, at=at: x.at[1, b, g, :, at].set(new[b, g])
    expected = jax.tree.map(put, expected, stored)
  # All other slots are unchanged, also in the tile of the written slot.
  expected = in_cache(case, expected)
  expected = jax.tree.map(poison, expected)
  for pair in zip(*map(jax.tree.leaves, (written, expected)), strict=True):
    pair = (x.astype(jnp.float32) for x in pair)  # NumPy's NaN lacks bfloat16
    np.testing.assert_array_equal(*pair)


@pytest.mark.parametrize(
  "shape, dtype, served",
  [
    ((1, 512, 128), BF16, True),
    ((8, 512, 256), jnp.int8, True),
    ((2, 48, 128), BF16, True),
    ((2, 48, 128), jnp.int8, False),  # a tile has 32 slots
    ((2, 384, 128), BF16, True),
    ((2, 384, 128), jnp.int8, False),
    ((2, 512, 64), BF16, False),  # half of the lanes
    ((2, 512, 96), BF16, False),
    ((64, 512, 256), BF16, False),  # blocks do not fit in VMEM
  ],
)
def test_served_shapes(shape, dtype, served):
  assert serves(jax.ShapeDtypeStruct((1, 4, 8, *shape), dtype)) == served


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize(
  "case", [Case(2, 7, 64), Case(4, 4, 128, cap=5.0, in_8_bits=True)]
)
def test_a_token_loop_does_not_copy_the_cache(chip, case):
  pytest.importorskip("libtpu")
  device = topology.machine(chip).devices[0]
  on_chip = jax.sharding.SingleDeviceSharding(device)
  many = 64  # layers

  def tokens(q, new, slots, first):
    def layer(i, state):
      q, slots, positions = state
      stored = as_stored(case, *new)
      rows = slots, i, positions, first
      out, lse, slots = attend(q, new, stored, *rows, scale=SCALE, cap=case.cap)
      return out + lse[..., None].astype(q.dtype), slots, positions

    def token(state):
      q, slots, positions = jax.lax.fori_loop(0, many, layer, state)
      return q, slots, positions + 1

    unfinished = lambda state: jnp.any(state[2] < CAPACITY)
    state = q, slots, jnp.zeros_like(first)
    return jax.lax.while_loop(unfinished, token, state)

  def inputs():
    key = jax.random.key(0)
    new = jnp.zeros((B, G, case.k, case.e), case.dtype)
    q = jnp.zeros((B, G, case.k, case.r, case.e), case.dtype)
    slots = in_cache(case, stored_by_head(case, key))
    slots = jax.tree.map(
      lambda x: jnp.concatenate([x] * (many // LAYERS)), slots
    )
    return q, KeysValues(new, new), slots, jnp.zeros((B, G), jnp.int32)

  args = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_chip),
    jax.eval_shape(inputs),
  )
  compiled = jax.jit(tokens, donate_argnums=2).lower(*args).compile()
  memory = compiled.memory_analysis()
  keys = args[2].keys
  least = keys.size * keys.dtype.itemsize
  assert memory.alias_size_in_bytes >= 2 * least
  assert memory.temp_size_in_bytes < least / 8
