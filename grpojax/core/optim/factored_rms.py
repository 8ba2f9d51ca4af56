"""Adafactor's second moment: a row and a column instead of a matrix."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

SMALLEST = 128  # least width of a matrix worth factoring, as in optax
EPS = 1e-30  # added to the square of a gradient
CLIP = 1.0  # the most that the root mean square of a matrix's update may be


class FactoredState(NamedTuple):
  """State of `scale_by_factored_rms`.

  Attributes:
    count: updates so far.
    v: means of squared gradients: for a factored matrix [..., in, out] a dict
      of `row` [..., in] and `col` [..., out], means along the other axis; for
      anything else an array of its own shape.
  """

  count: Int[Array, ""]
  v: PyTree


def scale_by_factored_rms(
  b2: float, stacks: Sequence[str] = ()
) -> optax.GradientTransformation:
  """Divides gradients by their factored root mean square (Adafactor).

  Algorithm 4 of Shazeer and Stern 2018, arXiv 1804.04235, without scaling by
  the parameters. The second moment's decay is 1 - t**-0.8 at update t, but at
  most `b2` (Zhai et al. 2021, arXiv 2106.04560). A matrix's update is divided
  by its root mean square where that is more than 1, which stands in for a
  warm-up.

  Unlike in optax's, a matrix is always the last two axes: layers and experts
  stacked before them are matrices of their own, and a row is one whatever its
  length, so that it can be split over a mesh like its matrix. Below the names
  `stacks` in the parameters' tree the first axis of all arrays counts layers,
  so that [layers, width] is a vector of each.
  """

  def rank(path, x):
    """Number of axes of the vectors or matrices that an array is a stack of."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    stacked = any(name in stacks for name in names)
    return min(x.ndim - stacked, 2)

  def init(params):
    v = jax.tree_util.tree_map_with_path(
      lambda path, x: _zeros(x, rank(path, x)), params
    )
    return FactoredState(jnp.zeros((), jnp.int32), v)

  def update(updates, state, params=None):
    del params
    t = (state.count + 1).astype(jnp.float32)
    decay = jnp.minimum(1 - t**-0.8, b2)
    paths, structure = jax.tree_util.tree_flatten_with_path(updates)
    statistics = structure.flatten_up_to(state.v)
    pairs = [
      _scale(g.astype(jnp.float32), v, decay, rank(path, g))
      for (path, g), v in zip(paths, statistics, strict=True)
    ]
    scaled, v = (structure.unflatten(x[i] for x in pairs) for i in (0, 1))
    return scaled, FactoredState(optax.safe_increment(state.count), v)

  return optax.GradientTransformation(init, update)


def _zeros(x: Array, rank: int) -> PyTree:
  if rank < 2 or min(x.shape[-2:]) < SMALLEST:
    return jnp.zeros(x.shape, jnp.float32)
  row, col = x.shape[:-1], x.shape[:-2] + x.shape[-1:]
  return {"row": jnp.zeros(row), "col": jnp.zeros(col)}


def _scale(
  g: Float[Array, "..."], v: PyTree, decay: Float[Array, ""], rank: int
) -> tuple[Array, PyTree]:
  """Returns the update of one array, and its new statistics."""
  square = jnp.square(g) + EPS

  def average(old, new):
    return decay * old + (1 - decay) * new

  if isinstance(v, dict):
    row = average(v["row"], jnp.mean(square, -1))
    col = average(v["col"], jnp.mean(square, -2))
    v = {"row": row, "col": col}
    # Rows relative to their mean, so that no product leaves float32's range.
    row = jax.lax.rsqrt(row / jnp.mean(row, -1, keepdims=True))
    g = g * row[..., None] * jax.lax.rsqrt(col)[..., None, :]
  else:
    v = average(v, square)
    g = g * jax.lax.rsqrt(v)
  axes = tuple(range(-rank, 0))
  rms = jnp.sqrt(jnp.mean(jnp.square(g), axes, keepdims=True))
  return g / jnp.maximum(rms / CLIP, 1.0), v
