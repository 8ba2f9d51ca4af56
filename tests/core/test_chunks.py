"""Chunks of decoding with environments of the host, against the device's."""

import dataclasses
import functools
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core.decoding import chunks
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.environments import episodes
from grpojax.environments.episodes import Answer, Programs, play, play_together
from grpojax.models.transformer import transformer

DEVICE = runpy.run_path(
  str(pathlib.Path(__file__).with_name("test_environment.py"))
)
ENVIRONMENT, EOS, KEY, PROMPTS, reset, sampled, step = map(
  DEVICE.get, "ENVIRONMENT EOS KEY PROMPTS reset sampled step".split()
)


def programs(
  lm, t_max, tokens, turn_tokens=0, record_experts=False, **sampling
):
  """The functions of `chunks`, compiled with their options."""
  jit = lambda f, **options: jax.jit(
    functools.partial(f, lm, sampling=Sampling(**sampling), **options),
    static_argnames="slots",
  )
  begin = jit(
    chunks.begin,
    group_size=4,
    max_new_tokens=t_max,
    eos_ids=EOS,
    pad_id=0,
    slots=episodes.cache_sizes(t_max)[0],
    record_experts=record_experts,
  )
  turns = {"tokens": tokens, "turn_tokens": turn_tokens, "eos_ids": EOS}
  decode = jit(chunks.decode, **turns)
  return Programs(begin, decode, jit(chunks.feed), jax.jit(chunks.finish))


def played(tiny, own, answer, max_turns):
  """Trajectories of all prompts, with answers of the host."""
  turns = play(own, tiny.params, PROMPTS, KEY, answer, max_turns=max_turns)
  (result,) = play_together(turns)
  return result


def of_host():
  """The device's environment as one of the host: its state is here."""
  fold = lambda i, j: jax.random.fold_in(KEY, i * 4 + j)
  luck = lambda *place: jax.random.fold_in(fold(*place), jnp.int32(-1))
  states = {
    (i, j): reset(PROMPTS.targets[i], luck(i, j)) for i, j in np.ndindex(3, 4)
  }

  def answer(turns):
    answers = []
    for turn in turns:
      place = turn.prompt, turn.sample
      key = jax.random.fold_in(fold(*place), jnp.int32(-2 - turn.turn))
      ids = jnp.asarray(turn.ids)
      states[place], seen = step(states[place], ids, len(ids), key)
      ids = seen.ids[: int(seen.length)].tolist()
      answers.append(Answer(ids, float(seen.reward), bool(seen.done)))
    return answers

  return answer


@pytest.mark.slow
@pytest.mark.parametrize(
  "t_max, tokens, weights_dtype", [(24, 7, "int8"), (112, 32, "model")]
)
def test_rows_are_those_of_the_device(tiny, t_max, tokens, weights_dtype):
  sampling = Sampling(weights_dtype=weights_dtype)
  expected = sampled(tiny, t_max=t_max, sampling=sampling)
  own = programs(tiny.lm, t_max, tokens, weights_dtype=weights_dtype)
  result = played(tiny, own, of_host(), ENVIRONMENT.max_turns)
  for name, value in vars(expected).items():
    if value is None:  # nobody has asked for experts
      assert getattr(result, name) is None
      continue
    close = np.testing.assert_allclose
    close(getattr(result, name), value, atol=2e-5, err_msg=name)
  assert (result.turns >= 2).any()


def test_a_cache_begins_in_its_format(tiny):
  begin, *_ = programs(tiny.lm, 24, 1, cache_dtype="int8")
  cache = jax.eval_shape(lambda: begin(tiny.params, PROMPTS, KEY).cache)
  assert cache.blocks[0][0].keys.dtype == jnp.int8


@pytest.mark.slow
def test_long_observations_are_read_as_the_trainer_reads_them(tiny):
  """Over several blocks, sizes of the cache and layers with a window."""
  layers, turn_tokens = {"window": 20, "local_layers": (True, False)}, 6
  lm = transformer(dataclasses.replace(tiny.config, **layers))
  rng = np.random.default_rng(0)

  def answer(turns):
    sizes = [(0, 1, 40, 150)[(x.prompt + x.sample) % 4] for x in turns]
    return [Answer(rng.integers(1, 5, n).tolist(), 1.0) for n in sizes]

  own = programs(lm, 400, 16, turn_tokens, temperature=0.8)
  result = played(tiny, own, answer, 5)
  tokens = result.prompt_ids, result.prompt_mask, result.completion_ids
  logprobs, _ = token_logprobs(lm, tiny.params, *tokens, sampling=Sampling(0.8))
  own_ = np.asarray(result.sampled)
  np.testing.assert_allclose(result.logprobs[own_], logprobs[own_], atol=3e-5)
  sizes = np.sum(result.turns[..., None, :] == np.arange(5)[:, None], axis=-1)
  assert sizes.max() == turn_tokens
  length, turns = result.completion_mask.sum(-1), result.turns.max(-1) + 1
  assert not result.finished.any() and length.max() > 300
  # Cut off at the last turn, or where the next observation has no room.
  assert turns.max() == 5 and (turns < 5).any()
  last = np.take_along_axis(result.turns, length[..., None] - 1, axis=-1)
  assert (last >= 0).all()
  turns, number = turns[..., None], np.arange(5)
  ids = np.take_along_axis(result.completion_ids, length[..., None] - 1, -1)
  longest = np.take_along_axis(sizes, turns - 1, axis=-1)
  done = np.isin(ids, EOS) | (longest == turn_tokens)
  assert done.any()
  rewarded = (number < turns) & (done | (number < turns - 1))
  np.testing.assert_array_equal(result.turn_rewards, rewarded)


def test_a_model_whose_rows_cannot_wait_is_refused(tiny):
  lm = tiny.lm._replace(align_cache_rows=None)
  with pytest.raises(ValueError, match="no align_cache_rows"):
    programs(lm, 24, 8).begin(tiny.params, PROMPTS, KEY)


def test_rows_are_aligned_in_place(tiny):
  """A row at a time, not from a copy of the cache."""
  cache = jax.eval_shape(lambda: tiny.lm.init_cache(4, 8, 64))
  of = lambda *x: tiny.lm.align_cache_rows(*x, jnp.int32(40), 64)
  align = jax.jit(of, donate_argnums=0)
  compiled = align.lower(cache, jnp.zeros((4, 8), jnp.int32)).compile()
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  assert compiled.memory_analysis().temp_size_in_bytes < size / 8
