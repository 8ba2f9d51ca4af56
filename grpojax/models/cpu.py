"""Array layouts for which XLA:CPU generates fast code; values do not change.

Products: the gradient of a factor is a sum over the axes that only the other
factor has. Over several axes, XLA:CPU first copies and recomputes both factors;
over a single axis it reads them in place. So on CPUs, adjacent axes that only
the first factor has are merged, unless this would move data between devices.

    [B, G, K, R, S, E] x [B, G, K, C, E] -> [B, G, K, R, S, C]
    [B, G, K, R S, E]  x [B, G, K, C, E] -> [B, G, K, R S, C]      on CPUs

Sums: gradients of norms and of softmax are sums of products, which XLA:CPU
computes up to ten times faster if axes of size 1 are squeezed.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, DTypeLike, Float

from grpojax.core.meshes import ROWS, free_axes, sample_cuts


def _has_explicit_axes() -> bool:
  """Returns True if the mesh has axes that are part of an array's type."""
  return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _mergeable(b: int, g: int) -> bool:
  """Returns True if the mesh splits [B, G, ...] along no axis except B."""
  if _has_explicit_axes():
    return False
  others = free_axes(jax.sharding.get_abstract_mesh()).keys() - set(ROWS)
  return not others and sample_cuts(b, g)[1] == 1


def matmul(
  x: Float[Array, "*tokens in"],
  weight: Float[Array, "in out"],
  dtype: DTypeLike | None = None,
) -> Float[Array, "*tokens out"]:
  """Returns the product x W, summed in `dtype` (default: x's)."""
  multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)

  def merged(x, weight):
    y = multiply(x.reshape(-1, x.shape[-1]), weight)
    return y.reshape(*x.shape[:-1], y.shape[-1])

  if x.ndim <= 2 or x.shape[-2] == 1 or not _mergeable(*x.shape[:2]):
    return multiply(x, weight)  # includes decoding, which has no gradients
  return jax.lax.platform_dependent(x, weight, cpu=merged, default=multiply)


def float32_einsum(product: str, x: Array, y: Array) -> Array:
  """Returns an einsum of two arrays of equal dtype, summed in float32.

  Rounded logits would differ between rollout and training. On CPUs the factors
  are converted first, because XLA:CPU lacks some products of 16-bit floats. In
  `product`, b and g are prompts and samples.
  """
  x_axes, y_axes, out = product.replace("->", ",").split(",")
  # Find the axes that only the first factor and the result have.
  alone = "".join(axis for axis in x_axes if axis in out and axis not in y_axes)
  sizes = dict(zip(x_axes, x.shape, strict=True))
  several = sum(sizes[axis] > 1 for axis in alone) > 1
  free = _mergeable(sizes.get("b", 1), sizes.get("g", 1))
  # They must be adjacent, and in the same order in x and the result.
  merge = several and alone in x_axes and alone in out and free

  def on_cpu(x, y):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    if not merge:
      return jnp.einsum(product, x, y)
    # Merge these axes of x; the merged axis takes the first one's letter.
    first = x_axes.index(alone)
    after = first + len(alone)
    merged = x.reshape(*x.shape[:first], -1, *x.shape[after:])
    z = jnp.einsum(product.replace(alone, alone[0]), merged, y)
    # Split the merged axis of the result again.
    axis = out.index(alone)
    sizes = *z.shape[:axis], *x.shape[first:after], *z.shape[axis + 1 :]
    return z.reshape(sizes)

  def elsewhere(x, y):
    return jnp.einsum(product, x, y, preferred_element_type=jnp.float32)

  if x.dtype == y.dtype == jnp.float32 and not merge:
    return elsewhere(x, y)
  return jax.lax.platform_dependent(x, y, cpu=on_cpu, default=elsewhere)


def on_squeezed(function: Callable[..., Array]) -> Callable[..., Array]:
  """Wraps a function of vectors [..., D] to run without axes of size 1."""

  def run(x, *args):
    axes = x.shape[:-1]
    if not _has_explicit_axes():
      axes = [size for size in axes if size != 1]
    return function(x.reshape(*axes, x.shape[-1]), *args).reshape(x.shape)

  return run


def unit_axes(shape: Sequence[int], axes: str) -> str:
  """Returns the letters of axes of size 1; "" if the mesh has explicit axes."""
  if _has_explicit_axes():
    return ""
  return "".join(a for a, n in zip(axes, shape, strict=True) if n == 1)


def without(axes: str, unit: str) -> str:
  """Returns `axes` without the letters in `unit`."""
  return "".join(axis for axis in axes if axis not in unit)


def squeeze(x: Array, axes: str, unit: str) -> Array:
  """Removes the axes in `unit`, of size 1, from an array [*axes]."""
  sizes = dict(zip(axes, x.shape, strict=True))
  return x.reshape([sizes[axis] for axis in without(axes, unit)])
