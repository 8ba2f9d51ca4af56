"""Adapters merged into their matrices, a layer at a time, to be written."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merged_matrix(base: Array, a: Array, b: Array, scale: int | float) -> Array:
  """W + scale A B in float32, of one layer or of a stack of them."""
  base, a, b = (x.astype(jnp.float32) for x in (base, a, b))
  return base + jnp.matmul(a, scale * b, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Merged:
  """A stack of matrices W + scale A B, computed where a layer is asked for.

  In float32, whatever W is: in bfloat16 a change of less than 0.2% of a weight
  would be rounded away.
  """

  base: Float[Array, "L ..."]
  a: Float[Array, "L m r"]
  b: Float[Array, "L r n"]
  scale: float

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the stack."""
    return self.base.shape

  @property
  def dtype(self) -> jnp.dtype:
    """Of the sum."""
    return jnp.dtype(jnp.float32)

  def __getitem__(self, layer: Any) -> Float[Array, "m n"]:
    """The matrix of one layer."""
    parts = (x[layer] for x in (self.base, self.a, self.b))
    return merged_matrix(*parts, self.scale)


def merged(
  base: Mapping[str, Any], adapters: Mapping[str, Any], scale: int | float
) -> dict[str, Any]:
  """Parameters for `hf.save`, with `Merged` in the place of adapted matrices.

  Args:
    base: parameters with their layers in one stack.
    adapters: from `lora.init`, trained.
    scale: as in `lora.adapt`.
  """
  layers = dict(base["layers"])
  for name, x in adapters.get("layers", {}).items():
    layers[name] = Merged(layers[name], x["a"], x["b"], float(scale))
  return {**base, "layers": layers}
