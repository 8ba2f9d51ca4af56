"""The GPU's decode attention: interpreted, and compiled without a GPU."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from grpojax.models.cache import KeysValues, PromptKeysValues, Slots
from grpojax.models.gpu_decode_attention import attend
from grpojax.models.quantization import quantize

SCALE = 0.2
CAPACITY = 150  # no multiple of a block
PROMPT = 70
LENGTHS = np.array([0, PROMPT, 33])
BF16 = jnp.bfloat16


class Case(NamedTuple):
  r: int
  e: int
  dtype: Any = BF16
  cap: float | None = None
  window: int = 999
  in_8_bits: bool = False
  k: int = 2

  def arrays(self):
    keys = iter(jax.random.split(jax.random.key(self.e), 7))
    normal = lambda *shape: jax.random.normal(next(keys), shape, self.dtype)
    rows = positions().shape + (self.k,)
    q = normal(*rows, self.r, self.e)
    new = KeysValues(normal(*rows, self.e), normal(*rows, self.e))
    shape = 1, *rows, CAPACITY, self.e
    slots = self.stored(normal(*shape), normal(*shape))
    shape = len(LENGTHS), self.k, PROMPT, self.e
    prompt = PromptKeysValues(normal(*shape), normal(*shape))
    stored = self.stored(*(x[..., None, :] for x in new))
    return q, new, stored, slots, prompt

  def stored(self, *keys_values):
    if not self.in_8_bits:
      return Slots(*keys_values)
    (keys, key_scales), (values, value_scales) = map(quantize, keys_values)
    return Slots(keys, values, key_scales, value_scales)


def positions():
  """Finished rows, first and last slots, and each side of blocks' ends."""
  rows = [0, -1, CAPACITY - 1], [16, 31, 33], [63, 64, 128]
  return np.array(rows, np.int32)


CASES = {
  "7 queries": Case(7, 64, cap=2.0),
  "one key head, window": Case(1, 80, jnp.float32, window=40, k=1),
  "17 queries": Case(17, 96, jnp.float32, cap=1.0),
  "window in the prompt": Case(3, 112, window=100),
  "32 queries": Case(32, 128, k=1),
  "8 bits": Case(4, 64, window=70, in_8_bits=True),
  "8 bits, float32": Case(2, 192, jnp.float32, 3.0, in_8_bits=True),
  "256 channels": Case(2, 256, jnp.float32, window=5),
}


def expected_of(case, row, q, new, slots, prompt, first, prompt_first):
  """Computes a row's outputs in float64."""
  numbers = lambda x: np.asarray(x, np.float64)
  own = [numbers(x[0][row]) for x in jax.tree.leaves(slots)]
  if case.in_8_bits:
    own = [x * scales[..., None] for x, scales in (own[::2], own[1::2])]
  earlier = slice(prompt_first[row], LENGTHS[row[0]])
  keys, values = (
    np.concatenate(
      [
        numbers(x[row[0]])[:, earlier],
        y[:, first[row] : positions()[row]],
        numbers(z[row])[:, None],
      ],
      axis=1,
    )
    for x, y, z in zip(prompt, own, new, strict=True)
  )
  logits = np.einsum("kre,kce->krc", numbers(q[row]), keys) * SCALE
  if case.cap is not None:
    logits = case.cap * np.tanh(logits / case.cap)
  weights = np.exp(logits)
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum("krc,kce->kre", weights, values)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_a_softmax_in_float64(case, monkeypatch):
  interpreted = functools.partial(pl.pallas_call, interpret=True)
  monkeypatch.setattr(pl, "pallas_call", interpreted)
  q, new, stored, slots, prompt = case.arrays()
  at = positions()
  first = np.maximum(at - case.window, 0)
  prompt_first = np.clip(
    LENGTHS[:, None] + at - case.window, 0, LENGTHS[:, None]
  )
  slot = np.arange(CAPACITY)
  unread = (slot < first[..., None]) | (slot >= at[..., None])
  least = np.where(at >= 0, prompt_first, PROMPT).min(1)[:, None]
  unread_prompt = np.arange(PROMPT) >= LENGTHS[:, None]
  unread_prompt |= np.arange(PROMPT) < least

  def with_nan(x, mask, heads):
    mask = np.expand_dims(mask, [heads, *range(mask.ndim + 1, x.ndim)])
    return x if x.dtype == jnp.int8 else jnp.where(mask, jnp.nan, x)

  poisoned = jax.tree.map(lambda x: with_nan(x, unread[None], 3), slots)
  prompts = jax.tree.map(lambda x: with_nan(x, unread_prompt, 1), prompt)
  run = jax.jit(functools.partial(attend, scale=SCALE, cap=case.cap))
  place = jnp.int32(0), at, first
  out, written = run(
    q, new, stored, poisoned, *place, prompts, LENGTHS, prompt_first
  )
  assert jnp.all(jnp.isfinite(out)), "a row read a slot that it does not see"
  tolerance = 1e-5 if case.dtype == jnp.float32 else 1e-2
  expected = poisoned
  for row in map(tuple, np.argwhere(at >= 0)):
    inputs = q, new, slots, prompt, first, prompt_first
    result = expected_of(case, row, *inputs)
    np.testing.assert_allclose(out[row], result, atol=tolerance)
    b, g = row
    put = lambda x, new, b=b, g=g, i=at[row]: x.at[0, b, g, :, i].set(
      new[b, g, :, 0]
    )
    expected = jax.tree.map(put, expected, stored)
  for pair in zip(*map(jax.tree.leaves, (written, expected)), strict=True):
    pair = (x.astype(jnp.float32) for x in pair)  # NumPy's NaN lacks bfloat16
    np.testing.assert_array_equal(*pair)
