"""Matrix products of tokens, and products summed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from grpojax.core.mesh import sample_cuts


def matmul(
  x: Float[Array, "B G S in"],
  weight: Float[Array, "in out"],
  dtype: DTypeLike | None = None,
) -> Float[Array, "B G S out"]:
  """X W, as one product of all tokens where one device has all samples.

  The weight's gradient is a sum over tokens. Over three axes of them, XLA's CPU
  compiler first makes a transposed copy of the output's gradient, and computes
  again what that is made of; over one it reads it as it is. Samples that a mesh
  cuts keep their axes, or they would leave their devices.

  Args:
    x: hidden states.
    weight: a matrix.
    dtype: of the sums and of what is returned; by default that of x and weight.
  """
  lead = x.shape[:-1]
  if x.ndim > 2 and sample_cuts(*lead[:2]) == (1, 1):
    x = x.reshape(-1, x.shape[-1])
  y = jnp.matmul(x, weight, preferred_element_type=dtype)
  return y.reshape(*lead, weight.shape[-1])


def float32_einsum(product: str, x: Array, y: Array) -> Array:
  """A product of two arrays of one dtype, summed and returned in float32.

  Rounded to bfloat16, logits would differ between sampling and scoring. On CPUs
  it is one of float32 copies, which gives the same: XLA's has no such product
  of 16-bit floats for every order of axes, and would fail when it is run.
  """

  def widened(x, y):
    return jnp.einsum(product, x.astype(jnp.float32), y.astype(jnp.float32))

  def as_it_is(x, y):
    return jnp.einsum(product, x, y, preferred_element_type=jnp.float32)

  if x.dtype == y.dtype == jnp.float32:
    return as_it_is(x, y)
  return jax.lax.platform_dependent(x, y, cpu=widened, default=as_it_is)
