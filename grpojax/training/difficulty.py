"""Prompts drawn by their success rates: what the section difficulty may say.

`prompt_choice` does it.
"""

import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from grpojax.runtime.config import problem

OFF = "none"


def on(config: ConfigDict) -> bool:
  """Whether prompts are drawn by their success rates."""
  return config.difficulty.priority != OFF


def settings(config: ConfigDict) -> dict[str, Any]:
  """All of the section, by name."""
  return {name: config.difficulty[name] for name in config.difficulty}


def problems(leaves: Mapping[str, Any]) -> list[str]:
  """What is wrong with the section, a line each: field, value, what to do.

  Args:
    leaves: all settings by dotted path.
  """
  wrong = []

  def need(key, holds, todo):
    field = f"difficulty.{key}"
    if not holds(leaves[field]):
      wrong.append(problem(field, leaves[field], todo))

  def pair(value, good):
    numbers = len(value) == 2 and all(
      isinstance(x, (int, float)) and math.isfinite(x) for x in value
    )
    return numbers and good(*value)

  order = lambda x: pair(x, lambda a, b: 0 <= a < b <= 1)
  need("band", order, "must be two numbers, 0 <= low < high <= 1")
  inside = lambda x: pair(x, lambda a, b: 0 < min(a, b) <= max(a, b) < 1)
  need("target", inside, "must be two numbers inside (0, 1)")
  if leaves["difficulty.priority"] == OFF:
    if leaves["difficulty.importance_weights"]:
      todo = "nothing is to be undone without difficulty.priority: use False"
      wrong.append(problem("difficulty.importance_weights", True, todo))
    return wrong
  if leaves["reward.on_device"]:
    todo = "reward.on_device keeps rewards from the host, which counts them"
    need("priority", lambda _: False, f"{todo}: use {OFF}")
  if leaves["filter_groups.enable"]:
    todo = (
      "groups that do not vary are replaced by prompts of the stream, and with "
      "difficulty.priority there is none: use False, or difficulty.priority = "
      f"{OFF!r}"
    )
    wrong.append(problem("filter_groups.enable", True, todo))
  if leaves["difficulty.importance_weights"] and leaves["diagnostics.every"]:
    todo = (
      "the diagnosis (and group_size = 'auto') is of a gradient without "
      "importance weights: use diagnostics.every = 0, or no weights"
    )
    wrong.append(problem("difficulty.importance_weights", True, todo))
  return wrong
