"""Real tokens side by side: where they are, and what flows back from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import flat_tokens
from grpojax.core.flat_tokens import FlatTokens

KEY = jax.random.key(0)
REAL = np.array(
  [
    [[1, 1, 1, 0], [0, 0, 0, 0]],
    [[1, 1, 0, 1], [1, 0, 0, 0]],
  ],
  bool,
)


def test_places_by_hand():
  """Two devices with a prompt each, and room for five tokens."""
  found = flat_tokens.places(jnp.asarray(REAL), 2, 5)
  np.testing.assert_array_equal(
    found.token, [[0, 1, 2, 5, 5, 5, 5, 5], [0, 1, 5, 2, 3, 5, 5, 5]]
  )
  np.testing.assert_array_equal(found.place, [[0, 1, 2, 8, 8], [0, 1, 3, 4, 8]])


def test_what_has_no_room_is_nowhere():
  found = flat_tokens.places(jnp.asarray(REAL), 1, 3)
  assert np.sum(found.token < 3) == 3
  np.testing.assert_array_equal(found.place, [[0, 1, 2]])


@pytest.mark.parametrize("devices", [1, 2])
def test_padding_is_left_out_and_comes_back_as_zeros(devices):
  x = 1 + jnp.arange(16.0).reshape(2, 2, 4)
  places = flat_tokens.places(jnp.asarray(REAL), devices, 8 // devices)
  flat = flat_tokens.flatten(x, places)
  expected = np.zeros((devices, 8 // devices))
  for device, real in enumerate(REAL.reshape(devices, -1)):
    expected[device, : real.sum()] = x.reshape(devices, -1)[device, real]
  np.testing.assert_array_equal(flat[:, 0], expected)
  back = flat_tokens.unflatten(flat, places, x.shape)
  np.testing.assert_array_equal(back, np.where(REAL, x, 0))


def test_gradients_are_taken_back_without_a_scatter():
  """Both ways, against products with matrices that choose."""
  places = flat_tokens.places(jnp.asarray(REAL), 1, 9)
  choose = np.zeros((9, 16))
  choose[np.arange(7), np.flatnonzero(REAL)] = 1
  x, flat = jax.random.normal(KEY, (2, 2, 4, 3)), jax.random.normal(KEY, (9, 3))

  def there(x):
    return flat_tokens.flatten(x, places)[0, 0]

  def back(flat):
    rows = flat_tokens.unflatten(flat[None, None], places, (2, 2, 4))
    return rows.reshape(16, 3)

  @jax.jit
  def gradients(x, flat):
    (of_there,) = jax.vjp(there, x)[1](flat)
    return of_there, *jax.vjp(back, flat)[1](x.reshape(16, 3))

  of_there, of_back = gradients(x, flat)
  x = x.reshape(16, 3)
  np.testing.assert_allclose(of_there.reshape(16, 3), choose.T @ flat, 1e-6)
  np.testing.assert_allclose(of_back, choose @ x, 1e-6)
  text = gradients.lower(x.reshape(2, 2, 4, 3), flat).as_text()
  assert "gather" in text and "scatter" not in text


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_rows_share_is_summed_in_float32(dtype):
  """300 times 1/256 is 1.17; a sum of bfloat16 would stop at 1."""
  owners = jnp.array([[0] * 300 + [2]])
  none = flat_tokens.places(jnp.zeros((301, 1, 1), bool), 1, 1)
  flat = FlatTokens(none, none, owners)
  x = jnp.arange(6, dtype=dtype).reshape(3, 2)
  shared, back = jax.vjp(flat.of_rows, x)
  np.testing.assert_array_equal(shared, x[owners[0]])
  given = jnp.full((301, 2), 1 / 256, dtype)
  # CPUs sum products of bfloat16 in float32 unasked.
  assert "preferred_element_type=float32" in str(jax.make_jaxpr(back)(given))
  (gradient,) = back(given)
  assert gradient.dtype == dtype
  expected = np.array([300 / 256, 0, 1 / 256])[:, None] * np.ones(2)
  np.testing.assert_allclose(np.float32(gradient), expected, 4e-3)
