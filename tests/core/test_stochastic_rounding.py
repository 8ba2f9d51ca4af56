"""Stochastic rounding to bfloat16, and Adam with bfloat16 moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core.optim import scale_by_rounded_adam, stochastic_round

KEY = jax.random.key(7)
ALL_BITS = jnp.arange(2**16, dtype=jnp.uint16)
BFLOAT16_MAX = float(jnp.finfo(jnp.bfloat16).max)


def neighbours(x):
  """Returns the bfloat16 numbers around a float32 number."""
  magnitude = np.abs(np.float32(x)).view(np.uint32) & np.uint32(0xFFFF0000)
  ends = np.array([magnitude, magnitude + 0x10000], np.uint32)
  return np.sign(x) * ends.view(np.float32).astype(np.float64)


@pytest.mark.parametrize("x", [1.0001, -3.14159, 1e-30, -2.3e30, 0.999999])
def test_rounding_has_the_exact_mean(x):
  """By enumeration of all random bits."""
  x = np.float32(x)
  low, high = neighbours(x)
  rounded = stochastic_round(jnp.full(2**16, x), ALL_BITS)
  assert rounded.dtype == jnp.bfloat16
  rounded = np.asarray(rounded, np.float64)
  assert set(rounded) == {low, high}
  assert rounded.mean() == np.float64(x)


def test_bfloat16_and_nonfinite_numbers_stay():
  exact = [0.0, -0.0, 1.0, -2.5, BFLOAT16_MAX, jnp.inf, -jnp.inf]
  for x in exact:
    rounded = np.asarray(stochastic_round(jnp.full(2**16, x), ALL_BITS))
    assert (rounded == x).all() and (np.signbit(rounded) == np.signbit(x)).all()
  # All kinds of nan: a mantissa of ones, or only bits that bfloat16 lacks.
  for word in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001):
    x = jax.lax.bitcast_convert_type(jnp.uint32(word), jnp.float32)
    rounded = stochastic_round(jnp.full(2**16, x), ALL_BITS)
    assert jnp.isnan(rounded).all(), hex(word)


def test_finite_numbers_stay_finite():
  for x in (np.finfo(np.float32).max, np.float32(BFLOAT16_MAX * 1.0001)):
    for sign in (1, -1):
      rounded = stochastic_round(jnp.full(2**16, sign * x), ALL_BITS)
      assert (np.asarray(rounded, np.float64) == sign * BFLOAT16_MAX).all()


def run_adam(tx, gradients, params):
  def update(state, grads):
    updates, state = tx.update(grads, state, params)
    return state, updates

  return jax.lax.scan(update, tx.init(params), gradients)


@pytest.mark.slow
def test_moments_are_unbiased_over_keys():
  """Against optax's moments in float32."""
  rng = np.random.default_rng(0)
  params = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
  gradients = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=(5, *x.shape)), jnp.float32), params
  )
  exact, steps = run_adam(optax.scale_by_adam(0.9, 0.95), gradients, params)

  def rounded(key):
    return run_adam(scale_by_rounded_adam(0.9, 0.95, key), gradients, params)

  # An update uses the moments before they are rounded.
  same = lambda a, b: np.testing.assert_allclose(a[0], b[0], rtol=1e-6)
  jax.tree.map(same, rounded(KEY)[1], steps)
  keys = jax.random.split(KEY, 4000)

  @jax.jit
  @jax.vmap
  def moments(key):
    state, _ = rounded(key)
    return state.mu, state.nu

  result = jax.tree.map(lambda x: np.asarray(x, np.float64), moments(keys))
  for x, expected in zip(
    jax.tree.leaves(result), jax.tree.leaves((exact.mu, exact.nu)), strict=True
  ):
    error = x.std(0) / np.sqrt(len(keys))
    assert (error > 0).all()
    assert (np.abs(x.mean(0) - expected) < 4.5 * error).all()
  # Elements, arrays and moments are rounded independently.
  leaves = jax.tree.leaves(result)
  errors = np.concatenate([x.reshape(4000, -1) for x in leaves], 1)
  correlation = np.corrcoef(errors.T) - np.eye(errors.shape[1])
  assert np.abs(correlation).max() < 4.5 / np.sqrt(4000)


def test_rounding_depends_only_on_key_and_count():
  tx = scale_by_rounded_adam(0.9, 0.999, KEY)
  params = {"a": jnp.zeros(64), "b": jnp.zeros(64)}
  gradients = jax.tree.map(lambda x: jnp.full((4, 64), 0.3), params)
  whole, _ = jax.jit(lambda g: run_adam(tx, g, params))(gradients)
  first = jax.tree.map(lambda g: g[0], gradients)

  @jax.jit
  def update(key, state):
    return scale_by_rounded_adam(0.9, 0.999, key).update(first, state)[1]

  state = tx.init(params)
  for _ in range(4):  # as in a run that resumes after every step
    state = update(KEY, jax.tree.map(np.asarray, state))
  jax.tree.map(np.testing.assert_array_equal, state, whole)
  assert (state.mu["a"] != state.mu["b"]).any()
  later = state._replace(count=state.count + 1)
  now = update(KEY, state)
  for other in (update(KEY, later), update(jax.random.key(8), state)):
    assert (now.mu["a"] != other.mu["a"]).any()
