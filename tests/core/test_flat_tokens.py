"""Flattening of real tokens: places, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core.packing import flat_tokens
from grpojax.core.packing.flat_tokens import FlatTokens

KEY = jax.random.key(0)
REAL = [[[1, 1, 1, 0], [0, 0, 0, 0]], [[1, 1, 0, 1], [1, 0, 0, 0]]]
REAL = np.array(REAL, bool)


@pytest.mark.parametrize("devices, size", [(1, 9), (2, 4), (1, 3)])
def test_flattening_and_its_gradient_use_no_scatter(devices, size):
  """With more room than tokens, and with too little room."""
  index = flat_tokens.find_tokens(jnp.asarray(REAL), devices, size)
  choose = np.zeros((devices, size, devices, 16 // devices))
  for device, real in enumerate(REAL.reshape(devices, -1)):
    places = np.flatnonzero(real)[:size]
    choose[device, np.arange(len(places)), device, places] = 1
  choose = choose.reshape(devices * size, 16)
  x = jax.random.normal(KEY, (2, 2, 4, 3))
  flat = jax.random.normal(KEY, (devices, 1, size, 3))

  @jax.jit
  def both_ways(x, flat):
    flattened, pull = jax.vjp(lambda x: flat_tokens.flatten(x, index), x)
    restored, pull_back = jax.vjp(
      lambda flat: flat_tokens.unflatten(flat, index, x.shape[:3]), flat
    )
    return flattened, restored, pull(flat)[0], pull_back(x)[0]

  flattened, restored, pulled, pulled_back = (
    np.asarray(y).reshape(-1, 3) for y in both_ways(x, flat)
  )
  expected = choose @ x.reshape(16, 3)
  np.testing.assert_array_equal(flattened, expected.astype(np.float32))
  expected = choose.T @ flat.reshape(-1, 3)
  np.testing.assert_array_equal(restored, expected.astype(np.float32))
  np.testing.assert_array_equal(pulled, restored)
  np.testing.assert_array_equal(pulled_back, flattened)
  text = both_ways.lower(x, flat).as_text()
  assert "gather" in text and "scatter" not in text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_shared_prompts_are_summed_in_float32(dtype):
  """300 times 1/256 is 1.17; a sum of bfloat16 would stop at 1."""
  prompt_of_row = jnp.array([[0] * 300 + [2]])
  none = flat_tokens.find_tokens(jnp.zeros((301, 1, 1), bool), 1, 1)
  flat = FlatTokens(none, none, prompt_of_row)
  x = jnp.arange(6, dtype=dtype).reshape(3, 2)
  shared, back = jax.vjp(flat.of_rows, x)
  np.testing.assert_array_equal(shared, x[prompt_of_row[0]])
  data = jnp.full((301, 2), 1 / 256, dtype)
  # CPUs sum products of bfloat16 in float32 anyway.
  assert "preferred_element_type=float32" in str(jax.make_jaxpr(back)(data))
  (gradient,) = back(data)
  assert gradient.dtype == dtype
  expected = np.array([300 / 256, 0, 1 / 256])[:, None] * np.ones(2)
  np.testing.assert_allclose(np.float32(gradient), expected, 4e-3)
