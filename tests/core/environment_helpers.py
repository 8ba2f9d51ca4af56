"""A random environment on the device, and the same environment on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.core.decoding import chunks
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.environment import Environment, Observation
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.environments import episodes
from grpojax.environments.episodes import Answer, Programs

KEY = jax.random.key(3)
EOS = (0, 5)
LONGEST = 3
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
  """Returns a rollout with the environment on the device."""
  options |= {"group_size": 4, "max_new_tokens": t_max, "eos_ids": EOS}
  options["environment"] = ENVIRONMENT
  run = functools.partial(rollout, tiny.lm, **options)
  return jax.jit(run)(tiny.params, prompts, key)


def sample_key(i, j):
  return jax.random.fold_in(KEY, i * 4 + j)


def turn_key(i, j, turn):
  """Key of the environment of sample j of prompt i; the reset is turn -1."""
  return jax.random.fold_in(sample_key(i, j), jnp.int32(-2 - turn))


def host_answers():
  """Returns the environment's `answer` on the host, for `episodes.play`."""
  states = {
    (i, j): reset(PROMPTS.targets[i], turn_key(i, j, -1))
    for i, j in np.ndindex(3, 4)
  }

  def answer(turns):
    answers = []
    for turn in turns:
      place = turn.prompt, turn.sample
      key = turn_key(*place, turn.turn)
      ids = jnp.asarray(turn.ids)
      states[place], seen = step(states[place], ids, len(ids), key)
      ids = seen.ids[: int(seen.length)].tolist()
      answers.append(Answer(ids, float(seen.reward), bool(seen.done)))
    return answers

  return answer


def programs(lm, t_max, tokens, turn_tokens=0, **sampling):
  """Returns the jitted functions of `chunks`, with their options."""
  jit = lambda f, **options: jax.jit(
    functools.partial(f, lm, sampling=Sampling(**sampling), **options)
  )
  turns = {"turn_tokens": turn_tokens, "eos_ids": EOS}
  begin = jit(
    chunks.begin,
    **turns,
    group_size=4,
    max_new_tokens=t_max,
    pad_id=0,
  )
  decode = jit(chunks.decode, tokens=tokens, **turns)
  return Programs(begin, decode, jit(chunks.feed), jax.jit(chunks.finish))


def play(functions, params, answer, max_turns=ENVIRONMENT.max_turns):
  """Returns the trajectories of all prompts, with answers of the host."""
  arguments = functions, params, PROMPTS, KEY, answer
  playing = episodes.play(*arguments, max_turns=max_turns)
  return episodes.result(playing)
