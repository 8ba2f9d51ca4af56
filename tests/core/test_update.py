"""Sums over micro-batches, and the order of rows in minibatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpojax.core.packing.micro_batches import draw_orders, reorder_rows
from grpojax.core.step import init_state
from grpojax.core.types import Batch
from grpojax.core.update import UpdateOptions, make_update

KEY = jax.random.key(5)


def one_token_batch(b, vocab, seed=0):
  """Returns a batch of completions of a single token."""
  rng = np.random.default_rng(seed)
  return Batch(
    prompt_ids=jnp.zeros((b, 1), jnp.int32),
    prompt_mask=jnp.ones((b, 1), bool),
    completion_ids=jnp.asarray(rng.integers(0, vocab, (b, 1, 1))),
    completion_mask=jnp.ones((b, 1, 1), bool),
    advantages=jnp.asarray(rng.uniform(0.5, 1.5, (b, 1)), jnp.float32),
  )


@pytest.mark.slow
def test_bfloat16_gradients_are_added_in_float32(tabular):
  """Many micro-batches, against the closed form in float64."""
  b, vocab = 1024, 3
  lm = tabular.lm(1, vocab)
  table = lm.init(KEY).astype(jnp.bfloat16)
  batch = one_token_batch(b, vocab)
  tx = optax.sgd(1.0)
  options = UpdateOptions(micro_batches=b, max_grad_norm=0.01)
  update = jax.jit(make_update(lm, tx, options=options))
  state, metrics = update(init_state(table, tx, KEY), batch)
  p = np.exp(tabular.log_table(table)[0, 0])
  one_hot = np.eye(vocab)[np.asarray(batch.completion_ids)[:, 0, 0]]
  weights = np.asarray(batch.advantages, np.float64)
  gradient = -(weights * (one_hot - p)).sum(0) / b
  norm = np.linalg.norm(gradient)
  # A bfloat16 sum would lose most micro-batches, as it has only 8 bits.
  assert_allclose(metrics["grad_norm"], norm, rtol=1e-3)
  assert_allclose(metrics["update_norm"], 0.01, rtol=4e-3)
  assert state.params.dtype == jnp.bfloat16


def test_the_optimizer_keeps_its_dtypes(tabular):
  """This lets several updates be scanned."""
  lm, tx = tabular.lm(1, 3), optax.MultiSteps(optax.adam(0.1), 2)
  tx = tx.gradient_transformation()
  state = init_state(lm.init(KEY).astype(jnp.bfloat16), tx, KEY)
  batch = one_token_batch(4, 3)
  batch = batch.replace(old_logprobs=jnp.zeros((4, 1, 1)))
  update = make_update(lm, tx, options=UpdateOptions(minibatches=2))
  after, _ = jax.eval_shape(update, state, batch)
  dtypes = functools.partial(jax.tree.map, lambda x: x.dtype)
  assert dtypes(after) == dtypes(state)


@pytest.mark.parametrize("parts", [4, 2, 12])
def test_each_epoch_draws_new_minibatches(parts):
  rows, epochs = 12, 4
  draw = jax.jit(draw_orders, static_argnums=(1, 2, 3))
  orders = draw(KEY, rows, parts, epochs)
  taken = np.array([reorder_rows(jnp.arange(rows), o) for o in orders])
  assert_array_equal(taken[0], np.arange(rows))
  for epoch in taken:
    # An epoch has every row once, and rows stay in their blocks.
    assert_array_equal(np.sort(epoch), np.arange(rows))
    blocks = epoch.reshape(-1, parts) // parts
    assert (blocks == np.arange(rows // parts)[:, None]).all()
  minibatches = {tuple(np.sort(epoch[0::parts])) for epoch in taken}
  assert len(minibatches) == epochs
  assert_array_equal(draw(KEY, rows, parts, epochs), orders)
  other = draw(jax.random.fold_in(KEY, 1), rows, parts, epochs)
  assert (other[1:] != orders[1:]).any()
