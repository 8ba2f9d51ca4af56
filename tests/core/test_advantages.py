"""Advantages: properties of all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import advantages
from grpojax.core.binding import bind

G = 6
NAN = np.nan
LENGTHS = np.array([5.0, 1, 3, 9, 2, 4, 6])


def oracle(rewards):
  """Oracle with the value 1/4 for every prompt."""
  return advantages.oracle(rewards, jnp.full(rewards.shape[:-1], 0.25))


EVERY = advantages.ADVANTAGES | {"oracle": oracle}
# Advantages that depend on other prompts of the batch.
POOLED = ("batch_std", "reinforce_plus_plus", "shrinkage", "beta_binomial")
WITHIN_GROUPS = [name for name in EVERY if name not in POOLED]
FEWEST = dict.fromkeys(EVERY, 2) | {"vanilla": 1, "oracle": 1}
FEWEST["reinforce_plus_plus"] = 1
FEWEST |= {"max_at_k": 3, "min_at_k": 3, "max_rl": 3}


def call(name, rewards, lengths=None):
  """Computes an advantage, with k = 2 and the weights it has parameters for."""
  lengths = LENGTHS[: rewards.shape[-1]] if lengths is None else lengths
  lengths = jnp.broadcast_to(jnp.asarray(lengths, "float32"), rewards.shape)
  unsure = jnp.sqrt(lengths)
  offered = {"lengths": lengths, "logit_score_sq": unsure}
  offered["token_score_sq"] = unsure[..., None]  # a single token
  offered["sampled"] = jnp.full((*rewards.shape, 1), True)
  actual = bind(EVERY[name], k=2, **offered)(rewards)
  return actual[..., 0] if actual.ndim > rewards.ndim else actual


compiled = jax.jit(call, static_argnums=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_dtypes_and_other_prompts_do_not_matter(name):
  rewards = jax.random.bernoulli(jax.random.key(0), 0.4, (2, 3, 4))
  actual = compiled(name, rewards.astype("float32"))
  assert actual.shape == rewards.shape and np.abs(actual).max() > 0.1
  for dtype in (rewards.dtype, "bfloat16"):
    other = compiled(name, rewards.astype(dtype))
    assert other.dtype == jnp.float32
    np.testing.assert_allclose(other, actual, atol=1e-6)
  one = compiled(name, rewards[1])
  mapped = jax.jit(jax.vmap(lambda r: call(name, r)))(rewards)
  np.testing.assert_allclose(mapped[1], one, atol=1e-5)
  assert np.allclose(mapped, actual, atol=1e-5) == (name not in POOLED)


@pytest.mark.slow
@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_equal_rewards_give_exactly_zero(name):
  """Also for values whose mean rounds, with and without jit."""
  within = name in advantages.WITHIN_GROUPS
  if within or name == "shrinkage":
    for value in (0.1, 1 / 3, -7.7, 1e6 + 0.3):
      assert not compiled(name, jnp.full((4, 7), value)).any()
      assert not call(name, jnp.full((4, 3), value)).any()
  # Dynamic sampling may drop equal groups of a batch that varies.
  rewards = jnp.array([[1.0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0]])
  assert (not compiled(name, rewards)[0].any()) == within


@pytest.mark.parametrize("name", EVERY)
def test_a_group_that_is_too_small_is_refused(name):
  fewest = FEWEST[name]
  trace = lambda size: jax.eval_shape(lambda: call(name, jnp.ones((3, size))))
  assert trace(fewest).shape == (3, fewest)
  if fewest > 1:
    with pytest.raises(ValueError, match=f"{name} .*needs .* G >= {fewest}"):
      trace(fewest - 1)


# Samples without a reward.


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_missing_rewards_count_as_not_drawn(name):
  rng = np.random.default_rng(0)
  for n in (0, 1, 2, 3, G - 1):
    rewards = np.full(G, NAN, np.float32)
    places = np.sort(rng.permutation(G)[:n])
    rewards[places] = rng.choice([0.3, 1.0, -2.0, 5.0], n)
    actual = np.asarray(compiled(name, rewards))
    expected = np.zeros(G)
    if n >= FEWEST[name]:
      expected[places] = compiled(name, rewards[places], LENGTHS[places])
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert (actual[np.isnan(rewards)] == 0).all()
    if n > 1 and name in advantages.WITHIN_GROUPS:
      rewards[places] = 0.1  # the mean rounds
      assert (np.asarray(compiled(name, rewards)) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_infinite_rewards_count_as_missing_and_gradients_are_finite(name):
  rng = np.random.default_rng(3)
  rewards = rng.choice([0.3, 1.0, 2.0], (6, G)).astype(np.float32)
  holes = rng.random((6, G)) < 0.3
  holes[0] = True
  holes[1], holes[4:] = np.arange(G) == 2, False
  rewards[5] = 0.1
  expected = np.asarray(compiled(name, np.where(holes, NAN, rewards)))
  assert np.isfinite(expected).all() and (expected[holes] == 0).all()
  assert expected.any()
  jacobian = jax.jit(jax.jacobian(lambda z: call(name, z)))
  signs = np.where(rng.random((6, G)) < 0.5, np.inf, -np.inf)
  for bad in (NAN, np.inf, -np.inf, signs):
    broken = np.where(holes, bad, rewards).astype(np.float32)
    np.testing.assert_array_equal(compiled(name, broken), expected)
    assert np.isfinite(jacobian(broken)).all()
  assert np.isfinite(jacobian(np.full((6, G), 0.1, np.float32))).all()
