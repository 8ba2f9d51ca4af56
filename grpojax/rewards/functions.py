"""Loads reward functions by name, and sums their weighted rewards.

A reward is a function `(prompt, completion, example) -> float | None` of two
texts and a dict; None abstains. A name is one of `BUILT_IN`,
"package.module:function", or "path/to/file.py:function"; `conventions` adapts
functions for TRL and verl. This module loads no JAX, so workers start quickly.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpojax.rewards import conventions
from grpojax.runtime.processes import user_calls

BUILT_IN = {
  "exact_answer": "exact",
  "math_answer": "math",
  "math_verify": "math",
  "format": "format",
  "length": "length",
  "overlong": "length",
  "unfinished": "length",
  "environment": "functions",
}
"""Built-in rewards and their modules in `grpojax.rewards`."""

READ_ANSWERS = ("math_answer", "math_verify")
"""Both names of the built-in reward that reads answers of any form."""

_TRIAL = {"answer": "1", "completion_length": 1, "max_completion_length": 1}
_TRIAL |= {"finished": True, "turn_rewards": (), "episode_info": {}}


def label(name: str) -> str:
  """Returns the name after the colon, used in metrics and options."""
  return name.rpartition(":")[2]


Reward = Callable[[str, str, dict[str, Any]], Any] | conventions.Trl
"""`(prompt, completion, example) -> float | None`, or a dict with numbers to
log; or a `Trl` function of all completions of a prompt."""


def resolve(name: str, options: Mapping[str, Any] | None = None) -> Reward:
  """Returns the reward function called `name`, with its options bound.

  ValueError if it cannot be loaded, or has wrong parameters or options.
  """
  paths = {key: f"grpojax.rewards.{BUILT_IN[key]}:{key}" for key in BUILT_IN}
  function = user_calls.load(f"reward {name!r}", name, paths)
  if not callable(function):
    raise ValueError(f"reward {name!r} is not a function: {function!r:.80}")
  reward = conventions.follow(name, function, dict(options or {}))
  if name in BUILT_IN:
    try:
      reward("", "", dict(_TRIAL))  # checks the options' values
    except (TypeError, ValueError) as error:
      raise ValueError(f"reward {name!r}: {error}") from error
  return reward


def environment(
  prompt: str, completion: str, example: dict[str, Any]
) -> dict[str, float] | None:
  """Returns the summed rewards of an environment's turns and numbers to log.

  None if the environment failed.
  """
  if example.get("episode_error"):
    return None
  score = float(sum(example["turn_rewards"]))
  return {**example["episode_info"], "score": score}


def workers_for(names: Sequence[str], workers: int) -> int:
  """Returns the number of workers, at least 1 if Math-Verify may be used."""
  return workers or int(any(name in READ_ANSWERS for name in names))


def resolve_all(
  names: Sequence[str], options: Mapping[str, Any] | None = None
) -> list[Reward]:
  """Returns the functions of several names; `options` is keyed by `label`.

  ValueError for no names, a repeated label, or a function that fails to load.
  """
  labels = [label(name) for name in names]
  if not names:
    raise ValueError("reward.functions is empty: name at least one")
  for name in labels:
    same = [path for path in names if label(path) == name]
    if len(same) > 1:
      raise ValueError(
        f"the reward functions {' and '.join(same)} share a name, which metrics"
        " and options need to tell them apart: remove or rename one of them"
      )
  options = options or {}
  for name, keywords in options.items():
    if not isinstance(keywords, Mapping):
      raise ValueError(
        f"--config.reward.options.{name} = {keywords!r}: set keywords of the "
        f"function instead, reward.options.{name}.KEYWORD = ..."
      )
    if name not in labels:
      raise ValueError(
        f"reward.options.{name} belongs to no reward function: use {labels}"
        f"{user_calls.nearest(name, labels)}"
      )
  return [resolve(name, options.get(label(name))) for name in names]


def combine(
  values: Sequence[int | float | None], weights: Sequence[int | float]
) -> float | None:
  """Returns the weighted sum without None values; None if all are None."""
  pairs = zip(values, weights, strict=True)
  terms = [weight * value for value, weight in pairs if value is not None]
  return math.fsum(terms) if terms else None
