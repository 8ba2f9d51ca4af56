"""Weightings, ratios and the loss: gradients, and hostile numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import losses
from grpojax.core.losses import surrogates
from grpojax.core.losses.kl import k1, k2, k3

WEIGHTINGS = losses.WEIGHTINGS | {
  "fixed_length": lambda mask: losses.fixed_length(mask, 8)
}
RATIOS, SURROGATES = surrogates.RATIOS, surrogates.SURROGATES
MASK = jnp.array(
  [[[1, 1, 1, 0], [1, 0, 0, 0]], [[1, 1, 0, 0], [0, 0, 0, 0]]], bool
)
KL = [(k1, True), (k2, False), (k3, False), (k3, True)]


def random_case(seed, shape=(3, 4, 5)):
  """Log-probabilities of three policies, advantages and a ragged mask."""
  keys = jax.random.split(jax.random.key(seed), 5)
  logprobs, old, ref = (
    jnp.log(jax.random.uniform(k, shape, minval=0.05)) for k in keys[:3]
  )
  rewards = jax.random.normal(keys[3], shape[:-1])
  lengths = jax.random.randint(keys[4], (*shape[:-1], 1), 1, shape[-1] + 1)
  mask = jnp.arange(shape[-1]) < lengths
  return logprobs, old, ref, rewards, mask


@pytest.mark.slow
def test_padding_has_no_weight():
  """Padding of tokens, samples and prompts; test_other_losses has values."""
  padded = jnp.pad(MASK, ((0, 2), (0, 1), (0, 3)))
  for weighting in WEIGHTINGS.values():
    weights = weighting(MASK)
    assert weights.shape == MASK.shape and weights.dtype == jnp.float32
    assert ((weights > 0) == MASK).all()
    np.testing.assert_array_equal(weighting(padded)[:2, :2, :4], weights)
    assert (weighting(jnp.zeros((2, 3, 4), bool)) == 0).all()


@pytest.mark.parametrize(
  "with_old", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_on_policy_gradient_is_reinforce(with_old):
  """For all surrogates and ratios; also with bounds of 0."""
  logprobs, _, _, rewards, mask = random_case(2)
  weights = losses.sequence_mean(mask)
  expected = -weights * jnp.where(mask, rewards[..., None], 0)

  cases = [{"surrogate": s} for s in SURROGATES.values()]
  cases.append({"clip_low": 0.0, "clip_high": 0.0})

  @jax.jit
  def all_gradients(logprobs):
    def loss(x, settings):
      old = logprobs if with_old else None
      return losses.grpo_loss(x, rewards, weights, mask, old, **settings)

    return [
      jax.grad(loss, has_aux=True)(logprobs, {"ratio": ratio} | case)
      for ratio in RATIOS.values()
      for case in cases
    ]

  for gradient, aux in all_gradients(logprobs):
    np.testing.assert_allclose(gradient, expected, rtol=2e-6, atol=1e-9)
    assert (aux["ratio"] == 1).all() and (aux["kl"] == 0).all()
    assert not any(np.any(x) for k, x in aux.items() if k.startswith("clip"))


def test_only_logprobs_are_differentiated():
  logprobs, old, ref, rewards, mask = random_case(3)
  weights = losses.token_mean(mask)

  def loss(rewards, *others):
    args = logprobs, rewards, weights, mask, *others
    return losses.grpo_loss(*args, beta=0.5)[0]

  for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(rewards, old, ref):
    assert (gradient == 0).all()


HOSTILE = [
  # Every ratio, surrogate and KL term.
  ("token_ratio", "clipped", KL[0], True),
  *[("token_ratio", "clipped", kl, False) for kl in KL],
  ("sequence_ratio", "clipped", KL[3], False),
  ("trajectory_ratio", "clipped", KL[3], False),
  *[("token_ratio", s, KL[2], False) for s in SURROGATES if s != "clipped"],
]


@pytest.mark.slow
@pytest.mark.parametrize("ratio, surrogate, kl, on_policy", HOSTILE)
def test_hostile_numbers(ratio, surrogate, kl, on_policy):
  """Junk on padding, and tokens that a policy excludes."""
  logprobs, old, ref, rewards, mask = random_case(8)
  mask = mask.at[2, 1].set(False)
  weights = losses.sequence_mean(mask)

  functions = {"ratio": RATIOS[ratio], "surrogate": SURROGATES[surrogate]}
  functions |= {"kl": kl[0], "kl_correction": kl[1]}

  def loss(logprobs, old, ref, rewards):
    args = logprobs, rewards, weights, mask, None if on_policy else old, ref
    return losses.grpo_loss(*args, beta=0.1, **functions)

  outcome = jax.jit(jax.value_and_grad(loss, has_aux=True))
  clean = outcome(logprobs, old, ref, rewards)
  assert (clean[1][~mask] == 0).all()
  dirty_rewards = rewards.at[2, 1].set(jnp.nan)
  arrays = logprobs, old, ref
  for junk in itertools.permutations([jnp.nan, -jnp.inf, jnp.inf]):
    dirty = [jnp.where(mask, x, j) for x, j in zip(arrays, junk, strict=True)]
    dirty = outcome(*dirty, dirty_rewards)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
  # A token that some policies exclude.
  for extreme in (-1e30, -3e38, -jnp.inf):
    hit = logprobs.at[:, :, 0].set(extreme)
    for policies in itertools.product((logprobs, hit), repeat=3):
      for x in jax.tree.leaves(outcome(*policies, rewards)):
        assert np.isfinite(x).all()
