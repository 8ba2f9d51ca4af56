"""8-bit integers for matrices and caches, to reduce the traffic per token.

Integers are symmetric and rounded to nearest, with a scale per channel:

    x ~ q * s      s = max |x| / 127      |x - q s| <= s / 2

A product takes q in the dtype of computation, where it is exact, and scales the
result. So a scale must not vary along the axis summed over.

| array               | summed over | a scale for each                        |
|---------------------|-------------|-----------------------------------------|
| matrix [in, out]    | in          | output channel                          |
| keys, [.., E]       | E           | token and head: a factor of its logit   |
| values, [.., E]     | tokens      | token and head: a factor of its softmax |
|                     |             | weight                                  |

A matrix "q" has scales "q_scale" in the dtype of computation.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from grpojax.core.types import Params
from grpojax.models import cpu

MATRICES = (
  *("q", "k", "v", "o", "gate", "up", "down", "head"),
  *("linear_qkv", "linear_z", "linear_o"),
)
"""Matrices to store in 8 bits. Biases, norms, routers and adapters are small,
embeddings are looked up, and experts' matrices (`moe`) keep their dtype."""

_LARGEST = 127


def quantize(
  x: Float[Array, "*axes"], axis: int = -1, dtype: Any = None
) -> tuple[Int8[Array, "*axes"], Float[Array, "..."]]:
  """Returns integers and their scales, which lack `axis`; zeros have scale 0.

  Scales are rounded to `dtype` (default: x's) before x is divided by them.
  """
  x32 = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x32), axis=axis) / _LARGEST
  scale = scale.astype(dtype or x.dtype)
  # Zeros are divided by 1 instead of their scale 0.
  divisor = jnp.expand_dims(jnp.where(scale == 0, 1, scale), axis)
  q = jnp.round(x32 / divisor.astype(jnp.float32))
  # If `dtype` rounds the scale down, quotients exceed the largest integer.
  return jnp.clip(q, -_LARGEST, _LARGEST).astype(jnp.int8), scale


def quantize_matrices(arrays: Params, dtype: Any) -> Params:
  """Quantizes the `MATRICES` [..., in, out] in a dict of arrays."""
  for name in [name for name in MATRICES if name in arrays]:
    q, scale = quantize(arrays[name], axis=-2, dtype=dtype)
    arrays = arrays | {name: q, f"{name}_scale": scale}
  return arrays


def dtype_of(arrays: Params, name: str) -> Any:
  """Returns the dtype in which a matrix is multiplied."""
  return arrays.get(f"{name}_scale", arrays[name]).dtype


def matmul(
  x: Float[Array, "*tokens in"], arrays: Params, name: str
) -> Float[Array, "*tokens out"]:
  """Returns the product of x and a matrix, quantized or not."""
  weight = arrays[name]
  scale = arrays.get(f"{name}_scale")
  if scale is None:
    return cpu.matmul(x, weight)
  return cpu.matmul(x, weight.astype(x.dtype)) * scale
