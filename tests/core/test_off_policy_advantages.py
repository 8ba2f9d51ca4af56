"""Which advantages a correction makes exact, over all groups of a policy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core.advantages import ADVANTAGES, OF_SUBSETS
from grpojax.core.binding import bind
from grpojax.core.decoding.sampling import Sampling, transform_logits
from grpojax.core.losses.rollout_correction import CORRECTIONS, is_weights
from grpojax.core.objective import Objective
from grpojax.core.update import make_update
from grpojax.training.config import default_job, from_config

# A chain on three tokens, of which 0 ends; at most two tokens: 7 completions.
IDS = np.array([[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]])
MASK = np.array([[True, False]] + [[True, True]] * 6)
REWARDS = np.array([0.3, 1.0, 0.5, 0.2, 0.0, 0.9, 0.7])
GROUPS = np.array(list(itertools.product(range(7), repeat=3)))
RNG = np.random.default_rng(0)
POLICY = RNG.normal(size=(4, 3))
SAMPLER = POLICY + 0.4 * RNG.normal(size=(4, 3))

# Their own reward does not reach the baseline, or scales all advantages alike.
EXACT = (
  "vanilla leave_one_out dr_grpo shrinkage beta_binomial length_weighted "
  "score_weighted optimal_token_baseline"
).split()


def logprobs(table, sampling=Sampling(), keep=None):
  """Log-probabilities [7, 2] of all completions' tokens; 0 on padding."""
  rows = np.stack([np.zeros(7, int), 1 + IDS[:, 0]], axis=-1)
  logits = jnp.asarray(table)[rows]
  log_p = jax.nn.log_softmax(transform_logits(logits, sampling, keep))
  chosen = jnp.take_along_axis(log_p, IDS[..., None], axis=-1)[..., 0]
  return jnp.where(MASK, chosen, 0.0)


def advantages_of(name, sampled):
  """Advantages [groups, 3, 2] of tokens; other prompts' rewards are fixed."""
  others = jnp.array([[0.1, 0.9, 0.4], [0.8, 0.6, 0.3]])
  score_sq = jnp.where(MASK, jnp.expm1(sampled) ** 2, 0)

  def one(group):
    def of_batch(x):  # the other prompts have the first group's completions
      fixed = jnp.asarray(x)[GROUPS[:2] + 2]
      return jnp.concatenate([jnp.asarray(x)[group][None], fixed])

    rewards = jnp.concatenate([jnp.asarray(REWARDS)[group][None], others])
    found = bind(
      ADVANTAGES[name],
      k=2,
      lengths=of_batch(MASK.sum(-1)),
      logit_score_sq=of_batch(score_sq.sum(-1)),
      token_score_sq=of_batch(score_sq),
      sampled=of_batch(MASK),
    )(rewards)[0]
    return jnp.broadcast_to(found.reshape(3, -1), (3, 2))

  return jax.vmap(one)(jnp.asarray(GROUPS))


def expected(name, sampler, correction, sampling=Sampling()):
  """Expected gradient estimate by the groups that `sampler` writes."""
  sampled = logprobs(sampler, sampling)
  policy = functools.partial(logprobs, sampling=sampling, keep=jnp.asarray(IDS))
  log_ratio = policy(POLICY) - sampled
  weights = jnp.ones((7, 2))
  if correction != "none":
    bounds = (0.8, 1.2) if correction == "geometric_mask" else (0.0, np.inf)
    mask = jnp.asarray(MASK)[None]
    weights = is_weights(log_ratio[None], mask, correction, *bounds)[0][0]
  scores = jax.jacobian(policy)(jnp.asarray(POLICY))  # [7, 2, 4, 3]
  weighed = weights[..., None, None] * scores
  probability = jnp.exp(sampled.sum(-1))[GROUPS].prod(-1)
  advantages = advantages_of(name, sampled)
  estimate = jnp.einsum("ngt,ngtab->nab", advantages, weighed[GROUPS]) / 3
  return jnp.tensordot(probability, estimate, 1)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_corrections_of_whole_sequences_are_exact_for_some(name):
  """Unbounded, for baselines of the others; token weights for none."""

  @jax.jit
  def all_of_them():
    own = expected(name, POLICY, "none")
    return own, [expected(name, SAMPLER, x) for x in CORRECTIONS]

  own, found = all_of_them()
  size = np.linalg.norm(own)
  for correction, gradient in zip(CORRECTIONS, found, strict=True):
    error = np.linalg.norm(gradient - own) / size
    if name in EXACT and correction.startswith("sequence_"):
      assert error < 1e-5, correction
    else:
      assert error > 1e-3, correction
  assert not set(EXACT) & set(OF_SUBSETS)


@pytest.mark.parametrize(
  "cut", [{"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.4}], ids=str
)
def test_a_sampler_with_another_cut_leaves_a_bias(cut):
  sampling = Sampling(**cut)
  own = jax.jit(lambda: expected("vanilla", POLICY, "none", sampling))()
  found = jax.jit(
    lambda: expected("vanilla", SAMPLER, "sequence_truncate", sampling)
  )()
  assert np.linalg.norm(found - own) > 0.01 * np.linalg.norm(own)


OTHER_SAMPLERS = {
  "correction": {"loss.correction": "token_truncate"},
  "ahead": {"sampling.ahead": 1, "optim.minibatches": 2},
  "int8": {"sampling.cache_dtype": "int8", "optim.minibatches": 2},
}


@pytest.mark.parametrize("sampler", OTHER_SAMPLERS)
@pytest.mark.parametrize("advantage", OF_SUBSETS)
def test_subsets_of_another_policys_samples_are_refused(advantage, sampler):
  config = default_job()
  config.update_from_flattened_dict(OTHER_SAMPLERS[sampler])
  from_config(config)
  config.advantage = advantage
  words = f"advantage = '{advantage}': compares subsets .*{sampler}"
  with pytest.raises(ValueError, match=words):
    from_config(config)


def test_the_update_refuses_subsets_by_name_and_by_function(tabular):
  wrapped = functools.partial(ADVANTAGES["max_at_k"], k=2)
  for advantage in ("max_rl", ADVANTAGES["pairwise_rank"], wrapped):
    objective = Objective(advantage=advantage, correction="sequence_mask")
    with pytest.raises(ValueError, match="compares subsets of a group"):
      make_update(tabular.lm(1, 3), optax.sgd(1.0), objective)
