"""Layouts that XLA's CPU compiler is fast with; no number depends on them.

Products. A gradient of a product is a product too, summed over the axes that
the other factor has alone. Over several of them XLA's CPU compiler first copies
both factors in another order, and computes again what they are made of; over
one it reads them as they are. So on CPUs the axes that the first factor has
alone are merged where they follow each other, and no mesh splits them but the
first: what is split would leave its devices if it were merged.

    [B, G, K, R, S, E] x [B, G, K, C, E] -> [B, G, K, R, S, C]
    [B, G, K, R S, E]  x [B, G, K, C, E] -> [B, G, K, R S, C]      on CPUs

Sums. Gradients of norms and of softmax are sums of products, for which its code
is up to ten times as fast without axes of size 1. So these are left out.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, DTypeLike, Float

from grpojax.core.mesh import ROWS, free_axes, sample_cuts


def _has_explicit_axes() -> bool:
  """Returns True where the mesh's axes are part of an array's type."""
  return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _mergeable(b: int, g: int) -> bool:
  """Returns True where a mesh splits [B, G, ...] along B alone, the outermost.

  That is as far as the mesh in context says; other arrays are right, and may be
  moved. A `jax.shard_map` around this has split its arrays already.
  """
  if _has_explicit_axes():
    return False
  others = free_axes(jax.sharding.get_abstract_mesh()).keys() - set(ROWS)
  return not others and sample_cuts(b, g)[1] == 1


def _merge(x: Array, first: int, count: int) -> Array:
  """Merges `count` axes into one."""
  return x.reshape(*x.shape[:first], -1, *x.shape[first + count :])


def _split(z: Array, axis: int, sizes: Sequence[int]) -> Array:
  """Splits an axis into several, the inverse of `_merge`."""
  return z.reshape(*z.shape[:axis], *sizes, *z.shape[axis + 1 :])


def matmul(
  x: Float[Array, "*tokens in"],
  weight: Float[Array, "in out"],
  dtype: DTypeLike | None = None,
) -> Float[Array, "*tokens out"]:
  """Returns the product X W.

  Args:
    x: hidden states.
    weight: a matrix.
    dtype: type of the sums and of the result; by default that of x and weight.
  """
  multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)

  def merged(x, weight):
    *tokens, _ = x.shape
    return _split(multiply(_merge(x, 0, len(tokens)), weight), 0, tokens)

  if x.ndim <= 2 or x.shape[-2] == 1 or not _mergeable(*x.shape[:2]):
    return multiply(x, weight)  # one token a row: decoding, without gradients
  return jax.lax.platform_dependent(x, weight, cpu=merged, default=multiply)


def float32_einsum(product: str, x: Array, y: Array) -> Array:
  """Returns a product of two arrays of one dtype, summed in float32.

  Rounded to bfloat16, logits would differ between rollout and training. On CPUs
  the factors are converted to float32, which gives the same: XLA has no such
  product of 16-bit floats for every order of axes there, and would fail.

  Args:
    product: as `jnp.einsum` takes it, with b and g for prompts and samples.
    x: an array.
    y: an array.
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
    first, count = of_x.index(alone), len(alone)
    z = jnp.einsum(product.replace(alone, alone[0]), _merge(x, first, count), y)
    return _split(z, out.index(alone), x.shape[first : first + count])

  def elsewhere(x, y):
    return jnp.einsum(product, x, y, preferred_element_type=jnp.float32)

  if x.dtype == y.dtype == jnp.float32 and not merge:
    return elsewhere(x, y)
  return jax.lax.platform_dependent(x, y, cpu=on_cpu, default=elsewhere)


def on_squeezed(function: Callable[..., Array]) -> Callable[..., Array]:
  """Calls a function of vectors [..., D] without axes of size 1 before D."""

  def run(x, *args):
    axes = x.shape[:-1]
    if not _has_explicit_axes():
      axes = [size for size in axes if size != 1]
    return function(x.reshape(*axes, x.shape[-1]), *args).reshape(x.shape)

  return run


def unit_axes(shape: Sequence[int], axes: str) -> str:
  """Returns the letters of the axes that have size 1 and carry no sharding."""
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
