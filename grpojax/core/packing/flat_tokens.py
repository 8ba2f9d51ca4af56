"""Conversion of padded rows to flat arrays of their real tokens, and back.

This is the second step of `packing`: only attention needs rows. Each of C
devices has its own rows, and room for N tokens:

    rows [B, G, S]               tokens [C, 1, N]
    a a a - b b -                a a a b b
    c c d d d d d       ->       c c d d d d d - - -
    e - - - - - -                e f f f
    f f f - - - -
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, Shaped

from grpojax.core.meshes import activation_spec, free_axes


class TokenIndex(NamedTuple):
  """Places of real tokens in a device's padded rows, and the inverse."""

  token_of_place: Int[Array, "C n"]  # N on padding; n = B G S / C
  place_of_token: Int[Array, "C N"]  # n for unused tokens


def _constrain_rows(x: Array) -> Array:
  """Shards axis 0 over the mesh in context; leaves the other axes free."""
  mesh = jax.sharding.get_abstract_mesh()
  if not free_axes(mesh):
    return x
  (rows,) = activation_spec(mesh, x.shape, ("batch",))
  free = [PartitionSpec.UNCONSTRAINED for _ in x.shape[1:]]
  return jax.lax.with_sharding_constraint(x, PartitionSpec(rows, *free))


def by_device(x: Array, devices: int) -> Array:
  """Adds an axis of devices: [n, ...] -> [C, n / C, ...]."""
  return x.reshape(devices, -1, *x.shape[1:])


def find_tokens(
  real: Bool[Array, "B G S"], devices: int, size: int
) -> TokenIndex:
  """Indexes the real tokens of padded rows; drops tokens beyond N = size."""
  real = _constrain_rows(real.reshape(devices, -1))
  # A real token's number is the count of real places before it.
  count = jnp.cumsum(real, axis=1, dtype=jnp.int32)
  token_of_place = jnp.where(real & (count <= size), count - 1, size)
  # The place of token n is the first at which more than n tokens are counted.
  find = lambda count: jnp.searchsorted(count, jnp.arange(size), side="right")
  # For unused tokens the search returns n, the index after all places.
  return TokenIndex(token_of_place, jax.vmap(find)(count).astype(jnp.int32))


@jax.custom_vjp
def _take(x, index, inverse):
  """Takes entries of x on each device; an index out of range gives 0.

  None is taken twice: the backward pass uses the inverse index, not a scatter.
  """
  look_up = lambda x, index: x.at[index].get(mode="fill", fill_value=0)
  return jax.vmap(look_up)(x, index)


def _take_backward(indices, gradient):
  index, inverse = indices
  return _take(gradient, inverse, index), None, None


_take.defvjp(
  lambda x, index, inverse: (_take(x, index, inverse), (index, inverse)),
  _take_backward,
)


def flatten(
  x: Shaped[Array, "B G S *more"], index: TokenIndex
) -> Shaped[Array, "C 1 N *more"]:
  """Gathers the real tokens of rows; unused tokens are 0."""
  x = x.reshape(len(index.token_of_place), -1, *x.shape[3:])
  x = _take(_constrain_rows(x), index.place_of_token, index.token_of_place)
  return _constrain_rows(x[:, None])


def unflatten(
  x: Shaped[Array, "C 1 N *more"],
  index: TokenIndex,
  shape: tuple[int, int, int],
) -> Shaped[Array, "B G S *more"]:
  """Puts tokens back into rows of shape (B, G, S); 0 on padding."""
  x = _take(x[:, 0], index.token_of_place, index.place_of_token)
  return _constrain_rows(x.reshape(*shape, *x.shape[2:]))


@jax.custom_vjp
def _repeat(x, index):
  """Takes entries of each device's x, some of them several times.

  The backward pass sums gradients in float32, by a product, not a scatter.
  """
  return jax.vmap(lambda x, index: x[index])(x, index)


def _repeat_backward(residuals, gradient):
  index, count = residuals
  # One-hot matrices [C, n, count]: entry u gets all gradients with index u.
  chosen = index[..., None] == jnp.arange(count)
  flat = gradient.reshape(*index.shape, -1)
  total = jnp.einsum(
    "cnu,cnd->cud",
    chosen.astype(flat.dtype),
    flat,
    preferred_element_type=jnp.promote_types(flat.dtype, jnp.float32),
    precision="highest",
  )
  shape = *total.shape[:2], *gradient.shape[2:]
  return total.reshape(shape).astype(gradient.dtype), None


_repeat.defvjp(
  lambda x, index: (_repeat(x, index), (index, x.shape[1])), _repeat_backward
)


class FlatTokens(NamedTuple):
  """Places of the real tokens in prompts and in rows of completions."""

  prompts: TokenIndex  # of prompts [B, 1, P]
  rows: TokenIndex  # of rows of completions [n, 1, S]
  prompt_of_row: Int[Array, "C rows"]  # index on its device

  def of_rows(self, x: Shaped[Array, "B *more"]) -> Shaped[Array, "n *more"]:
    """Repeats values of prompts for each of their rows."""
    rows = _repeat(by_device(x, len(self.prompt_of_row)), self.prompt_of_row)
    return _constrain_rows(rows.reshape(-1, *x.shape[1:]))

  def of_tokens(
    self, x: Shaped[Array, "B *more"]
  ) -> Shaped[Array, "C 1 N *more"]:
    """Repeats values of prompts for each token of their rows."""
    devices, rows = self.prompt_of_row.shape
    width = self.rows.token_of_place.shape[1] // rows
    # Unused tokens have a place past the last row; they may use any row.
    row = jnp.minimum(self.rows.place_of_token // width, rows - 1)
    prompt_of_token = jnp.take_along_axis(self.prompt_of_row, row, axis=1)
    tokens = _repeat(by_device(x, devices), prompt_of_token)
    return _constrain_rows(tokens[:, None])
