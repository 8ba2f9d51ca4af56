"""Settings that cannot stand together.

Each setting has been found in its own range before (`core.options`). A new
conflict is one more `yield` in a function of `CONFLICTS`.
"""

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.core.advantages import (
  ADVANTAGES,
  SCALED_LEAVE_ONE_OUT,
  WITHIN_GROUPS,
)
from grpojax.core.advantages.multi_reward import AGGREGATIONS
from grpojax.core.binding import bind
from grpojax.core.losses.kl import PLACEMENTS
from grpojax.core.packing import micro_batches
from grpojax.core.turns import check_credit
from grpojax.core.update import off_policy_conflicts
from grpojax.rewards.exact_ids import ON_DEVICE
from grpojax.rewards.functions import workers_for
from grpojax.runtime.cli.config import config_error, name_errors
from grpojax.runtime.text import tokenizer
from grpojax.training.data import mixtures
from grpojax.training.report import profiling
from grpojax.training.run import hub_pins
from grpojax.training.settings import batches
from grpojax.training.settings.inputs import DIFFICULTY_OFF
from grpojax.training.settings.run import AUTO, TrainSettings

_TRIED = 256  # prompts, and samples of each, that an advantage is tried on


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


def _finite(values: Any) -> bool:
  largest = sys.float_info.max  # an integer may be too large for a float
  return all(isinstance(x, int | float) and abs(x) <= largest for x in values)


def _pair(value: Any, holds: Callable[[float, float], bool]) -> bool:
  return len(value) == 2 and _finite(value) and holds(*value)


Rows = Iterator[tuple[str, str]]
"""Setting that has to change, and why, with what to do."""


def _model(s: TrainSettings) -> Rows:
  if not s.model.path:
    yield (
      "model.path",
      "give a Hugging Face directory, ORG/NAME of the Hub, or the name of an "
      "embedded model",
    )
  if s.sampling.distribution.temperature < 0.01:
    remedy = "must be 0.01 or more (greedy sampling has no policy gradient)"
    yield "sampling.temperature", remedy
  try:
    re.compile(s.lora.targets)
  except re.error as error:
    yield "lora.targets", f"is no regular expression ({error})"
  if not tokenizer.is_template(s.data.template):
    yield "data.template", tokenizer.TEMPLATE
  stop = s.sampling.stop
  if not all(isinstance(x, str) and x for x in stop):
    yield "sampling.stop", "must be texts, none of them empty"
  texts = {
    "sampling.stop": "".join(map(str, stop)),
    "data.template": s.data.template,
    "data.system_prompt": s.data.system_prompt,
    "environment.template": s.environment.template,
    "model.reference_prompt": s.model.reference_prompt,
  }
  for name, text in texts.items():
    if re.search("[\ud800-\udfff]", text):  # of bytes on the command line
      yield (
        name,
        "is no UTF-8 text, which the tokenizer reads: write it as such",
      )
  if (s.optim.name, s.optim.moments_dtype) == ("adafactor", "bfloat16"):
    yield (
      "optim.moments_dtype",
      "is for optim.name = 'adamw'; the row and column statistics of "
      "'adafactor' are small and stay float32: use float32",
    )


def _reference_prompt(s: TrainSettings) -> Rows:
  name, names = (
    "model.reference_prompt",
    tokenizer.fields(s.model.reference_prompt),
  )
  if names is None or "prompt" not in names:
    yield name, "must hold {prompt}; write braces that are no field doubled"
  if not s.loss.beta:
    yield (
      name,
      "is read for the KL term alone: give loss.beta > 0, or no prompt",
    )
  if s.reward.on_device:
    yield (
      name,
      "reward.on_device is one program, which reads no texts: use False",
    )


def _loss(s: TrainSettings) -> Rows:
  loss, estimators = s.loss, PLACEMENTS[s.loss.kl_placement]
  if loss.beta and loss.kl not in estimators:
    remedy = (
      f"with loss.kl_placement = {loss.kl_placement!r} use "
      f"{' or '.join(estimators)}"
    )
    if loss.kl == "k1":
      remedy += (
        "; k1 = log(p / p_ref) as a loss term has the gradient E[grad log p] = "
        "0 on-policy: it adds noise and pulls nowhere. k1 works with "
        "loss.kl_placement = 'reward' or 'ratio'"
      )
    yield "loss.kl", remedy
  if s.model.teacher and not loss.beta:
    remedy = (
      "is heard in the KL term alone: give loss.beta > 0, or leave it out"
    )
    yield "model.teacher", remedy
  if s.model.reference_prompt:
    yield from _reference_prompt(s)
  if s.model.teacher and s.model.reference_every:
    remedy = "a teacher does not follow the policy: use 0, or no model.teacher"
    yield "model.reference_every", remedy
  if loss.has_exact_kl and s.model.reference != "device":
    yield (
      "model.reference",
      "loss.kl = 'exact' reads the reference in the update too: use device",
    )
  if s.model.reference_every and not loss.beta:
    remedy = "there is no reference without a KL term: use 0, or loss.beta > 0"
    yield "model.reference_every", remedy
  if s.model.reference_mix != 1 and not s.model.reference_every:
    remedy = (
      "a fixed reference is not mixed: use 1, or model.reference_every > 0"
    )
    yield "model.reference_mix", remedy
  if loss.entropy_target and loss.entropy_coef > loss.entropy_coef_max:
    most = f"loss.entropy_coef_max = {loss.entropy_coef_max}"
    yield "loss.entropy_coef", f"starts above {most}: give no more"
  if loss.top_entropy_quantile < 1 and _whole_sequences(s):
    yield (
      "loss.top_entropy_quantile",
      f"with loss.surrogate = {loss.surrogate!r} and loss.ratio = "
      f"{loss.ratio!r} each token's loss has the gradient of its whole "
      "completion, so that none is left out: use 1, or another ratio or "
      "surrogate",
    )
  on_policy = s.optim.update.on_policy or loss.old_logprobs != "rollout"
  if loss.correction != "none" and not on_policy:
    yield (
      "loss.correction",
      "with several updates a step and loss.old_logprobs = 'rollout' the "
      "ratios are to the sampler already, and there is nothing left to "
      "correct: use loss.old_logprobs = 'trainer', or none",
    )
  off_policy = off_policy_conflicts(
    loss, s.optim.update, s.sampling.distribution, s.sampling.ahead
  )
  for name, remedy in off_policy.items():
    yield name if name == "advantage" else f"loss.{name}", remedy


def _rewards(s: TrainSettings) -> Rows:
  reward, names = s.reward, s.reward.functions
  texts = all(isinstance(name, str) for name in names)
  if not (names and texts and all(names)):
    remedy = "name at least one function; the first says what a right answer is"
    yield "reward.functions", remedy
  if texts and len(set(names)) < len(names):
    yield "reward.functions", "names must differ"
  if len(reward.weights) != len(names) or not _finite(reward.weights):
    remedy = "must be finite numbers, one for each of reward.functions"
    yield "reward.weights", remedy
  if not _finite([reward.model_weight]):
    yield "reward.model_weight", "must be finite"
  workers = workers_for(names, reward.workers)
  idle = not (workers or s.environment.workers)
  if s.sampling.parts > 1 and (reward.on_device or idle):
    yield (
      "sampling.parts",
      "nothing computes rewards while the next part is sampled: use 1, or "
      "reward.workers of 1 or more (and reward.on_device = False)",
    )
  if reward.on_device and not _only_token_ids(s):
    yield (
      "reward.on_device",
      f"needs one reward function ({', '.join(ON_DEVICE)}), reward.weights = "
      "(1.0,) and no reward.model: nothing else can be computed on token ids",
    )
  if reward.on_device and s.sampling.stop:
    remedy = "rewards on ids (reward.on_device) cannot cut it off: use False"
    yield "sampling.stop", f"{remedy} there, or ()"
  if reward.on_device and s.model.reference != "device":
    remedy = "reward.on_device is one program, which holds it all along"
    yield "model.reference", f"{remedy}: use device"
  if reward.on_device and s.mesh.sampling_tensor not in (0, s.mesh.tensor):
    remedy = "reward.on_device is one program on one mesh: use 0"
    yield "mesh.sampling_tensor", remedy


def _ahead(s: TrainSettings) -> Rows:
  """Conflicts of a rollout that is drawn before the last update."""
  setting, count = "mesh.sampling_devices", s.mesh.sampling_devices
  if count and s.environment.on:
    yield setting, "not with an environment (environment.path): use 0"
  if not s.sampling.ahead:
    if count:
      remedy = "they would wait for each other: use 0, or sampling.ahead = 1"
      yield setting, remedy
    return
  refused = {
    "reward.on_device": (s.reward.on_device, "is one program: use False"),
    "filter_groups.enable": (
      s.filter_groups.enable,
      "draws more once rewards are there: use False",
    ),
    "difficulty.priority": (
      _drawn_by_difficulty(s),
      f"draws by the rewards of the last step: use {DIFFICULTY_OFF}",
    ),
    "group_size": (_auto(s), "changes after an update: give a number"),
  }
  for setting, (wrong, remedy) in refused.items():
    if wrong:
      yield setting, f"{remedy}, or sampling.ahead = 0"


def _environment(s: TrainSettings) -> Rows:
  own, reward = s.environment, s.reward
  if not own.on:
    if "environment" in reward.functions:
      yield (
        "reward.functions",
        "'environment' is the reward of environment.path: name one there",
      )
    if own.credit != "trajectory":
      yield "environment.credit", "there are no turns: use 'trajectory'"
    return
  refused = {
    "reward.on_device": reward.on_device,
    "mesh.sampling_tensor": s.mesh.sampling_tensor not in (0, s.mesh.tensor),
  }
  for setting, wrong in refused.items():
    if wrong:
      yield setting, "not with an environment (environment.path): leave it out"
  if own.failed != "drop" and reward.model:
    yield "environment.failed", "not with reward.model, which adds to it: drop"
  if own.credit == "trajectory":
    return
  try:
    check_credit(own.credit, s.loss, True)
  except ValueError as error:
    yield "environment.credit", f"{error}".partition(": ")[2]
  if "environment" not in reward.functions:
    yield (
      "environment.credit",
      "the turns' rewards are those of reward.functions = 'environment': add "
      "it, or use 'trajectory'",
    )
  if AGGREGATIONS[reward.aggregation] is not None:
    yield "reward.aggregation", "compares whole trajectories: use the sum"
  if s.diagnostics.every:
    yield (
      "diagnostics.every",
      "the diagnosis is of whole trajectories: use 0, or environment.credit = "
      "'trajectory'",
    )


def _aggregation(s: TrainSettings) -> Rows:
  """Rewards that are normalised by function lose their unit."""
  setting = "reward.aggregation"
  use = f"use {setting} = 'sum_then_normalize'"
  if AGGREGATIONS[s.reward.aggregation] is None:
    return
  if s.reward.on_device:
    yield setting, f"reward.on_device has one function only: {use}"
  if _auto(s):
    remedy = "group_size = 'auto' follows the best size for the weighted sum"
    yield setting, f"{remedy}: {use}, or a number for group_size"
  if s.group_size == 1:
    yield setting, "a group of 1 has no spread: use group_size of 2 or more"
  if s.loss.advantage == "beta_binomial":
    yield (
      setting,
      "gives rewards outside [0, 1], which advantage = 'beta_binomial' cannot "
      f"read as successes: {use}",
    )
  if _kl_in_reward(s):
    yield (
      setting,
      "gives rewards without unit, which a KL penalty in nats cannot be taken "
      "from: use loss.kl_placement = 'ratio'",
    )


def _filter_groups(s: TrainSettings) -> Rows:
  setting, options = "filter_groups.enable", s.filter_groups
  if not options.enable:
    return
  if s.reward.on_device:
    remedy = "reward.on_device is one program, which draws once: use "
    yield setting, f"{remedy}reward.on_device = False"
  if s.loss.advantage not in WITHIN_GROUPS:
    yield (
      setting,
      f"advantage = {s.loss.advantage!r} learns from groups of equal rewards "
      f"too: use one of {', '.join(WITHIN_GROUPS)}",
    )
  if _kl_in_reward(s):
    yield (
      setting,
      "with a KL penalty in the reward (loss.kl_placement = 'reward') groups "
      "of equal rewards teach something: use loss.kl_placement = 'ratio'",
    )
  if _drawn_by_difficulty(s):
    yield (
      setting,
      "groups that do not vary are replaced by prompts of the stream, and with "
      "difficulty.priority there is none: use False, or difficulty.priority = "
      f"{DIFFICULTY_OFF!r}",
    )
  several = len(s.reward.functions) > 1 or s.reward.model
  if options.rescale and options.metric == "acc" and several:
    yield (
      "filter_groups.rescale",
      "groups of equal filter_groups.metric = 'acc' may still differ in other "
      "rewards, so that no factor gives the gradient of all back: use False, "
      "or metric = 'reward'",
    )


def _difficulty(s: TrainSettings) -> Rows:
  options, drawn = s.difficulty, _drawn_by_difficulty(s)
  if not _pair(options.band, lambda a, b: 0 <= a < b <= 1):
    yield "difficulty.band", "must be two numbers, 0 <= low < high <= 1"
  if not _pair(options.target, lambda a, b: 0 < a < 1 and 0 < b < 1):
    yield "difficulty.target", "must be two numbers inside (0, 1)"
  if options.importance_weights and not drawn:
    remedy = "nothing is to be undone without difficulty.priority: use False"
    yield "difficulty.importance_weights", remedy
  if drawn and options.importance_weights and s.diagnostics.every:
    yield (
      "difficulty.importance_weights",
      "the diagnosis (and group_size = 'auto') is of a gradient without "
      "importance weights: use diagnostics.every = 0, or no weights",
    )
  if drawn and s.reward.on_device:
    remedy = "reward.on_device keeps rewards from the host, which counts them"
    yield "difficulty.priority", f"{remedy}: use {DIFFICULTY_OFF}"


def _group_size(s: TrainSettings) -> Rows:
  """The best group size, and the diagnoses that it rests on."""
  every, loss = s.diagnostics.every, s.loss
  if s.lora.rank and s.diagnostics.last_layers:
    remedy = "adapters (lora.rank) are diagnosed as a whole: use 0"
    yield "diagnostics.last_layers", remedy
  if not _auto(s):
    if every and (s.group_size < 4 or s.batch_size < 3):
      remedy = "needs group_size of 4 or more and batch_size of 3 or more"
      yield "diagnostics.every", f"{remedy}; 0 is off"
    return
  if not every:
    remedy = "group_size = 'auto' rests on the diagnostics: give 1 or more"
    yield "diagnostics.every", remedy
  for name, off in _OFF_IN_AUTO.items():
    if getattr(loss, name) != off:
      yield (
        f"loss.{name}",
        "group_size = 'auto' follows the error of the whole gradient, of all "
        f"completions at full weight: use {off}, or a number for group_size",
      )
  if loss.weighting == "sequence_mean":
    yield (
      "loss.weighting",
      "group_size = 'auto' follows the error of a gradient in which all tokens "
      "count alike: use another weighting, or a number for group_size",
    )
  if loss.advantage not in SCALED_LEAVE_ONE_OUT:
    yield (
      "advantage",
      "group_size = 'auto' follows the best size for "
      f"{' or '.join(SCALED_LEAVE_ONE_OUT)}, whose error the diagnostics "
      "estimate: use one of these, or a number for group_size",
    )


_OFF_IN_AUTO = {
  "top_entropy_quantile": 1,
  "advantage_clip": 0,
  "truncated": "keep",
  "correction": "none",
  "off_policy_threshold": 0,
}
"""Settings of the loss beside group_size = auto."""


def _batches(s: TrainSettings) -> Rows:
  yield from [*_auto_sizes(s)] or _division(s)
  yield from _advantage(s)


def _auto_sizes(s: TrainSettings) -> Rows:
  """The group sizes that "auto" moves among."""
  if not _auto(s):
    return
  auto = s.auto_group_size
  for name in ("smallest", "start", "largest"):
    size = getattr(auto, name)
    power = size >= 4 and size & (size - 1) == 0
    if not power or not auto.smallest <= size <= auto.largest:
      remedy = "4 <= smallest <= start <= largest must be powers of two"
      yield f"auto_group_size.{name}", remedy
  samples, updates = batches.samples_per_step(s), s.optim.update.minibatches
  prompts, left = divmod(samples, auto.largest)
  if left or prompts % updates or prompts < 3:
    yield (
      "auto_group_size.largest",
      f"leaves {samples} / {auto.largest} prompts a step, which must be 3 or "
      f"more (for a diagnosis) and a whole multiple of optim.minibatches = "
      f"{updates}: take a smaller one or more prompts",
    )


def _division(s: TrainSettings) -> Rows:
  """The first batch that does not divide into its parts."""
  update = s.optim.update
  if s.batch_size % update.minibatches:
    yield (
      "optim.minibatches",
      f"must divide batch_size = {s.batch_size} (prompts; groups stay whole)",
    )
    return
  parts = {"sampling.parts": s.sampling.parts}
  parts["filter_groups.gen_parts"] = batches.draw_parts(s)
  for size in batches.group_sizes(s):
    prompts = batches.samples_per_step(s) // size
    for setting, count in parts.items():
      if prompts % count:
        remedy = (
          f"must divide a step's prompts, {prompts} with groups of {size}"
        )
        yield setting, remedy
        return
    try:
      minibatch = prompts // update.minibatches
      micro_batches.cuts(minibatch, size, update.micro_batches)
    except ValueError as error:
      yield "optim.micro_batches", str(error)
      return


def _advantage(s: TrainSettings) -> Rows:
  """A batch that the advantage refuses, in its own words.

  It is tried on the run's shapes, so that it needs no other check than its own;
  nothing is computed.
  """
  name, k = s.loss.advantage, s.loss.subset_size
  advantage = bind(ADVANTAGES[name], k=k)
  takes_k = advantage is not ADVANTAGES[name]

  def trial(rewards, lengths):
    return bind(
      advantage,
      lengths=lengths,
      logit_score_sq=rewards,
      token_score_sq=rewards[..., None],
      sampled=rewards[..., None] > 0,
    )(rewards)

  sizes = batches.group_sizes(s)
  for size in sorted({min(sizes), max(sizes)}):
    # A large batch refuses nothing that a smaller one takes: tables stay small.
    prompts = min(batches.samples_per_step(s) // size, _TRIED)
    shape = prompts, min(size, max(_TRIED, k + 1) if takes_k else _TRIED)
    arrays = (jax.ShapeDtypeStruct(shape, x) for x in (jnp.float32, jnp.int32))
    try:
      jax.eval_shape(trial, *arrays)
    except ValueError as error:
      of_k = f", subset_size = {k}" if takes_k else ""
      shapes = f"batch_size = {prompts}, group_size = {size}{of_k}"
      yield "advantage", f"refuses {shapes}: {error}"
      return


def _profile(s: TrainSettings) -> Rows:
  try:
    steps = profiling.parse(s.profile.steps)
  except ValueError as error:
    yield "profile.steps", str(error)
    return
  if steps and steps[-1] > s.steps:
    remedy = f"the last step is {s.steps} (steps): profile earlier ones"
    yield "profile.steps", remedy


CONFLICTS = (
  _model,
  _loss,
  _rewards,
  _ahead,
  _environment,
  _aggregation,
  _filter_groups,
  _difficulty,
  _group_size,
  _batches,
  _profile,
  hub_pins.conflicts,
)
"""The conflicts, by the part of the settings that has to change."""


def errors(s: TrainSettings, flat: Mapping[str, Any]) -> list[str]:
  """Returns a line for each conflict: setting, value, what to do.

  Args:
    s: Settings, each in its own range.
    flat: The same by dotted path, as in the config.
  """
  rows = itertools.chain.from_iterable(one(s) for one in CONFLICTS)
  lines = [config_error(name, flat[name], remedy) for name, remedy in rows]
  return name_errors(s.name) + lines + mixtures.errors(s)
