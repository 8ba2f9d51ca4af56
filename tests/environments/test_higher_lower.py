"""The game higher_lower: its answers and rewards."""

import jax
import jax.numpy as jnp
import pytest

from grpojax.environments import higher_lower as game


def test_the_game_answers_and_ends():
  environment = game.higher_lower(8, max_turns=3, cost=0.2)
  key = jax.random.key(0)
  secret = environment.reset(jnp.int32(5), key)
  for guess, answer, reward in ((2, 8, -0.2), (6, 9, -0.2), (5, None, 1.0)):
    ids = jnp.array([9, guess, 0])  # a token before the number; padding
    secret, seen = environment.step(secret, ids, 2, key)
    assert float(seen.reward) == pytest.approx(reward)
    assert bool(seen.done) == (answer is None)
    assert answer is None or seen.ids.tolist() == [answer]
