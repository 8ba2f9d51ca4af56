"""Samples by the device that they lie on, and a copy of a weight for each.

A weight that all devices read has a gradient that is a sum over all samples.
Where a loop adds it up, XLA has no name for one device's part of the sum: it
adds up all devices' parts of the whole weight (an all-reduce), even where each
of them keeps only a cut. With samples [parts, rows, ...] and a copy of the
weight for each part, the loop adds up each device's own, and after it the parts
are added up once, as the weight is laid out: a reduce-scatter where it is cut.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from grpojax.core import mesh as mesh_lib


def _row_axes() -> dict[str, int]:
  """The axes of the mesh in context that may cut rows, and their sizes."""
  free = mesh_lib.free_axes(jax.sharding.get_abstract_mesh())
  return {axis: free[axis] for axis in mesh_lib.ROWS if axis in free}


def copies(x: Array) -> Array:
  """[...] -> [parts, ...], one on each device that rows are cut over.

  It is there already: what all of them read is whole on each of them. Without
  a mesh it stays as it is.
  """
  axes = _row_axes()
  if not axes:
    return x
  rest = [P.UNCONSTRAINED] * x.ndim  # a cut along tensor
  x = jnp.broadcast_to(x, (math.prod(axes.values()), *x.shape))
  return jax.lax.with_sharding_constraint(x, P(tuple(axes), *rest))


class RowParts(NamedTuple):
  """How samples [B, G, ...] lie on the devices that rows are cut over.

  Attributes:
    shape: B and G, each as the axes of the mesh that cut it and what is left.
    order: that brings all of these axes to the front, in the mesh's order.
    size: B and G themselves.
  """

  shape: tuple[int, ...]
  order: tuple[int, ...]
  size: tuple[int, int]

  def split(self, x: Array) -> Array:
    """[B, G, ...] -> [parts, rows, ...]; no row leaves its device."""
    axes, rest = _row_axes(), x.shape[2:]
    trailing = range(len(self.shape), len(self.shape) + len(rest))
    x = x.reshape(*self.shape, *rest).transpose(*self.order, *trailing)
    x = x.reshape(math.prod(axes.values()), -1, *rest)
    return jax.lax.with_sharding_constraint(x, P(tuple(axes)))

  def join(self, x: Array) -> Array:
    """The inverse of `split`."""
    rest = x.shape[2:]
    trailing = range(len(self.shape), len(self.shape) + len(rest))
    x = x.reshape(*(self.shape[i] for i in self.order), *rest)
    back = sorted(range(len(self.order)), key=self.order.__getitem__)
    return x.transpose(*back, *trailing).reshape(*self.size, *rest)


def row_parts(prompts: int, group_size: int) -> RowParts | None:
  """The parts of [B, G, ...]; None where some axis can cut neither of them."""
  axes, size = _row_axes(), (prompts, group_size)
  wanted = (mesh_lib.ACTIVATIONS["batch"], mesh_lib.ACTIVATIONS["group"])
  shape, places = [], {}
  for count, cut in zip(size, mesh_lib.divide(size, wanted, axes), strict=True):
    for axis in cut:
      places[axis] = len(shape)
      shape.append(axes[axis])
      count //= axes[axis]
    shape.append(count)
  if places.keys() != axes.keys():
    return None
  first = [places[axis] for axis in axes]
  rest = (i for i in range(len(shape)) if i not in first)
  return RowParts(tuple(shape), (*first, *rest), size)
