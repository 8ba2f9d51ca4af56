"""Instances of classes as functions: their states are the actions so far.

    {"actions": ["left", "up"], "seed": 7, "member": 7, "digest": "1c9..."}

Any free worker does any step. A worker keeps the instances of its last
episodes, so with one worker, or none, no action is played again. Where an
instance is not there, because another worker did the last step or was killed, a
new one is made with the same seed and example, and the actions are played
again. That its replies are the same is checked by their hash, the digest.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

from grpojax.environments.protocol import Step, to_step
from grpojax.runtime.processes.user_calls import WrongAnswer

_LIVE = 512  # instances that a worker keeps


@dataclasses.dataclass
class Replay:
  """Functions `reset` and `step` of instances.

  Attributes:
    begin: `(example, seed) -> (instance, Step)`.
    act: `(instance, action) -> Step`.
    live: instances by the hash of their example and state.
  """

  begin: Callable[[dict[str, Any], int], tuple[Any, Step]]
  act: Callable[[Any, str], Step]
  live: dict[str, Any] = dataclasses.field(default_factory=dict)

  def reset(self, example: dict[str, Any], seed: int) -> Step:
    """Begins an episode."""
    instance, reply = self.begin(example, seed)
    before = {"actions": [], "seed": seed, "member": seed, "digest": ""}
    return self._keep(instance, reply, example, before)

  def step(
    self, state: Any, action: str, example: dict[str, Any], seed: int
  ) -> Step:
    """Plays an action; WrongAnswer where an instance answers differently.

    The seed may differ from the reset's, which a group's members share.
    """
    instance, own = self._take(state, example, seed)
    actions = [*state["actions"], action]
    state = state | {"actions": actions, "seed": own, "member": seed}
    return self._keep(instance, self.act(instance, action), example, state)

  def end(self, state: Any, example: dict[str, Any], seed: int) -> Step:
    """Ends an episode that is cut off, with its instance's `get_reward`."""
    instance, _ = self._take(state, example, seed)
    try:
      return to_step(Step(reward=instance.get_reward(), done=True))
    finally:
      _close(instance)

  def _take(self, state, example, seed) -> tuple[Any, int]:
    """Returns the instance of a state, and the seed that it began with."""
    if seed == state["member"]:
      # Taken out: two episodes that are alike so far have an instance each.
      instance = self.live.pop(_hash(example, state), None)
      if instance is not None:
        return instance, state["seed"]
    # A member's own luck, if its beginning is the group's; else the group's.
    seeds = dict.fromkeys((seed, state["seed"]))
    if state["actions"]:
      seeds = (state["seed"],)
    for own in seeds:
      instance, reply = self.begin(example, own)
      digest = _hash("", reply[:3])  # `info` may have times, and is left out
      for action in state["actions"]:
        digest = _hash(digest, self.act(instance, action)[:3])
      if digest == state["digest"]:
        return instance, own
      _close(instance)
    raise WrongAnswer(
      "answers differently when its actions are played again: draw all luck"
      " from `seed`"
    )

  def _keep(self, instance, reply: Step, example, state) -> Step:
    """Keeps an instance for the next step, and returns the reply with state."""
    state["digest"] = _hash(state["digest"], reply[:3])
    reply = to_step(reply._replace(state=state))
    if reply.done:
      _close(instance)
    else:
      self.live[_hash(example, reply.state)] = instance
    while len(self.live) > _LIVE:
      _close(self.live.pop(next(iter(self.live))))
    return reply


def _close(instance: Any) -> None:
  """Calls an instance's `close` if it has one, whatever that raises."""
  with contextlib.suppress(Exception):
    getattr(instance, "close", lambda: None)()


def _hash(*values: Any) -> str:
  text = json.dumps(values, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:32]
