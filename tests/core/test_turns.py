"""Several turns: credit, masks and imported trajectories.

The enumerated policy has two turns. Turn 0 draws x from 0, 1 and 2; 2 ends the
trajectory. Else the observation is a coin that depends on x, and turn 1 draws
y. There are 13 trajectories.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import grpojax
from grpojax.core import losses, turns
from grpojax.core.advantages import leave_one_out
from grpojax.core.batch import make_batch
from grpojax.core.objective import Objective
from grpojax.core.rollout import rollout_metrics
from grpojax.core.step import init_state
from grpojax.core.turns import Segment
from grpojax.core.types import Prompts, Rollout
from grpojax.core.update import make_update

KEY = jax.random.key(11)
COIN = np.array([[0.7, 0.3], [0.2, 0.8]])  # by x
ALL = [(2, None, None), *itertools.product((0, 1), (0, 1), (0, 1, 2))]
IDS = jnp.array([[2, 0, 0]] + [[x, x + coin, y] for x, coin, y in ALL[1:]])
TURNS = jnp.array([[0, -1, -1]] + [[0, -1, 1]] * 12)
MASK = jnp.array([[True, False, False]] + [[True] * 3] * 12)
LUCK = jnp.array([1.0] + [COIN[x, coin] for x, coin, _ in ALL[1:]])
LAST = np.random.default_rng(0).normal(size=(2, 2, 3))
REWARDS = jnp.array(
  [[0.2, 0.0]] + [[(0.1, -0.2)[x], LAST[x, c, y]] for x, c, y in ALL[1:]]
)

TRACES = {"trajectory": 0.0793, "turn": 0.0774, "turn_reached": 0.0823}
"""Traces of the variance at G = 3, as in docs/theory.md."""


def token_logprobs(table):
  """Returns log-probabilities [13, 3] of all tokens, with the coin's."""
  log_table = jax.nn.log_softmax(table[0])
  before = jnp.concatenate([jnp.zeros_like(IDS[:, :1]), 1 + IDS[:, :-1]], 1)
  return jnp.where(MASK, log_table[before, IDS], 0.0)


def logprobs(table):
  """Returns the log-probability [13] of each trajectory's sampled tokens."""
  return jnp.where(TURNS >= 0, token_logprobs(table), 0.0).sum(-1)


def value(table):
  return jnp.sum(LUCK * jnp.exp(logprobs(table)) * REWARDS.sum(-1))


def expected(probability, value_of, size):
  """Returns E[value_of(group)] over all 13^G groups."""
  groups = jnp.array(list(itertools.product(range(13), repeat=size)))
  p = probability[groups].prod(-1)
  return jnp.tensordot(p, jax.vmap(value_of)(groups), 1)


def gradient(lm, table, credit, mu=None, **objective):
  """Returns a function that computes the update of a group."""
  mu = table if mu is None else mu
  objective = Objective(
    weighting=lambda mask: losses.fixed_length(mask, length=1), **objective
  )
  tx = optax.sgd(1.0)
  update = make_update(lm, tx, objective)
  state = init_state(table, tx, KEY)
  by_mu = jnp.where(TURNS >= 0, token_logprobs(mu), 0.0)

  def of_group(group):
    prompts = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    drawn = (x[group][None] for x in (IDS, MASK, by_mu))
    done = jnp.ones((1, len(group)), bool)
    samples = Rollout(*prompts, *drawn, done, TURNS[group][None])
    rewards = REWARDS[group][None]
    batch = make_batch(lm, samples, rewards, objective, credit=credit)
    return update(state, batch)[0].params - table

  return of_group


@pytest.fixture(scope="module")
def policy(tabular):
  lm = tabular.lm(1, 3)
  table = lm.init(KEY)
  return lm, table, jax.jit(jax.grad(value))(table)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("credit", "objective"),
  [
    ("trajectory", {}),
    ("turn", {}),
    ("turn_reached", {}),
    ("turn", {"ratio": "trajectory_ratio", "surrogate": "cispo"}),
  ],
)
def test_every_credit_is_unbiased(policy, credit, objective):
  lm, table, truth = policy
  probability = LUCK * jnp.exp(logprobs(table))
  assert float(probability.sum()) == pytest.approx(1, abs=1e-6)
  of_group = gradient(lm, table, credit, **objective)

  def moments(group):
    estimate = of_group(group).ravel()
    return jnp.append(estimate, jnp.sum((estimate - truth.ravel()) ** 2))

  *mean, trace = jax.jit(lambda: expected(probability, moments, 3))()
  assert_allclose(mean, truth.ravel(), atol=2e-6)
  assert jnp.abs(truth).max() > 0.05
  assert float(trace) == pytest.approx(TRACES[credit], abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  "credit, correction", [("trajectory", "token"), ("turn", "sequence")]
)
def test_only_sequence_weights_are_unbiased_off_policy(
  policy, credit, correction
):
  lm, table, truth = policy
  mu = lm.init(jax.random.key(1))
  options = {"correction": f"{correction}_truncate", "correction_high": 0.0}
  of_group = gradient(lm, table, credit, mu=mu, **options)
  probability = LUCK * jnp.exp(logprobs(mu))
  got = jax.jit(lambda: expected(probability, of_group, 2))()
  error = float(jnp.abs(got - truth).max())
  assert error < 2e-6 if correction == "sequence" else error > 1e-2


def partial_rollout(mask, turns_of):
  """Returns a rollout with only the fields that `turn_advantages` reads."""
  ids = jnp.zeros(mask.shape, jnp.int32)
  return Rollout(None, None, ids, mask, None, None, turns_of)


@pytest.mark.slow
def test_turn_credit_by_hand():
  nan = jnp.nan
  rewards = jnp.array([[[1.0, 4.0], [2.0, 0.0], [3.0, 6.0], [nan, 1.0]]])
  samples = partial_rollout(
    jnp.array([[[1] * 4, [1, 1, 0, 0], [1] * 4, [1] * 4]], bool),
    jnp.array([[[0, 0, -1, 1], [0, 0, -1, -1], [0, -1, 1, 1], [0, 1, 1, 1]]]),
  )
  advantages = jax.jit(turns.turn_advantages, static_argnums=2)
  # Rewards to go: (5, 4), (2, 0 after the end), (9, 6), none.
  for credit, second in (("turn", (1, 4)), ("turn_reached", (-2, 2))):
    result = advantages(rewards, samples, credit)[0]
    first = [-0.5, -0.5, 0, second[0]]
    third = [5.5, 0, second[1], second[1]]
    expected = [first, [-5, -5, 0, 0], third, [0] * 4]
    assert_allclose(result, expected)
  # The only trajectory with a turn has the baseline 0.
  two = jax.tree.map(lambda x: x[:, 1:3], samples)
  alone = advantages(rewards[:, 1:3], two, "turn_reached")
  assert_allclose(alone[0, 1], [7, 0, 6, 6])
  # A turn without a reward has the advantage nan.
  short = advantages(rewards[..., :1], samples, "turn")
  assert jnp.isnan(short[0, 0, 3]) and not jnp.isnan(short[0, 0, 0])


TURN = Segment([1], [-0.1])
ONE = Prompts(jnp.array([[3]]), jnp.ones((1, 1), bool))


@pytest.mark.slow
def test_trajectories_become_rows():
  first = [Segment([5, 6], [-0.5, -0.1], 0.25), Segment([9])]
  first.append(Segment([7], [0.0], 1))
  second = [Segment([4], [-1.0], 2.0)]
  options = {"length": 6, "pad_id": 1, "finished": [[True, False]]}
  rollout = grpojax.trajectories(ONE, [[first, second]], **options)
  ids = [[5, 6, 9, 7, 1, 1], [4, 1, 1, 1, 1, 1]]
  assert rollout.completion_ids[0].tolist() == ids
  assert rollout.turns[0].tolist() == [[0, 0, -1, 1, -1, -1], [0] + [-1] * 5]
  assert_allclose(rollout.logprobs[0, 0], [-0.5, -0.1, 0, 0, 0, 0])
  rewards = rollout.turn_rewards
  assert rewards.tolist() == [[[0.25, 1.0], [2.0, 0.0]]]
  assert rollout.completion_mask.sum(-1).tolist() == [[4, 1]]
  assert rollout.finished.tolist() == [[True, False]]
  metrics = rollout_metrics(rollout, rewards.sum(-1))
  assert metrics["turns_mean"] == 1.5 and metrics["sampled_tokens_mean"] == 2
  assert metrics["completion_length_mean"] == 2.5


@pytest.mark.parametrize(
  ("segments", "message"),
  [
    ([], "B = 1 prompts and an equal G, not 0 groups"),
    ([[]], r"1 groups of \[0\]"),
    ([[[]]], r"segments\[0\]\[0\] must end with a sampled segment"),
    ([[[TURN, Segment([2])]]], "leave out the observation after the last"),
    ([[[Segment([], [])]]], r"\[0\].ids must be a non-empty list .*, not \[\]"),
    ([[[Segment([1.5], [0.0])]]], "ids must be a non-empty list"),
    ([[[Segment([2**31], [0.0])]]], "ids must be a non-empty list"),
    ([[[Segment([[1], [1, 2]], [0.0])]]], "ids must be a non-empty list"),
    ([[[Segment([1, 2], [0.0])]]], "logprobs must be 2 log-probabilities"),
    ([[[Segment([1], [0.5])]]], "finite and at most 0"),
    ([[[Segment([1], ["a"])]]], "must be 1 log-probabilities"),
    ([[[Segment([1], reward=1.0), TURN]]], "give its reward to a turn"),
    ([[[Segment([1], [0.0], None)]]], "reward must be a number, not None"),
    ([[[TURN] * 3]], "length = 2: must be an int of at least 3"),
    ([[TURN]], r"segments\[0\]\[0\] must be a list of Segment"),
    ([[[([1], [0.0])]]], "must be a list of Segment"),
  ],
)
def test_invalid_segments_are_refused(segments, message):
  with pytest.raises(ValueError, match=message):
    turns.trajectories(ONE, segments, length=2)


@pytest.mark.parametrize(
  ("credit", "objective", "message"),
  [
    ("step", {}, "use one of trajectory, turn, turn_reached"),
    ("turn", {"advantage": "grpo"}, "use advantage = 'leave_one_out'"),
    ("turn", {"off_policy_threshold": 0.1}, "one advantage per trajectory"),
    ("turn", {"ratio": "sequence_ratio"}, "average over a trajectory"),
    ("turn_reached", {"surrogate": "gmpo"}, "average over a trajectory"),
    ("turn", {"beta": 0.1, "kl_placement": "reward"}, "'loss'"),
  ],
)
def test_credit_of_turns_limits_the_objective(tiny, credit, objective, message):
  samples = turns.trajectories(ONE, [[[TURN], [TURN]]])
  args = tiny.lm, samples, samples.turn_rewards, Objective(**objective)
  with pytest.raises(ValueError, match=message):
    make_batch(*args, ref_params=tiny.params, credit=credit)


def test_rewards_of_turns_need_turns(tiny):
  samples = turns.trajectories(ONE, [[[TURN], [TURN]]])
  rewards = samples.turn_rewards
  no_turns = samples.replace(turns=None)
  alone = turns.trajectories(ONE, [[[TURN]]])
  for rollout, turn_rewards, credit, message in (
    (samples, rewards[..., 0], "turn", "needs rewards per turn"),
    (no_turns, rewards, "turn", "there are no turns"),
    (no_turns, rewards, "trajectory", "one per completion"),
    (alone, alone.turn_rewards, "turn_reached", "G = 1 must be at least 2"),
  ):
    with pytest.raises(ValueError, match=message):
      make_batch(tiny.lm, rollout, turn_rewards, credit=credit)
  sizes = {"group_size": 2, "max_new_tokens": 2, "eos_ids": 0}
  args = tiny.lm, optax.sgd(1.0), grpojax.returns
  with pytest.raises(ValueError, match="give an environment"):
    grpojax.make_grpo_step(*args, credit="turn", **sizes)
  with pytest.raises(ValueError, match="give environment="):
    grpojax.returns(no_turns.replace(turn_rewards=None))


def test_segments_can_be_arrays_of_an_engine():
  ids = np.array([5], np.uint32)
  logprobs = np.array([1e-7], np.float32)
  samples = turns.trajectories(ONE, [[[Segment(ids, logprobs, np.float32(2))]]])
  assert samples.completion_ids.tolist() == [[[5]]]
  assert samples.logprobs.tolist() == [[[0.0]]]
  assert samples.turn_rewards.tolist() == [[[2.0]]]


def test_the_bias_between_credits_depends_on_the_weighting():
  """The expected gradient of credit `turn` minus that of `trajectory`.

  Each trajectory has two turns; the second turn's action is its length, 1 or 3
  tokens. The difference is 0 if weights do not depend on the trajectory, of
  order 1 / N for `token_mean`, and the same for every G for `sequence_mean`.
  """
  rewards = np.array([[1.0, -0.5], [0.2, 0.9]])  # by turn and action
  x, y = np.array(list(itertools.product(range(2), repeat=2))).T
  turns_of = np.array([[0, 1, 1, 1]] * 4)
  mask = np.arange(4) < np.where(y, 4, 2)[:, None]
  by_turn = jnp.asarray(np.stack([rewards[0][x], rewards[1][y]], -1))
  scores = np.zeros((4, 4, 2))  # [trajectories, tokens, the turns' logits]
  rates = 0.4, np.where(x, 0.1, 0.5)  # of action 1, in the second turn by x
  scores[:, 0, 0] = x - rates[0]
  scores[:, 1, 1] = y - rates[1]
  chance = [np.where(a, q, 1 - q) for a, q in zip((x, y), rates, strict=True)]

  def difference(weighting, size):
    groups = np.array(list(itertools.product(range(4), repeat=size)))
    placed = jnp.asarray(np.where(mask, turns_of, -1)[groups])
    samples = partial_rollout(jnp.asarray(mask[groups]), placed)
    of_turns = turns.turn_advantages(by_turn[groups], samples, "turn")
    whole = leave_one_out(by_turn.sum(-1)[groups])[..., None]
    weights = jax.vmap(weighting)(jnp.asarray(mask[groups])[:, None])[:, 0]
    gradients = (weights * (of_turns - whole))[..., None] * scores[groups]
    share = np.prod(chance, 0)[groups].prod(-1)
    return np.einsum("n,ngtd->d", share, gradients)

  for weighting in (losses.sequence_sum, lambda m: losses.fixed_length(m, 4)):
    assert_allclose(difference(weighting, 3), 0, atol=1e-6)
  by_sequence = [difference(losses.sequence_mean, size) for size in (2, 4)]
  assert np.abs(by_sequence[0]).max() > 1e-2
  assert_allclose(*by_sequence, atol=1e-6)
  by_token = [difference(losses.token_mean, size) for size in (2, 4, 6)]
  scaled = [n * x[1] for n, x in zip((2, 4, 6), by_token, strict=True)]
  assert_allclose(scaled, 0.019, rtol=0.1)
