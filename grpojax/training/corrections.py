"""What a loss leaves out or makes up for: settings to functions.

A sampler that is not the policy, and completions that were cut off.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core import rollout_correction
from grpojax.core.truncation import TRUNCATED
from grpojax.core.types import Rollout
from grpojax.runtime.config import config_error
from grpojax.training.group_sizes import AUTO


def correction(config: ConfigDict) -> rollout_correction.Correct | None:
  """What `make_update` corrects its losses by; None where all is off."""
  given = config.loss
  return rollout_correction.make_correction(
    given.correction,
    given.correction_low,
    given.correction_high or math.inf,
    given.off_policy_threshold or None,
  )


def compared(
  config: ConfigDict, samples: Rollout, rewards: Float[np.ndarray, "B G"]
) -> Bool[np.ndarray, "B G"]:
  """The completions that are in their group's baseline.

  Args:
    config: the run's.
    samples: of a step.
    rewards: one a completion; not finite where there is none.
  """
  rewarded = np.isfinite(rewards)
  if config.loss.truncated == "drop":
    rewarded &= mesh_lib.fetch(samples.finished)
  return rewarded


def compared_rewards(
  config: ConfigDict,
  aggregate: Callable[..., Array] | None,
  samples: Rollout,
  rewards: Float[Array, "B G"],
  values: Float[Array, "K B G"] | None,
) -> Float[Array, "B G"]:
  """What the completions of a group are compared by; nan where by nothing.

  Args:
    config: the run's.
    aggregate: see `from_config.aggregation`.
    samples: of a step.
    rewards: one a completion.
    values: of each reward function, where these are aggregated.
  """
  given = values if aggregate else rewards
  # What is dropped has no part in the normalisation, either.
  given, _ = TRUNCATED[config.loss.truncated](given, samples.finished)
  return aggregate(given) if aggregate else given


def read_by_training(
  config: ConfigDict, samples: Rollout, rewards: Float[np.ndarray, "B G"]
) -> Bool[np.ndarray, "B G"]:
  """The completions whose log-probabilities anybody asks for.

  Args:
    config: the run's.
    samples: of a step.
    rewards: one a completion; not finite where there is none.
  """
  read = compared(config, samples, rewards)
  # A masked one is still in the baseline, with its KL penalty if there is one.
  penalised = config.loss.beta > 0 and config.loss.kl_placement == "reward"
  if config.loss.truncated == "mask" and not penalised:
    read &= mesh_lib.fetch(samples.finished)
  return read


def config_errors(flat_config: dict[str, Any]) -> list[str]:
  """What is wrong with these settings, a line each.

  Args:
    flat_config: all settings by dotted path, each in its own range.
  """
  errors, name = [], flat_config["loss.correction"]
  high = flat_config["loss.correction_high"]
  if 0 < high < 1:
    remedy = "must be 1 or more: a weight is 1 where nothing differs; 0 is off"
    errors.append(config_error("loss.correction_high", high, remedy))
  updates = flat_config["optim.epochs"] * flat_config["optim.minibatches"]
  old = flat_config["loss.old_logprobs"]
  if name != "none" and updates > 1 and old == "rollout":
    remedy = (
      f"with {updates} updates a step and loss.old_logprobs = 'sampler' the "
      "ratios are to the sampler already, and there is nothing left to "
      "correct: use loss.old_logprobs = 'trainer', or none"
    )
    errors.append(config_error("loss.correction", name, remedy))
  return errors + _auto(flat_config)


def _auto(flat_config: dict[str, Any]) -> list[str]:
  """What the best group size is not known for.

  The diagnosis takes all completions of a group, and all of their scores, at
  their full weight (`training.diagnosis`).
  """
  off = {
    "loss.truncated": "keep",
    "loss.correction": "none",
    "loss.off_policy_threshold": 0,
  }
  remedy = (
    "group_size = 'auto' follows the error of a gradient of all completions, "
    "at full weight: use {}, or a number for group_size"
  )
  return [
    config_error(field, flat_config[field], remedy.format(value))
    for field, value in off.items()
    if flat_config["group_size"] == AUTO and flat_config[field] != value
  ]
