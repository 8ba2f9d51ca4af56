"""The real tokens of padded rows, side by side, and back again.

What a layer does to each token by itself (norms, projections, the MLP, the
vocabulary) need not be done to padding. Its tokens are flat there:

    rows [B, G, S]               flat [C, 1, N]
    a a a - b b -                a a a b b
    c c d d d d d       ->       c c d d d d d - - -
    e - - - - - -                e f f f
    f f f - - - -

Attention has rows. Each of C devices has rows of its own, and N is a size that
all of them have room for.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, Shaped

from grpojax.core.mesh import activation_spec, free_axes


class Places(NamedTuple):
  """Where real tokens are among the places of padded rows, and the inverse.

  Attributes:
    token: of each place of rows [B, G, S] the token among the flat ones; N
      where there is padding.
    place: of each flat token its place; B G S / C where there is none.
  """

  token: Int[Array, "C n"]
  place: Int[Array, "C N"]


def _where_rows_are(x: Array) -> Array:
  """Lays axis 0 out over the mesh in context; the others as they are.

  Those may be cut: heads of keys and values, say.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not free_axes(mesh):
    return x
  (rows,) = activation_spec(mesh, x.shape, ("batch",))
  rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
  spec = PartitionSpec(rows, *rest)
  return jax.lax.with_sharding_constraint(x, spec)


def places(real: Bool[Array, "B G S"], shards: int, size: int) -> Places:
  """Finds the real tokens.

  Args:
    real: True on real tokens.
    shards: C, which divides B.
    size: N; as many as any shard has of them, or more.
  """
  real = _where_rows_are(real.reshape(shards, -1))
  count = jnp.cumsum(real, axis=1, dtype=jnp.int32)
  token = jnp.where(real & (count <= size), count - 1, size)
  # The place of token n is the first with more than n of them up to there.
  find = lambda count: jnp.searchsorted(count, jnp.arange(size), side="right")
  return Places(token, jax.vmap(find)(count).astype(jnp.int32))


@jax.custom_vjp
def _take(x, index, inverse):
  """Entries of each shard of x; 0 for an index that lies outside."""
  del inverse
  look_up = lambda x, index: x.at[index].get(mode="fill", fill_value=0)
  return jax.vmap(look_up)(x, index)


def _take_forward(x, index, inverse):
  return _take(x, index, inverse), (index, inverse)


def _take_backward(indices, gradient):
  """No entry is taken twice, so that it is taken back by the inverse."""
  index, inverse = indices
  return _take(gradient, inverse, index), None, None


_take.defvjp(_take_forward, _take_backward)


def flatten(
  x: Shaped[Array, "B G S *more"], places: Places
) -> Shaped[Array, "C 1 N *more"]:
  """The real tokens alone; 0 where there are fewer than N."""
  shards = len(places.token)
  x = _where_rows_are(x.reshape(shards, -1, *x.shape[3:]))
  x = _take(x, places.place, places.token)
  return _where_rows_are(x[:, None])


def unflatten(
  x: Shaped[Array, "C 1 N *more"], places: Places, shape: tuple[int, int, int]
) -> Shaped[Array, "B G S *more"]:
  """The inverse of `flatten`; 0 on padding.

  Args:
    x: of flat tokens.
    places: of these.
    shape: B, G and S.
  """
  x = _take(x[:, 0], places.token, places.place)
  return _where_rows_are(x.reshape(*shape, *x.shape[2:]))


@jax.custom_vjp
def _share(x, owners):
  """Of each row what is of its owner: [C, U, ...], [C, n] -> [C, n, ...]."""
  return jax.vmap(lambda x, owners: x[owners])(x, owners)


def _share_forward(x, owners):
  return _share(x, owners), (owners, x.shape[1])


def _share_backward(kept, gradient):
  """Summed over the rows of each owner in float32, as products."""
  owners, count = kept
  own = owners[..., None] == jnp.arange(count)
  flat = gradient.reshape(*owners.shape, -1)
  total = jnp.einsum(
    "cnu,cnd->cud",
    own.astype(flat.dtype),
    flat,
    preferred_element_type=jnp.promote_types(flat.dtype, jnp.float32),
    precision="highest",
  )
  shape = *total.shape[:2], *gradient.shape[2:]
  return total.reshape(shape).astype(gradient.dtype), None


_share.defvjp(_share_forward, _share_backward)


class FlatTokens(NamedTuple):
  """Real tokens of prompts, and after them of their completions: [C, 1, N].

  Attributes:
    prompts: of the prompts [B, 1, P], the first tokens.
    rows: of the rows of completions [n, 1, S], the others.
    owners: the prompt of each row, of those on its device.
  """

  prompts: Places
  rows: Places
  owners: Int[Array, "C rows"]

  def of_rows(self, x: Shaped[Array, "B *more"]) -> Shaped[Array, "n *more"]:
    """What is of each prompt, for its rows."""
    shards = len(self.owners)
    found = _share(x.reshape(shards, -1, *x.shape[1:]), self.owners)
    return _where_rows_are(found.reshape(-1, *x.shape[1:]))

  def of_tokens(
    self, x: Shaped[Array, "B *more"]
  ) -> Shaped[Array, "C 1 N *more"]:
    """What is of each prompt, for the flat tokens of its rows."""
    shards, rows = self.owners.shape
    size = self.rows.token.shape[1] // rows
    row = jnp.minimum(self.rows.place // size, rows - 1)
    owners = jnp.take_along_axis(self.owners, row, axis=1)
    found = _share(x.reshape(shards, -1, *x.shape[1:]), owners)
    return _where_rows_are(found[:, None])
