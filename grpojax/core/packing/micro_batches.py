"""Division of a batch into equal minibatches and micro-batches."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree

from grpojax.core.meshes import row_shards
from grpojax.core.random_keys import random_key


def cuts(prompts: int, group_size: int, micro_batches: int) -> tuple[int, int]:
  """Returns into how many parts to cut the prompts, and each group.

  Their product is `micro_batches`; ValueError if this is impossible. On a mesh
  each micro-batch has a prompt per device if possible.
  """
  shards = row_shards(jax.sharding.get_abstract_mesh())
  on_device = prompts // shards if prompts % shards == 0 else prompts
  # First try parts that have prompts of every device.
  for rows in (on_device, prompts):
    prompt_parts = math.gcd(micro_batches, rows)
    group_parts = micro_batches // prompt_parts
    if group_size % group_parts == 0:
      return prompt_parts, group_parts
  raise ValueError(
    f"{prompts} prompts of {group_size} samples cannot be divided into "
    f"{micro_batches} equal parts (micro_batches), as {group_parts} parts per "
    "group do not divide the group size: change one of these numbers"
  )


def split_rows(tree: PyTree, parts: int) -> PyTree:
  """Splits axis 0 into [parts, rows, ...]; row r goes to part r mod parts.

  This keeps each part of a sharded batch spread over all devices.
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
  within each block: each row is equally likely in every minibatch, and stays on
  its device.

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
  """Reorders the rows of axis 0 by an epoch's order from `draw_orders`."""

  def reorder(x):
    blocks = x.reshape(*order.shape, *x.shape[1:])
    return jax.vmap(lambda block, i: block[i])(blocks, order).reshape(x.shape)

  return jax.tree.map(reorder, tree)
