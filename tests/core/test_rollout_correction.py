"""Corrections of a rollout policy: parity with TRL, and enumeration."""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from grpojax.core import losses
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.gradients import LossTerms, MinibatchTotals, micro_batch_loss
from grpojax.core.logprobs import TokenLogprobs
from grpojax.core.losses.rollout_correction import is_weights, make_correction
from grpojax.core.objective import Objective
from grpojax.core.types import Batch

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

  def loss(table):
    args = (batch, share * mask, MinibatchTotals(), objective.entropy_coef)
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
