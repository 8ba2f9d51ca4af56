"""Matrix products, and of which axes.

A gradient of a product is a product too, summed over the axes that the other
factor has alone. Over several of them XLA's CPU compiler first copies both
factors in another order, and computes again what they are made of; over one it
reads them as they are. So on CPUs the axes that the first factor has alone are
merged if they follow each other, and no mesh cuts them but the first: merged,
what is cut would leave its devices.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, DTypeLike, Float

from grpojax.core.mesh import ROWS, free_axes, sample_cuts


def _mergeable(b: int, g: int) -> bool:
  """Whether a mesh cuts nothing of [B, G, ...] but B, as it lies outermost.

  As far as the mesh in context says; other arrays are right, and may be moved.
  A `jax.shard_map` around this has cut its arrays already. An explicit axis
  cuts whatever its size: it is part of an array's type.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if AxisType.Explicit in mesh.axis_types:
    return False
  others = free_axes(mesh).keys() - set(ROWS)
  return not others and sample_cuts(b, g)[1] == 1


def _merge(x: Array, first: int, count: int) -> Array:
  """One axis in the place of several."""
  return x.reshape(*x.shape[:first], -1, *x.shape[first + count :])


def _part(z: Array, at: int, sizes: Sequence[int]) -> Array:
  """Several axes in the place of one."""
  return z.reshape(*z.shape[:at], *sizes, *z.shape[at + 1 :])


def matmul(
  x: Float[Array, "*tokens in"],
  weight: Float[Array, "in out"],
  dtype: DTypeLike | None = None,
) -> Float[Array, "*tokens out"]:
  """X W.

  Args:
    x: hidden states.
    weight: a matrix.
    dtype: of the sums and of what is returned; by default that of x and weight.
  """
  multiply = functools.partial(jnp.matmul, preferred_element_type=dtype)

  def merged(x, weight):
    *tokens, _ = x.shape
    return _part(multiply(_merge(x, 0, len(tokens)), weight), 0, tokens)

  if x.ndim <= 2 or x.shape[-2] == 1 or not _mergeable(*x.shape[:2]):
    return multiply(x, weight)  # one token a row: decoding, of no gradient
  return jax.lax.platform_dependent(x, weight, cpu=merged, default=multiply)


def float32_einsum(product: str, x: Array, y: Array) -> Array:
  """A product of two arrays of one dtype, summed and returned in float32.

  Rounded to bfloat16, logits would differ between sampling and scoring. On CPUs
  it is one of float32 copies, which gives the same: XLA's has no such product
  of 16-bit floats for every order of axes, and would fail when it is run.

  Args:
    product: as `jnp.einsum` takes it, with b and g for prompts and samples. On
      CPUs, where no mesh cuts more than the prompts, the axes that are x's
      alone are merged if all of them follow each other, in x and in the result.
    x: an array.
    y: an array.
  """
  of_x, of_y, out = product.replace("->", ",").split(",")
  own = "".join(axis for axis in of_x if axis in out and axis not in of_y)
  several = sum(x.shape[of_x.index(axis)] > 1 for axis in own) > 1
  sizes = dict(zip(of_x, x.shape, strict=True))
  free = _mergeable(sizes.get("b", 1), sizes.get("g", 1))
  merge = several and own in of_x and own in out and free

  def on_cpu(x, y):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    if not merge:
      return jnp.einsum(product, x, y)
    first, count = of_x.index(own), len(own)
    z = jnp.einsum(product.replace(own, own[0]), _merge(x, first, count), y)
    return _part(z, out.index(own), x.shape[first : first + count])

  def keep_groups(x, y):
    return jnp.einsum(product, x, y, preferred_element_type=jnp.float32)

  if x.dtype == y.dtype == jnp.float32 and not merge:
    return keep_groups(x, y)
  return jax.lax.platform_dependent(x, y, cpu=on_cpu, default=keep_groups)
