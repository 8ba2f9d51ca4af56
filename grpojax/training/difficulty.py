"""Prompts drawn by their success rates: what the section difficulty may say.

`prompt_choice` does it.
"""

import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from grpojax.runtime.config import config_error

OFF = "none"


def on(config: ConfigDict) -> bool:
  """Whether prompts are drawn by their success rates."""
  return config.difficulty.priority != OFF


def settings(config: ConfigDict) -> dict[str, Any]:
  """All of the section, by name."""
  return {name: config.difficulty[name] for name in config.difficulty}


def config_errors(flat_config: Mapping[str, Any]) -> list[str]:
  """What is wrong with the section, a line each: field, value, what to do.

  Args:
    flat_config: all settings by dotted path.
  """
  errors = []

  def need(key, holds, remedy):
    field = f"difficulty.{key}"
    if not holds(flat_config[field]):
      errors.append(config_error(field, flat_config[field], remedy))

  def pair(value, good):
    numbers = len(value) == 2 and all(
      isinstance(x, (int, float)) and math.isfinite(x) for x in value
    )
    return numbers and good(*value)

  order = lambda x: pair(x, lambda a, b: 0 <= a < b <= 1)
  need("band", order, "must be two numbers, 0 <= low < high <= 1")
  inside = lambda x: pair(x, lambda a, b: 0 < min(a, b) <= max(a, b) < 1)
  need("target", inside, "must be two numbers inside (0, 1)")
  if flat_config["difficulty.priority"] == OFF:
    if flat_config["difficulty.importance_weights"]:
      remedy = "nothing is to be undone without difficulty.priority: use False"
      errors.append(config_error("difficulty.importance_weights", True, remedy))
    return errors
  if flat_config["reward.on_device"]:
    remedy = "reward.on_device keeps rewards from the host, which counts them"
    need("priority", lambda _: False, f"{remedy}: use {OFF}")
  if flat_config["filter_groups.enable"]:
    remedy = (
      "groups that do not vary are replaced by prompts of the stream, and with "
      "difficulty.priority there is none: use False, or difficulty.priority = "
      f"{OFF!r}"
    )
    errors.append(config_error("filter_groups.enable", True, remedy))
  if (
    flat_config["difficulty.importance_weights"]
    and flat_config["diagnostics.every"]
  ):
    remedy = (
      "the diagnosis (and group_size = 'auto') is of a gradient without "
      "importance weights: use diagnostics.every = 0, or no weights"
    )
    errors.append(config_error("difficulty.importance_weights", True, remedy))
  return errors
