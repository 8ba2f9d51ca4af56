"""How the rows of a batch are cut into parts that are computed in turn.

Prompts are cut first. Where there are not enough of them, groups are cut too,
and their prompts are computed again for each part; that changes no number, for
advantages and weights are known before. A packed batch is cut as its layout
says (`packing`).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from grpojax.core.mesh import row_shards


def on_each_device(rows: int) -> int:
  """How many of so many rows a device has; all where they do not divide."""
  shards = row_shards(jax.sharding.get_abstract_mesh())
  return rows // shards if rows % shards == 0 else rows


def cuts(prompts: int, group_size: int, parts: int) -> tuple[int, int]:
  """Into how many parts prompts and groups are cut.

  Args:
    prompts: B.
    group_size: G.
    parts: wanted in all.

  Returns:
    Parts of the prompts and of the groups, whose product is `parts`. With a
    mesh in context each part keeps a prompt for each device where it can.

  Raises:
    ValueError: there is no such cut.
  """
  for rows in (on_each_device(prompts), prompts):
    of_prompts = math.gcd(parts, rows)
    if group_size % (parts // of_prompts) == 0:
      return of_prompts, parts // of_prompts
  raise ValueError(
    f"{prompts} prompts of {group_size} samples cannot be cut into {parts} "
    f"equal parts (micro_batches): what is left of {parts} after the prompts, "
    f"{parts // math.gcd(parts, prompts)}, must divide the group size"
  )


def split_rows(tree: PyTree, parts: int) -> PyTree:
  """Splits axis 0 into `parts`, row r to part r mod parts: [parts, rows, ...].

  Strided, so that a batch sharded over devices stays spread over all of them.
  """
  return jax.tree.map(
    lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), tree
  )


def split_prompts(tree: PyTree, cut: tuple[int, int]) -> PyTree:
  """Arrays [B, ...] into [parts, rows, ...], once for each part of a group."""
  of_prompts, of_groups = cut
  return jax.tree.map(
    lambda x: jnp.repeat(x, of_groups, axis=0), split_rows(tree, of_prompts)
  )


def split_samples(tree: PyTree, cut: tuple[int, int]) -> PyTree:
  """Arrays [B, G, ...] into [parts, rows, samples, ...]."""
  of_prompts, of_groups = cut

  def leaf(x):
    x = split_rows(x, of_prompts)
    x = x.reshape(*x.shape[:2], -1, of_groups, *x.shape[3:])
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(-1, *x.shape[2:])

  return jax.tree.map(leaf, tree)


def join_samples(tree: PyTree, cut: tuple[int, int]) -> PyTree:
  """The inverse of `split_samples`."""
  of_prompts, of_groups = cut

  def leaf(x):
    rows, samples, *rest = x.shape[1:]
    x = x.reshape(of_prompts, of_groups, rows, samples, *rest)
    x = x.transpose(2, 0, 3, 1, *range(4, x.ndim))
    return x.reshape(rows * of_prompts, samples * of_groups, *rest)

  return jax.tree.map(leaf, tree)
