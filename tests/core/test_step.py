"""`make_batch`, `make_update`, `make_grpo_step` and their metrics."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose, assert_array_equal

from grpojax.core.batch import make_batch
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.objective import Objective
from grpojax.core.packing import layout
from grpojax.core.packing.micro_batches import draw_orders, reorder_rows
from grpojax.core.rollout import rollout
from grpojax.core.step import init_state, make_grpo_step, rollout_metrics
from grpojax.core.types import Batch, Prompts, Rollout
from grpojax.core.update import (
  UpdateOptions,
  apply_gradients,
  make_gradients,
  make_update,
)
from grpojax.models.transformer import transformer

KEY = jax.random.key(8)


# An update, against a loss that is written out.


def make_case(tabular, seed=0, b=4, g=3, t=5, vocab=5):
  """Returns a random off-policy batch of a chain, with a reference."""
  keys = jax.random.split(jax.random.key(seed), 8)
  lm = tabular.lm(2, vocab)
  table, old, ref = (lm.init(key) for key in keys[:3])
  old = table + 0.3 * old
  ids = jax.random.randint(keys[3], (b, g, t), 0, vocab)
  length = jax.random.randint(keys[4], (b, g, 1), 1, t + 1)
  prompt_ids = jnp.arange(b)[:, None] % 2

  def score(table):
    log_table = jnp.asarray(tabular.log_table(table), jnp.float32)
    rows = tabular.rows(np.arange(b) % 2, ids)
    return jnp.take_along_axis(log_table[rows], ids[..., None], -1)[..., 0]

  batch = Batch(
    prompt_ids=prompt_ids,
    prompt_mask=jnp.ones((b, 1), bool),
    completion_ids=ids,
    completion_mask=jnp.arange(t) < length,
    advantages=jax.random.normal(keys[5], (b, g)),
    old_logprobs=score(old),
    ref_logprobs=score(ref),
  )
  return lm, table, batch


def plain_loss(table, batch, beta, tabular):
  """Returns PPO's clipped surrogate plus GRPO's KL term, per token."""
  rows = tabular.rows(np.asarray(batch.prompt_ids)[:, 0], batch.completion_ids)
  log_p = jax.nn.log_softmax(table)[rows]
  ids = batch.completion_ids[..., None]
  logprobs = jnp.take_along_axis(log_p, ids, -1)[..., 0]
  ratio = jnp.exp(logprobs - batch.old_logprobs)
  a = batch.advantages[..., None]
  surrogate = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
  d = batch.ref_logprobs - logprobs
  per_token = -surrogate + beta * (jnp.exp(d) - d - 1)
  mask = batch.completion_mask
  entropy = -(jnp.exp(log_p) * log_p).sum(-1)
  return jnp.where(mask, per_token, 0).sum() / mask.sum(), (ratio, d, entropy)


def descend(lm, table, batch, tx, objective=Objective(), **options):
  """Returns the state after an update, and its metrics."""
  update = make_update(lm, tx, objective, UpdateOptions(**options))
  return jax.jit(update)(init_state(table, tx, KEY), batch)


def all_ones(ids, kinds, **fields):
  """Returns a rollout without padding, of prompts of these kinds."""
  return Rollout(
    prompt_ids=jnp.asarray(kinds)[:, None],
    prompt_mask=jnp.ones((len(kinds), 1), bool),
    completion_ids=ids,
    completion_mask=jnp.ones(ids.shape, bool),
    logprobs=jnp.zeros(ids.shape),
    finished=jnp.ones(ids.shape[:2], bool),
  ).replace(**fields)


def plain_gradient(table, batch, beta, tabular):
  """Returns loss, parts and gradient of `plain_loss`."""
  loss = lambda table: plain_loss(table, batch, beta, tabular)
  return jax.jit(jax.value_and_grad(loss, has_aux=True))(table)


@pytest.mark.slow
def test_epochs_and_minibatches_equal_a_plain_loop(tabular):
  lm, table, batch = make_case(tabular)
  tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.1))
  opt_state = tx.init(table)
  params = table
  seen = []
  transform = jax.jit(tx.update)
  orders = np.asarray(draw_orders(jax.random.fold_in(KEY, 7), 4, 2, 3))
  assert (orders[1:] != orders[0]).any()
  for order in orders:
    for part in range(2):  # One row of 0 and 1, one of 2 and 3.
      places = np.array([0, 2]) + order[:, part]
      rows = jax.tree.map(lambda x, places=places: x[places], batch)
      (loss, (ratio, _, _)), grads = plain_gradient(params, rows, 0.1, tabular)
      seen.append((loss, ratio[rows.completion_mask].max()))
      updates, opt_state = transform(grads, opt_state, params)
      params = optax.apply_updates(params, updates)
  options = UpdateOptions(epochs=3, minibatches=2, max_grad_norm=0.05)
  update = make_update(lm, optax.adam(0.1), Objective(beta=0.1), options)
  state = init_state(table, optax.adam(0.1), KEY).replace(step=jnp.int32(7))
  state, metrics = jax.jit(update)(state, batch)
  assert_allclose(state.params, params, atol=1e-5)
  close = lambda x, y: assert_allclose(x, y, atol=1e-6)
  jax.tree.map(close, state.opt_state[0], opt_state[1][0])
  loss, ratio_max = np.transpose(seen)
  assert_allclose(metrics["loss"], loss.mean(), rtol=1e-4)
  assert_allclose(metrics["ratio_max"], ratio_max.max(), rtol=1e-4)
  assert (state.step, state.prompts_consumed, state.skipped) == (8, 4, 0)
  assert (jax.random.key_data(state.key) == jax.random.key_data(KEY)).all()


def test_gradients_may_be_changed_before_they_are_applied(tabular):
  """Adds the gradient of half the squared parameters, the parameters."""
  lm, table, batch = make_case(tabular)
  objective = Objective(beta=0.1)
  tx = optax.sgd(0.5)
  options = UpdateOptions(micro_batches=2)
  gradients = jax.jit(make_gradients(lm, objective, options))
  state = init_state(table, tx, KEY)
  gradient = gradients(state, batch)
  (loss, _), want = plain_gradient(table, batch, 0.1, tabular)
  assert_allclose(gradient.loss, loss, rtol=1e-5)
  assert_allclose(gradient.grads, want, atol=1e-6)
  gradient = gradient._replace(grads=gradient.grads + table)
  new, metrics = apply_gradients(tx, objective, options, state, gradient)
  assert_allclose(new.params, table - 0.5 * (want + table), atol=1e-6)
  norm = np.linalg.norm(want + table)
  assert_allclose(metrics["mean"]["grad_norm"], norm, rtol=1e-5)
  assert metrics["sum"]["skipped_updates"] == new.skipped == 0


@pytest.mark.slow
def test_update_metrics_equal_numpy(tabular):
  lm, table, batch = make_case(tabular)
  objective = Objective(beta=0.1)
  state, metrics = descend(lm, table, batch, optax.sgd(0.5), objective)
  (loss, parts), grads = plain_gradient(table, batch, 0.1, tabular)
  mask = np.asarray(batch.completion_mask)
  ratio, d, entropy = (np.asarray(x, np.float64)[mask] for x in parts)
  a = np.broadcast_to(np.asarray(batch.advantages)[..., None], mask.shape)[mask]
  norm = np.linalg.norm(grads)
  expected = {
    "loss": loss,
    "kl": (np.exp(d) - d - 1).mean(),
    "entropy": entropy.mean(),
    "clip_fraction_low": ((ratio < 0.8) & (a < 0)).mean(),
    "clip_fraction_high": ((ratio > 1.2) & (a > 0)).mean(),
    "ratio_min": ratio.min(),
    "ratio_max": ratio.max(),
    "grad_norm": norm,
    "update_norm": 0.5 * norm,
    "skipped_updates": 0,
  }
  assert set(metrics) == set(expected)
  assert 0 < expected["clip_fraction_low"] != expected["clip_fraction_high"] > 0
  for name, value in expected.items():
    assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
  assert_allclose(state.params, table - 0.5 * grads, atol=1e-6)


def equal_bits(a, b):
  jax.tree.map(assert_array_equal, a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
  "bad, max_grad_norm", [(jnp.nan, math.inf), (jnp.inf, 0.1)]
)
def test_a_nonfinite_gradient_skips_the_update(tabular, bad, max_grad_norm):
  lm, table, batch = make_case(tabular)
  tx = optax.adam(0.1)
  options = UpdateOptions(max_grad_norm=max_grad_norm)
  update = jax.jit(make_update(lm, tx, options=options))
  state, _ = update(init_state(table, tx, KEY), batch)
  broken = batch.replace(advantages=batch.advantages.at[0, 0].set(bad))
  after, metrics = update(state, broken)
  equal_bits((after.params, after.opt_state), (state.params, state.opt_state))
  assert (after.skipped, after.step, after.prompts_consumed) == (1, 2, 8)
  assert (metrics["skipped_updates"], metrics["update_norm"]) == (1, 0)
  assert not np.isfinite(metrics["grad_norm"])
  healthy, _ = update(after, batch)
  continued, _ = update(state, batch)
  equal_bits(healthy.params, continued.params)
  assert healthy.skipped == 1


@pytest.mark.slow
def test_only_the_nonfinite_minibatch_is_skipped(tabular):
  lm, table, batch = make_case(tabular)
  tx = optax.adam(0.1)
  broken = batch.replace(advantages=batch.advantages.at[0, 0].set(jnp.nan))
  got, metrics = descend(lm, table, broken, tx, minibatches=2)
  healthy = jax.tree.map(lambda x: x[1::2], batch)
  expected, _ = descend(lm, table, healthy, tx)
  assert_allclose(got.params, expected.params, atol=1e-6)
  assert (got.skipped, metrics["skipped_updates"]) == (1, 1)


@pytest.mark.slow
def test_completions_without_a_reward_take_no_part(tabular):
  """The update is as if they had not been sampled."""
  lm = tabular.lm(2, 3)
  params = jax.random.normal(jax.random.key(3), (2, 4, 3))
  rng = np.random.default_rng(0)
  ids = jnp.asarray(rng.integers(0, 3, (2, 4, 5)))
  length = np.array([[5, 2, 3, 1], [4, 4, 1, 5]])
  mask = jnp.arange(5) < jnp.asarray(length)[..., None]
  samples = all_ones(ids, [0, 1], completion_mask=mask)
  rewards = jnp.array([[1.0, 0.5, 0.0, jnp.nan], [0.0, 2.0, jnp.nan, 1.0]])
  chosen = np.array([[0, 1, 2], [0, 1, 3]])
  rows = np.arange(2)[:, None]
  smaller = all_ones(
    ids[rows, chosen], [0, 1], completion_mask=mask[rows, chosen]
  )
  tx = optax.sgd(1.0)
  objective = Objective(beta=0.1)
  update = make_update(lm, tx, objective)

  @jax.jit
  def learn(samples, rewards):
    args = lm, samples, rewards, objective
    batch = make_batch(*args, ref_params=0.5 * params)
    return update(init_state(params, tx, KEY), batch)

  got, metrics = learn(samples, rewards)
  other = jnp.array([[jnp.inf], [-jnp.inf]])
  infinite = jnp.where(jnp.isnan(rewards), other, rewards)
  equal_bits(learn(samples, infinite)[0].params, got.params)
  expected, row = learn(smaller, rewards[rows, chosen])
  assert_allclose(got.params, expected.params, atol=1e-6)
  for name in ("loss", "kl", "entropy"):
    assert_allclose(metrics[name], row[name], rtol=1e-5)
  assert jnp.abs(got.params - params).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
  "micro_batches, sampling, scale",
  [
    (1, Sampling(0.7, top_k=1), 1),
    (2, Sampling(0.7, top_p=0.5), 2),
    (4, Sampling(0.7, min_p=0.9), 1),
  ],
)
def test_reference_logprobs_have_the_temperature_without_cuts(
  tabular, micro_batches, sampling, scale
):
  lm = tabular.lm(4, 3)
  teacher = lm._replace(unembed=lambda *args: scale * lm.unembed(*args))
  table = jax.random.normal(jax.random.key(3), (4, 4, 3))
  ids = jax.random.randint(jax.random.key(4), (4, 2, 5), 0, 3)
  kinds = jnp.array([2, 0, 3, 1])
  batch = jax.jit(
    lambda samples: make_batch(
      lm,
      samples,
      jnp.ones((4, 2)),
      options=UpdateOptions(micro_batches=micro_batches),
      sampling=sampling,
      ref_params=table,
      ref_lm=teacher if scale > 1 else None,
    )
  )(all_ones(ids, kinds))
  rows = tabular.rows(kinds, ids)
  expected = tabular.log_table(scale * table / 0.7)[*rows, np.asarray(ids)]
  assert_allclose(batch.ref_logprobs, expected, atol=1e-5)
  two = Prompts(kinds[:2, None], jnp.ones((2, 1), bool))
  with pytest.raises(
    ValueError, match="give one for each of the rollout's 4 prompts"
  ):
    args = lm, all_ones(ids, kinds), jnp.ones((4, 2))
    make_batch(*args, ref_params=table, ref_prompts=two)


LENGTHS = np.array([[7, 2], [1, 4], [2, 2], [3, 1]])
REWARDS = jnp.ones((4, 2))


def with_prompts(width, seed):
  """Returns a rollout of `LENGTHS` with prompts of up to `width` tokens."""
  ids = jax.random.randint(jax.random.key(2), (4, 2, 7), 1, 11)
  prompt_ids = jax.random.randint(jax.random.key(seed), (4, width), 1, 11)
  real = jnp.arange(width) < jnp.array([[width], [1], [width - 1], [2]])
  mask = jnp.arange(7) < LENGTHS[..., None]
  zeros = jnp.zeros(ids.shape)
  full = jnp.ones(ids.shape[:2], bool)
  return Rollout(prompt_ids, real, ids, mask, zeros, full)


@pytest.mark.parametrize(
  "dtype, packed, micro_batches",
  [
    (jnp.float32, True, 2),
    pytest.param(jnp.float32, False, 1, marks=pytest.mark.slow),
    pytest.param(jnp.bfloat16, True, 1, marks=pytest.mark.slow),
  ],
)
def test_the_exact_kl_term_equals_its_definition(
  tiny, dtype, packed, micro_batches
):
  """The teacher is wider and has more token ids and other prompts.

  The batch needs its layers, the update only its head.
  """
  lm = transformer(tiny.config, dtype=dtype)
  wider = dict(width=24, vocab_size=tiny.config.vocab_size + 5)
  teacher = transformer(dataclasses.replace(tiny.config, **wider), dtype=dtype)
  params = lm.init(KEY)
  ref_params = teacher.init(jax.random.key(1))
  samples = with_prompts(3, 3)
  hinted = with_prompts(20, 4)
  mask = samples.completion_mask
  packing = None
  if packed:
    of_prompts = np.asarray(samples.prompt_mask.sum(-1))
    packing = layout.plan(LENGTHS, 7, of_prompts, 3, 1, micro_batches)
    assert packing is not None
  objective = Objective(beta=2.0, kl="exact")
  options = UpdateOptions(micro_batches=micro_batches, chunk_size=3)
  sampling = Sampling(0.7)
  tx = optax.sgd(1.0)
  update = make_update(lm, tx, objective, options, sampling, teacher)

  @jax.jit
  def step(params):
    batch = make_batch(
      *(lm, samples, REWARDS, objective),
      options=options,
      sampling=sampling,
      ref_params=ref_params,
      ref_lm=teacher,
      ref_prompts=Prompts(hinted.prompt_ids, hinted.prompt_mask),
      packing=packing,
    )
    nans = jax.tree.map(lambda x: jnp.nan * x, ref_params["layers"])
    only_head = ref_params | {"layers": nans}
    return update(init_state(params, tx, KEY), batch, only_head)

  def log_table(lm, params, prompts):
    prefix = lm.prefill(params, prompts.prompt_ids, prompts.prompt_mask)
    hidden, *_ = lm.extend(params, prefix, samples.completion_ids)
    last = jnp.broadcast_to(prefix.last_hidden[:, None, None], hidden.shape)
    hidden = jnp.concatenate([last[:, :, :1], hidden[:, :, :-1]], 2)
    logits = lm.unembed(params, hidden).astype(jnp.float32)
    return jax.nn.log_softmax(logits / 0.7)

  def term(params):
    log_p = log_table(lm, params, samples)
    log_q = log_table(teacher, ref_params, hinted)[..., : log_p.shape[-1]]
    kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    return jnp.sum(jnp.where(mask, kl, 0)) / mask.sum()

  kl, gradient = jax.jit(jax.value_and_grad(term))(params)
  state, metrics = step(params)
  tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
  assert_allclose(metrics["kl"], kl, rtol=tolerance)
  assert kl > 0.3
  flat = lambda tree: ravel_pytree(tree)[0]
  moved = flat(params) - flat(state.params)
  expected = 2 * flat(gradient)
  off = np.linalg.norm(moved - expected) / np.linalg.norm(expected)
  assert off < tolerance


def test_exact_kl_requires_a_matching_reference(tabular):
  lm, wide, small = (tabular.lm(1, n) for n in (3, 4, 2))
  params, of_wide, of_small = (model.init(KEY) for model in (lm, wide, small))
  samples = all_ones(jnp.zeros((1, 2, 2), int), jnp.zeros(1, int))
  objective = Objective(beta=1.0, kl="exact")
  tx = optax.sgd(1.0)

  def step(objective, ref_lm, ref_params, of_update, other=None):
    update = make_update(lm, tx, other or objective, ref_lm=ref_lm)
    args = lm, samples, jnp.ones((1, 2)), objective
    batch = make_batch(*args, ref_lm=ref_lm, ref_params=ref_params)
    return update(init_state(params, tx, KEY), batch, of_update)

  _, metrics = step(objective, wide, of_wide, of_wide)
  exact = metrics["kl"]
  estimate = Objective(beta=1.0)
  for made in (objective, estimate):  # the update's objective counts
    _, metrics = step(made, wide, of_wide, of_wide, estimate)
    difference = jax.nn.log_softmax(of_wide[0])[[0, 1], 0]
    difference -= jax.nn.log_softmax(params[0])[[0, 1], 0]
    k3 = jnp.mean(jnp.exp(difference) - 1 - difference)
    assert_allclose(metrics["loss"], k3, rtol=1e-4)
    assert abs(exact - k3) > 0.1
  in_reward, in_ratio = (
    dataclasses.replace(objective, kl_placement=x) for x in ("reward", "ratio")
  )
  none = "kl = 'exact' needs .* ref_params"
  other = "make_batch's ref_params"
  for words, *args in (
    (none, objective, wide, of_wide, None),
    (none, objective, wide, None, of_wide),
    *(
      (other, objective, wide, of_wide, x) for x in (params, {}, {"x": of_wide})
    ),
    ("has 2 token ids and the policy 3", objective, small, of_small, of_small),
    ("kl = 'exact': .*use k1 ", in_reward, wide, of_wide, of_wide),
    ("kl = 'exact': .*use k1 or k3 ", in_ratio, wide, of_wide, of_wide),
  ):
    with pytest.raises(ValueError, match=words):
      step(*args)


# Sums over micro-batches, and the order of rows in minibatches.


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
  b = 1024
  vocab = 3
  lm = tabular.lm(1, vocab)
  table = lm.init(KEY).astype(jnp.bfloat16)
  batch = one_token_batch(b, vocab)
  options = {"micro_batches": b, "max_grad_norm": 0.01}
  state, metrics = descend(lm, table, batch, optax.sgd(1.0), **options)
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
  lm = tabular.lm(1, 3)
  tx = optax.MultiSteps(optax.adam(0.1), 2)
  tx = tx.gradient_transformation()
  state = init_state(lm.init(KEY).astype(jnp.bfloat16), tx, KEY)
  batch = one_token_batch(4, 3)
  batch = batch.replace(old_logprobs=jnp.zeros((4, 1, 1)))
  update = make_update(lm, tx, options=UpdateOptions(minibatches=2))
  after, _ = jax.eval_shape(update, state, batch)
  dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
  assert dtypes(after) == dtypes(state)


@pytest.mark.parametrize("parts", [4, 2, 12])
def test_each_epoch_draws_new_minibatches(parts):
  rows = 12
  epochs = 4
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


# Importance weights of prompts.


def of_weights(tabular, pack=False, beta=0.0, **options):
  """Returns the function from prompt weights to a step of SGD."""
  lm = tabular.lm(2, 4)
  tx = optax.sgd(1.0)
  params = lm.init(KEY)
  ids = jax.random.randint(KEY, (4, 2, 3), 0, 4)
  lengths = np.array([[3, 1], [2, 2], [1, 1], [3, 2]])
  samples = all_ones(
    ids,
    jnp.arange(4) % 2,
    completion_mask=jnp.asarray(np.arange(3) < lengths[..., None]),
    logprobs=jnp.full(ids.shape, -1.4),
  )
  rewards = jax.random.normal(KEY, (4, 2))
  options = UpdateOptions(**options)
  packing = None
  if pack:
    ones = np.ones(4, int)
    parts = options.micro_batches
    packing = layout.plan(lengths, 3, ones, 1, 1, parts)
  objective = Objective(weighting="fixed_length", beta=beta)
  update = make_update(lm, tx, objective, options)

  @jax.jit
  def moved(weights):
    batch = make_batch(
      *(lm, samples, rewards, objective),
      options=options,
      ref_params=params + 0.5 * params**2 if beta else None,
      prompt_weights=weights,
      packing=packing,
    )
    return params - update(init_state(params, tx, KEY), batch)[0].params

  return lambda weights: np.asarray(
    moved(None if weights is None else jnp.asarray(weights, "f4"))
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "options", [{}, {"micro_batches": 2, "pack": True}, {"beta": 0.3}], ids=str
)
def test_the_gradient_is_linear_in_the_weights(options, tabular):
  weights = np.array([0.5, 3.0, 0.0, 1.25])
  gradient = of_weights(tabular, **options)
  each = [gradient(row) for row in np.eye(4)]
  result = gradient(weights)
  plain = gradient(None)
  assert_allclose(result, np.tensordot(weights, each, 1), atol=1e-6)
  assert_allclose(plain, sum(each), atol=1e-6)
  assert np.abs(result).max() > 0.01 < np.abs(plain - result).max()


def test_minibatches_take_the_weights_of_their_prompts(tabular):
  """The first minibatch, of every second prompt, has weight 0."""
  gradient = of_weights(tabular, minibatches=2)
  half, last = (gradient([0.0, w, 0.0, w]) for w in (1.0, 2.0))
  assert_allclose(last, 2 * half, rtol=1e-4, atol=1e-6)
  assert np.abs(half).max() > 0.01


# Metrics of the rollout.


@pytest.mark.slow
def test_rollout_metrics_equal_numpy():
  rng = np.random.default_rng(0)
  b = 4
  g = 3
  t = 6
  rewards = rng.normal(size=(b, g)).astype(np.float32)
  rewards[1] = 0.1
  rewards[0, 1] = rewards[1, 2] = np.nan
  length = rng.integers(1, t, (b, g))
  finished = rng.random((b, g)) < 0.5
  # The last row only pads the batch.
  length[3] = 0
  finished[3] = False
  rewards[3] = np.nan
  samples = all_ones(
    jnp.zeros((b, g, t), int),
    [0] * b,
    prompt_mask=jnp.array([[True]] * 3 + [[False]]),
    completion_mask=jnp.arange(t) < jnp.asarray(length)[..., None],
    finished=jnp.asarray(finished),
  )
  other = np.array([[-np.inf], [np.inf]] * 2, np.float32)
  infinite = np.where(np.isnan(rewards), other, rewards)
  metrics = jax.jit(rollout_metrics)(samples, jnp.asarray(infinite))
  expected = {
    "reward_mean": np.nanmean(rewards[:3]),
    "reward_std": np.nanstd(rewards[:3]),
    "rewards_missing": 2 / 9,
    "zero_variance_groups": 1 / 3,
    "completion_length_mean": length[:3].mean(),
    "completion_length_max": length.max(),
    "truncated": 1 - finished[:3].mean(),
  }
  assert set(metrics) == set(expected)
  for name, value in expected.items():
    assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
  # A group of one sample has no baseline, so its variance is not counted.
  fields = "completion_ids completion_mask logprobs finished".split()
  alone = samples.replace(**{f: getattr(samples, f)[:, :1] for f in fields})
  metrics = rollout_metrics(alone, jnp.asarray(infinite)[:, :1])
  assert metrics["zero_variance_groups"] == 0


@pytest.mark.slow
def test_invalid_options_are_refused(tabular):
  lm, table, batch = make_case(tabular)
  parts = (
    "2 prompts of 3 samples cannot be divided into 4 .* as 2 parts per group"
  )
  on_policy = batch.replace(old_logprobs=None)
  for options, bad, message in (
    ({"minibatches": 3}, batch, "4 prompts cannot be split.*minibatches=3"),
    ({"minibatches": 2, "micro_batches": 4}, batch, parts),
    ({"epochs": 2}, on_policy, "give make_batch the same UpdateOptions"),
    ({"minibatches": 2}, on_policy, "give make_batch the same UpdateOptions"),
  ):
    with pytest.raises(ValueError, match=message):
      descend(lm, table, bad, optax.sgd(1.0), **options)
  samples = all_ones(batch.completion_ids, [0, 1, 0, 1])
  objective = Objective(beta=0.1, kl="k1", kl_placement="reward")
  with pytest.raises(ValueError, match="'reward' needs .* give ref_params"):
    make_batch(lm, samples, batch.advantages, objective)


# The whole step as one function.

PROMPTS = Prompts(
  jnp.arange(4)[:, None] % 2,
  jnp.ones((4, 1), bool),
  targets=1 + jnp.arange(4) % 2,
  weights=jnp.array([1.0, 2.0, 0.5, 1.0]),
)
SAMPLING = Sampling(temperature=1.2, top_k=4)
PENALTY = {"beta": 0.05, "kl": "k1", "kl_placement": "reward"}
OBJECTIVE = Objective("dr_grpo", weighting="sequence_mean", **PENALTY)
OPTIONS = UpdateOptions(
  epochs=2, minibatches=2, micro_batches=2, max_grad_norm=0.5
)
SETTINGS = {"group_size": 4, "max_new_tokens": 4, "eos_ids": (0,), "pad_id": 3}


def share_of_target(samples, targets):
  hit = samples.completion_ids == targets[:, None, None]
  return jnp.sum(hit & samples.completion_mask, -1) / 4


@pytest.fixture(scope="module")
def chain_step(tabular):
  """A step of a chain, its first state and its reference policy."""
  lm = tabular.lm(2, 5)
  tx = optax.adam(0.2)
  params, ref = (lm.init(key) for key in jax.random.split(KEY))
  options = {"objective": OBJECTIVE, "update": OPTIONS, "sampling": SAMPLING}
  step = make_grpo_step(lm, tx, share_of_target, **SETTINGS, **options)
  state = init_state(params, tx, KEY)
  return lm, tx, step, jax.jit(step), state, ref


def close(a, b):
  def leaf(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      a = jax.random.key_data(a)
      b = jax.random.key_data(b)
    np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)

  jax.tree.map(leaf, a, b)


@pytest.mark.slow
def test_a_step_samples_makes_a_batch_and_updates(chain_step):
  lm, tx, _, step, state, ref = chain_step
  state, _ = step(state, PROMPTS, ref)  # Test the second step.
  got, metrics = step(state, PROMPTS, ref)
  draw = functools.partial(rollout, lm, sampling=SAMPLING, **SETTINGS)
  key = jax.random.fold_in(state.key, 1)
  samples = jax.jit(draw)(state.params, PROMPTS, key)
  rewards = jax.jit(share_of_target)(samples, PROMPTS.targets)
  settings = {"options": OPTIONS, "sampling": SAMPLING, "ref_params": ref}
  settings["prompt_weights"] = PROMPTS.weights
  of_batch = functools.partial(make_batch, lm, objective=OBJECTIVE, **settings)
  batch = jax.jit(of_batch)(samples, rewards)
  update = make_update(lm, tx, OBJECTIVE, OPTIONS, SAMPLING)
  expected, parts = jax.jit(update)(state, batch)
  close(got, expected)
  drawn = jax.jit(rollout_metrics)(samples, rewards)
  close(metrics, drawn | parts)
  assert got.step == 2 and got.prompts_consumed == 8
  assert metrics["grad_norm"] > 0


@pytest.mark.slow
def test_a_second_step_compiles_nothing(chain_step):
  """With donated states."""
  _, tx, whole, _, state, ref = chain_step
  params = jax.tree.map(jnp.copy, state.params)
  state = init_state(params, tx, jax.random.key(5))
  step = jax.jit(whole, donate_argnums=0)
  for _ in range(3):
    state, _ = step(state, PROMPTS, ref)
  assert step._cache_size() == 1


def test_steps_can_be_scanned_and_learn(chain_step):
  _, _, whole, step, state, ref = chain_step
  one = lambda state, _: whole(state, PROMPTS, ref)
  last, metrics = jax.jit(lambda x: jax.lax.scan(one, x, length=40))(state)
  looped = state
  for i in range(2):
    looped, one = step(looped, PROMPTS, ref)
    close(jax.tree.map(lambda x, i=i: x[i], metrics), one)
  assert last.step == 40 and last.prompts_consumed == 160
  reward = np.asarray(metrics["reward_mean"])
  assert reward[-5:].mean() > reward[:5].mean() + 0.2
