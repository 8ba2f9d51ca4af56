"""Which samples are computed together when others are done."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from grpojax.core.mesh import ACTIVATIONS, divide, free_axes

take = jax.vmap(lambda x, order: x[order])
_put = jax.vmap(lambda x, order, new: x.at[order].set(new))


def cut(shape: tuple[int, int]) -> tuple[int, bool]:
  """Into how many parts the mesh in context cuts prompts; whether groups."""
  sizes = free_axes(jax.sharding.get_abstract_mesh())
  wanted = ACTIVATIONS["batch"], ACTIVATIONS["group"]
  prompts, groups = divide(shape, wanted, sizes)
  return math.prod(sizes[axis] for axis in prompts), bool(groups)


WORTH = 48
"""Tokens that a stage has to have, to be compiled for several sizes: to decode
fewer takes less time than XLA does."""


class Compaction(NamedTuple):
  """How the samples that are not done are put together.

  Rows are seen as [parts, size, ...]: the samples of each group or, where a
  group is one sample, the prompts of each device. None leaves its part, so that
  nothing crosses devices.

  Attributes:
    parts: of the rows.
    size: rows of each part.
    of_prompts: whether a row is a prompt.
  """

  parts: int
  size: int
  of_prompts: bool

  def sizes(self, stage: int, tokens: int) -> list[int]:
    """Rows of a part that a stage may compute, descending: each is compiled.

    A program of one sample a prompt is an evaluation's, and runs seldom: it has
    one more size at most.

    Args:
      stage: its number; the first, 0, has all rows.
      tokens: that it has at most.
    """
    if tokens < WORTH:
      return [self.size]
    halvings = [0, 2] if self.of_prompts else range(4)
    allowed = halvings[: stage + 1]
    return sorted({-(-self.size // 2**i) for i in allowed}, reverse=True)

  def parted(self, done: Bool[Array, "B G"]) -> Bool[Array, "parts size"]:
    """The rows as parts."""
    return done.reshape(self.parts, self.size)

  def order(
    self, done: Bool[Array, "B G"], size: int
  ) -> Int[Array, "parts {size}"]:
    """Of each part `size` rows, those that are not done first."""
    return jnp.argsort(self.parted(done), axis=1, stable=True)[:, :size]

  def take(self, x: Array, order: Int[Array, "parts few"]) -> Array:
    """Those rows of an array [B, G, ...] or, of prompts, [B, ...]."""
    if not self.of_prompts:
      return take(x, order)
    parted = x.reshape(self.parts, self.size, *x.shape[1:])
    return take(parted, order).reshape(-1, *x.shape[1:])

  def put(self, new: Array, x: Array, order: Int[Array, "parts few"]) -> Array:
    """The array with those rows in their places again."""
    if not self.of_prompts:
      return _put(x, order, new)
    parted = x.reshape(self.parts, self.size, *x.shape[1:])
    new = new.reshape(*order.shape, *x.shape[1:])
    return _put(parted, order, new).reshape(x.shape)


def find(shape: tuple[int, int], prompts: bool) -> Compaction | None:
  """What can be put together of samples [B, G]; None is nothing.

  Args:
    shape: B and G.
    prompts: whether prompts can be left out.
  """
  b, g = shape
  parts, cuts_groups = cut(shape)
  if g > 1:  # which device has a sample may not change
    return None if cuts_groups else Compaction(b, g, False)
  if not prompts or b == parts:
    return None
  return Compaction(parts, b // parts, True)
