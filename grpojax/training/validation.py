"""What makes a run's settings impossible, found before anything compiles."""

import functools
import math
import re
from typing import Any

from grpojax.core.kl import PLACEMENTS
from grpojax.core.multi_reward import AGGREGATIONS
from grpojax.rewards.exact_ids import ON_DEVICE
from grpojax.runtime import settings as settings_lib
from grpojax.runtime.config import problem
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


def _ranges(leaves: dict[str, Any]) -> list[str]:
  """Values outside their range, or that their setting does not know."""
  known = dict(leaves)
  if leaves["advantage"] == "oracle":  # has an error of its own
    known["advantage"] = next(iter(CHOICES["advantage"]))
  wrong = settings_lib.problems(SETTINGS, known)
  if 0 < leaves["loss.dual_clip"] <= 1:
    todo = "must be more than 1, or 0 for off"
    wrong.append(problem("loss.dual_clip", leaves["loss.dual_clip"], todo))
  return wrong


def _names(leaves: dict[str, Any]) -> list[str]:
  wrong = []
  if leaves["advantage"] == "oracle":
    todo = (
      "needs the true value of each prompt, which a training run does not "
      f"know; use one of {', '.join(CHOICES['advantage'])}"
    )
    wrong.append(problem("advantage", "oracle", todo))
  if not re.fullmatch(r"[\w.-]+", leaves["name"]):
    todo = "names a directory: use letters, digits, '_', '-' and '.'"
    wrong.append(problem("name", leaves["name"], todo))
  if not leaves["model.path"]:
    todo = (
      "give a Hugging Face directory, ORG/NAME of the Hub, or the name of an "
      "embedded model"
    )
    wrong.append(problem("model.path", "", todo))
  template = leaves["data.template"]
  try:
    good = "\0" in template.format(prompt="\0")
  except (AttributeError, IndexError, KeyError, ValueError):
    good = False
  if not good:
    todo = "must hold {prompt} and no other field; write other braces doubled"
    wrong.append(problem("data.template", template, todo))
  return wrong


def _rewards(leaves: dict[str, Any]) -> list[str]:
  """Names alone; `rewards.functions` looks them up."""
  wrong = []
  names, weights = leaves["reward.functions"], leaves["reward.weights"]
  if not names or not all(name and isinstance(name, str) for name in names):
    todo = "name at least one function; the first says what a right answer is"
    wrong.append(problem("reward.functions", names, todo))
  elif len(set(names)) < len(names):
    wrong.append(problem("reward.functions", names, "names must differ"))
  numbers = [w for w in weights if isinstance(w, (int, float))]
  if len(weights) != len(names) or not (
    len(numbers) == len(weights) and all(map(math.isfinite, numbers))
  ):
    todo = f"must be {len(names)} numbers, one for each of reward.functions"
    wrong.append(problem("reward.weights", weights, todo))
  parts = leaves["sampling.parts"]
  if parts > 1 and (leaves["reward.on_device"] or not leaves["reward.workers"]):
    todo = (
      "nothing computes rewards while the next part is sampled: use 1, or "
      "reward.workers of 1 or more (and reward.on_device = False)"
    )
    wrong.append(problem("sampling.parts", parts, todo))
  if not math.isfinite(leaves["reward.model_weight"]):
    value = leaves["reward.model_weight"]
    wrong.append(problem("reward.model_weight", value, "must be finite"))
  if leaves["reward.on_device"]:
    alone = len(names) == 1 and names[0] in ON_DEVICE
    if not alone or tuple(weights) != (1.0,) or leaves["reward.model"]:
      todo = (
        f"needs one reward function ({', '.join(ON_DEVICE)}), reward.weights = "
        "(1.0,) and no reward.model: nothing else can be computed on token ids"
      )
      wrong.append(problem("reward.on_device", True, todo))
  return wrong


def _aggregation(leaves: dict[str, Any]) -> list[str]:
  """What cannot be done to rewards that are normalised by functions."""
  value = leaves["reward.aggregation"]
  if AGGREGATIONS.get(value) is None:
    return []
  say, wrong = functools.partial(problem, "reward.aggregation", value), []
  plain = "use reward.aggregation = 'sum_then_normalize'"
  if leaves["reward.on_device"]:
    wrong.append(say(f"reward.on_device has one function only: {plain}"))
  if leaves["group_size"] == AUTO:
    todo = "group_size = 'auto' follows the best size for the weighted sum"
    wrong.append(say(f"{todo}: {plain}, or a number for group_size"))
  elif leaves["group_size"] == 1:
    wrong.append(say("a group of 1 has no spread: use group_size of 2 or more"))
  if leaves["advantage"] == "beta_binomial":
    todo = "gives rewards outside [0, 1], which advantage = 'beta_binomial'"
    wrong.append(say(f"{todo} cannot read as successes: {plain}"))
  if score_norms.wanted(leaves["advantage"]):
    todo = "compares rewards without unit, and advantage = 'norm_ratio' knows"
    wrong.append(say(f"{todo} the scores' lengths by their sum: {plain}"))
  if leaves["loss.beta"] > 0 and leaves["loss.kl_placement"] == "reward":
    todo = "gives rewards without unit, which a KL penalty in nats cannot be"
    wrong.append(say(f"{todo} taken from: use loss.kl_placement = 'ratio'"))
  return wrong


def _lora(leaves: dict[str, Any]) -> list[str]:
  wrong, targets = [], leaves["lora.targets"]
  try:
    re.compile(targets)
  except re.error as error:
    todo = f"is no regular expression ({error})"
    wrong.append(problem("lora.targets", targets, todo))
  if leaves["lora.rank"] and leaves["diagnostics.last_layers"]:
    todo = "adapters (lora.rank) are diagnosed as a whole: use 0"
    value = leaves["diagnostics.last_layers"]
    wrong.append(problem("diagnostics.last_layers", value, todo))
  return wrong


def _kl(leaves: dict[str, Any]) -> list[str]:
  """KL estimators where they have a useful gradient (nothing if beta = 0)."""
  kl, placement = leaves["loss.kl"], leaves["loss.kl_placement"]
  known = kl in CHOICES["loss.kl"] and placement in PLACEMENTS
  if leaves["loss.beta"] == 0 or not known or kl in PLACEMENTS[placement]:
    return []
  useful = " or ".join(PLACEMENTS[placement])
  todo = f"with loss.kl_placement = {placement!r} use {useful}"
  if (kl, placement) == ("k1", "loss"):
    todo += (
      "; k1 = log(p / p_ref) as a loss term has the gradient E[grad log p] = 0 "
      "on-policy: it adds noise and pulls nowhere. k1 works with "
      "loss.kl_placement = 'reward' or 'ratio'"
    )
  return [problem("loss.kl", kl, todo)]


def _moments(leaves: dict[str, Any]) -> list[str]:
  name, dtype = leaves["optim.name"], leaves["optim.moments_dtype"]
  if (name, dtype) != ("adafactor", "bfloat16"):
    return []
  todo = (
    "is for optim.name = 'adamw'; the row and column statistics of "
    "'adafactor' are small and stay float32: use float32"
  )
  return [problem("optim.moments_dtype", dtype, todo)]


def problems(leaves: dict[str, Any]) -> list[str]:
  """All that is wrong with the values, a line each: field, value, what to do.

  Args:
    leaves: all settings by dotted path, of the default's types.
  """
  wrong = _ranges(leaves) + _names(leaves) + _kl(leaves)
  wrong += _rewards(leaves) + _lora(leaves) + _moments(leaves)
  wrong += _aggregation(leaves) + filter_groups.problems(leaves)
  wrong += loss_settings.problems(leaves) + reference.problems(leaves)
  wrong += corrections.problems(leaves) + score_norms.problems(leaves)
  wrong += mixtures.problems(leaves) + difficulty.problems(leaves)
  wrong += sources.problems(leaves) + profiling.problems(leaves)
  return wrong + batch_sizes.problems(leaves) + group_sizes.problems(leaves)
