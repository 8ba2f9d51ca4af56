"""Environments in the decoding loop, against a loop that is written plainly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import grpojax
from grpojax.core.decoding import Decoding
from grpojax.core.decoding.sampling import Sampling, sample
from grpojax.core.environment import Environment, Observation, returns
from grpojax.core.logprobs import token_logprobs
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts

KEY, EOS, LONGEST = jax.random.key(3), (0, 5), 3
PROMPTS = Prompts(
  jnp.array([[1, 2, 3], [4, 5, 0], [6, 1, 2]]),
  jnp.array([[1, 1, 1], [1, 1, 0], [1, 1, 1]], bool),
  targets=jnp.array([0, 1, 2]),
)


def reset(target, key):
  return {"sum": target, "luck": jax.random.randint(key, (), 0, 3)}


def step(state, ids, length, key):
  """Answers 0 to 3 random tokens, ends at a sum, and rewards the length."""
  total = state["sum"] + ids[0] + state["luck"] + length
  answer = jax.random.randint(key, (LONGEST,), 1, 5)
  return state | {"sum": total}, Observation(
    answer, total % (LONGEST + 1), length / 10, total % 7 == 0
  )


ENVIRONMENT = Environment(reset, step, LONGEST, max_turns=4)


def sampled(tiny, t_max=24, key=KEY, prompts=PROMPTS, **options):
  return jax.jit(
    lambda params, prompts, key: rollout(
      tiny.lm,
      params,
      prompts,
      key,
      group_size=4,
      max_new_tokens=t_max,
      eos_ids=EOS,
      environment=ENVIRONMENT,
      **options,
    )
  )(tiny.params, prompts, key)


def replayed(tiny, whole, i, g, t_max):
  """One trajectory, by whole forward passes."""
  key = jax.random.fold_in(KEY, i * 4 + g)
  state = reset(PROMPTS.targets[i], jax.random.fold_in(key, jnp.int32(-1)))
  prompt = PROMPTS.prompt_ids[i : i + 1], PROMPTS.prompt_mask[i : i + 1]
  prefix = tiny.lm.prefill(tiny.params, *prompt)
  first = tiny.lm.unembed(tiny.params, prefix.last_hidden)[0]
  draw = jax.jit(sample)
  ids, turns, turn, begin, rewards = [], [], 0, 0, []
  while len(ids) < t_max:
    logits = first
    if ids:
      padded = jnp.array(ids + [0] * (t_max - len(ids)))[None, None]
      logits = whole(prefix, padded)[0, 0, len(ids) - 1]
    drawn, _ = draw(jax.random.fold_in(key, len(ids)), logits)
    ids, turns = [*ids, int(drawn)], [*turns, turn]
    if ids[-1] not in EOS:
      continue
    state, seen = step(
      state,
      jnp.array(ids[begin:]),
      len(ids) - begin,
      jax.random.fold_in(key, jnp.int32(-2 - turn)),
    )
    count, turn = int(seen.length), turn + 1
    rewards.append(float(seen.reward))
    if seen.done or turn == 4 or len(ids) + count + 1 > t_max:
      return ids, turns, rewards, bool(seen.done)
    ids += seen.ids[:count].tolist()
    turns += [-1] * count
    begin = len(ids)
  return ids, turns, rewards, False


@pytest.mark.slow
def test_rows_are_those_of_a_plain_loop(tiny):
  result = sampled(tiny, t_max=24)
  whole = jax.jit(
    lambda prefix, ids: tiny.lm.unembed(
      tiny.params, tiny.lm.extend(tiny.params, prefix, ids)[0]
    )
  )
  ends = set()
  for i, g in np.ndindex(3, 4):
    ids, turns, rewards, finished = replayed(tiny, whole, i, g, 24)
    n = len(ids)
    assert result.completion_ids[i, g].tolist() == ids + [0] * (24 - n)
    assert result.turns[i, g].tolist() == turns + [-1] * (24 - n)
    assert int(result.completion_mask[i, g].sum()) == n
    assert bool(result.finished[i, g]) == finished
    np.testing.assert_allclose(
      result.turn_rewards[i, g], rewards + [0] * (4 - len(rewards)), rtol=1e-6
    )
    assert turns[-1] >= 0  # nothing is read at the end
    ends.add((finished, n < 24))
  assert ends >= {(True, True), (False, True)}
  assert (result.turns >= 2).any() and (result.turn_rewards[..., 2] > 0).any()


@pytest.mark.slow
def test_what_was_drawn_is_scored_as_drawn(tiny):
  sampling = Sampling(0.7, top_k=5)
  result = sampled(tiny, sampling=sampling)
  logprobs, _ = token_logprobs(
    tiny.lm,
    tiny.params,
    result.prompt_ids,
    result.prompt_mask,
    result.completion_ids,
    sampling=sampling,
  )
  read = result.completion_mask & ~result.sampled
  assert read.any() and not result.logprobs[read].any()
  np.testing.assert_allclose(
    result.logprobs[result.sampled], logprobs[result.sampled], atol=2e-5
  )


@pytest.mark.slow
def test_the_loop_may_be_cut_in_any_way(tiny):
  """Stages, and rows put together that are not done, change no sample."""
  plain = sampled(tiny, t_max=112, decoding=Decoding(stages=1, compact=False))
  staged = sampled(tiny, t_max=112, decoding=Decoding(stages=2))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-5), plain, staged
  )
  # Some go on in the second stage, which has fewer rows then.
  going_on = (plain.completion_mask.sum(-1) > 64).sum(-1)
  assert 0 < going_on.max() < 3


@pytest.mark.long
def test_seeds_may_be_mapped_over(tiny):
  keys = jnp.stack([jax.random.key(9), KEY])
  both = jax.vmap(lambda key: sampled(tiny, key=key))(keys)
  alone = sampled(tiny)
  assert (both.completion_ids[1] == alone.completion_ids).all()
  assert (both.turns[1] == alone.turns).all()
  assert (both.turns[0] != alone.turns).any()


@pytest.mark.slow
def test_a_row_that_only_pads_the_batch_is_empty(tiny):
  mask = PROMPTS.prompt_mask.at[1].set(False)
  result = sampled(tiny, prompts=PROMPTS.replace(prompt_mask=mask))
  assert not result.completion_mask[1].any() and (result.turns[1] == -1).all()
  assert not result.turn_rewards[1].any()


@pytest.mark.slow
def test_a_whole_step_is_its_parts(tiny):
  tx, size = optax.sgd(0.1), {"group_size": 4, "max_new_tokens": 24}
  step_ = jax.jit(
    grpojax.make_grpo_step(
      tiny.lm,
      tx,
      returns,
      eos_ids=EOS,
      environment=ENVIRONMENT,
      credit="turn",
      **size,
    )
  )
  state = grpojax.init_state(tiny.params, tx, KEY)
  new, metrics = step_(state, PROMPTS)
  samples = sampled(tiny, key=jax.random.fold_in(KEY, 0))
  batch = grpojax.make_batch(
    tiny.lm, samples, samples.turn_rewards, credit="turn"
  )
  update = grpojax.make_update(tiny.lm, tx, grpojax.Objective())
  expected, _ = jax.jit(update)(state, batch)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-5),
    new.params,
    expected.params,
  )
  total = samples.turn_rewards.sum(-1)
  assert float(metrics["reward_mean"]) == pytest.approx(float(total.mean()))
  assert metrics["turns_mean"] > 1


@pytest.mark.slow
@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"environment": ENVIRONMENT._replace(max_turns=0)}, "max_turns=0"),
    ({"environment": ENVIRONMENT._replace(max_turns=2.0)}, "max_turns=2.0"),
  ],
)
def test_what_an_environment_does_not_go_with(tiny, options, message):
  options = {"environment": ENVIRONMENT} | options
  with pytest.raises(ValueError, match=message):
    rollout(
      tiny.lm,
      tiny.params,
      PROMPTS,
      KEY,
      group_size=4,
      max_new_tokens=4,
      eos_ids=EOS,
      **options,
    )


def small(tiny, answer, state=0.0, **changes):
  """A rollout whose environment answers what a function of its state gives."""
  environment = Environment(
    lambda target, key: state, lambda s, *_: answer(s), LONGEST, 3
  )
  run = lambda: rollout(
    tiny.lm,
    tiny.params,
    PROMPTS.replace(**changes),
    KEY,
    group_size=2,
    max_new_tokens=5,
    eos_ids=range(11),  # every token ends a turn
    environment=environment,
  )
  return jax.jit(run)()


IDS = jnp.array([1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("answer", "message"),
  [
    (lambda s: Observation(IDS, 1, 0.0, False), "returns .state, Observation"),
    (lambda s: (s, (IDS, 1, 0.0, False)), "returns .state, Observation"),
    (lambda s: (s, Observation(IDS[:2], 1, 0.0, False)), r"ids is .*\(3,\)"),
    (lambda s: (s, Observation([1, 2, 3], 1, 0.0, False)), "ids is integer"),
    (lambda s: (s, Observation(IDS / 2, 1, 0.0, False)), "ids is integer"),
    (lambda s: (s, Observation(IDS, 1.5, 0.0, False)), "length is integer"),
    (lambda s: (s, Observation(IDS, 1, IDS, False)), "reward is real"),
    (lambda s: (s, Observation(IDS, 1, None, False)), "reward is real"),
    (lambda s: (s, Observation(IDS, 1, 0.0, 0)), "done is boolean"),
    (lambda s: (IDS, Observation(IDS, 1, 0.0, False)), "state of the struct"),
    (lambda s: (s > 0, Observation(IDS, 1, 0.0, False)), "state of the struct"),
  ],
)
def test_an_answer_of_another_kind_is_refused(tiny, answer, message):
  with pytest.raises(ValueError, match=message):
    small(tiny, answer)


@pytest.mark.long
def test_a_state_of_integers_stays_one(tiny):
  half = lambda s: (s + 0.5, Observation(IDS, 1, 0.0, False))
  with pytest.raises(ValueError, match="int32.*not|float32.*int32"):
    small(tiny, half, state=0)
  count = lambda s: (s + 1, Observation(IDS, 1, s, False))
  result = small(tiny, count, state=0)
  assert (result.turn_rewards == jnp.arange(3.0)).all()


@pytest.mark.slow
def test_targets_are_one_a_prompt(tiny):
  answer = lambda s: (s, Observation(IDS, 1, 0.0, False))
  with pytest.raises(ValueError, match="that of the prompts, .3,"):
    small(tiny, answer, targets=jnp.zeros(2))
  small(tiny, answer, targets=None)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("ids", "length", "valid"),
  [
    ([1, 2, 99], 2, True),  # what is not read may be anything
    ([1, -2, 3], 2, False),
    pytest.param([1, 2, 3], 4, False, marks=pytest.mark.slow),
    pytest.param([1, 2, 3], -1, False, marks=pytest.mark.slow),
  ],
)
def test_an_answer_that_cannot_be_read_has_no_reward(tiny, ids, length, valid):
  answer = lambda s: (s, Observation(jnp.array(ids), length, 0.5, False))
  result = small(tiny, answer)
  assert (jnp.isfinite(result.turn_rewards[..., 0]) == valid).all()
  if valid:
    read = result.completion_ids[0, 0][result.turns[0, 0] == -1].tolist()
    assert read[:length] == ids[:length]


@pytest.mark.slow
def test_groups_are_equal_where_no_turn_differs(tiny):
  """Returns that are equal may be of turns that are not."""

  def step(state, ids, length, key):
    first = ids[0] % 2
    reward = jnp.where(state == 0, first, 2 - state)
    return 1 + first, Observation(IDS[:1], 0, reward, False)

  run = grpojax.make_grpo_step(
    tiny.lm,
    optax.sgd(0.1),
    returns,
    group_size=8,
    max_new_tokens=2,
    eos_ids=range(11),
    environment=Environment(lambda *_: jnp.int32(0), step, 1, 2),
    credit="turn",
  )
  state = grpojax.init_state(tiny.params, optax.sgd(0.1), KEY)
  _, metrics = jax.jit(run)(state, PROMPTS)
  assert metrics["reward_std"] == 0 and metrics["zero_variance_groups"] == 0
  assert metrics["grad_norm"] > 0
