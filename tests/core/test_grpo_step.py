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
  lm, tx = tabular.lm(2, 5), optax.adam(0.2)
  params, ref = (lm.init(key) for key in jax.random.split(KEY))
  options = {"objective": OBJECTIVE, "update": OPTIONS, "sampling": SAMPLING}
  step = make_grpo_step(lm, tx, share_of_target, **SETTINGS, **options)
  state = init_state(params, tx, KEY)
  return lm, tx, step, jax.jit(step), state, ref


def close(a, b):
  def leaf(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
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
