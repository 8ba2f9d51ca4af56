"""Chunks of decoding with environments of the host, against the device's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environment_helpers import (
  EOS,
  KEY,
  PROMPTS,
  host_answers,
  play,
  programs,
  sampled,
)

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.environments.episodes import Answer
from grpojax.models.transformer import transformer


@pytest.mark.slow
@pytest.mark.parametrize(
  "t_max, tokens, weights_dtype", [(24, 7, "int8"), (112, 32, "model")]
)
def test_host_and_device_environments_give_equal_trajectories(
  tiny, t_max, tokens, weights_dtype
):
  sampling = Sampling(weights_dtype=weights_dtype)
  expected = sampled(tiny, t_max=t_max, sampling=sampling)
  functions = programs(tiny.lm, t_max, tokens, weights_dtype=weights_dtype)
  result = play(functions, tiny.params, host_answers())
  close = lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5)
  jax.tree.map(close, result, expected)
  assert (result.turns >= 2).any()


def test_the_first_cache_has_its_dtype(tiny):
  begin, *_ = programs(tiny.lm, 24, 1, cache_dtype="int8")
  cache = jax.eval_shape(lambda: begin(tiny.params, PROMPTS, KEY).cache)
  assert cache.blocks[0][0].keys.dtype == jnp.int8


@pytest.mark.slow
def test_logprobs_after_long_observations_are_the_trainers(tiny):
  """With several blocks, cache sizes, and layers with a window."""
  layers, turn_tokens = {"window": 20, "local_layers": (True, False)}, 6
  lm = transformer(dataclasses.replace(tiny.config, **layers))
  rng = np.random.default_rng(0)

  def answer(turns):
    sizes = [(0, 1, 40, 150)[(x.prompt + x.sample) % 4] for x in turns]
    return [Answer(rng.integers(1, 5, n).tolist(), 1.0) for n in sizes]

  functions = programs(lm, 400, 16, turn_tokens, temperature=0.8)
  result = play(functions, tiny.params, answer, 5)
  tokens = result.prompt_ids, result.prompt_mask, result.completion_ids
  logprobs, _ = token_logprobs(lm, tiny.params, *tokens, sampling=Sampling(0.8))
  drawn = np.asarray(result.sampled)
  np.testing.assert_allclose(result.logprobs[drawn], logprobs[drawn], atol=3e-5)
  sizes = np.sum(result.turns[..., None, :] == np.arange(5)[:, None], axis=-1)
  assert sizes.max() == turn_tokens
  length, turns = result.completion_mask.sum(-1), result.turns.max(-1) + 1
  assert not result.finished.any() and length.max() > 300
  # Cut off after the last turn, or because an observation does not fit.
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


def test_chunks_require_a_cache_that_can_be_aligned(tiny):
  lm = tiny.lm._replace(align_cache_rows=None)
  with pytest.raises(ValueError, match="no LM.align_cache_rows"):
    programs(lm, 24, 8).begin(tiny.params, PROMPTS, KEY)


def test_rows_are_aligned_without_a_copy_of_the_cache(tiny):
  cache = jax.eval_shape(lambda: tiny.lm.init_cache(4, 8, 64))
  of = lambda *x: tiny.lm.align_cache_rows(*x, jnp.int32(40), 64)
  align = jax.jit(of, donate_argnums=0)
  compiled = align.lower(cache, jnp.zeros((4, 8), jnp.int32)).compile()
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  assert compiled.memory_analysis().temp_size_in_bytes < size / 8
