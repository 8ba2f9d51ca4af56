"""Expected updates, by enumeration of all groups of seven completions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import losses
from grpojax.core.advantages import ADVANTAGES, OF_SUBSETS
from grpojax.core.batch import make_batch
from grpojax.core.binding import bind
from grpojax.core.decoding.sampling import Sampling, transform_logits
from grpojax.core.losses.rollout_correction import CORRECTIONS, is_weights
from grpojax.core.objective import Objective
from grpojax.core.step import init_state
from grpojax.core.types import Rollout
from grpojax.core.update import make_update

KEY = jax.random.key(5)
IDS = np.array([[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]])
MASK = np.array([[True, False]] + [[True, True]] * 6)
REWARDS = jnp.array([0.3, 1.0, 0.5, 0.2, 0.0, 0.9, 0.7])


def all_groups(size):
  return np.array(list(itertools.product(range(7), repeat=size)))


def logprobs(table, sampling=Sampling()):
  """Returns log-probabilities [7, 2] of all completions; 0 on padding."""
  rows = np.stack([np.zeros(7, int), 1 + IDS[:, 0]], axis=-1)
  logits = jnp.asarray(table)[rows]
  log_p = jax.nn.log_softmax(transform_logits(logits, sampling))
  chosen = jnp.take_along_axis(log_p, IDS[..., None], axis=-1)[..., 0]
  return jnp.where(MASK, chosen, 0.0)


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
  """Returns E[-update] over 7^G groups, of SGD with learning rate 1."""
  tx = optax.sgd(1.0)
  objective = Objective(
    advantage=advantage,
    weighting=lambda mask: losses.fixed_length(mask, length=1),
    beta=beta,
    **{"kl": "k1", "kl_placement": "reward"} | kl,
  )
  update = make_update(lm, tx, objective, sampling=sampling, ref_lm=ref_lm)
  state = init_state(table, tx, KEY)
  scored = logprobs(table[0], sampling)
  groups = jnp.asarray(all_groups(group_size))

  def update_of(group):
    samples = Rollout(
      prompt_ids=jnp.zeros((1, 1), jnp.int32),
      prompt_mask=jnp.ones((1, 1), bool),
      completion_ids=jnp.asarray(IDS)[group][None],
      completion_mask=jnp.asarray(MASK)[group][None],
      logprobs=scored[group][None],
      finished=jnp.ones((1, group_size), bool),
    )
    models = {"ref_params": reference, "ref_lm": ref_lm}
    batch = make_batch(
      lm, samples, rewards[group][None], objective, sampling=sampling, **models
    )
    return update(state, batch, reference)[0].params - table

  @jax.jit
  def expectation():
    probability = jnp.exp(scored.sum(-1))[groups].prod(-1)
    return jnp.tensordot(probability, jax.vmap(update_of)(groups), 1)

  return expectation()


@pytest.mark.parametrize(
  ("advantage", "group_size", "factor"),
  [("vanilla", 1, 1), ("leave_one_out", 3, 1), ("dr_grpo", 3, 2 / 3)],
)
def test_expected_update_is_the_policy_gradient(
  tabular, advantage, group_size, factor
):
  lm = tabular.lm(1, 3)
  table = lm.init(KEY)
  value = lambda table: jnp.exp(logprobs(table[0]).sum(-1)) @ REWARDS
  truth = jax.jit(jax.grad(value))(table)
  step = expected_step(lm, table, group_size, advantage)
  np.testing.assert_allclose(step, factor * truth, atol=2e-6)
  assert jnp.abs(truth).max() > 0.05


PLAIN = pytest.param(Sampling(), marks=pytest.mark.slow)
CUT = Sampling(0.8, top_k=2)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [PLAIN, CUT])
def test_expected_update_with_a_penalty_in_the_reward(tabular, sampling):
  """It is the gradient of E[R] - beta KL(pi || ref), with ref uncut."""
  lm = tabular.lm(1, 3)
  beta = 0.7
  table, reference = (lm.init(key) for key in jax.random.split(KEY))
  uncut = Sampling(sampling.temperature)

  def objective(table):
    logprob = logprobs(table[0], sampling).sum(-1)
    log_ratio = logprob - logprobs(reference[0], uncut).sum(-1)
    return jnp.exp(logprob) @ (REWARDS - beta * log_ratio)

  step = expected_step(lm, table, 2, "leave_one_out", reference, beta, sampling)
  expected = jax.jit(jax.grad(objective))(table)
  np.testing.assert_allclose(step, expected, atol=2e-6)


@pytest.mark.parametrize("sampling", [PLAIN, CUT])
def test_expected_update_with_an_exact_kl_of_every_token(tabular, sampling):
  """The teacher has an extra id; k3 times the ratio has the same mean."""
  lm = tabular.lm(1, 3)
  ref_lm = tabular.lm(1, 4)
  table = lm.init(KEY)
  reference = ref_lm.init(jax.random.key(6))
  logits = transform_logits(reference[0] / sampling.temperature)
  ref_log_p = jax.nn.log_softmax(logits)[:4, :3]
  visits = jnp.exp(jax.nn.log_softmax(transform_logits(table[0], sampling)))
  visits = jnp.array([1.0, 0.0, visits[0, 1], visits[0, 2]])  # 0 is the end

  def divergence(table):
    log_p = jax.nn.log_softmax(transform_logits(table[0], sampling))
    return visits @ (jnp.exp(log_p) * (log_p - ref_log_p)).sum(-1)

  def step(**kl):
    options = {"ref_lm": ref_lm, "rewards": jnp.zeros(7)} | kl
    return expected_step(
      lm, table, 1, "vanilla", reference, 0.7, sampling, **options
    )

  expected = -0.7 * jax.jit(jax.grad(divergence))(table)
  exact = step(kl="exact", kl_placement="loss")
  np.testing.assert_allclose(exact, expected, atol=2e-6)
  assert jnp.abs(expected).max() > 0.05
  estimate = step(kl="k3", kl_placement="ratio")
  np.testing.assert_allclose(estimate, exact, atol=2e-6)


# Importance weights for samples of another policy.

GROUPS = all_groups(3)
RNG = np.random.default_rng(0)
POLICY = RNG.normal(size=(4, 3))
SAMPLER = POLICY + 0.4 * RNG.normal(size=(4, 3))
# A sample's reward does not affect its baseline, or only scales the advantages.
EXACT = (
  "vanilla leave_one_out dr_grpo shrinkage beta_binomial length_weighted "
  "score_weighted optimal_token_baseline"
).split()


def advantages_of(name, sampled):
  """Returns token advantages [groups, 3, 2], with two other fixed prompts."""
  fixed_rewards = jnp.array([[0.1, 0.9, 0.4], [0.8, 0.6, 0.3]])
  score_sq = jnp.where(MASK, jnp.expm1(sampled) ** 2, 0)

  def group_advantages(group):
    def batch(x):
      fixed = jnp.asarray(x)[GROUPS[:2] + 2]
      return jnp.concatenate([jnp.asarray(x)[group][None], fixed])

    offered = {"k": 2, "lengths": batch(MASK.sum(-1)), "sampled": batch(MASK)}
    offered["token_score_sq"] = batch(score_sq)
    offered["logit_score_sq"] = batch(score_sq.sum(-1))
    rewards = jnp.concatenate([REWARDS[group][None], fixed_rewards])
    advantages = bind(ADVANTAGES[name], **offered)(rewards)
    return jnp.broadcast_to(advantages[0].reshape(3, -1), (3, 2))

  return jax.vmap(group_advantages)(jnp.asarray(GROUPS))


def expected_gradient(name, sampler, correction):
  """Returns the expected gradient estimate of groups drawn from `sampler`."""
  sampled = logprobs(sampler)
  log_ratio = logprobs(POLICY) - sampled
  weights = jnp.ones((7, 2))
  if correction != "none":
    bounds = (0.8, 1.2) if correction == "geometric_mask" else (0.0, np.inf)
    mask = jnp.asarray(MASK)[None]
    weights = is_weights(log_ratio[None], mask, correction, *bounds)[0][0]
  scores = jax.jacobian(logprobs)(jnp.asarray(POLICY))  # [7, 2, 4, 3]
  weighed = weights[..., None, None] * scores
  probability = jnp.exp(sampled.sum(-1))[GROUPS].prod(-1)
  advantages = advantages_of(name, sampled)
  estimate = jnp.einsum("ngt,ngtab->nab", advantages, weighed[GROUPS]) / 3
  return jnp.tensordot(probability, estimate, 1)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_only_sequence_corrections_can_be_exact(name):
  """They are exact without bounds, for the advantages `EXACT`."""

  @jax.jit
  def expected_gradients():
    on_policy = expected_gradient(name, POLICY, "none")
    return on_policy, [expected_gradient(name, SAMPLER, x) for x in CORRECTIONS]

  on_policy, gradients = expected_gradients()
  size = np.linalg.norm(on_policy)
  for correction, gradient in zip(CORRECTIONS, gradients, strict=True):
    error = np.linalg.norm(gradient - on_policy) / size
    if name in EXACT and correction.startswith("sequence_"):
      assert error < 1e-5, correction
    else:
      assert error > 1e-3, correction
  assert not set(EXACT) & set(OF_SUBSETS)


def test_the_update_refuses_corrected_subset_advantages(tabular):
  wrapped = functools.partial(ADVANTAGES["max_at_k"], k=2)
  for advantage in ("max_rl", ADVANTAGES["pairwise_rank"], wrapped):
    objective = Objective(advantage=advantage, correction="sequence_mask")
    with pytest.raises(ValueError, match="compares subsets of a group"):
      make_update(tabular.lm(1, 3), optax.sgd(1.0), objective)
