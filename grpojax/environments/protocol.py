"""Interface of environments on the host: functions of JSON values.

    reset(example, seed) -> Step                  once per prompt
    step(state, action, example, seed) -> Step    once per turn

A step gets and returns its whole state, so any worker can run or repeat it.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from grpojax.rewards.worker import numbers, to_float, to_reward
from grpojax.runtime.processes.user_calls import WrongAnswer
from grpojax.runtime.processes.workers import to_plain

# Limits, in bytes of JSON (UTF-8).
_LARGEST_STATE = 2**22
_LARGEST_OBSERVATION = 2**20


class Step(NamedTuple):
  """Answer of an environment to a reset or a turn."""

  # Text, or chat messages {"role": TEXT, "content": TEXT}.
  observation: str | list[dict[str, str]] = ""
  reward: float | None = 0.0  # reward of the turn; None if it has none
  done: bool = False  # True if the episode has ended
  state: Any = None  # JSON value, passed to the next step
  info: Mapping[str, float] = {}  # numbers for logs


def to_step(value: Any) -> Step:
  """Converts the result of a user's environment to a Step of JSON values.

  WrongAnswer unless it is a Step, or a dict with some fields of Step, and all
  values are valid. `info` keeps only its finite numbers.
  """
  if is_step(value):
    value = Step(**value)
  if not isinstance(value, Step):
    raise WrongAnswer(
      f"returned {value!r:.80}: write `return Step(observation, reward, done,"
      " state)`, or a dict with these keys"
    )
  done = to_float(value.done)
  seen = value.observation
  if done not in (0.0, 1.0):
    raise WrongAnswer(f"returned done={value.done!r:.80}: use True or False")
  if not isinstance(value.info, Mapping | None):
    raise WrongAnswer(f"returned info={value.info!r:.80}: use a dict")
  messages = isinstance(seen, list | tuple) and all(map(is_message, seen))
  if not messages and not isinstance(seen, str):
    raise WrongAnswer(
      f"returned the observation {seen!r:.80}: use text, or a list of"
      ' messages {"role": ..., "content": ...} of text'
    )
  return Step(
    _to_json("an observation", seen, _LARGEST_OBSERVATION),
    to_reward(value.reward, "returned the reward"),
    bool(done),
    _to_json("a state", value.state, _LARGEST_STATE),
    numbers(value.info or {}),
  )


def is_step(value: Any) -> bool:
  """Returns True for a dict whose keys are all names of fields of Step."""
  return isinstance(value, Mapping) and {*value} <= {*Step._fields}


def is_message(message: Any) -> bool:
  """Returns True for a dict of strings with the keys "role" and "content"."""
  return (
    isinstance(message, dict)
    and {"role", "content"} <= {*message}
    and all(isinstance(x, str) for pair in message.items() for x in pair)
  )


def _to_json(subject: str, value: Any, largest: int) -> Any:
  """Converts a value to JSON and back; "?" replaces text outside UTF-8."""
  options = {"allow_nan": False, "ensure_ascii": False, "default": to_plain}
  try:
    text = json.dumps(value, **options).encode(errors="replace")
  except (TypeError, ValueError, RecursionError) as error:
    message = f"returned {subject} that is not JSON: {error}"
    raise WrongAnswer(message) from error
  if len(text) <= largest:
    return json.loads(text)
  raise WrongAnswer(f"returned {subject} of {len(text)} bytes, limit {largest}")
