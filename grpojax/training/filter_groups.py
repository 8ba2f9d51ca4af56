"""When groups are replaced by fresh prompts: what `filter_groups` may say.

`dynamic_sampling` does it.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from grpojax.core.advantages import ADVANTAGES, ZERO_IN_EQUAL_GROUPS
from grpojax.runtime.config import config_error

METRICS = ("reward", "acc")
"""What has to vary in a group: `reward`, what its completions are compared by;
`acc`, the function that says what a right answer is. With several rewards `acc`
leaves groups out that would teach something, and the objective is
another."""


class Settings(NamedTuple):
  """The section `filter_groups` of a config where it is enabled.

  Attributes:
    metric: one of `METRICS`.
    limit: prompts drawn for a step at most, in units of a step's.
    parts: of a step's prompts, the equal parts that a draw has one of.
    rescale: whether advantages are multiplied by the acceptance.
  """

  metric: str
  limit: int
  parts: int
  rescale: bool


def settings_of(config: ConfigDict) -> Settings | None:
  """None where dynamic sampling is off."""
  given = config.filter_groups
  chosen = Settings(
    given.metric, given.max_num_gen_batches, given.gen_parts, given.rescale
  )
  return chosen if given.enable else None


def draw_parts(config: ConfigDict) -> int:
  """Of a step's prompts, the equal parts that a draw has one of."""
  settings = settings_of(config)
  return settings.parts if settings else 1


def config_errors(flat_config: Mapping[str, Any]) -> list[str]:
  """What keeps a run from dynamic sampling, a line each.

  Args:
    flat_config: all settings by dotted path, each in its own range.
  """
  if not flat_config["filter_groups.enable"]:
    return []
  refuse = functools.partial(config_error, "filter_groups.enable", True)
  errors, advantage = [], flat_config["advantage"]
  if flat_config["reward.on_device"]:
    errors.append(
      refuse(
        "reward.on_device is one program, which draws once: use "
        "reward.on_device = False"
      )
    )
  if advantage in ADVANTAGES and advantage not in ZERO_IN_EQUAL_GROUPS:
    errors.append(
      refuse(
        f"advantage = {advantage!r} learns from groups of equal rewards too: "
        f"use one of {', '.join(ZERO_IN_EQUAL_GROUPS)}"
      )
    )
  if (
    flat_config["loss.beta"] > 0
    and flat_config["loss.kl_placement"] == "reward"
  ):
    errors.append(
      refuse(
        "with a KL penalty in the reward (loss.kl_placement = 'reward') groups "
        "of equal rewards teach something: use loss.kl_placement = 'ratio'"
      )
    )
  several = (
    len(flat_config["reward.functions"]) > 1 or flat_config["reward.model"]
  )
  acc = flat_config["filter_groups.metric"] == "acc"
  if acc and several and flat_config["filter_groups.rescale"]:
    remedy = (
      "groups of equal filter_groups.metric = 'acc' may still differ in other "
      "rewards, so that no factor gives the gradient of all back: use False, "
      "or metric = 'reward'"
    )
    errors.append(config_error("filter_groups.rescale", True, remedy))
  return errors
