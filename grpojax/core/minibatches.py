"""In what order the epochs of an update take the rows of a batch."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PyTree


def draw_orders(
  key: Key[Array, ""], rows: int, parts: int, epochs: int
) -> Int[Array, "epochs blocks parts"]:
  """In what order each epoch takes the rows, for `split_rows` to part them.

  The first epoch takes them as they come, the others in an order drawn anew
  within each block of `parts` consecutive rows, so that every row is as likely
  in any part, and every part has one row of each block: no row has to leave the
  device that it lies on, and every part stays spread over all devices.

  Args:
    key: of this step.
    rows: a multiple of parts.
    parts: minibatches an epoch.
    epochs: at least 1.

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
