"""Layouts that XLA's CPU compiler is fast with; no number depends on them.

Products. The gradient of a product is a sum over the axes that the other factor
has alone. If there are several, XLA:CPU first copies both factors in another
order, and recomputes them; over one axis it reads them in place. So on CPUs
adjacent axes that the first factor has alone are merged, unless a mesh splits
any but the first: merged, those would leave their devices.

    [B, G, K, R, S, E] x [B, G, K, C, E] -> [B, G, K, R, S, C]
    [B, G, K, R S, E]  x [B, G, K, C, E] -> [B, G, K, R S, C]      on CPUs

Sums. Gradients of norms and of softmax are sums of products, which XLA:CPU
computes up to ten times faster without axes of size 1. So these are left out.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, DTypeLike, Float

from grpojax.core.mesh import ROWS, free_axes, sample_cuts


def _has_explicit_axes() -> bool:
  """Returns True if the mesh's axes are part of an array's type."""
  return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _mergeable(b: int, g: int) -> bool:
  """Returns True if the mesh splits [B, G, ...] along B alone, if at all."""
  if _has_explicit_axes():
    return False
  others = free_axes(jax.sharding.get_abstract_mesh()).keys() - set(ROWS)
  return not others and sample_cuts(b, g)[1] == 1


def matmul(
  x: Float[Array, "*tokens in"],
  weight: Float[Array, "in out"],
  dtype: DTypeLike | None = None,
) -> Float[Array, "*tokens out"]:
  """Returns the product X W, summed in `dtype`, by default that of x."""
  multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)

  def merged(x, weight):
    y = multiply(x.reshape(-1, x.shape[-1]), weight)
    return y.reshape(*x.shape[:-1], y.shape[-1])

  if x.ndim <= 2 or x.shape[-2] == 1 or not _mergeable(*x.shape[:2]):
    return multiply(x, weight)  # one token a row: decoding, without gradients
  return jax.lax.platform_dependent(x, weight, cpu=merged, default=multiply)


def float32_einsum(product: str, x: Array, y: Array) -> Array:
  """Returns a product of two arrays of one dtype, summed in float32.

  Rounded to bfloat16, logits would differ between rollout and training. On CPUs
  the factors are converted first, with the same result: XLA:CPU lacks some such
  products of 16-bit floats. In `product` b and g are prompts and samples.
  """
  of_x, of_y, out = product.replace("->", ",").split(",")
  # Letters of the axes that x has alone: they could be one axis.
  alone = "".join(axis for axis in of_x if axis in out and axis not in of_y)
  several = sum(x.shape[of_x.index(axis)] > 1 for axis in alone) > 1
  sizes = dict(zip(of_x, x.shape, strict=True))
  free = _mergeable(sizes.get("b", 1), sizes.get("g", 1))
  merge = several and alone in of_x and alone in out and free

  def on_cpu(x, y):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    if not merge:
      return jnp.einsum(product, x, y)
    first, after = of_x.index(alone), of_x.index(alone) + len(alone)
    merged = x.reshape(*x.shape[:first], -1, *x.shape[after:])
    z = jnp.einsum(product.replace(alone, alone[0]), merged, y)
    axis = out.index(alone)
    sizes = *z.shape[:axis], *x.shape[first:after], *z.shape[axis + 1 :]
    return z.reshape(sizes)

  def elsewhere(x, y):
    return jnp.einsum(product, x, y, preferred_element_type=jnp.float32)

  if x.dtype == y.dtype == jnp.float32 and not merge:
    return elsewhere(x, y)
  return jax.lax.platform_dependent(x, y, cpu=on_cpu, default=elsewhere)


def on_squeezed(function: Callable[..., Array]) -> Callable[..., Array]:
  """Returns a function of vectors [..., D] that runs without axes of size 1."""

  def run(x, *args):
    axes = x.shape[:-1]
    if not _has_explicit_axes():
      axes = [size for size in axes if size != 1]
    return function(x.reshape(*axes, x.shape[-1]), *args).reshape(x.shape)

  return run


def unit_axes(shape: Sequence[int], axes: str) -> str:
  """Returns the letters of the axes of size 1 without sharding."""
  if _has_explicit_axes():
    return ""
  return "".join(a for a, n in zip(axes, shape, strict=True) if n == 1)


def without(axes: str, unit: str) -> str:
  """Returns the letters of the axes that `squeeze` leaves."""
  return "".join(axis for axis in axes if axis not in unit)


def squeeze(x: Array, axes: str, unit: str) -> Array:
  """Returns an array [*axes] without the axes named in `unit`, of size 1."""
  sizes = dict(zip(axes, x.shape, strict=True))
  return x.reshape([sizes[axis] for axis in without(axes, unit)])
