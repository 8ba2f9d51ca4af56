"""User environments: misbehaving functions, and classes for libraries."""

import asyncio
import os
import random
import sys
import time

from grpojax.environments.protocol import Step


def step(state, action, example, seed):
  """Follows the action; other actions are counted."""
  if action == "none":
    return None
  if action == "raise":
    raise RuntimeError("no idea")
  if action == "leave":
    sys.exit("bye")
  if action == "changes":
    example.clear()
    state["count"] = -1
  count = state["count"] + 1 if state else 1
  return Step(f"{count}: {action}", state={"count": count}, info={"n": 1})


class Game:
  """Like gymnasium's: a game with a secret number."""

  def __init__(self, luck=False):
    self.luck = luck
    self.count = 0

  def reset(self, *, seed=None, options=None):
    self.secret = random.Random(seed).randrange(100) + options["offset"]
    return "", {"number": 3}

  def step(self, action):
    if action == "exit":
      os._exit(3)
    self.count += 1
    luck = os.getpid() if self.luck else ""
    text = f"{self.count}: {action[:9]} for {self.secret}{luck}"
    return text, self.count / 2, action == "stop", False, {"time": time.time()}


class OldGame:
  def reset(self, seed):
    return f"begins with {seed}"

  def step(self, action):
    return action, 1, action == "stop", {}


class Words:
  """Like TRL's: its methods are tools."""

  def reset(self, secret, **kwargs):
    self._secret = secret
    self._guesses = 0

  def guess(self, word: str) -> str:
    """Guesses the word.

    Args:
      word: The word.
    """
    self._guesses += 1
    if len(word) != len(self._secret):
      raise ValueError("another length")
    pairs = zip(word, self._secret, strict=True)
    return "".join(a if a == b else "." for a, b in pairs)

  def get_reward(self):
    return 1 / self._guesses if self._guesses else 0.0


class Echo:
  """Like TRL's example: `step` is a tool."""

  def reset(self, **kwargs):
    pass

  def step(self, message: str) -> str:
    """Returns a message.

    Args:
      message: The message.
    """
    return message


def multiply(a: int, b: int = 2) -> int:
  """Multiplies two numbers.

  Args:
    a: The first.
    b: The second.
  """
  return a * b


async def waits(a: int) -> int:
  """Waits.

  Args:
    a: Its result.
  """
  await asyncio.sleep(0)
  return a


class Held:
  """Like TRL's: it logs resets and closes."""

  def __init__(self, log, luck=False):
    self._log = log
    self._luck = luck
    self._count = 0

  def _note(self, word):
    with open(self._log, "a") as file:
      file.write(f"{word}\n")

  def reset(self, broken=False, options=()):
    self._note("reset")
    if broken or "broken" in options:
      raise RuntimeError("broken")

  async def look(self, number: int) -> str:
    """Looks.

    Args:
      number: Where.
    """
    self._count += 1
    if number == 13:
      return object()
    return f"{number}{os.getpid() if self._luck else ''}"

  async def get_reward(self):
    return self._count / 8

  async def close(self):
    self._note("close")
    raise RuntimeError("a socket")  # is ignored


class HeldGame(Held):
  """Like gymnasium's."""

  def step(self, action):
    if action == "raise":
      raise RuntimeError("no idea")
    return action, 0.5, action == "stop", False, {}
