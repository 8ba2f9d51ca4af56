"""Division of a batch into equal minibatches and micro-batches."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree

from grpojax.core.meshes import row_shards
from grpojax.core.random_keys import random_key


def cuts(prompts: int, group_size: int, micro_batches: int) -> tuple[int, int]:
  """Returns the number of parts of the prompts, and of each group.

  Their product is `micro_batches`; ValueError if this is impossible. On a mesh
  each micro-batch has a prompt per device if possible.
  """
  shards = row_shards(jax.sharding.get_abstract_mesh())
  on_device = prompts // shards if prompts % shards == 0 else prompts
  # First with prompts of all devices in each part; if that fails, without.
  for rows in (on_device, prompts):
    of_prompts = math.gcd(micro_batches, rows)
    of_groups = micro_batches // of_prompts
    if group_size % of_groups == 0:
      return of_prompts, of_groups
  raise ValueError(
    f"{prompts} prompts of {group_size} samples cannot be divided into "
    f"{micro_batches} equal parts (micro_batches): {of_groups}, the parts of "
    "each group, must divide the group size"
  )


def split_rows(tree: PyTree, parts: int) -> PyTree:
  """Splits axis 0 into [parts, rows, ...]; row r goes to part r mod parts.

  So each part of a sharded batch stays spread over all devices.
  """
  return jax.tree.map(
    lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), tree
  )


def draw_orders(
  key: Key[Array, ""], rows: int, parts: int, epochs: int
) -> Int[Array, "epochs blocks parts"]:
  """Draws the order of the rows in each epoch.

  `split_rows` gives row i of every block of `parts` consecutive rows to
  minibatch i. The first epoch keeps the order; later epochs shuffle the rows
  within each block. So each row is equally likely in any minibatch, and no row
  changes its device.

      block 0  block 1       order [1, 0], [0, 1]     minibatches of rows
      0 1      2 3       ->  1 0      2 3         ->  1 2  and  0 3
  """
  blocks = jnp.broadcast_to(jnp.arange(parts), (rows // parts, parts))
  key = random_key(key)

  def draw(epoch):
    # Negative, because the rollout folds sample numbers into the same key.
    drawn = jax.random.permutation(
      jax.random.fold_in(key, -1 - epoch), blocks, axis=1, independent=True
    )
    return jnp.where(epoch == 0, blocks, drawn)

  return jax.vmap(draw)(jnp.arange(epochs))


def reorder_rows(tree: PyTree, order: Int[Array, "blocks parts"]) -> PyTree:
  """Reorders the rows of axis 0 by an epoch's order of `draw_orders`."""

  def leaf(x):
    blocks = x.reshape(*order.shape, *x.shape[1:])
    return jax.vmap(lambda block, o: block[o])(blocks, order).reshape(x.shape)

  return jax.tree.map(leaf, tree)
