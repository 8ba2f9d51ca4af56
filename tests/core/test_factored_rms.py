"""Adafactor's second moment, beside optax's own and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import optim
from grpojax.core.optim import scale_by_factored_rms

SHAPES = {
  "embed": (15, 9),  # taller than wide: optax's rows are our columns
  "norm": (9,),
  "narrow": (20, 4),
  "layers": {
    "q": (2, 9, 16),
    "bias": (2, 9),
    "experts": (2, 3, 8, 10),
    "deep": (12, 8, 10),  # more layers than rows: not to be reduced
    "deep_bias": (12, 9),
  },
}


def gradients(shapes, steps):
  """Of different sizes along rows and columns, so that factors matter."""
  rng = np.random.default_rng(0)

  def one(shape):
    x = rng.normal(size=(steps, *shape))
    for axis in range(1, x.ndim):
      sizes = np.exp(rng.normal(size=x.shape[axis]))
      x = x * sizes.reshape(-1, *[1] * (x.ndim - axis - 1))
    return jnp.asarray(x, jnp.float32)

  return jax.tree.map(one, shapes, is_leaf=lambda x: isinstance(x, tuple))


def run(tx, grads):
  params = jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), grads)

  def one(state, g):
    return tx.update(g, state, params)[::-1]

  return jax.jit(lambda g: jax.lax.scan(one, tx.init(params), g))(grads)


@pytest.mark.slow
def test_every_matrix_and_vector_is_as_optax_has_it(monkeypatch):
  """The second layer of each stack by itself, through optax's Adafactor."""
  monkeypatch.setattr(optim, "SMALLEST", 8)
  grads = gradients(SHAPES, steps=3)
  state, found = run(scale_by_factored_rms(0.999, stacks=("layers",)), grads)

  def alone(tree):
    layers = {name: stack[:, 1] for name, stack in tree["layers"].items()}
    layers["experts"] = layers["experts"][:, 2]
    return {k: x for k, x in tree.items() if k != "layers"} | layers

  tx = optax.adafactor(
    multiply_by_parameter_scale=False, min_dim_size_to_factor=8
  )
  _, expected = run(tx, alone(grads))
  found = alone(found)
  for name, x in expected.items():
    np.testing.assert_allclose(-found[name], x, rtol=2e-5, err_msg=name)
  shapes = jax.tree.map(jnp.shape, state.v)
  assert shapes == {
    "embed": {"row": (15,), "col": (9,)},
    "norm": (9,),
    "narrow": (20, 4),
    "layers": {
      "q": {"row": (2, 9), "col": (2, 16)},
      "bias": (2, 9),
      "experts": {"row": (2, 3, 8), "col": (2, 3, 10)},
      "deep": {"row": (12, 8), "col": (12, 10)},
      "deep_bias": (12, 9),
    },
  }


@pytest.mark.slow
def test_by_hand_of_rank_one(monkeypatch):
  """What is a product of rows and columns is factored without loss."""
  monkeypatch.setattr(optim, "SMALLEST", 2)
  rows, cols = np.array([1.0, 2.0, 0.5]), np.array([3.0, 0.1])
  g = jnp.asarray(np.outer(rows, cols), jnp.float32)
  tx = scale_by_factored_rms(0.4)
  state = tx.init({"w": g})
  updates, state = tx.update({"w": g}, state)
  np.testing.assert_allclose(updates["w"], 1, rtol=1e-5)
  # The second decay is 1 - 2**-0.8 = 0.43, and b2 allows 0.4; then the update
  # of twice the gradient is 2 / sqrt(0.4 + 0.6 * 4), which clipping makes 1.
  _, after = tx.update({"w": 2 * g}, state)
  for name, axis in (("row", -1), ("col", -2)):
    mean = np.square(np.outer(rows, cols)).mean(axis)
    np.testing.assert_allclose(after.v["w"][name], 2.8 * mean, rtol=1e-5)
  clipped, _ = tx.update({"w": 2 * g}, state)
  np.testing.assert_allclose(clipped["w"], 1, rtol=1e-5)
  # Half the gradient is no reason to clip; no gradient moves nothing.
  small, _ = tx.update({"w": g / 2}, state)
  np.testing.assert_allclose(small["w"], 0.5 / np.sqrt(0.55), rtol=1e-5)
  still, _ = tx.update({"w": 0 * g}, tx.init({"w": g}))
  assert (still["w"] == 0).all()


def test_the_state_keeps_its_dtypes():
  """Of parameters in bfloat16 too: the statistics are float32."""
  params = {"w": jnp.zeros((130, 130), jnp.bfloat16), "b": jnp.zeros(3)}
  tx = scale_by_factored_rms(0.95)
  state = jax.eval_shape(tx.init, params)
  _, after = jax.eval_shape(tx.update, params, state)
  for old, new in zip(*map(jax.tree.leaves, (state, after)), strict=True):
    assert (old.shape, old.dtype) == (new.shape, new.dtype)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(after.v))
