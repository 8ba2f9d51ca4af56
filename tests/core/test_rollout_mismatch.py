"""Rollouts whose log-probabilities are not the trainer's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core.batch import make_batch
from grpojax.core.objective import Objective
from grpojax.core.step import init_state, make_grpo_step
from grpojax.core.types import Prompts, Rollout
from grpojax.core.update import UpdateOptions, make_update

KEY = jax.random.key(5)
B, G, T, VOCAB = 4, 3, 5, 4
NAMES = [
  "rollout_mismatch_mean",
  "rollout_mismatch_max",
  "rollout_clip_fraction_low",
  "rollout_clip_fraction_high",
]


@pytest.fixture(scope="module")
def case(tabular):
  """A rollout of a chain, whose log-probabilities are wrong by `noise` nats."""
  lm, rng = tabular.lm(2, VOCAB), np.random.default_rng(0)
  table = lm.init(KEY)
  ids = rng.integers(0, VOCAB, (B, G, T))
  rows = tabular.rows(np.arange(B) % 2, ids)
  log_p = tabular.log_table(table)[rows]
  exact = np.take_along_axis(log_p, ids[..., None], -1)[..., 0]
  noise = rng.normal(size=ids.shape) * 0.3
  mask = np.arange(T) < rng.integers(1, T + 1, (B, G, 1))
  samples = Rollout(
    prompt_ids=jnp.arange(B)[:, None] % 2,
    prompt_mask=jnp.ones((B, 1), bool),
    completion_ids=jnp.asarray(ids),
    completion_mask=jnp.asarray(mask),
    logprobs=jnp.asarray(np.where(mask, exact - noise, 0), jnp.float32),
    finished=jnp.ones((B, G), bool),
  )
  rewards = jnp.asarray(rng.normal(size=(B, G)), jnp.float32)
  return lm, table, samples, rewards, exact, noise


def metrics_of(noise, mask, advantages):
  """Metrics of some rows; noise is log(pi_trainer / pi_rollout)."""
  ratio = np.exp(noise[mask])
  a = np.broadcast_to(np.asarray(advantages)[..., None], mask.shape)[mask]
  return {
    "rollout_mismatch_mean": np.abs(noise[mask]).mean(),
    "rollout_mismatch_max": np.abs(noise[mask]).max(),
    "rollout_clip_fraction_low": ((ratio < 0.9) & (a < 0)).mean(),
    "rollout_clip_fraction_high": ((ratio > 1.2) & (a > 0)).mean(),
  }


@pytest.mark.parametrize(
  "updates, old", [(1, "rollout"), (2, "rollout"), (2, "trainer")]
)
def test_the_mismatch_is_logged_whosever_the_old_logprobs_are(
  case, updates, old
):
  lm, table, samples, rewards, exact, noise = case
  tx = optax.sgd(0.5)
  objective = Objective(clip_low=0.1, old_logprobs=old)
  options = UpdateOptions(minibatches=updates)
  update = make_update(lm, tx, objective, options)

  @jax.jit
  def learn():
    batch = make_batch(
      lm,
      samples,
      rewards,
      objective,
      options=options,
      policy_params=table if old == "trainer" else None,
    )
    return batch, *update(init_state(table, tx, KEY), batch)

  batch, state, metrics = learn()
  mask = np.asarray(samples.completion_mask)
  first = slice(None, None, updates)  # rows of the first minibatch
  expected = metrics_of(noise[first], mask[first], batch.advantages[first])
  assert expected["rollout_clip_fraction_low"] > 0
  assert expected["rollout_clip_fraction_high"] > 0
  for name in NAMES:
    np.testing.assert_allclose(
      metrics[name], expected[name], rtol=1e-4, err_msg=name
    )
  own = {"trainer": exact, "rollout": exact - noise}
  if updates == 1:
    assert batch.old_logprobs is None
    np.testing.assert_array_equal(metrics["ratio_max"], 1)
  else:
    found = np.asarray(batch.old_logprobs)[mask]
    np.testing.assert_allclose(found, own[old][mask], atol=1e-5)


def test_a_penalty_is_taken_between_log_probabilities_of_the_trainer(case):
  lm, table, samples, rewards, *_ = case

  def advantages(objective):
    return make_batch(
      lm,
      samples,
      rewards,
      objective,
      options=UpdateOptions(epochs=2),
      policy_params=table,
      ref_params=table,
    ).advantages

  plain = advantages(Objective())
  penalised = advantages(
    Objective(beta=0.5, kl_placement="reward", old_logprobs="trainer")
  )
  # The policy is the reference: its KL is 0, and was not with the rollout's.
  np.testing.assert_allclose(penalised, plain, atol=1e-5)


def test_a_whole_step_can_recompute_logprobs(tabular):
  """One more pass; and on-policy there is nothing to recompute."""
  lm, tx = tabular.lm(2, VOCAB), optax.sgd(0.5)
  passes = []

  def unembed(params, hidden):
    passes.append(hidden.shape)
    return lm.unembed(params, hidden)

  counting = lm._replace(unembed=unembed)
  prompts = Prompts(jnp.arange(B)[:, None] % 2, jnp.ones((B, 1), bool))
  reward = lambda samples, _: samples.completion_mask.sum(-1) * 1.0
  state = jax.eval_shape(lambda: init_state(lm.init(KEY), tx, KEY))

  def traced(old_logprobs, epochs):
    passes.clear()
    step = make_grpo_step(
      counting,
      tx,
      reward,
      group_size=G,
      max_new_tokens=T,
      eos_ids=(0,),
      objective=Objective(old_logprobs=old_logprobs),
      update=UpdateOptions(epochs=epochs),
    )
    jax.eval_shape(step, state, prompts)
    return len(passes)

  assert traced("trainer", epochs=1) == traced("rollout", epochs=1)
  assert traced("trainer", epochs=2) > traced("rollout", epochs=2)


def test_old_logprobs_of_the_trainer_need_its_policy(case):
  lm, _, samples, rewards, *_ = case
  objective, options = (
    Objective(old_logprobs="trainer"),
    UpdateOptions(epochs=2),
  )
  with pytest.raises(ValueError, match="give policy_params"):
    make_batch(lm, samples, rewards, objective, options=options)
