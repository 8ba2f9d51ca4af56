"""Which group sizes a run may use: one, or those that "auto" moves among."""

import functools
from collections.abc import Mapping
from typing import Any

from grpojax.core.advantages import ADVANTAGES, SCALED_LEAVE_ONE_OUT
from grpojax.runtime.config import config_error

AUTO = "auto"  # group_size: follow the best one


def group_sizes(flat_config: Mapping[str, Any]) -> list[int]:
  """The group sizes that a run may use: one, or all powers of two between.

  Args:
    flat_config: all settings by dotted path.
  """
  if flat_config["group_size"] != AUTO:
    return [flat_config["group_size"]]
  sizes = [max(flat_config["auto_group_size.smallest"], 1)]
  while sizes[-1] < flat_config["auto_group_size.largest"]:
    sizes.append(2 * sizes[-1])
  return sizes


def samples_per_step(flat_config: Mapping[str, Any]) -> int:
  """N = B G, the same at every step.

  Args:
    flat_config: all settings by dotted path.
  """
  auto = flat_config["group_size"] == AUTO
  first = flat_config["auto_group_size.start" if auto else "group_size"]
  return flat_config["batch_size"] * first


def config_errors(flat_config: Mapping[str, Any]) -> list[str]:
  """What a diagnosis, and a search for the best size need, a line each.

  Args:
    flat_config: all settings by dotted path, each in its own range.
  """
  every = flat_config["diagnostics.every"]
  if flat_config["group_size"] == AUTO:
    return _auto(flat_config)
  if every and (flat_config["group_size"] < 4 or flat_config["batch_size"] < 3):
    remedy = (
      "needs group_size of 4 or more and batch_size of 3 or more; 0 is off"
    )
    return [config_error("diagnostics.every", every, remedy)]
  return []


def _auto(flat_config: Mapping[str, Any]) -> list[str]:
  sizes, errors = group_sizes(flat_config), []
  for field in ("smallest", "start", "largest"):
    size = flat_config[f"auto_group_size.{field}"]
    if size < 4 or size & (size - 1) or not sizes[0] <= size <= sizes[-1]:
      remedy = "4 <= smallest <= start <= largest must be powers of two"
      errors.append(config_error(f"auto_group_size.{field}", size, remedy))
  advantage = flat_config["advantage"]
  if advantage in ADVANTAGES and advantage not in SCALED_LEAVE_ONE_OUT:
    remedy = (
      "group_size = 'auto' follows the best size for "
      f"{' or '.join(SCALED_LEAVE_ONE_OUT)}, whose error the diagnostics "
      "estimate: use one of these, or a number for group_size"
    )
    errors.append(config_error("advantage", advantage, remedy))
  if not flat_config["diagnostics.every"]:
    remedy = "group_size = 'auto' rests on the diagnostics: give 1 or more"
    errors.append(config_error("diagnostics.every", 0, remedy))
  samples = samples_per_step(flat_config)
  parts = flat_config["optim.minibatches"]
  if errors or min(samples, parts) < 1:
    return errors
  prompts, largest = samples // sizes[-1], sizes[-1]
  say = functools.partial(config_error, "auto_group_size.largest", largest)
  if prompts * largest != samples or prompts % parts:
    remedy = (
      f"leaves {samples} / {largest} prompts a step, which must be a whole "
      f"multiple of optim.minibatches = {parts}: take a smaller one or more "
      "prompts"
    )
    return [say(remedy)]
  if prompts < 3:
    return [say(f"leaves {prompts} prompts a step; a diagnosis needs 3")]
  return []
