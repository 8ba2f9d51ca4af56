"""What makes a run's settings impossible, found before anything compiles."""

import functools
import math
import re
from typing import Any

from grpojax.core.kl import PLACEMENTS
from grpojax.core.multi_reward import AGGREGATIONS
from grpojax.rewards.exact_ids import ON_DEVICE
from grpojax.runtime import settings as settings_lib
from grpojax.runtime.config import config_error
from grpojax.training import (
  batch_sizes,
  corrections,
  difficulty,
  filter_groups,
  group_sizes,
  loss_settings,
  mixtures,
  profiling,
  reference,
  score_norms,
  sources,
)
from grpojax.training.group_sizes import AUTO
from grpojax.training.settings import SETTINGS

CHOICES = settings_lib.choices(SETTINGS)
"""The settings that name something, and the names that they may have."""


def _ranges(flat_config: dict[str, Any]) -> list[str]:
  """Values outside their range, or that their setting does not know."""
  known = dict(flat_config)
  if flat_config["advantage"] == "oracle":  # has an error of its own
    known["advantage"] = next(iter(CHOICES["advantage"]))
  errors = settings_lib.config_errors(SETTINGS, known)
  if 0 < flat_config["loss.dual_clip"] <= 1:
    remedy = "must be more than 1, or 0 for off"
    errors.append(
      config_error("loss.dual_clip", flat_config["loss.dual_clip"], remedy)
    )
  return errors


def _names(flat_config: dict[str, Any]) -> list[str]:
  errors = []
  if flat_config["advantage"] == "oracle":
    remedy = (
      "needs the true value of each prompt, which a training run does not "
      f"know; use one of {', '.join(CHOICES['advantage'])}"
    )
    errors.append(config_error("advantage", "oracle", remedy))
  if not re.fullmatch(r"[\w.-]+", flat_config["name"]):
    remedy = "names a directory: use letters, digits, '_', '-' and '.'"
    errors.append(config_error("name", flat_config["name"], remedy))
  if not flat_config["model.path"]:
    remedy = (
      "give a Hugging Face directory, ORG/NAME of the Hub, or the name of an "
      "embedded model"
    )
    errors.append(config_error("model.path", "", remedy))
  template = flat_config["data.template"]
  try:
    good = "\0" in template.format(prompt="\0")
  except (AttributeError, IndexError, KeyError, ValueError):
    good = False
  if not good:
    remedy = "must hold {prompt} and no other field; write other braces doubled"
    errors.append(config_error("data.template", template, remedy))
  return errors


def _rewards(flat_config: dict[str, Any]) -> list[str]:
  """Names alone; `rewards.functions` looks them up."""
  errors = []
  names, weights = (
    flat_config["reward.functions"],
    flat_config["reward.weights"],
  )
  if not names or not all(name and isinstance(name, str) for name in names):
    remedy = "name at least one function; the first says what a right answer is"
    errors.append(config_error("reward.functions", names, remedy))
  elif len(set(names)) < len(names):
    errors.append(config_error("reward.functions", names, "names must differ"))
  numbers = [w for w in weights if isinstance(w, (int, float))]
  if len(weights) != len(names) or not (
    len(numbers) == len(weights) and all(map(math.isfinite, numbers))
  ):
    remedy = f"must be {len(names)} numbers, one for each of reward.functions"
    errors.append(config_error("reward.weights", weights, remedy))
  parts = flat_config["sampling.parts"]
  if parts > 1 and (
    flat_config["reward.on_device"] or not flat_config["reward.workers"]
  ):
    remedy = (
      "nothing computes rewards while the next part is sampled: use 1, or "
      "reward.workers of 1 or more (and reward.on_device = False)"
    )
    errors.append(config_error("sampling.parts", parts, remedy))
  if not math.isfinite(flat_config["reward.model_weight"]):
    value = flat_config["reward.model_weight"]
    errors.append(config_error("reward.model_weight", value, "must be finite"))
  if flat_config["reward.on_device"]:
    alone = len(names) == 1 and names[0] in ON_DEVICE
    if not alone or tuple(weights) != (1.0,) or flat_config["reward.model"]:
      remedy = (
        f"needs one reward function ({', '.join(ON_DEVICE)}), reward.weights = "
        "(1.0,) and no reward.model: nothing else can be computed on token ids"
      )
      errors.append(config_error("reward.on_device", True, remedy))
  return errors


def _aggregation(flat_config: dict[str, Any]) -> list[str]:
  """What cannot be done to rewards that are normalised by functions."""
  value = flat_config["reward.aggregation"]
  if AGGREGATIONS.get(value) is None:
    return []
  say, errors = functools.partial(config_error, "reward.aggregation", value), []
  plain = "use reward.aggregation = 'sum_then_normalize'"
  if flat_config["reward.on_device"]:
    errors.append(say(f"reward.on_device has one function only: {plain}"))
  if flat_config["group_size"] == AUTO:
    remedy = "group_size = 'auto' follows the best size for the weighted sum"
    errors.append(say(f"{remedy}: {plain}, or a number for group_size"))
  elif flat_config["group_size"] == 1:
    errors.append(
      say("a group of 1 has no spread: use group_size of 2 or more")
    )
  if flat_config["advantage"] == "beta_binomial":
    remedy = "gives rewards outside [0, 1], which advantage = 'beta_binomial'"
    errors.append(say(f"{remedy} cannot read as successes: {plain}"))
  if score_norms.wanted(flat_config["advantage"]):
    remedy = "compares rewards without unit, and advantage = 'norm_ratio' knows"
    errors.append(say(f"{remedy} the scores' lengths by their sum: {plain}"))
  if (
    flat_config["loss.beta"] > 0
    and flat_config["loss.kl_placement"] == "reward"
  ):
    remedy = "gives rewards without unit, which a KL penalty in nats cannot be"
    errors.append(say(f"{remedy} taken from: use loss.kl_placement = 'ratio'"))
  return errors


def _lora(flat_config: dict[str, Any]) -> list[str]:
  errors, targets = [], flat_config["lora.targets"]
  try:
    re.compile(targets)
  except re.error as error:
    remedy = f"is no regular expression ({error})"
    errors.append(config_error("lora.targets", targets, remedy))
  if flat_config["lora.rank"] and flat_config["diagnostics.last_layers"]:
    remedy = "adapters (lora.rank) are diagnosed as a whole: use 0"
    value = flat_config["diagnostics.last_layers"]
    errors.append(config_error("diagnostics.last_layers", value, remedy))
  return errors


def _kl(flat_config: dict[str, Any]) -> list[str]:
  """KL estimators where they have a useful gradient (nothing if beta = 0)."""
  kl, placement = flat_config["loss.kl"], flat_config["loss.kl_placement"]
  known = kl in CHOICES["loss.kl"] and placement in PLACEMENTS
  if flat_config["loss.beta"] == 0 or not known or kl in PLACEMENTS[placement]:
    return []
  useful = " or ".join(PLACEMENTS[placement])
  remedy = f"with loss.kl_placement = {placement!r} use {useful}"
  if (kl, placement) == ("k1", "loss"):
    remedy += (
      "; k1 = log(p / p_ref) as a loss term has the gradient E[grad log p] = 0 "
      "on-policy: it adds noise and pulls nowhere. k1 works with "
      "loss.kl_placement = 'reward' or 'ratio'"
    )
  return [config_error("loss.kl", kl, remedy)]


def _moments(flat_config: dict[str, Any]) -> list[str]:
  name, dtype = flat_config["optim.name"], flat_config["optim.moments_dtype"]
  if (name, dtype) != ("adafactor", "bfloat16"):
    return []
  remedy = (
    "is for optim.name = 'adamw'; the row and column statistics of "
    "'adafactor' are small and stay float32: use float32"
  )
  return [config_error("optim.moments_dtype", dtype, remedy)]


def config_errors(flat_config: dict[str, Any]) -> list[str]:
  """All that is wrong with the values, a line each: field, value, what to do.

  Args:
    flat_config: all settings by dotted path, of the default's types.
  """
  errors = _ranges(flat_config) + _names(flat_config) + _kl(flat_config)
  errors += _rewards(flat_config) + _lora(flat_config) + _moments(flat_config)
  errors += _aggregation(flat_config) + filter_groups.config_errors(flat_config)
  errors += loss_settings.config_errors(flat_config) + reference.config_errors(
    flat_config
  )
  errors += corrections.config_errors(flat_config) + score_norms.config_errors(
    flat_config
  )
  errors += mixtures.config_errors(flat_config) + difficulty.config_errors(
    flat_config
  )
  errors += sources.config_errors(flat_config) + profiling.config_errors(
    flat_config
  )
  return (
    errors
    + batch_sizes.config_errors(flat_config)
    + group_sizes.config_errors(flat_config)
  )
