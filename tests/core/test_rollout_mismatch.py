"""Rollouts whose log-probabilities differ from the trainer's; corrections."""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpojax.core import losses
from grpojax.core.batch import make_batch
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.gradients import LossTerms, MinibatchTotals, micro_batch_loss
from grpojax.core.logprobs import TokenLogprobs
from grpojax.core.losses.rollout_correction import is_weights, make_correction
from grpojax.core.objective import Objective
from grpojax.core.step import init_state
from grpojax.core.types import Batch, Rollout
from grpojax.core.update import UpdateOptions, make_update

KEY = jax.random.key(5)
B = 4
G = 3
T = 5
VOCAB = 4


@pytest.fixture(scope="module")
def case(tabular):
  """A chain's rollout, with log-probabilities wrong by `noise` nats."""
  lm = tabular.lm(2, VOCAB)
  rng = np.random.default_rng(0)
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
  """Expected metrics of rows; noise is log(pi_trainer / pi_rollout)."""
  ratio = np.exp(noise[mask])
  a = np.broadcast_to(np.asarray(advantages)[..., None], mask.shape)[mask]
  return {
    "rollout_mismatch_mean": np.abs(noise[mask]).mean(),
    "rollout_mismatch_max": np.abs(noise[mask]).max(),
    "rollout_clip_fraction_low": ((ratio < 0.9) & (a < 0)).mean(),
    "rollout_clip_fraction_high": ((ratio > 1.2) & (a > 0)).mean(),
  }


def learned(case, objective, options):
  """The batch and the metrics of one step's updates."""
  lm, table, samples, rewards, *_ = case
  tx = optax.sgd(0.0)  # so that all epochs see the same policy
  update = make_update(lm, tx, objective, options)
  policy = table if objective.old_logprobs == "trainer" else None

  @jax.jit
  def learn():
    args = lm, samples, rewards, objective
    batch = make_batch(*args, options=options, policy_params=policy)
    return batch, update(init_state(table, tx, KEY), batch)[1]

  return learn()


@pytest.mark.slow
@pytest.mark.parametrize(
  "updates, old", [(2, "rollout"), (2, "trainer"), (1, "trainer")]
)
def test_the_mismatch_is_logged_for_any_old_logprobs(case, updates, old):
  _, _, samples, _, exact, noise = case
  objective = Objective(clip_low=0.1, old_logprobs=old)
  options = UpdateOptions(minibatches=updates)
  batch, metrics = learned(case, objective, options)
  mask = np.asarray(samples.completion_mask)
  first = slice(None, None, updates)  # rows of the first minibatch
  expected = metrics_of(noise[first], mask[first], batch.advantages[first])
  assert expected["rollout_clip_fraction_low"] > 0
  assert expected["rollout_clip_fraction_high"] > 0
  for name, value in expected.items():
    assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
  own = {"trainer": exact, "rollout": exact - noise}
  if updates == 1:
    assert batch.old_logprobs is None
    assert_array_equal(metrics["ratio_max"], 1)
  else:
    result = np.asarray(batch.old_logprobs)[mask]
    assert_allclose(result, own[old][mask], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 6])
def test_corrections_do_not_depend_on_micro_batches(case, micro_batches):
  """Compares with the loss written out; six parts have two epochs."""
  _, _, samples, _, _, noise = case
  epochs = 1 + (micro_batches > 1)
  objective = Objective(
    correction="sequence_mask",
    correction_high=1.2,
    off_policy_threshold=0.03,
    old_logprobs="trainer" if epochs > 1 else "rollout",
  )
  options = UpdateOptions(epochs=epochs, micro_batches=micro_batches)
  batch, row = learned(case, objective, options)
  mask = np.asarray(samples.completion_mask)
  noise = np.where(mask, noise, 0)
  ratios = np.exp(noise.sum(-1, keepdims=True))
  out = mask & (ratios > 1.2)
  weight = np.where(mask, np.where(ratios > 1.2, 0, ratios), 0)
  drift = -noise.sum(-1) / mask.sum(-1)
  advantages = np.asarray(batch.advantages)
  left_out = (advantages < 0) & (drift > 0.03)
  assert out.any() and left_out.any() and (left_out != (drift > 0.03)).any()
  sums = {
    "loss": -np.sum(weight * (~left_out * advantages)[..., None]),
    "is_weight": weight.sum(),
    "is_weight_bounded": out.sum(),
    "off_policy_masked": (left_out[..., None] & mask).sum(),
    "rollout_kl": (np.exp(noise) - 1 - noise)[mask].sum(),
  }
  for name, value in sums.items():
    mean = value / mask.sum()
    assert_allclose(row[name], mean, rtol=1e-4, err_msg=name)
  weights = ratios[..., 0]
  share = weights.sum() ** 2 / (weights.size * (weights**2).sum())
  assert_allclose(row["rollout_effective_samples"], share, rtol=1e-4)


@pytest.mark.slow
def test_a_kl_penalty_uses_log_probabilities_of_the_trainer(case):
  lm, table, samples, rewards, *_ = case

  def advantages(objective):
    params = {"policy_params": table, "ref_params": table}
    options = UpdateOptions(epochs=2)
    args = lm, samples, rewards, objective
    return make_batch(*args, options=options, **params).advantages

  plain = advantages(Objective())
  penalised = advantages(
    Objective(beta=0.5, kl="k1", kl_placement="reward", old_logprobs="trainer")
  )
  # The policy is the reference, so its KL is 0.
  assert_allclose(penalised, plain, atol=1e-5)


def test_trainer_logprobs_need_policy_params(case):
  lm, _, samples, rewards, *_ = case
  objective = Objective(old_logprobs="trainer")
  options = UpdateOptions(epochs=2)
  with pytest.raises(ValueError, match="give policy_params"):
    make_batch(lm, samples, rewards, objective, options=options)


# Corrections: parity with TRL, and enumeration.

FILE = pathlib.Path(__file__).with_name("trl_corrections.json")
TRL = json.loads(FILE.read_text())
WEIGHTINGS = {"grpo": losses.sequence_mean, "dapo": losses.token_mean}
INF = float("inf")


def arrays():
  """TRL's case as a single group; padding is nan."""
  stored = {name: np.array(TRL[name]) for name in TRL if name != "cases"}
  mask = stored.pop("mask") > 0
  advantages = stored.pop("advantages")
  logprobs = {
    k: jnp.asarray(np.where(mask, x, np.nan))[None] for k, x in stored.items()
  }
  return logprobs, jnp.asarray(advantages)[None], jnp.asarray(mask)[None]


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", WEIGHTINGS)
def test_values_and_gradients_equal_trl(loss_type, float64):
  stored, advantages, mask = arrays()
  weights = WEIGHTINGS[loss_type](mask)
  old, ref, rollout = (stored[k] for k in ("old", "ref", "sampler"))
  batch = Batch(None, None, None, mask, advantages, old, None, rollout)

  def value(logprobs, correct):
    def loss(beta, is_weights=None, left_out=None):
      args = logprobs, advantages, weights, mask, old, ref, is_weights
      token_mask = None if left_out is None else ~left_out & mask
      return losses.grpo_loss(*args, beta=beta, token_mask=token_mask)[0]

    corrected = loss(0.0, *(correct(logprobs, batch)[:2] if correct else ()))
    return corrected + loss(0.1) - loss(0.0)  # TRL's KL term has no weights

  cases = [case for case in TRL["cases"] if case["loss_type"] == loss_type]
  assert len({case["value"] for case in cases}) > len(cases) / 2
  assert len(cases) == 18

  def of_case(case):
    bounds = case["low"] or 0.0, case["high"] or INF, case["threshold"]
    correct = make_correction(case["mode"] or "none", *bounds)
    return jax.value_and_grad(value)(stored["logprobs"], correct)

  results = jax.jit(lambda: [of_case(case) for case in cases])()
  for case, (result, gradient) in zip(cases, results, strict=True):
    name = str({k: v for k, v in case.items() if k != "gradient"})
    assert_allclose(result, case["value"], rtol=1e-6, err_msg=name)
    gradient = np.where(mask, gradient, 0)[0]
    expected = case["gradient"]
    assert_allclose(gradient, expected, rtol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def policies(tabular):
  """A chain, another rollout policy, and all completions."""
  lm = tabular.lm(1, 3)
  p = lm.init(jax.random.key(0))
  q = p + 0.4 * jax.random.normal(jax.random.key(1), p.shape)
  ids = np.array(list(itertools.product(range(3), repeat=3)))
  is_real = lambda ids: np.cumsum(ids == 0, -1) - (ids == 0) == 0  # 0 ends
  ids = np.unique(np.where(is_real(ids), ids, 0), axis=0)
  mask = is_real(ids)
  rows = tabular.rows(np.zeros(1, int), ids[None])
  rewards = np.random.default_rng(2).normal(size=len(ids))

  def logprobs(table):
    log_p = jax.nn.log_softmax(jnp.asarray(table))[rows]
    result = jnp.take_along_axis(log_p, jnp.asarray(ids)[None, ..., None], -1)
    return jnp.where(mask, result[..., 0], 0.0)

  def entropies(table):
    log_p = jax.nn.log_softmax(jnp.asarray(table))
    return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)[rows]

  mask = jnp.asarray(mask)[None]
  return lm, p, q, mask, rewards, logprobs, entropies


def expected_gradient(policies, sampler, objective):
  """Gradient of all terms of the loss, expected over `sampler`."""
  lm, p, _, mask, rewards, logprobs, entropies = policies
  sampled = logprobs(sampler)
  share = jnp.exp(sampled.sum(-1))[..., None]  # probability of each
  assert_allclose(share.sum(), 1, rtol=1e-5)
  ref = jnp.where(mask, -1.0, 0.0)
  advantages = jnp.asarray(rewards)[None]
  batch = Batch(None, None, None, mask, advantages, None, ref, sampled)
  terms = LossTerms(lm, objective, Sampling(), chunk_size=1)
  # The bonus is a mean over tokens: here weighted by probability.
  by_share = share * mask.sum()
  terms.logprobs = lambda table, batch: TokenLogprobs(
    logprobs(table), by_share * entropies(table)
  )

  batch = batch.replace(weights=share * mask)

  def loss(table):
    args = batch, MinibatchTotals(), objective.entropy_coef
    return micro_batch_loss(table, terms, *args)[0]

  return jax.jit(jax.grad(loss))(p)


TERMS = {
  "policy": {},
  "k3": {"beta": 0.3},
  "k3 times the ratio": {"beta": 0.3, "kl_placement": "ratio"},
  "entropy": {"entropy_coef": 0.2},
}


@pytest.mark.slow
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_unbounded_sequence_weights_give_the_policy_gradient(policies, terms):
  _, p, q, _, rewards, logprobs, _ = policies
  own = expected_gradient(policies, p, Objective(**terms))
  if not terms:
    value = lambda table: jnp.exp(logprobs(table).sum(-1))[0] @ rewards
    truth = jax.jit(jax.grad(value))(p)
    assert_allclose(-own, truth, atol=1e-6)

  def weighed(correction, high=0.0):
    objective = Objective(**terms, correction=correction, correction_high=high)
    return expected_gradient(policies, q, objective)

  for name in ("sequence_truncate", "sequence_mask"):
    assert_allclose(weighed(name), own, atol=1e-6)
  # Token weights leave the prefixes distributed as the sampler draws them.
  off = [weighed("token_truncate"), weighed("sequence_truncate", high=1.0)]
  assert min(np.abs(x - own).max() for x in off) > 1e-3


@pytest.mark.slow
def test_huge_sequence_weights_are_finite():
  huge = jnp.full((1, 1, 9), 20.0)
  weights, _ = is_weights(huge, huge > 0, "sequence_truncate")
  assert np.isfinite(weights).all()
