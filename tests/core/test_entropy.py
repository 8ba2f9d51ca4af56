"""Entropy in the loss: gradient, bonus, and selection of tokens."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.losses import entropy as entropy_lib
from grpojax.core.losses.entropy import highest_entropy
from grpojax.core.objective import Objective
from grpojax.core.packing import layout as packing_layout
from grpojax.core.step import init_state
from grpojax.core.types import Batch
from grpojax.core.update import UpdateOptions, make_update

KEY = jax.random.key(3)
B = 4
G = 2
T = 8
V = 6
SAMPLING = Sampling(temperature=0.7, top_k=3)


# Selection of tokens.


@pytest.mark.parametrize("tokens", [1, 2, 9, 12])
def test_the_tokens_of_highest_entropy(tokens):
  rng = np.random.default_rng(tokens)
  mask = rng.permutation(np.arange(24) < tokens).reshape(2, 3, 4)
  entropy = np.where(mask, rng.exponential(size=mask.shape), np.nan)
  entropy = entropy.astype(np.float32)
  for share in (0.0, 0.125, 0.25, 0.5, 0.75, 1.0):
    highest = highest_entropy(jnp.asarray(entropy), jnp.asarray(mask), share)
    # torch.quantile's and NumPy's; these shares are exact in binary.
    threshold = np.quantile(entropy[mask].astype(np.float64), 1 - share)
    np.testing.assert_array_equal(highest, mask & (entropy >= threshold))
    assert int(highest.sum()) == math.floor(share * (tokens - 1)) + 1


def test_ties_stay_and_padding_never_does():
  entropy = jnp.array([3.0, 1.0, 2.0, 2.0, 2.0, 9.0])
  mask = jnp.array([1, 1, 1, 1, 1, 0], bool)
  highest = highest_entropy(entropy, mask, 0.25)  # the two highest of five
  np.testing.assert_array_equal(highest, [1, 0, 1, 1, 1, 0])
  assert not highest_entropy(entropy, jnp.zeros(6, bool), 0.5).any()


# Updates.


def make_case(tabular):
  """Completions of a chain with two prompts, and old log-probabilities."""
  rng = np.random.default_rng(1)
  lm = tabular.lm(2, V)
  lengths = rng.integers(1, T // 2, (B, G))
  mask = np.arange(T) < lengths[..., None]
  mask[..., 1] &= lengths < 3  # an observation
  batch = Batch(
    prompt_ids=jnp.arange(B)[:, None] % 2,
    prompt_mask=jnp.ones((B, 1), bool),
    completion_ids=jnp.asarray(rng.integers(0, V, (B, G, T))),
    completion_mask=jnp.asarray(mask),
    advantages=jnp.asarray(rng.standard_normal((B, G, T)), jnp.float32),
    old_logprobs=jnp.asarray(-rng.exponential(size=(B, G, T)), jnp.float32),
  )
  return lm, lm.init(KEY), batch, lengths


def dense_loss(table, batch, share, coefficient, tabular):
  """Clipped surrogate and bonus of the tokens of highest entropy."""
  rows = tabular.rows(np.arange(B) % 2, batch.completion_ids)
  ids = batch.completion_ids[..., None]
  logits = table[rows] / SAMPLING.temperature
  least = jnp.sort(logits, -1)[..., -SAMPLING.top_k, None]
  scored = jax.nn.one_hot(ids[..., 0], V, dtype=bool)  # is never cut
  logits = jnp.where(scored | (logits >= least), logits, -1e30)
  log_p = jax.nn.log_softmax(logits)
  logprobs = jnp.take_along_axis(log_p, ids, -1)[..., 0]
  entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
  mask = np.asarray(batch.completion_mask)
  a = batch.advantages
  n = mask.sum()
  highest = mask & (entropy >= jnp.quantile(entropy[mask], 1 - share))
  ratio = jnp.exp(logprobs - batch.old_logprobs)
  per_token = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
  mean = jnp.sum(jnp.where(highest, entropy, 0)) / highest.sum()
  policy = jnp.sum(jnp.where(highest, per_token, 0)) / n
  return policy - coefficient * mean


CUTS = [(0.3, 0.7, 2, True), (0.3, 0.0, 4, False), (1.0, 0.7, 1, False)]


@pytest.mark.slow
@pytest.mark.parametrize("share, coefficient, parts, packed", CUTS)
def test_micro_batches_and_packing_do_not_change_an_update(
  share, coefficient, parts, packed, tabular
):
  """Compares with autodiff of the whole batch, with advantages of tokens."""
  lm, table, batch, lengths = make_case(tabular)
  if packed:
    layout = packing_layout.plan(lengths, T, np.ones(B, int), 1, 1, parts)
    assert layout is not None
    batch = batch.replace(packing=jax.tree.map(jnp.asarray, layout))
  tx = optax.sgd(1.0)
  options = UpdateOptions(micro_batches=parts, chunk_size=4)
  objective = Objective(entropy_coef=coefficient, top_entropy_quantile=share)
  update = make_update(lm, tx, objective, options, SAMPLING)
  state, metrics = jax.jit(update)(init_state(table, tx, KEY), batch)
  loss = lambda table: dense_loss(table, batch, share, coefficient, tabular)
  value, gradient = jax.jit(jax.value_and_grad(loss))(table)
  np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
  np.testing.assert_allclose(table - state.params, gradient, atol=1e-6)
  assert ("entropy_coefficient" in metrics) == (coefficient > 0)


@pytest.mark.slow
def test_the_coefficient_follows_the_entropy_of_each_update(tabular):
  lm, table, batch, _ = make_case(tabular)
  tx = optax.sgd(0.0)  # the entropy stays
  control = {"entropy_coef_delta": 0.25, "entropy_coef_max": 0.9}
  objective = Objective(entropy_coef=0.5, entropy_target=10.0, **control)
  options = UpdateOptions(minibatches=2)
  update = jax.jit(make_update(lm, tx, objective, options))
  state = init_state(table, tx, KEY)
  with pytest.raises(ValueError, match="state.replace"):
    update(state, batch)
  state = state.replace(extras={"entropy": entropy_lib.init_control(objective)})
  state, metrics = update(state, batch)
  # The first minibatch has no entropy yet; the second has 0.75.
  assert float(metrics["entropy_coefficient"]) == pytest.approx(0.75 / 2)
  assert float(state.extras["entropy"].coefficient) == pytest.approx(0.9)
  state, metrics = update(state, batch)
  assert float(metrics["entropy_coefficient"]) == pytest.approx(0.9)
  # A skipped update, or a batch without rewards, leaves the control unchanged.
  broken = batch.replace(advantages=jnp.full((B, G, T), jnp.inf))
  nothing = jnp.zeros_like(batch.completion_mask)
  nothing = batch.replace(completion_mask=nothing)
  for other, skipped in ((broken, 2), (nothing, 0)):
    after, metrics = update(state, other)
    assert int(metrics["skipped_updates"]) == skipped
    same = jax.tree.map(np.array_equal, after.extras, state.extras)
    assert jax.tree.all(same)
