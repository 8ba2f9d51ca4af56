"""User environments that draw numbers from global generators."""

import dataclasses
import random

import numpy as np


def draw():
  return f"{random.randrange(10**6)} {np.random.randint(10**6)}"


def step(state, action):
  return {"observation": draw(), "state": (state or 0) + 1}


class Guess:
  """Like TRL's: it draws a hidden secret, and answers at random."""

  def __init__(self):
    self._secret = draw()

  def reset(self, **kwargs):
    self._hidden = draw()

  def look(self) -> str:
    """Looks."""
    return f"{self._secret} {self._hidden} {draw()}"

  def get_reward(self):
    return random.random() + np.random.rand()


class Tiles(Guess):
  """Like TRL's, such as 2048: its board is drawn and shown."""

  def reset(self, **kwargs):
    self._hidden = draw()
    return self._hidden


class Walk:
  """Like gymnasium's, with numbers as observations."""

  def reset(self, seed=None, options=None):
    return np.random.randint(10**6), {}

  def step(self, action):
    return np.random.rand(3), random.random(), action == "stop", False, {}


def dice(sides: int) -> int:
  """Throws dice.

  Args:
    sides: Number of sides.
  """
  return random.randrange(10**6)


ENDS = [("reward", float, 0.5), ("done", bool, False)]
# OpenEnv's step result, and its observations, which share some fields.
Result = dataclasses.make_dataclass("Result", ["observation", *ENDS])
METADATA = ("metadata", dict, dataclasses.field(default_factory=dict))
FIELDS = [("echoed", str), ("length", int), *ENDS, METADATA]
Echo = dataclasses.make_dataclass("Echo", FIELDS)
Said = dataclasses.make_dataclass("Said", ["message", ("turn", int, 1)])


class Echoes:
  """Its methods return OpenEnv observations."""

  def reset(self):
    return Echo("a", 1)

  def step(self, action):
    return Echo("b", 2), 1.0, False, False, {}


class Client:
  """Like OpenEnv's typed client."""

  def __init__(self, url):
    self.url = url

  def reset(self):
    return Result(Said("ready"))

  def step(self, action):
    return Result(Said(f"{self.url}/{action}"), done=action == "stop")
