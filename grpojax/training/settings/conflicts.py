"""Settings that cannot stand together: a table, and checks that need code.

Each setting has been found in its own range before (`core.options`). A new
conflict is a row of `CONFLICTS`.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpojax.core.advantages import (
  ADVANTAGES,
  SCALED_LEAVE_ONE_OUT,
  ZERO_IN_EQUAL_GROUPS,
)
from grpojax.core.advantages.multi_reward import AGGREGATIONS
from grpojax.core.binding import asks_for
from grpojax.core.losses.kl import PLACEMENTS
from grpojax.rewards.exact_ids import ON_DEVICE
from grpojax.runtime.cli.config import config_error, name_errors
from grpojax.training.data import mixtures
from grpojax.training.report import profiling
from grpojax.training.run import hub_pins
from grpojax.training.settings import batches
from grpojax.training.settings.inputs import DIFFICULTY_OFF
from grpojax.training.settings.run import AUTO, TrainSettings


class Conflict(NamedTuple):
  """Row of the table.

  Attributes:
    setting: Dotted name of the setting that has to change.
    when: True where the settings conflict.
    remedy: Sentence that says why, and what to do; formatted with the settings
      as `s`, the KL `estimators` of their placement, and the `regex_error` of
      lora.targets.
  """

  setting: str
  when: Callable[[TrainSettings], Any]
  remedy: str


def needs_score_norms(s: TrainSettings) -> bool:
  """Returns True where the advantage takes lengths of scores."""
  return asks_for(ADVANTAGES[s.loss.advantage], "score_norms")


def _normalises(s: TrainSettings) -> bool:
  """True where rewards are normalised by function, and lose their unit."""
  return AGGREGATIONS[s.reward.aggregation] is not None


def _auto(s: TrainSettings) -> bool:
  return s.group_size == AUTO


def _kl_in_reward(s: TrainSettings) -> bool:
  return s.loss.beta > 0 and s.loss.kl_placement == "reward"


def _k1_in_loss(s: TrainSettings) -> bool:
  return (s.loss.kl, s.loss.kl_placement) == ("k1", "loss")


def _drawn_by_difficulty(s: TrainSettings) -> bool:
  return s.difficulty.priority != DIFFICULTY_OFF


def _whole_sequences(s: TrainSettings) -> bool:
  """True where each token's loss has the gradient of its whole completion."""
  return s.loss.surrogate == "gmpo" or (
    s.loss.surrogate in ("clipped", "sapo") and s.loss.ratio == "sequence_ratio"
  )


def _only_token_ids(s: TrainSettings) -> bool:
  """True where the rewards can be computed on token ids."""
  names = s.reward.functions
  return (
    len(names) == 1
    and names[0] in ON_DEVICE
    and tuple(s.reward.weights) == (1.0,)
    and not s.reward.model
  )


def _pair(value: Any, holds: Callable[[float, float], bool]) -> bool:
  numbers = [
    x for x in value if isinstance(x, (int, float)) and math.isfinite(x)
  ]
  return len(value) == len(numbers) == 2 and holds(*numbers)


_SUM = "use reward.aggregation = 'sum_then_normalize'"
_AUTO_WHOLE = (
  "group_size = 'auto' follows the best size for the whole gradient: use {}, "
  "or a number for group_size"
)
_AUTO_WEIGHTS = (
  "group_size = 'auto' follows the error of a gradient of all completions, at "
  "full weight: use {}, or a number for group_size"
)

CONFLICTS = (
  # Names, and what belongs to one kind of thing.
  Conflict(
    "model.path",
    lambda s: not s.model.path,
    "give a Hugging Face directory, ORG/NAME of the Hub, or the name of an "
    "embedded model",
  ),
  Conflict(
    "sampling.temperature",
    lambda s: s.sampling.distribution.temperature == 0,
    "must be more than 0 (greedy sampling has no policy gradient)",
  ),
  Conflict(
    "lora.targets",
    lambda s: _regex_error(s.lora.targets),
    "is no regular expression ({regex_error})",
  ),
  Conflict(
    "data.template",
    lambda s: not _formats(s.data.template),
    "must hold {{prompt}} and no other field; write other braces doubled",
  ),
  Conflict(
    "optim.moments_dtype",
    lambda s: (
      (s.optim.name, s.optim.moments_dtype) == ("adafactor", "bfloat16")
    ),
    "is for optim.name = 'adamw'; the row and column statistics of 'adafactor' "
    "are small and stay float32: use float32",
  ),
  Conflict(
    "diagnostics.last_layers",
    lambda s: s.lora.rank and s.diagnostics.last_layers,
    "adapters (lora.rank) are diagnosed as a whole: use 0",
  ),
  # KL terms and the reference.
  Conflict(
    "loss.kl",
    lambda s: (
      s.loss.beta
      and s.loss.kl not in PLACEMENTS[s.loss.kl_placement]
      and not _k1_in_loss(s)
    ),
    "with loss.kl_placement = {s.loss.kl_placement!r} use {estimators}",
  ),
  Conflict(
    "loss.kl",
    lambda s: s.loss.beta and _k1_in_loss(s),
    "with loss.kl_placement = 'loss' use {estimators}; k1 = log(p / p_ref) as "
    "a loss term has the gradient E[grad log p] = 0 on-policy: it adds noise "
    "and pulls nowhere. k1 works with loss.kl_placement = 'reward' or 'ratio'",
  ),
  Conflict(
    "model.reference",
    lambda s: s.model.reference != "device" and s.reward.on_device,
    "reward.on_device is one program, which holds it all along: use device",
  ),
  Conflict(
    "model.reference_every",
    lambda s: s.model.reference_every and not s.loss.beta,
    "there is no reference without a KL term: use 0, or loss.beta > 0",
  ),
  Conflict(
    "model.reference_mix",
    lambda s: s.model.reference_mix != 1 and not s.model.reference_every,
    "a fixed reference is not mixed: use 1, or model.reference_every > 0",
  ),
  # Rewards.
  Conflict(
    "reward.functions",
    lambda s: (
      not s.reward.functions
      or not all(name and isinstance(name, str) for name in s.reward.functions)
    ),
    "name at least one function; the first says what a right answer is",
  ),
  Conflict(
    "reward.functions",
    lambda s: (
      all(isinstance(name, str) for name in s.reward.functions)
      and len(set(s.reward.functions)) < len(s.reward.functions)
    ),
    "names must differ",
  ),
  Conflict(
    "reward.weights",
    lambda s: (
      len(s.reward.weights) != len(s.reward.functions)
      or not all(
        isinstance(w, (int, float)) and math.isfinite(w)
        for w in s.reward.weights
      )
    ),
    "must be finite numbers, one for each of reward.functions",
  ),
  Conflict(
    "reward.model_weight",
    lambda s: not math.isfinite(s.reward.model_weight),
    "must be finite",
  ),
  Conflict(
    "sampling.parts",
    lambda s: (
      s.sampling.parts > 1 and (s.reward.on_device or not s.reward.workers)
    ),
    "nothing computes rewards while the next part is sampled: use 1, or "
    "reward.workers of 1 or more (and reward.on_device = False)",
  ),
  Conflict(
    "reward.on_device",
    lambda s: s.reward.on_device and not _only_token_ids(s),
    f"needs one reward function ({', '.join(ON_DEVICE)}), reward.weights = "
    "(1.0,) and no reward.model: nothing else can be computed on token ids",
  ),
  Conflict(
    "reward.aggregation",
    lambda s: _normalises(s) and s.reward.on_device,
    f"reward.on_device has one function only: {_SUM}",
  ),
  Conflict(
    "reward.aggregation",
    lambda s: _normalises(s) and _auto(s),
    "group_size = 'auto' follows the best size for the weighted sum: "
    f"{_SUM}, or a number for group_size",
  ),
  Conflict(
    "reward.aggregation",
    lambda s: _normalises(s) and s.group_size == 1,
    "a group of 1 has no spread: use group_size of 2 or more",
  ),
  Conflict(
    "reward.aggregation",
    lambda s: _normalises(s) and s.loss.advantage == "beta_binomial",
    "gives rewards outside [0, 1], which advantage = 'beta_binomial' cannot "
    f"read as successes: {_SUM}",
  ),
  Conflict(
    "reward.aggregation",
    lambda s: _normalises(s) and needs_score_norms(s),
    "compares rewards without unit, and advantage = 'norm_ratio' knows the "
    f"scores' lengths by their sum: {_SUM}",
  ),
  Conflict(
    "reward.aggregation",
    lambda s: _normalises(s) and _kl_in_reward(s),
    "gives rewards without unit, which a KL penalty in nats cannot be taken "
    "from: use loss.kl_placement = 'ratio'",
  ),
  # Dynamic sampling.
  Conflict(
    "filter_groups.enable",
    lambda s: s.filter_groups.enable and s.reward.on_device,
    "reward.on_device is one program, which draws once: use reward.on_device = "
    "False",
  ),
  Conflict(
    "filter_groups.enable",
    lambda s: (
      s.filter_groups.enable and s.loss.advantage not in ZERO_IN_EQUAL_GROUPS
    ),
    "advantage = {s.loss.advantage!r} learns from groups of equal rewards too: "
    f"use one of {', '.join(ZERO_IN_EQUAL_GROUPS)}",
  ),
  Conflict(
    "filter_groups.enable",
    lambda s: s.filter_groups.enable and _kl_in_reward(s),
    "with a KL penalty in the reward (loss.kl_placement = 'reward') groups of "
    "equal rewards teach something: use loss.kl_placement = 'ratio'",
  ),
  Conflict(
    "filter_groups.rescale",
    lambda s: (
      s.filter_groups.enable
      and s.filter_groups.metric == "acc"
      and (len(s.reward.functions) > 1 or s.reward.model)
      and s.filter_groups.rescale
    ),
    "groups of equal filter_groups.metric = 'acc' may still differ in other "
    "rewards, so that no factor gives the gradient of all back: use False, or "
    "metric = 'reward'",
  ),
  # The loss.
  Conflict(
    "loss.entropy_coef",
    lambda s: (
      s.loss.entropy_target and s.loss.entropy_coef > s.loss.entropy_coef_max
    ),
    "starts above loss.entropy_coef_max = {s.loss.entropy_coef_max}: give no "
    "more",
  ),
  Conflict(
    "loss.top_entropy_quantile",
    lambda s: s.loss.top_entropy_quantile < 1 and _whole_sequences(s),
    "with loss.surrogate = {s.loss.surrogate!r} and loss.ratio = "
    "{s.loss.ratio!r} each token's loss has the gradient of its whole "
    "completion, so that none is left out: use 1, or another ratio or "
    "surrogate",
  ),
  Conflict(
    "loss.correction",
    lambda s: (
      s.loss.correction != "none"
      and not s.optim.update.on_policy
      and s.loss.old_logprobs == "rollout"
    ),
    "with several updates a step and loss.old_logprobs = 'rollout' the ratios "
    "are to the sampler already, and there is nothing left to correct: use "
    "loss.old_logprobs = 'trainer', or none",
  ),
  # The best group size, and the diagnoses that it rests on.
  Conflict(
    "loss.top_entropy_quantile",
    lambda s: _auto(s) and s.loss.top_entropy_quantile != 1,
    _AUTO_WHOLE.format(1),
  ),
  Conflict(
    "loss.advantage_clip",
    lambda s: _auto(s) and s.loss.advantage_clip,
    _AUTO_WHOLE.format(0),
  ),
  Conflict(
    "loss.truncated",
    lambda s: _auto(s) and s.loss.truncated != "keep",
    _AUTO_WEIGHTS.format("keep"),
  ),
  Conflict(
    "loss.correction",
    lambda s: _auto(s) and s.loss.correction != "none",
    _AUTO_WEIGHTS.format("none"),
  ),
  Conflict(
    "loss.off_policy_threshold",
    lambda s: _auto(s) and s.loss.off_policy_threshold,
    _AUTO_WEIGHTS.format(0),
  ),
  Conflict(
    "advantage",
    lambda s: _auto(s) and s.loss.advantage not in SCALED_LEAVE_ONE_OUT,
    "group_size = 'auto' follows the best size for "
    f"{' or '.join(SCALED_LEAVE_ONE_OUT)}, whose error the diagnostics "
    "estimate: use one of these, or a number for group_size",
  ),
  Conflict(
    "diagnostics.every",
    lambda s: _auto(s) and not s.diagnostics.every,
    "group_size = 'auto' rests on the diagnostics: give 1 or more",
  ),
  Conflict(
    "diagnostics.every",
    lambda s: needs_score_norms(s) and not s.diagnostics.every,
    "advantage = {s.loss.advantage!r} knows the scores' lengths from the "
    "diagnostics: give 1 or more",
  ),
  Conflict(
    "diagnostics.every",
    lambda s: (
      s.diagnostics.every
      and not _auto(s)
      and (s.group_size < 4 or s.batch_size < 3)
    ),
    "needs group_size of 4 or more and batch_size of 3 or more; 0 is off",
  ),
  # Prompts by their success rates.
  Conflict(
    "difficulty.band",
    lambda s: not _pair(s.difficulty.band, lambda a, b: 0 <= a < b <= 1),
    "must be two numbers, 0 <= low < high <= 1",
  ),
  Conflict(
    "difficulty.target",
    lambda s: (
      not _pair(
        s.difficulty.target, lambda a, b: 0 < min(a, b) <= max(a, b) < 1
      )
    ),
    "must be two numbers inside (0, 1)",
  ),
  Conflict(
    "difficulty.importance_weights",
    lambda s: s.difficulty.importance_weights and not _drawn_by_difficulty(s),
    "nothing is to be undone without difficulty.priority: use False",
  ),
  Conflict(
    "difficulty.priority",
    lambda s: _drawn_by_difficulty(s) and s.reward.on_device,
    "reward.on_device keeps rewards from the host, which counts them: use "
    f"{DIFFICULTY_OFF}",
  ),
  Conflict(
    "filter_groups.enable",
    lambda s: _drawn_by_difficulty(s) and s.filter_groups.enable,
    "groups that do not vary are replaced by prompts of the stream, and with "
    "difficulty.priority there is none: use False, or difficulty.priority = "
    f"{DIFFICULTY_OFF!r}",
  ),
  Conflict(
    "difficulty.importance_weights",
    lambda s: (
      _drawn_by_difficulty(s)
      and s.difficulty.importance_weights
      and s.diagnostics.every
    ),
    "the diagnosis (and group_size = 'auto') is of a gradient without "
    "importance weights: use diagnostics.every = 0, or no weights",
  ),
  # The mesh.
  Conflict(
    "mesh.sampling_tensor",
    lambda s: (
      s.reward.on_device and s.mesh.sampling_tensor not in (0, s.mesh.tensor)
    ),
    "reward.on_device is one program on one mesh: use 0",
  ),
)


def _formats(template: str) -> bool:
  try:
    return "\0" in template.format(prompt="\0")
  except (AttributeError, IndexError, KeyError, ValueError):
    return False


def _regex_error(text: str) -> str:
  try:
    re.compile(text)
  except re.error as error:
    return str(error)
  return ""


def _name(s: TrainSettings, flat: Mapping[str, Any]) -> list[str]:
  del flat
  return name_errors(s.name)


def _profile(s: TrainSettings, flat: Mapping[str, Any]) -> list[str]:
  try:
    steps = profiling.parse(s.profile.steps)
  except ValueError as error:
    return [config_error("profile.steps", s.profile.steps, str(error))]
  if steps and steps[-1] > s.steps:
    remedy = f"the last step is {s.steps} (steps): profile earlier ones"
    return [config_error("profile.steps", s.profile.steps, remedy)]
  return []


CHECKS = (_name, _profile, mixtures.errors, hub_pins.errors, batches.errors)
"""Checks of several settings that are no row of the table:
(settings, flat config) -> errors, a line each."""


def errors(s: TrainSettings, flat: Mapping[str, Any]) -> list[str]:
  """Returns a line for each conflict: setting, value, what to do.

  Args:
    s: Settings, each in its own range.
    flat: The same by dotted path, as in the config.
  """
  estimators = " or ".join(PLACEMENTS[s.loss.kl_placement])
  lines = [
    config_error(
      row.setting,
      flat[row.setting],
      row.remedy.format(
        s=s,
        estimators=estimators,
        regex_error=_regex_error(s.lora.targets),
      ),
    )
    for row in CONFLICTS
    if row.when(s)
  ]
  for check in CHECKS:
    lines += check(s, flat)
  return lines
