"""The expected update, over all groups of a policy with few outputs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import losses
from grpojax.core.batch import make_batch
from grpojax.core.decoding.sampling import Sampling, transform_logits
from grpojax.core.objective import Objective
from grpojax.core.step import init_state
from grpojax.core.types import Rollout
from grpojax.core.update import make_update

KEY = jax.random.key(5)


# Of a chain on three tokens, 0 ends, at most two tokens: seven completions.
OUTPUTS = jnp.array(
  [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]], jnp.int32
)
OUTPUT_MASK = jnp.array([[True, False]] + [[True, True]] * 6)
REWARDS = jnp.array([0.3, 1.0, -0.5, 0.2, 0.0, 2.0, 0.7])


def output_logprobs(table, sampling=Sampling()):
  """Log-probabilities [7, 2] of the tokens of all outputs; 0 on padding."""
  log_table = jax.nn.log_softmax(transform_logits(table[0], sampling))
  first = log_table[0, OUTPUTS[:, 0]]
  second = log_table[1 + OUTPUTS[:, 0], OUTPUTS[:, 1]]
  return jnp.where(OUTPUT_MASK, jnp.stack([first, second], -1), 0.0)


def expected_step(
  lm,
  table,
  group_size,
  advantage,
  reference=None,
  beta=0.0,
  sampling=Sampling(),
  ref_lm=None,
  rewards=REWARDS,
  **kl,
):
  """E[-update] of gradient descent at learning rate 1, over 7^G groups."""
  tx = optax.sgd(1.0)
  objective = Objective(
    advantage=advantage,
    weighting=lambda mask: losses.fixed_length(mask, length=1),
    beta=beta,
    **{"kl": "k1", "kl_placement": "reward"} | kl,
  )
  update = make_update(lm, tx, objective, sampling=sampling, ref_lm=ref_lm)
  state = init_state(table, tx, KEY)
  scored = output_logprobs(table, sampling)
  groups = jnp.array(list(itertools.product(range(7), repeat=group_size)))

  def one(group):
    samples = Rollout(
      prompt_ids=jnp.zeros((1, 1), jnp.int32),
      prompt_mask=jnp.ones((1, 1), bool),
      completion_ids=OUTPUTS[group][None],
      completion_mask=OUTPUT_MASK[group][None],
      logprobs=scored[group][None],
      finished=jnp.ones((1, group_size), bool),
    )
    batch = make_batch(
      lm,
      samples,
      rewards[group][None],
      objective,
      sampling=sampling,
      ref_params=reference,
      ref_lm=ref_lm,
    )
    return update(state, batch, reference)[0].params - table

  @jax.jit
  def expectation():
    probability = jnp.exp(scored.sum(-1))[groups].prod(-1)
    return jnp.tensordot(probability, jax.vmap(one)(groups), 1)

  return expectation()


@pytest.mark.parametrize(
  ("advantage", "group_size", "factor"),
  [
    ("vanilla", 1, 1),
    ("leave_one_out", 3, 1),
    ("dr_grpo", 3, 2 / 3),
  ],
)
def test_expected_update_is_the_policy_gradient(
  tabular, advantage, group_size, factor
):
  lm = tabular.lm(1, 3)
  table = lm.init(KEY)
  value = lambda table: jnp.exp(output_logprobs(table).sum(-1)) @ REWARDS
  truth = jax.jit(jax.grad(value))(table)
  got = expected_step(lm, table, group_size, advantage)
  np.testing.assert_allclose(got, factor * truth, atol=2e-6)
  assert jnp.abs(truth).max() > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
  "sampling",
  [pytest.param(Sampling(), marks=pytest.mark.slow), Sampling(0.8, top_k=2)],
)
def test_expected_update_with_a_penalty_in_the_reward(tabular, sampling):
  """The gradient of E[R] - beta KL(pi || ref), of whole completions.

  With the policy as it samples, cuts and all, and the reference without cuts.
  """
  lm, beta = tabular.lm(1, 3), 0.7
  table, reference = (lm.init(key) for key in jax.random.split(KEY))
  uncut = Sampling(sampling.temperature)

  def objective(table):
    logprob = output_logprobs(table, sampling).sum(-1)
    log_ratio = logprob - output_logprobs(reference, uncut).sum(-1)
    return jnp.exp(logprob) @ (REWARDS - beta * log_ratio)

  got = expected_step(lm, table, 2, "leave_one_out", reference, beta, sampling)
  expected = jax.jit(jax.grad(objective))(table)
  np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize(
  "sampling",
  [pytest.param(Sampling(), marks=pytest.mark.slow), Sampling(0.8, top_k=2)],
)
def test_expected_update_with_an_exact_kl_of_every_token(tabular, sampling):
  """The gradient of what each prefix's whole distribution differs by.

  From a teacher that knows one id more. What it is expected of is constant, as
  in the estimates: k3 times the ratio has the same expected gradient.
  """
  lm, ref_lm = tabular.lm(1, 3), tabular.lm(1, 4)
  table, reference = lm.init(KEY), ref_lm.init(jax.random.key(6))
  logits = transform_logits(reference[0] / sampling.temperature)
  of_teacher = jax.nn.log_softmax(logits)[:4, :3]
  visits = jnp.exp(jax.nn.log_softmax(transform_logits(table[0], sampling)))
  visits = jnp.array([1.0, 0.0, visits[0, 1], visits[0, 2]])  # 0 is the end

  def divergence(table):
    log_p = jax.nn.log_softmax(transform_logits(table[0], sampling))
    return visits @ (jnp.exp(log_p) * (log_p - of_teacher)).sum(-1)

  def found(**kl):
    nothing = jnp.zeros(7)
    options = dict(ref_lm=ref_lm, rewards=nothing, **kl)
    return expected_step(
      lm, table, 1, "vanilla", reference, 0.7, sampling, **options
    )

  expected = -0.7 * jax.jit(jax.grad(divergence))(table)
  exact = found(kl="exact", kl_placement="loss")
  np.testing.assert_allclose(exact, expected, atol=2e-6)
  assert jnp.abs(expected).max() > 0.05
  estimate = found(kl="k3", kl_placement="ratio")
  np.testing.assert_allclose(estimate, exact, atol=2e-6)
