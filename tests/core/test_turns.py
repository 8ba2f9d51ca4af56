"""Several turns: credit, masks and import; gradients by enumeration.

A policy of two turns: turn 0 draws x of 0, 1 and 2, and 2 ends the trajectory.
Else a coin falls, by x, and is written as a token; turn 1 draws y. There are 13
trajectories.
"""

import functools
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
from grpojax.core.packing import layout
from grpojax.core.rollout import rollout_metrics
from grpojax.core.step import init_state
from grpojax.core.turns import Segment
from grpojax.core.types import Prompts, Rollout
from grpojax.core.update import UpdateOptions, make_update

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
"""Traces of the variance at G = 3, as docs/theory.md has them."""


def token_logprobs(table):
  """Log-probabilities [13, 3] of all tokens, the coin's among them."""
  log_table = jax.nn.log_softmax(table[0])
  before = jnp.concatenate([jnp.zeros_like(IDS[:, :1]), 1 + IDS[:, :-1]], 1)
  return jnp.where(MASK, log_table[before, IDS], 0.0)


def logprobs(table):
  """Log-probability [13] of what the policy draws in each trajectory."""
  return jnp.where(TURNS >= 0, token_logprobs(table), 0.0).sum(-1)


def value(table, luck=LUCK):
  return jnp.sum(luck * jnp.exp(logprobs(table)) * REWARDS.sum(-1))


def expected(probability, of_group, size):
  """E[of_group] over all 13^G groups."""
  groups = jnp.array(list(itertools.product(range(13), repeat=size)))
  p = probability[groups].prod(-1)
  return jnp.tensordot(p, jax.vmap(of_group)(groups), 1)


def gradient(lm, table, credit, mu=None, **objective):
  """A group's gradient, through `make_batch` and `make_update`."""
  mu = table if mu is None else mu
  objective = Objective(
    weighting=lambda mask: losses.fixed_length(mask, length=1), **objective
  )
  tx = optax.sgd(1.0)
  update, state = make_update(lm, tx, objective), init_state(table, tx, KEY)
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
def test_every_credit_has_the_true_gradient(policy, credit, objective):
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
@pytest.mark.parametrize("credit", ["trajectory", "turn_reached"])
def test_members_of_a_group_may_share_their_luck(policy, credit):
  lm, table, truth = policy
  of_group = gradient(lm, table, credit)

  def with_coins(coins):
    happens = [1.0] + [float(c == coins[x]) for x, c, _ in ALL[1:]]
    p = jnp.array(happens) * jnp.exp(logprobs(table))
    return expected(p, of_group, 2)

  got = sum(
    COIN[0, a] * COIN[1, b] * with_coins((a, b))
    for a, b in itertools.product((0, 1), repeat=2)
  )
  assert_allclose(got, truth, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  "credit, correction", [("trajectory", "token"), ("turn", "sequence")]
)
def test_only_weights_of_sequences_are_exact_off_policy(
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
  """The fields of a rollout that `turn_advantages` reads."""
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
  # Rewards to go: (5, 4), (2, 0: it has ended), (9, 6); the last has none.
  for credit, second in (("turn", (1, 4)), ("turn_reached", (-2, 2))):
    result = advantages(rewards, samples, credit)[0]
    first = [-0.5, -0.5, 0, second[0]]
    third = [5.5, 0, second[1], second[1]]
    expected = [first, [-5, -5, 0, 0], third, [0] * 4]
    assert_allclose(result, expected)
  # Alone in its turn, it is compared with 0: the others decide that.
  two = jax.tree.map(lambda x: x[:, 1:3], samples)
  alone = advantages(rewards[:, 1:3], two, "turn_reached")
  assert_allclose(alone[0, 1], [7, 0, 6, 6])
  # A turn that has no reward is no number.
  short = advantages(rewards[..., :1], samples, "turn")
  assert jnp.isnan(short[0, 0, 3]) and not jnp.isnan(short[0, 0, 0])


def random_trajectories(count, seed=0):
  """Trajectories of random ids and logprobs: [B][4] of 1 to 3 turns."""
  rng = np.random.default_rng(seed)

  def segment(sampled):
    ids = rng.integers(1, 7, rng.integers(1, 4)).tolist()
    drawn = (-rng.random(len(ids))).tolist(), float(rng.normal())
    return Segment(ids, *drawn) if sampled else Segment(ids)

  lengths = 2 * rng.integers(1, 4, (count, 4)) - 1
  return [[[segment(i % 2 == 0) for i in range(n)] for n in x] for x in lengths]


PROMPTS = Prompts(
  jnp.array([[1, 2, 3], [4, 5, 0], [6, 1, 2], [3, 0, 0]]),
  jnp.array([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]], bool),
)


@pytest.mark.slow
def test_packed_and_in_parts_an_update_is_the_same(tiny):
  lm, params = tiny.lm, tiny.params
  samples = turns.trajectories(PROMPTS, random_trajectories(4))
  rewards = samples.turn_rewards
  tx = optax.sgd(1.0)

  @functools.partial(jax.jit, static_argnums=1)
  def updated(packing, micro_batches):
    options = UpdateOptions(micro_batches=micro_batches)
    cut = {"options": options, "packing": packing}
    batch = make_batch(lm, samples, rewards, credit="turn", **cut)
    update = make_update(lm, tx, Objective(), options)
    return update(init_state(params, tx, KEY), batch)[0].params

  plan = layout.plan(
    np.asarray(samples.completion_mask.sum(-1)),
    samples.completion_ids.shape[-1],
    np.asarray(PROMPTS.prompt_mask.sum(-1)),
    3,
    micro_batches=2,
  )
  assert plan is not None
  whole = updated(None, 1)
  same = functools.partial(assert_allclose, atol=2e-5)
  for other in (updated(None, 4), updated(plan, 2)):
    jax.tree.map(same, whole, other)


SAID = Segment([1], [-0.1])
ONE = Prompts(jnp.array([[3]]), jnp.ones((1, 1), bool))


@pytest.mark.slow
def test_trajectories_keep_every_id():
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
    ([], "B = 1 prompts and one group size, not 0 groups"),
    ([[]], r"1 groups of \[0\]"),
    ([[[]]], r"segments\[0\]\[0\] must end with a segment that was sampled"),
    ([[[SAID, Segment([2])]]], "nothing is learned from an observation after"),
    ([[[Segment([], [])]]], r"\[0\].ids are token ids, one or more, not \[\]"),
    ([[[Segment([1.5], [0.0])]]], "ids are token ids"),
    ([[[Segment([-1], [0.0])]]], "ids are token ids"),
    ([[[Segment([1, 2], [0.0])]]], "logprobs are 2 log-probabilities"),
    ([[[Segment([1], [0.5])]]], "finite and 0 or less, one an id"),
    ([[[Segment([1], [float("nan")])]]], "finite and 0 or less, one an id"),
    ([[[Segment([1], reward=1.0), SAID]]], "its reward belongs to a turn"),
    ([[[SAID] * 3]], "has 3 tokens, over length = 2"),
    ([[SAID]], r"segments\[0\]\[0\] is a list of Segment"),
    ([[[([1], [0.0])]]], "is a list of Segment"),
    ([[[Segment([2**31], [0.0])]]], "ids are token ids"),
    ([[[Segment([[1], [1, 2]], [0.0])]]], "ids are token ids"),
    ([[[Segment([1], [float("-inf")])]]], "finite and 0 or less"),
    ([[[Segment([1], ["a"])]]], "are 1 log-probabilities"),
    ([[[Segment([1], [0.0], None)]]], "reward is a number, not None"),
    ([[[Segment([1], [0.0], [1.0])]]], "reward is a number"),
  ],
)
def test_what_is_no_trajectory_is_refused(segments, message):
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
def test_a_credit_that_cannot_be_is_refused(tiny, credit, objective, message):
  samples = turns.trajectories(ONE, [[[SAID], [SAID]]])
  args = tiny.lm, samples, samples.turn_rewards, Objective(**objective)
  with pytest.raises(ValueError, match=message):
    make_batch(*args, ref_params=tiny.params, credit=credit)


def test_rewards_of_turns_need_turns(tiny):
  samples = turns.trajectories(ONE, [[[SAID], [SAID]]])
  rewards = samples.turn_rewards
  of_one = samples.replace(turns=None)
  alone = turns.trajectories(ONE, [[[SAID]]])
  for made, of_turns, credit, message in (
    (samples, rewards[..., 0], "turn", "needs a reward after each turn"),
    (of_one, rewards, "turn", "there are no turns"),
    (of_one, rewards, "trajectory", "one per completion"),
    (alone, alone.turn_rewards, "turn_reached", "G = 1 must be 2 or more"),
  ):
    with pytest.raises(ValueError, match=message):
      make_batch(tiny.lm, made, of_turns, credit=credit)
  sizes = {"group_size": 2, "max_new_tokens": 2, "eos_ids": 0}
  args = tiny.lm, optax.sgd(1.0), grpojax.returns
  with pytest.raises(ValueError, match="give an environment"):
    grpojax.make_grpo_step(*args, credit="turn", **sizes)
  with pytest.raises(ValueError, match="give environment="):
    grpojax.returns(of_one.replace(turn_rewards=None))


def test_ids_and_logprobs_of_engines_are_taken():
  ids, logprobs = np.array([5], np.uint32), np.array([1e-7], np.float32)
  samples = turns.trajectories(ONE, [[[Segment(ids, logprobs, np.float32(2))]]])
  assert samples.completion_ids.tolist() == [[[5]]]
  assert samples.logprobs.tolist() == [[[0.0]]]
  assert samples.turn_rewards.tolist() == [[[2.0]]]


def test_other_weightings_part_the_credits():
  """Credit of turns less that of trajectories, over all groups of two turns.

  The second turn's action is its length, 1 or 3 tokens. It is 0 if weights do
  not depend on the trajectory, of the order 1 / N for `token_mean`, and the
  same for every G for `sequence_mean`.
  """
  rewards = np.array([[1.0, -0.5], [0.2, 0.9]])  # by turn and action
  x, y = np.array(list(itertools.product(range(2), repeat=2))).T
  turns_of = np.array([[0, 1, 1, 1]] * 4)
  mask = np.arange(4) < np.where(y, 4, 2)[:, None]
  by_turn = jnp.asarray(np.stack([rewards[0][x], rewards[1][y]], -1))
  scores = np.zeros((4, 4, 2))  # [trajectories, tokens, the turns' logits]
  rates = 0.4, np.where(x, 0.1, 0.5)  # of action 1, in the second turn by x
  scores[:, 0, 0], scores[:, 1, 1] = x - rates[0], y - rates[1]
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
