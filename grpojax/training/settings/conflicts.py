"""Settings that cannot stand together: two tables, and checks that need code.

Each setting has been found in its own range before (`core.options`). A new
conflict is a value in `NEEDS`, where a setting must have one value beside
others, or else a row of `CONFLICTS`.
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


def needs_score_norms(s: TrainSettings) -> bool:
  """Returns True where the advantage takes lengths of scores."""
  return asks_for(ADVANTAGES[s.loss.advantage], "score_norms")


def _auto(s: TrainSettings) -> bool:
  return s.group_size == AUTO


def _kl_in_reward(s: TrainSettings) -> bool:
  return s.loss.beta > 0 and s.loss.kl_placement == "reward"


def _drawn_by_difficulty(s: TrainSettings) -> bool:
  return s.difficulty.priority != DIFFICULTY_OFF


def _whole_sequences(s: TrainSettings) -> bool:
  """True where each token's loss has the gradient of its whole completion."""
  return s.loss.surrogate == "gmpo" or (
    s.loss.surrogate in ("clipped", "sapo") and s.loss.ratio == "sequence_ratio"
  )


def _only_token_ids(s: TrainSettings) -> bool:
  """True where the rewards can be computed on token ids."""
  names, weights = s.reward.functions, tuple(s.reward.weights)
  on_ids = len(names) == 1 and names[0] in ON_DEVICE
  return on_ids and weights == (1.0,) and not s.reward.model


class Needs(NamedTuple):
  """Settings beside which some others must have one value.

  Attributes:
    when: True for these settings.
    why: Sentence that says so; formatted with the settings as `s`.
    values: Value that each other setting needs, by dotted name.
    otherwise: Another way out.
  """

  when: Callable[[TrainSettings], Any]
  why: str
  values: dict[str, Any]
  otherwise: str = ""


_SUM = next(name for name, norm in AGGREGATIONS.items() if norm is None)
_NO_AUTO = "a number for group_size"

NEEDS = (
  Needs(
    lambda s: s.optim.name == "adafactor",
    "is for optim.name = 'adamw'; the row and column statistics of 'adafactor' "
    "are small and stay float32",
    {"optim.moments_dtype": "float32"},
  ),
  Needs(
    lambda s: s.lora.rank,
    "adapters (lora.rank) are diagnosed as a whole",
    {"diagnostics.last_layers": 0},
  ),
  Needs(
    lambda s: not s.loss.beta,
    "there is no reference without a KL term",
    {"model.reference_every": 0},
    "loss.beta > 0",
  ),
  Needs(
    lambda s: not s.model.reference_every,
    "a fixed reference is not mixed",
    {"model.reference_mix": 1},
    "model.reference_every > 0",
  ),
  # Rewards.
  Needs(
    lambda s: s.reward.on_device,
    "reward.on_device is one program, which holds the reference all along, has "
    "one reward function, draws once and keeps rewards from the host",
    {
      "model.reference": "device",
      "reward.aggregation": _SUM,
      "filter_groups.enable": False,
      "difficulty.priority": DIFFICULTY_OFF,
    },
    "reward.on_device = False",
  ),
  Needs(
    lambda s: s.mesh.sampling_tensor != s.mesh.tensor and s.reward.on_device,
    "reward.on_device is one program on one mesh",
    {"mesh.sampling_tensor": 0},
  ),
  Needs(
    lambda s: s.reward.on_device or not s.reward.workers,
    "nothing computes rewards while the next part is sampled",
    {"sampling.parts": 1},
    "reward.workers of 1 or more (and reward.on_device = False)",
  ),
  Needs(
    lambda s: not _only_token_ids(s),
    f"needs one reward function ({', '.join(ON_DEVICE)}), reward.weights = "
    "(1.0,) and no reward.model: nothing else can be computed on token ids",
    {"reward.on_device": False},
  ),
  Needs(
    lambda s: s.group_size == 1,
    "a group of 1 has no spread",
    {"reward.aggregation": _SUM},
    "group_size of 2 or more",
  ),
  Needs(
    lambda s: s.loss.advantage == "beta_binomial",
    "gives rewards outside [0, 1], which advantage = 'beta_binomial' cannot "
    "read as successes",
    {"reward.aggregation": _SUM},
  ),
  Needs(
    needs_score_norms,
    "compares rewards without unit, and advantage = {s.loss.advantage!r} knows "
    "the scores' lengths by their sum",
    {"reward.aggregation": _SUM},
  ),
  Needs(
    _kl_in_reward,
    "gives rewards without unit, which a KL penalty in nats cannot be taken "
    "from",
    {"reward.aggregation": _SUM},
    "loss.kl_placement = 'ratio'",
  ),
  # Dynamic sampling, and prompts by their success rates.
  Needs(
    lambda s: s.loss.advantage not in ZERO_IN_EQUAL_GROUPS,
    "advantage = {s.loss.advantage!r} learns from groups of equal rewards too",
    {"filter_groups.enable": False},
    f"one of {', '.join(ZERO_IN_EQUAL_GROUPS)}",
  ),
  Needs(
    _kl_in_reward,
    "with a KL penalty in the reward (loss.kl_placement = 'reward') groups of "
    "equal rewards teach something",
    {"filter_groups.enable": False},
    "loss.kl_placement = 'ratio'",
  ),
  Needs(
    lambda s: (
      s.filter_groups.enable
      and s.filter_groups.metric == "acc"
      and (len(s.reward.functions) > 1 or s.reward.model)
    ),
    "groups of equal filter_groups.metric = 'acc' may still differ in other "
    "rewards, so that no factor gives the gradient of all back",
    {"filter_groups.rescale": False},
    "metric = 'reward'",
  ),
  Needs(
    _drawn_by_difficulty,
    "groups that do not vary are replaced by prompts of the stream, and with "
    "difficulty.priority there is none",
    {"filter_groups.enable": False},
    f"difficulty.priority = {DIFFICULTY_OFF!r}",
  ),
  Needs(
    lambda s: not _drawn_by_difficulty(s),
    "nothing is to be undone without difficulty.priority",
    {"difficulty.importance_weights": False},
  ),
  Needs(
    lambda s: s.diagnostics.every and _drawn_by_difficulty(s),
    "the diagnosis (and group_size = 'auto') is of a gradient without "
    "importance weights",
    {"difficulty.importance_weights": False},
    "diagnostics.every = 0",
  ),
  # The loss.
  Needs(
    _whole_sequences,
    "with loss.surrogate = {s.loss.surrogate!r} and loss.ratio = "
    "{s.loss.ratio!r} each token's loss has the gradient of its whole "
    "completion, so that none is left out",
    {"loss.top_entropy_quantile": 1},
    "another ratio or surrogate",
  ),
  Needs(
    lambda s: not s.optim.update.on_policy and s.loss.old_logprobs == "rollout",
    "with several updates a step and loss.old_logprobs = 'rollout' the ratios "
    "are to the sampler already, and there is nothing left to correct",
    {"loss.correction": "none"},
    "loss.old_logprobs = 'trainer'",
  ),
  # The best group size.
  Needs(
    _auto,
    "group_size = 'auto' follows the best size for the weighted sum",
    {"reward.aggregation": _SUM},
    _NO_AUTO,
  ),
  Needs(
    _auto,
    "group_size = 'auto' follows the error of the whole gradient, of all "
    "completions at full weight",
    {
      "loss.top_entropy_quantile": 1,
      "loss.advantage_clip": 0,
      "loss.truncated": "keep",
      "loss.correction": "none",
      "loss.off_policy_threshold": 0,
    },
    _NO_AUTO,
  ),
)


class Conflict(NamedTuple):
  """Row of the other table.

  Attributes:
    setting: Dotted name of the setting that has to change.
    when: A true value where the settings conflict.
    remedy: Sentence that says why, and what to do; formatted with the settings
      as `s`, and that value as `reason`.
  """

  setting: str
  when: Callable[[TrainSettings], Any]
  remedy: str


def _wrong_kl(s: TrainSettings) -> str:
  """The estimators to use where a KL term's placement does not take its own."""
  names = PLACEMENTS[s.loss.kl_placement]
  return " or ".join(names) if s.loss.beta and s.loss.kl not in names else ""


def _regex_error(text: str) -> str:
  try:
    re.compile(text)
  except re.error as error:
    return str(error)
  return ""


def _formats(template: str) -> bool:
  try:
    return "\0" in template.format(prompt="\0")
  except (AttributeError, IndexError, KeyError, ValueError):
    return False


def _finite(values: Any) -> bool:
  return all(isinstance(x, (int, float)) and math.isfinite(x) for x in values)


def _pair(value: Any, holds: Callable[[float, float], bool]) -> bool:
  return len(value) == 2 and _finite(value) and holds(*value)


CONFLICTS = (
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
    "is no regular expression ({reason})",
  ),
  Conflict(
    "data.template",
    lambda s: not _formats(s.data.template),
    "must hold {{prompt}} and no other field; write other braces doubled",
  ),
  Conflict(
    "loss.kl",
    lambda s: s.loss.kl != "k1" and _wrong_kl(s),
    "with loss.kl_placement = {s.loss.kl_placement!r} use {reason}",
  ),
  Conflict(
    "loss.kl",
    lambda s: s.loss.kl == "k1" and _wrong_kl(s),
    "with loss.kl_placement = 'loss' use {reason}; k1 = log(p / p_ref) as "
    "a loss term has the gradient E[grad log p] = 0 on-policy: it adds noise "
    "and pulls nowhere. k1 works with loss.kl_placement = 'reward' or 'ratio'",
  ),
  Conflict(
    "loss.entropy_coef",
    lambda s: (
      s.loss.entropy_target and s.loss.entropy_coef > s.loss.entropy_coef_max
    ),
    "starts above loss.entropy_coef_max = {s.loss.entropy_coef_max}: give no "
    "more",
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
      or not _finite(s.reward.weights)
    ),
    "must be finite numbers, one for each of reward.functions",
  ),
  Conflict(
    "reward.model_weight",
    lambda s: not _finite([s.reward.model_weight]),
    "must be finite",
  ),
  # The diagnoses, and what rests on them.
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
  Conflict(
    "difficulty.band",
    lambda s: not _pair(s.difficulty.band, lambda a, b: 0 <= a < b <= 1),
    "must be two numbers, 0 <= low < high <= 1",
  ),
  Conflict(
    "difficulty.target",
    lambda s: (
      not _pair(s.difficulty.target, lambda a, b: 0 < a < 1 and 0 < b < 1)
    ),
    "must be two numbers inside (0, 1)",
  ),
)


def _name(s: TrainSettings, flat: Mapping[str, Any]) -> list[str]:
  del flat
  return name_errors(s.name)


def _profile(s: TrainSettings, flat: Mapping[str, Any]) -> list[str]:
  del flat
  remedy = ""
  try:
    steps = profiling.parse(s.profile.steps)
    if steps and steps[-1] > s.steps:
      remedy = f"the last step is {s.steps} (steps): profile earlier ones"
  except ValueError as error:
    remedy = str(error)
  error = config_error("profile.steps", s.profile.steps, remedy)
  return [error] if remedy else []


CHECKS = (_name, _profile, mixtures.errors, hub_pins.errors, batches.errors)
"""Checks of several settings that are no row of the tables:
(settings, flat config) -> errors, a line each."""


def errors(s: TrainSettings, flat: Mapping[str, Any]) -> list[str]:
  """Returns a line for each conflict: setting, value, what to do.

  Args:
    s: Settings, each in its own range.
    flat: The same by dotted path, as in the config.
  """
  lines = []
  for needs in NEEDS:
    if needs.when(s):
      otherwise = f", or {needs.otherwise}" if needs.otherwise else ""
      for setting, value in needs.values.items():
        if flat[setting] != value:
          remedy = f"{needs.why.format(s=s)}: use {value}{otherwise}"
          lines.append(config_error(setting, flat[setting], remedy))
  for row in CONFLICTS:
    if reason := row.when(s):
      remedy = row.remedy.format(s=s, reason=reason)
      lines.append(config_error(row.setting, flat[row.setting], remedy))
  for check in CHECKS:
    lines += check(s, flat)
  return lines
