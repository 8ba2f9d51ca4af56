"""Matrix products, and of which axes.

A gradient of a product is a product too, summed over the axes that the other
factor has alone. Over several of them XLA's CPU compiler first copies both
factors in another order, and computes again what they are made of; over one it
reads them as they are. So axes that one factor has alone are merged, where no
mesh cuts them: merged, what is cut would leave its devices.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, DTypeLike, Float


def _whole() -> bool:
  """Whether arrays are not cut, or by a `jax.shard_map` around this alone."""
  mesh = jax.sharding.get_abstract_mesh()
  axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
  return all(size == 1 or kind == AxisType.Manual for size, kind in axes)


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
  tokens = x.shape[:-1]
  if _whole():
    x = x.reshape(-1, x.shape[-1])
  y = jnp.matmul(x, weight, preferred_element_type=dtype)
  return y.reshape(*tokens, weight.shape[-1])


def float32_einsum(product: str, x: Array, y: Array) -> Array:
  """A product of two arrays of one dtype, summed and returned in float32.

  Rounded to bfloat16, logits would differ between sampling and scoring. On CPUs
  it is one of float32 copies, which gives the same: XLA's has no such product
  of 16-bit floats for every order of axes, and would fail when it is run.

  Args:
    product: as `jnp.einsum` takes it. Axes that are x's alone are merged where
      they follow each other, in x and in the result.
    x: an array.
    y: an array.
  """
  of_x, of_y, out = product.replace("->", ",").split(",")
  own = "".join(axis for axis in of_x if axis in out and axis not in of_y)
  sizes = [x.shape[of_x.index(axis)] for axis in own]
  merged = len(own) > 1 and own in of_x and own in out and _whole()
  if merged:
    product = product.replace(own, own[0])
    before = of_x.index(own)
    x = x.reshape(*x.shape[:before], -1, *x.shape[before + len(own) :])

  def widened(x, y):
    return jnp.einsum(product, x.astype(jnp.float32), y.astype(jnp.float32))

  def as_it_is(x, y):
    return jnp.einsum(product, x, y, preferred_element_type=jnp.float32)

  if x.dtype == y.dtype == jnp.float32:
    z = as_it_is(x, y)
  else:
    z = jax.lax.platform_dependent(x, y, cpu=widened, default=as_it_is)
  if merged:
    before = out.index(own)
    z = z.reshape(*z.shape[:before], *sizes, *z.shape[before + 1 :])
  return z
