"""Runs environment classes as functions, with the actions so far as the state.

    {"actions": ["left", "up"], "seed": 7, "member": 7, "digest": "1c9..."}

One worker does all steps of an episode and keeps its instance. If the worker is
killed, another worker makes an instance with the same seed and example, and
plays the actions again: `digest`, a hash of the replies, must be the same.
`seed` is the seed of the reset; `member` is the sample's own seed.
"""

import contextlib
import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from grpojax.environments.protocol import Step, to_step
from grpojax.environments.tools import awaited
from grpojax.runtime.processes.user_calls import WrongAnswer


@dataclasses.dataclass
class Replay:
  """Functions `reset`, `step` and `end` of an environment class."""

  # `(example, seed) -> (instance, Step)`
  begin: Callable[[dict[str, Any], int], tuple[Any, Step]]
  act: Callable[[Any, str], Step]  # `(instance, action) -> Step`
  # `(instance) -> reward` of an episode that is cut off; None: no reward.
  reward: Callable[[Any], Any] | None = None
  # Instances by the hash of their example and state.
  live: dict[str, Any] = dataclasses.field(default_factory=dict)

  def reset(self, example: dict[str, Any], seed: int) -> Step:
    """Begins an episode."""
    with seeded(seed, 0):
      instance, reply = self.begin(example, seed)
    before = {"actions": [], "seed": seed, "member": seed, "digest": ""}
    return self._keep(instance, reply, example, before)

  def step(
    self, state: Any, action: str, example: dict[str, Any], seed: int
  ) -> Step:
    """Plays an action; WrongAnswer if a replay answers differently.

    `seed` is the sample's own; the reset's seed may be shared by the group.
    """
    instance, first_seed = self._take(state, example, seed)
    actions = [*state["actions"], action]
    state = state | {"actions": actions, "seed": first_seed, "member": seed}
    with closed_on_error(instance):
      with seeded(seed, len(actions)):
        reply = self.act(instance, action)
      return self._keep(instance, reply, example, state)

  def end(self, state: Any, example: dict[str, Any], seed: int) -> Step:
    """Cuts an episode off, and returns its reward, if any."""
    if self.reward is None:
      close(self._pop(state, example, seed))
      return Step(reward=None, done=True)
    instance, _ = self._take(state, example, seed)
    try:
      with seeded(seed, "end"):
        return to_step(Step(reward=self.reward(instance), done=True))
    finally:
      close(instance)

  def close(self) -> None:
    """Closes all instances."""
    while self.live:
      close(self.live.popitem()[1])

  def _pop(self, state, example, seed) -> Any:
    """Removes and returns the live instance of a state, if any."""
    if seed != state["member"]:
      return None  # the instance belongs to another sample of the group
    return self.live.pop(_hash(example, state), None)

  def _take(self, state, example, seed) -> tuple[Any, int]:
    """Returns the instance of a state, and the seed of its reset."""
    instance = self._pop(state, example, seed)
    if instance is not None:
      return instance, state["seed"]
    # Before any action, a reset by the sample's own seed is tried first.
    first = () if state["actions"] else (seed,)
    for first_seed in dict.fromkeys((*first, state["seed"])):
      with seeded(first_seed, 0):
        instance, reply = self.begin(example, first_seed)
      digest = _hash("", reply[:3])  # without `info`, which may contain times
      with closed_on_error(instance):
        for i, action in enumerate(state["actions"]):
          with seeded(state["member"], i + 1):
            digest = _hash(digest, self.act(instance, action)[:3])
      if digest == state["digest"]:
        return instance, first_seed
      close(instance)
    raise WrongAnswer(
      "answers differently when its actions are played again: draw random"
      " numbers from `seed`, `random` or `numpy.random`"
    )

  def _keep(self, instance, reply: Step, example, state) -> Step:
    """Keeps an instance for the next step; returns the reply with its state."""
    state["digest"] = _hash(state["digest"], reply[:3])
    reply = to_step(reply._replace(state=state))
    if reply.done:
      close(instance)
    else:
      key = _hash(example, reply.state)
      close(self.live.pop(key, None))  # replace an older one
      self.live[key] = instance
    return reply


def close(instance: Any) -> None:
  """Calls an instance's `close`, if any, and ignores errors."""
  with contextlib.suppress(Exception):
    awaited(getattr(instance, "close", lambda: None)())


@contextlib.contextmanager
def closed_on_error(instance: Any) -> Iterator[None]:
  """Closes an instance if the block raises or is interrupted."""
  try:
    yield
  except BaseException:
    close(instance)
    raise


def _hash(*values: Any) -> str:
  text = json.dumps(values, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextlib.contextmanager
def seeded(*values: Any) -> Iterator[None]:
  """Seeds `random` and `numpy.random` with JSON values, then restores them.

  A repeated step draws the same numbers in any process.
  """
  seed = int(_hash(*values)[:8], 16)
  before = random.getstate()
  numpy_before = np.random.get_state()
  try:
    random.seed(seed)
    np.random.seed(seed)
    yield
  finally:
    random.setstate(before)
    np.random.set_state(numpy_before)
