"""Minibatches: the order in which each epoch of an update takes the rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree


def draw_orders(
  key: Key[Array, ""], rows: int, parts: int, epochs: int
) -> Int[Array, "epochs blocks parts"]:
  """Draws the order in which each epoch takes the rows.

  `split_rows` then gives row i of every block of `parts` consecutive rows to
  minibatch i. The first epoch takes the rows as they come, the others in an
  order drawn anew within each block: every row is as likely in any minibatch,
  no row leaves the device that it lies on, and every minibatch stays spread
  over all devices.

      block 0  block 1       order [1, 0], [0, 1]     minibatches of rows
      0 1      2 3       ->  1 0      2 3         ->  1 2  and  0 3

  Args:
    key: Key of this step.
    rows: Number of rows, a multiple of parts.
    parts: Number of minibatches an epoch.
    epochs: Number of epochs, at least 1.

  Returns:
    Places within the blocks.
  """
  blocks = jnp.broadcast_to(jnp.arange(parts), (rows // parts, parts))

  def draw(epoch):
    # Negative, because the rollout folds the numbers of its samples, which are
    # not, into the same key.
    drawn = jax.random.permutation(
      jax.random.fold_in(key, -1 - epoch), blocks, axis=1, independent=True
    )
    return jnp.where(epoch == 0, blocks, drawn)

  return jax.vmap(draw)(jnp.arange(epochs))


def reorder_rows(tree: PyTree, order: Int[Array, "blocks parts"]) -> PyTree:
  """Takes the rows of axis 0 in one of the orders of `draw_orders`."""

  def leaf(x):
    blocks = x.reshape(*order.shape, *x.shape[1:])
    return jax.vmap(lambda block, o: block[o])(blocks, order).reshape(x.shape)

  return jax.tree.map(leaf, tree)
