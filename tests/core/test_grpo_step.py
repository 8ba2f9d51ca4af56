"""`make_grpo_step`: the whole step as one function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core.batch import make_batch
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.objective import Objective
from grpojax.core.rollout import rollout
from grpojax.core.step import init_state, make_grpo_step, rollout_metrics
from grpojax.core.types import Prompts
from grpojax.core.update import UpdateOptions, make_update

KEY = jax.random.key(5)


PROMPTS = Prompts(
  jnp.arange(4)[:, None] % 2,
  jnp.ones((4, 1), bool),
  targets=1 + jnp.arange(4) % 2,
  weights=jnp.array([1.0, 2.0, 0.5, 1.0]),
)
SAMPLING = Sampling(temperature=1.2, top_k=4)
OBJECTIVE = Objective(
  advantage="dr_grpo",
  weighting="sequence_mean",
  beta=0.05,
  kl="k1",
  kl_placement="reward",
)
OPTIONS = UpdateOptions(
  epochs=2, minibatches=2, micro_batches=2, max_grad_norm=0.5
)
SETTINGS = {"group_size": 4, "max_new_tokens": 4, "eos_ids": (0,), "pad_id": 3}


def share_of_target(samples, targets):
  hit = samples.completion_ids == targets[:, None, None]
  return jnp.sum(hit & samples.completion_mask, -1) / 4


@pytest.fixture(scope="module")
def chain_step(tabular):
  """A step of a chain, its first state and its reference."""
  lm, tx = tabular.lm(2, 5), optax.adam(0.2)
  params, ref = (lm.init(key) for key in jax.random.split(KEY))
  step = make_grpo_step(
    lm,
    tx,
    share_of_target,
    **SETTINGS,
    objective=OBJECTIVE,
    update=OPTIONS,
    sampling=SAMPLING,
  )
  state = init_state(params, tx, KEY)
  return lm, tx, step, jax.jit(step), state, ref


def close(a, b, atol=1e-6):
  def leaf(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)

  jax.tree.map(leaf, a, b)


@pytest.mark.slow
def test_a_step_is_its_three_parts(chain_step):
  lm, tx, _, step, state, ref = chain_step
  state, _ = step(state, PROMPTS, ref)  # The second step: not key and step 0.
  got, metrics = step(state, PROMPTS, ref)
  draw = functools.partial(rollout, lm, sampling=SAMPLING, **SETTINGS)
  key = jax.random.fold_in(state.key, 1)
  samples = jax.jit(draw)(state.params, PROMPTS, key)
  rewards = jax.jit(share_of_target)(samples, PROMPTS.targets)
  batch = jax.jit(
    lambda samples, rewards: make_batch(
      lm,
      samples,
      rewards,
      OBJECTIVE,
      options=OPTIONS,
      sampling=SAMPLING,
      ref_params=ref,
      prompt_weights=PROMPTS.weights,
    )
  )(samples, rewards)
  update = make_update(lm, tx, OBJECTIVE, OPTIONS, SAMPLING)
  expected, parts = jax.jit(update)(state, batch)
  close(got, expected, atol=1e-5)
  drawn = jax.jit(rollout_metrics)(samples, rewards)
  close(metrics, drawn | parts, atol=1e-5)
  assert got.step == 2 and got.prompts_consumed == 8
  assert metrics["grad_norm"] > 0


@pytest.mark.slow
def test_a_second_step_compiles_nothing(chain_step):
  _, _, whole, _, state, ref = chain_step
  step = jax.jit(whole, donate_argnums=0)
  state = jax.tree.map(jnp.copy, state)
  for _ in range(3):
    state, _ = step(state, PROMPTS, ref)
  assert step._cache_size() == 1


def test_steps_can_be_scanned_and_learn(chain_step):
  _, _, whole, step, state, ref = chain_step
  scan = jax.jit(
    lambda state: jax.lax.scan(
      lambda state, _: whole(state, PROMPTS, ref), state, length=40
    )
  )
  last, metrics = scan(state)
  looped = state
  for i in range(2):
    looped, one = step(looped, PROMPTS, ref)
    close(jax.tree.map(lambda x, i=i: x[i], metrics), one, atol=1e-5)
  assert last.step == 40 and last.prompts_consumed == 160
  reward = np.asarray(metrics["reward_mean"])
  assert reward[-5:].mean() > reward[:5].mean() + 0.2


@pytest.mark.long
def test_steps_can_be_mapped_over_seeds(chain_step):
  _, _, whole, step, state, ref = chain_step
  keys = jax.random.split(KEY, 3)
  states = jax.vmap(lambda key: state.replace(key=key))(keys)
  mapped, metrics = jax.jit(jax.vmap(lambda state: whole(state, PROMPTS, ref)))(
    states
  )
  for i, key in enumerate(keys):
    expected = step(state.replace(key=key), PROMPTS, ref)
    got = jax.tree.map(lambda x, i=i: x[i], (mapped, metrics))
    close(got, expected, atol=1e-5)
  assert len(np.unique(metrics["reward_mean"])) > 1


@pytest.mark.slow
def test_every_step_samples_anew(tabular):
  """Two steps on the same prompts with the same policy."""
  lm, tx = tabular.lm(2, 5), optax.sgd(0.0)

  def fingerprint(samples, _):
    code = jnp.sin(1.0 + samples.completion_ids * (1 + jnp.arange(4)))
    return jnp.sum(code * samples.completion_mask, -1)

  step = make_grpo_step(lm, tx, fingerprint, **SETTINGS)
  state = init_state(lm.init(KEY), tx, KEY)
  _, metrics = jax.jit(
    lambda state: jax.lax.scan(
      lambda state, _: step(state, PROMPTS), state, length=5
    )
  )(state)
  assert len(np.unique(metrics["reward_mean"])) == 5
  assert (metrics["kl"] == 0).all() and (metrics["ratio_max"] == 1).all()


def test_the_first_state_can_be_donated(tiny):
  state = init_state(tiny.params, optax.adam(1e-3), jax.random.key(0))
  state = state.replace(params={})  # the fixture's, which others need
  donated = jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)
  assert int(donated(state).step) == 1


@pytest.mark.slow
def test_an_advantage_that_asks_for_lengths_gets_them(tabular):
  """From `make_batch`, and inside the whole step; those bound already stay."""
  lm, asked = tabular.lm(2, 5), []

  def advantage(rewards, lengths):
    asked.append(lengths)
    return rewards * lengths

  params = lm.init(KEY)
  draw = functools.partial(rollout, lm, **SETTINGS)
  samples = jax.jit(draw)(params, PROMPTS, KEY)
  rewards = jax.jit(share_of_target)(samples, PROMPTS.targets)
  lengths = np.asarray(samples.completion_mask).sum(-1)
  assert len(np.unique(lengths)) > 1
  for f, factor in (
    (advantage, lengths),
    (functools.partial(advantage, lengths=2), 2),
    (jnp.negative, -1),
  ):
    objective = Objective(advantage=f)
    found = make_batch(lm, samples, rewards, objective).advantages
    np.testing.assert_allclose(found, rewards * factor, rtol=1e-6)
    objective = Objective(advantage=f, advantage_clip=0.3)
    bounded = make_batch(lm, samples, rewards, objective).advantages
    np.testing.assert_allclose(bounded, np.clip(found, -0.3, 0.3), rtol=1e-6)
    assert (bounded != found).any()
  tx = optax.sgd(0.1)
  step = make_grpo_step(
    lm,
    tx,
    share_of_target,
    **SETTINGS,
    objective=Objective(advantage="length_weighted"),
  )
  state, metrics = jax.jit(step)(init_state(params, tx, KEY), PROMPTS)
  assert metrics["skipped_updates"] == 0 and metrics["grad_norm"] > 0
