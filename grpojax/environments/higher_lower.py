"""A jittable game: guess a number from 0 to N - 1, with hints.

Token ids below N are numbers; a wrong guess is answered by HIGHER = N or LOWER
= N + 1, and each prompt is START = N + 2. A number ends a turn (all numbers
are `eos_ids`), so a good policy's turns are single numbers. Log: docs/log.md.

    START  7 HIGHER  11 LOWER  9
"""

import jax.numpy as jnp

from grpojax.core.environment import Environment, Observation
from grpojax.core.types import Prompts


def vocab_size(numbers: int) -> int:
  """Returns the number of token ids."""
  return numbers + 3


def higher_lower(
  numbers: int, max_turns: int, cost: float = 0.1
) -> Environment:
  """Returns the game with N = `numbers`; a prompt's target is the solution.

  The right guess has reward 1 and ends the game; a wrong guess has -`cost`.
  """

  def reset(target, key):
    return target

  def step(secret, ids, length, key):
    guess = ids[length - 1]
    right = guess == secret
    answer = jnp.where(guess < secret, numbers, numbers + 1)[None]
    return secret, Observation(answer, 1, jnp.where(right, 1.0, -cost), right)

  return Environment(reset, step, observation_length=1, max_turns=max_turns)


def prompts(numbers: int) -> Prompts:
  """Returns a prompt for each number to guess."""
  start = jnp.full((numbers, 1), numbers + 2, jnp.int32)
  return Prompts(start, jnp.ones(start.shape, bool), jnp.arange(numbers))
