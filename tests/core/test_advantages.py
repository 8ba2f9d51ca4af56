"""Advantages against hand-made numbers, and by enumerating every group.

That the expected gradient is right is tested through the loss, in
test_losses.py; here the estimator (1/G) sum_i s_i A_i itself is enumerated.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from grpojax.core import advantages
from grpojax.core.binding import bind
from grpojax.core.weighted_baselines import ScoreNorms

GROUP_ONLY = ["leave_one_out", "dr_grpo", "grpo", "batch_std"]
ALL = ["vanilla", *GROUP_ONLY, "oracle"]


def call(name, rewards):
  """Any member of the family; the oracle believes that every value is 1/4."""
  if name == "oracle":
    return advantages.oracle(rewards, jnp.full(rewards.shape[:-1], 0.25))
  return getattr(advantages, name)(rewards)


compiled = jax.jit(call, static_argnums=0)


# Group 1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14.
GOLDEN = {
  "vanilla": [1, 2, 3, 6],
  "oracle": [0.75, 1.75, 2.75, 5.75],
  "dr_grpo": [-2, -1, 0, 3],
  "leave_one_out": [1 - 11 / 3, 2 - 10 / 3, 0, 4],
  "grpo": [x / math.sqrt(14 / 3) for x in (-2, -1, 0, 3)],
  "batch_std": [x / math.sqrt(14 / 3) for x in (-2, -1, 0, 3)],
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_golden(name, transform):
  rewards = jnp.array([1.0, 2.0, 3.0, 6.0])
  got = transform(lambda r: call(name, r))(rewards)
  np.testing.assert_allclose(got, GOLDEN[name], atol=1e-5)


def test_batch_std_divides_all_prompts_by_one_number():
  # Centred: -1, 1 and -3, 3 and 0, 0; second moment 20 over 5.
  got = advantages.batch_std(jnp.array([[0.0, 2.0], [10.0, 16.0], [5.0, 5.0]]))
  np.testing.assert_allclose(
    got, np.array([[-1, 1], [-3, 3], [0, 0]]) / 2, atol=1e-5
  )


def test_grpo_standardises_each_prompt_by_itself():
  got = advantages.grpo(jnp.array([[0.0, 2.0], [10.0, 16.0], [5.0, 5.0]]))
  half = math.sqrt(0.5)
  np.testing.assert_allclose(
    got, [[-half, half], [-half, half], [0, 0]], atol=1e-5
  )


def test_epsilon_is_added_to_the_standard_deviation():
  for name in ("grpo", "batch_std"):
    got = getattr(advantages, name)(jnp.array([0.0, 2.0]), epsilon=1.0)
    np.testing.assert_allclose(
      got, np.array([-1, 1]) / (math.sqrt(2) + 1), rtol=1e-6
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
  ("shape", "dtype"),
  [((4,), bool), ((3, 4), "int32"), ((3, 4), "bfloat16"), ((2, 3, 4), float)],
)
def test_shape_and_dtype(name, shape, dtype):
  rewards = jax.random.bernoulli(jax.random.key(0), 0.5, shape).astype(dtype)
  got = jax.jit(lambda r: call(name, r))(rewards)
  assert got.shape == shape
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, call(name, rewards.astype("float32")))


@pytest.mark.parametrize("name", [n for n in ALL if n != "batch_std"])
def test_prompts_do_not_influence_each_other(name):
  rewards = jax.random.normal(jax.random.key(1), (5, 4))
  one_by_one = np.stack([compiled(name, r) for r in rewards])
  np.testing.assert_allclose(compiled(name, rewards), one_by_one, atol=1e-6)
  mapped = jax.jit(jax.vmap(lambda r: call(name, r)))(rewards)
  np.testing.assert_allclose(mapped, one_by_one, atol=1e-6)


@pytest.mark.parametrize("name", GROUP_ONLY)
@pytest.mark.parametrize("group_size", [2, 3, 7, 10])
def test_equal_rewards_give_exactly_zero(name, group_size):
  """Of values whose mean rounds, too."""
  values = jnp.array([0.0, 0.1, 1 / 3, -7.7, 1e6 + 0.3])
  rewards = jnp.broadcast_to(values[:, None], (len(values), group_size))
  for f in (lambda r: call(name, r), jax.jit(lambda r: call(name, r))):
    assert (f(rewards) == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_finite(name):
  """One group of equal rewards alone, and beside one that varies."""
  jacobian = jax.jit(jax.jacobian(lambda r: call(name, r)))
  equal = np.full((2, 4), 0.1, np.float32)
  varied = equal.copy()
  varied[1, 2] = 1.0
  for rewards in (equal, varied):
    assert np.isfinite(jacobian(rewards)).all()


@pytest.mark.parametrize("name", ["grpo", "batch_std"])
def test_gradient_of_a_varying_group(name):
  rewards = jnp.array([[1.0, 2.0, 3.0, 6.0], [0.0, 1.0, 1.0, 1.0]])
  check_grads(
    lambda r: compiled(name, jnp.asarray(r)),
    (rewards,),
    order=1,
    atol=1e-2,
    rtol=1e-2,
  )


@pytest.mark.parametrize("name", GROUP_ONLY)
def test_a_group_of_one_is_refused(name):
  with pytest.raises(ValueError, match=f"{name} needs .* G >= 2"):
    call(name, jnp.ones((3, 1)))


@pytest.mark.parametrize("name", ["vanilla", "oracle"])
def test_a_group_of_one_is_fine_without_a_group_baseline(name):
  assert call(name, jnp.ones((3, 1))).shape == (3, 1)


def test_oracle_wants_one_value_a_prompt():
  # Without the run-time annotation checks, which only tests have.
  oracle = getattr(advantages.oracle, "__wrapped__", advantages.oracle)
  with pytest.raises(ValueError, match=r"need values \(3,\)"):
    oracle(jnp.ones((3, 2)), jnp.ones((3, 2)))


def test_a_scalar_is_no_group():
  vanilla = getattr(advantages.vanilla, "__wrapped__", advantages.vanilla)
  with pytest.raises(ValueError, match="rewards"):
    vanilla(jnp.float32(1.0))


def test_leave_one_out_is_the_u_statistic():
  """Lemma 1: the estimator equals the mean of the kernel over pairs."""
  rng = np.random.default_rng(0)
  for group_size in (2, 3, 6):
    scores = rng.normal(size=(group_size, 5))
    rewards = rng.normal(size=group_size)
    pairs = list(itertools.combinations(range(group_size), 2))
    kernel = sum(
      0.5 * (scores[i] - scores[j]) * (rewards[i] - rewards[j])
      for i, j in pairs
    )
    weights = np.asarray(advantages.leave_one_out(jnp.asarray(rewards)))
    np.testing.assert_allclose(
      scores.T @ weights / group_size, kernel / len(pairs), atol=1e-6
    )


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("name", [n for n in ALL if n != "batch_std"])
def test_expected_estimator_over_all_groups(name, group_size):
  """E (1/G) sum s_i A_i as a multiple of g: the module's table."""
  probability = np.array([0.2, 0.3, 0.5])
  reward = np.array([1.0, 0.0, 0.0])
  scores = np.eye(3) - probability  # Of a softmax, with respect to its logits.
  g = (probability * reward) @ scores
  groups = np.array(list(itertools.product(range(3), repeat=group_size)))
  group_probability = probability[groups].prod(-1)
  weights = np.asarray(compiled(name, jnp.asarray(reward[groups])))
  mean = np.einsum("n,ng,ngd->d", group_probability, weights, scores[groups])
  p, others = 0.2, group_size - 1
  standardised = 0.0  # E[A | Z = 1] - E[A | Z = 0] given m of the others right.
  for m in range(group_size):
    binomial = math.comb(others, m) * p**m * (1 - p) ** (others - m)
    for z, sign in ((1, 1), (0, -1)):
      group = [z] + [1] * m + [0] * (others - m)
      if len(set(group)) > 1:
        deviation = z - np.mean(group)
        standardised += sign * binomial * deviation / np.std(group, ddof=1)
  factor = {
    "dr_grpo": (group_size - 1) / group_size,
    "grpo": standardised,
  }.get(name, 1.0)
  np.testing.assert_allclose(mean / group_size, factor * g, atol=1e-5)


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_which_are_leave_one_out_times_a_number(name):
  """Of the batch's gradient, for which the best group size is known."""
  rng = np.random.default_rng(0)
  rewards = jnp.asarray(rng.exponential(size=(6, 5)), jnp.float32)
  lengths = jnp.asarray(rng.integers(1, 9, (6, 5)))
  weights = {"lengths": lengths, "logit_score_sq": lengths + 0.5}
  weights["score_norms"] = ScoreNorms(*jnp.array([2.0, -0.5, 1.5]))
  function = bind(advantages.ADVANTAGES[name], k=2, **weights)
  found = np.ravel(jax.jit(function)(rewards)).astype(np.float64)
  basis = np.ravel(jax.jit(advantages.leave_one_out)(rewards))
  cosine = found @ basis / np.linalg.norm(found) / np.linalg.norm(basis)
  proportional = name in advantages.SCALED_LEAVE_ONE_OUT
  assert (cosine > 1 - 1e-6) == proportional
  assert proportional or cosine < 0.995
