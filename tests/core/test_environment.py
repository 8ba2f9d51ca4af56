"""Environments in the decoding loop, against a plain loop, and on the host."""

import dataclasses
import functools
import types

import environment_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from environment_helpers import EOS, KEY, LONGEST, PROMPTS, programs, sampled
from toy_fixtures import single_loop

import grpojax
from grpojax.core.decoding.sampling import Sampling, sample
from grpojax.core.environment import Environment, Observation, returns
from grpojax.core.logprobs import token_logprobs
from grpojax.core.rollout import rollout
from grpojax.environments.episodes import Answer
from grpojax.models.transformer import transformer

close = functools.partial(np.testing.assert_allclose, atol=1e-5)


def plain_loop(tiny, whole, i, g, t_max):
  """Samples a trajectory by whole forward passes."""
  key = helpers.sample_key(i, g)
  state = helpers.reset(PROMPTS.targets[i], helpers.turn_key(i, g, -1))
  prompt = PROMPTS.prompt_ids[i : i + 1], PROMPTS.prompt_mask[i : i + 1]
  prefix = tiny.lm.prefill(tiny.params, *prompt)
  first = tiny.lm.unembed(tiny.params, prefix.last_hidden)[0]
  draw = jax.jit(sample)
  ids = []
  turns = []
  rewards = []
  turn = begin = 0
  while len(ids) < t_max:
    logits = first
    if ids:
      padded = jnp.array(ids + [0] * (t_max - len(ids)))[None, None]
      logits = whole(prefix, padded)[0, 0, len(ids) - 1]
    drawn, _ = draw(jax.random.fold_in(key, len(ids)), logits)
    ids = [*ids, int(drawn)]
    turns = [*turns, turn]
    if ids[-1] not in EOS:
      continue
    turn_ids = jnp.array(ids[begin:])
    turn_key = helpers.turn_key(i, g, turn)
    state, seen = helpers.step(state, turn_ids, len(turn_ids), turn_key)
    count = int(seen.length)
    turn = turn + 1
    rewards.append(float(seen.reward))
    if seen.done or turn == 4 or len(ids) + count + 1 > t_max:
      return ids, turns, rewards, bool(seen.done)
    ids += seen.ids[:count].tolist()
    turns += [-1] * count
    begin = len(ids)
  return ids, turns, rewards, False


@pytest.mark.slow
def test_trajectories_equal_a_plain_loop(tiny):
  result = sampled(tiny, t_max=24)
  lm = tiny.lm
  params = tiny.params
  states = lambda *x: lm.extend(params, *x)[0]
  whole = jax.jit(lambda *x: lm.unembed(params, states(*x)))
  ends = set()
  for i, g in np.ndindex(3, 4):
    ids, turns, rewards, finished = plain_loop(tiny, whole, i, g, 24)
    n = len(ids)
    assert result.completion_ids[i, g].tolist() == ids + [0] * (24 - n)
    assert result.turns[i, g].tolist() == turns + [-1] * (24 - n)
    assert int(result.completion_mask[i, g].sum()) == n
    assert bool(result.finished[i, g]) == finished
    rewards += [0] * (4 - len(rewards))
    np.testing.assert_allclose(result.turn_rewards[i, g], rewards, rtol=1e-6)
    assert turns[-1] >= 0  # no observation at the end
    ends.add((finished, n < 24))
  assert ends >= {(True, True), (False, True)}
  assert (result.turns >= 2).any() and (result.turn_rewards[..., 2] > 0).any()


@pytest.mark.slow
def test_rollout_and_trainer_logprobs_of_sampled_tokens_agree(tiny):
  sampling = Sampling(0.7, top_k=5)
  result = sampled(tiny, sampling=sampling)
  tokens = result.prompt_ids, result.prompt_mask, result.completion_ids
  logprobs, _ = token_logprobs(tiny.lm, tiny.params, *tokens, sampling=sampling)
  read = result.completion_mask & ~result.sampled
  drawn = result.sampled
  assert read.any() and not result.logprobs[read].any()
  close(result.logprobs[drawn], logprobs[drawn], atol=2e-5)


@pytest.mark.slow
def test_shapes_of_the_loop_do_not_change_trajectories(tiny):
  plain = types.SimpleNamespace(lm=single_loop(tiny.lm), params=tiny.params)
  plain = sampled(plain, t_max=112)
  jax.tree.map(close, plain, sampled(tiny, t_max=112))
  # The batch shrinks to a half before the end.
  unfinished = (plain.completion_mask.sum(-1) > 64).sum()
  assert 0 < unfinished < 6


def small(tiny, answer, state=0.0, max_turns=3, **changes):
  """Returns a rollout whose environment answers a function of its state."""
  environment = Environment(
    lambda target, key: state, lambda s, *_: answer(s), LONGEST, max_turns
  )
  options = {"group_size": 2, "max_new_tokens": 5, "environment": environment}
  options["eos_ids"] = range(11)  # every token ends a turn
  prompts = PROMPTS.replace(**changes)
  run = lambda: rollout(tiny.lm, tiny.params, prompts, KEY, **options)
  return jax.jit(run)()


IDS = jnp.array([1, 2, 3])
SEEN = Observation(IDS, 1, 0.0, False)
seen = lambda **changes: lambda s: (s, SEEN._replace(**changes))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("answer", "changes", "message"),
  [
    (seen(), {"max_turns": 0}, "max_turns=0"),
    (seen(), {"max_turns": 2.0}, "max_turns=2.0"),
    (seen(), {"targets": jnp.zeros(2)}, "must be those of the prompts, .3,"),
    (lambda s: (s, tuple(SEEN)), {}, "must return .state, Observation"),
    (seen(ids=IDS[:2]), {}, r"ids must be .*\(3,\)"),
    (seen(ids=[1, 2, 3]), {}, "ids must be integer"),
    (seen(ids=IDS / 2), {}, "ids must be integer"),
    (seen(length=1.5), {}, "length must be integer"),
    (seen(reward=IDS), {}, "reward must be real"),
    (seen(done=0), {}, "done must be boolean"),
    (lambda s: (IDS, SEEN), {}, "a state like reset's"),
    (lambda s: (s + 0.5, SEEN), {"state": 0}, "int32.*, not .*float32"),
  ],
)
def test_invalid_environments_are_refused(tiny, answer, changes, message):
  with pytest.raises(ValueError, match=message):
    small(tiny, answer, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("ids", "length", "valid"),
  [
    ([1, 2, 99], 2, True),  # ids after the length are not read
    ([1, -2, 3], 2, False),
    ([1, 2, 3], 4, False),
    ([1, 2, 3], -1, False),
  ],
)
def test_an_invalid_observation_has_no_reward(tiny, ids, length, valid):
  answer = seen(ids=jnp.array(ids), length=length, reward=0.5)
  result = small(tiny, answer)
  assert (jnp.isfinite(result.turn_rewards[..., 0]) == valid).all()
  if valid:
    read = result.completion_ids[0, 0][result.turns[0, 0] == -1].tolist()
    assert read[:length] == ids[:length]


@pytest.mark.slow
def test_groups_of_equal_returns_can_differ_in_their_turns(tiny):

  def step(state, ids, length, key):
    first = ids[0] % 2
    reward = jnp.where(state == 0, first, 2 - state)
    return 1 + first, Observation(IDS[:1], 0, reward, False)

  options = {"group_size": 8, "max_new_tokens": 2, "eos_ids": range(11)}
  game = Environment(lambda *_: jnp.int32(0), step, 1, 2)
  options |= {"environment": game, "credit": "turn"}
  run = grpojax.make_grpo_step(tiny.lm, optax.sgd(0.1), returns, **options)
  state = grpojax.init_state(tiny.params, optax.sgd(0.1), KEY)
  _, metrics = jax.jit(run)(state, PROMPTS)
  assert metrics["reward_std"] == 0 and metrics["zero_variance_groups"] == 0
  assert metrics["grad_norm"] > 0


# Environments of the host, in chunks of decoding.


@pytest.mark.slow
@pytest.mark.parametrize(
  "t_max, tokens, layers, formats",
  [
    (24, 7, 2, {"weights_dtype": "int8"}),
    (112, 32, 2, {}),
    pytest.param(24, 7, 9, {}, marks=pytest.mark.long),  # a stack of layers
  ],
)
def test_host_and_device_environments_give_equal_trajectories(
  tiny, t_max, tokens, layers, formats
):
  model = tiny
  if layers > 2:
    lm = transformer(dataclasses.replace(tiny.config, layers=layers))
    model = types.SimpleNamespace(lm=lm, params=lm.init(KEY))
  expected = sampled(model, t_max=t_max, sampling=Sampling(**formats))
  functions = programs(model.lm, t_max, tokens, **formats)
  result = helpers.play(functions, model.params, helpers.host_answers())
  jax.tree.map(functools.partial(close, atol=2e-5), result, expected)
  assert (result.turns >= 2).any()


def test_the_first_cache_has_its_dtype(tiny):
  begin, *_ = programs(tiny.lm, 24, 1, cache_dtype="int8")
  cache = jax.eval_shape(lambda: begin(tiny.params, PROMPTS, KEY).cache)
  assert cache[0].keys.dtype == jnp.int8


@pytest.mark.slow
def test_logprobs_after_long_observations_are_the_trainers(tiny):
  """With several blocks, cache sizes, and layers with a window."""
  layers = {"window": 20, "local_layers": (True, False)}
  turn_tokens = 6
  lm = transformer(dataclasses.replace(tiny.config, **layers))
  rng = np.random.default_rng(0)

  def answer(turns):
    sizes = [(0, 1, 40, 150)[(x.prompt + x.sample) % 4] for x in turns]
    return [Answer(rng.integers(1, 5, n).tolist(), 1.0) for n in sizes]

  functions = programs(lm, 400, 16, turn_tokens, temperature=0.8)
  result = helpers.play(functions, tiny.params, answer, 5)
  tokens = result.prompt_ids, result.prompt_mask, result.completion_ids
  logprobs, _ = token_logprobs(lm, tiny.params, *tokens, sampling=Sampling(0.8))
  drawn = np.asarray(result.sampled)
  close(result.logprobs[drawn], logprobs[drawn], atol=3e-5)
  sizes = np.sum(result.turns[..., None, :] == np.arange(5)[:, None], axis=-1)
  assert sizes.max() == turn_tokens
  length = result.completion_mask.sum(-1)
  turns = result.turns.max(-1) + 1
  assert not result.finished.any() and length.max() > 300
  # Cut off after the last turn, or because an observation does not fit.
  assert turns.max() == 5 and (turns < 5).any()
  last = np.take_along_axis(result.turns, length[..., None] - 1, axis=-1)
  assert (last >= 0).all()
  turns = turns[..., None]
  number = np.arange(5)
  ids = np.take_along_axis(result.completion_ids, length[..., None] - 1, -1)
  longest = np.take_along_axis(sizes, turns - 1, axis=-1)
  done = np.isin(ids, EOS) | (longest == turn_tokens)
  assert done.any()
  rewarded = (number < turns) & (done | (number < turns - 1))
  np.testing.assert_array_equal(result.turn_rewards, rewarded)
