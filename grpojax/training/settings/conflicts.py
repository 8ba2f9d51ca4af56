"""Conflicts between settings.

`core.options` checks the range of each setting. Functions in `NEEDS` yield
values that other settings require; all other conflicts are found by `CHECKS`.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.core import advantages
from grpojax.core.advantages.multi_reward import AGGREGATIONS
from grpojax.core.binding import bind
from grpojax.core.losses.kl import PLACEMENTS
from grpojax.core.packing import micro_batches
from grpojax.core.turns import check_credit
from grpojax.core.update import off_policy_conflicts
from grpojax.rewards.exact_ids import ON_DEVICE
from grpojax.rewards.functions import workers_for
from grpojax.runtime.cli.configs import config_error, name_errors
from grpojax.runtime.files import hub, run_storage
from grpojax.runtime.text import tokenization
from grpojax.training.settings import batches, mixtures
from grpojax.training.settings.inputs import DIFFICULTY_OFF
from grpojax.training.settings.run import AUTO, TrainSettings, profiled_steps

_TRIED = 256  # maximum B and G of the batch for trying an advantage
_ONE_SUM = {"reward.aggregation": "sum_then_normalize"}

Needs = Iterator[tuple[dict[str, Any], str]]
"""Required values by setting, with "REASON: ALTERNATIVE"."""


def _has_turn_credit(s: TrainSettings) -> bool:
  return s.environment.on and s.environment.credit != "trajectory"


def _model_needs(s: TrainSettings) -> Needs:
  if s.optim.name == "adafactor":
    why = "'adafactor' keeps float32 statistics: optim.name = 'adamw'"
    yield {"optim.moments_dtype": "float32"}, why
  if s.lora.rank:
    why = "adapters are diagnosed as a whole: lora.rank = 0"
    yield {"diagnostics.last_layers": 0}, why
  if not s.loss.beta:
    unused = dict.fromkeys(("model.teacher", "model.reference_prompt"), "")
    unused |= {"model.reference_every": 0, "loss.kl": "k3"}
    yield unused, "only affects the KL term: loss.beta > 0"
  if s.model.teacher:
    why = "a teacher does not follow the policy: no model.teacher"
    yield {"model.reference_every": 0}, why
  if not s.model.reference_every:
    why = "a fixed reference is not mixed: model.reference_every > 0"
    yield {"model.reference_mix": 1}, why
  if s.loss.has_exact_kl:
    why = "loss.kl = 'exact' runs the reference in the update: another loss.kl"
    yield {"model.reference": "device"}, why


def _reward_needs(s: TrainSettings) -> Needs:
  if s.reward.on_device:
    why = "a step on the device is one program without texts: "
    why += "reward.on_device = False"
    yield _ONE_SUM | {"filter_groups.enable": False, "sampling.stop": ()}, why
    yield {"sampling.ahead": 0, "sampling.parts": 1}, why
    yield {"model.reference": "device", "model.reference_prompt": ""}, why
    yield {"difficulty.priority": DIFFICULTY_OFF}, why
    yield {"reward.length_penalty": 0}, why
  if s.reward.length_penalty:
    why = "a length penalty changes the sum of the rewards: "
    why += "reward.length_penalty = 0"
    yield _ONE_SUM | {"environment.credit": "trajectory"}, why
    why = "a length penalty gives groups of equal rewards a gradient: "
    why += "reward.length_penalty = 0"
    yield {"filter_groups.enable": False}, why
  if s.loss.needs_reference and s.loss.kl_placement == "reward":
    why = "a KL penalty in the reward needs unnormalised rewards, and gives "
    why += "groups of equal rewards a gradient: loss.kl_placement = 'ratio'"
    yield _ONE_SUM | {"filter_groups.enable": False}, why
  if s.environment.on:
    why = "does not work with an environment: no environment.path"
    yield {"reward.on_device": False, "mesh.sampling_devices": 0}, why
  else:
    why = "without an environment there are no turns: environment.path"
    yield {"environment.credit": "trajectory"}, why
  if s.environment.on and s.reward.model:
    why = "reward.model would add to the reward 0 of a failed trajectory: no "
    yield {"environment.failed": "drop"}, f"{why}reward.model"
  if _has_turn_credit(s):
    why = "requires one advantage per trajectory: "
    why += "environment.credit = 'trajectory'"
    yield _ONE_SUM | {"diagnostics.every": 0}, why


def _sampling_needs(s: TrainSettings) -> Needs:
  if s.difficulty.priority != DIFFICULTY_OFF:
    why = "a step's prompts depend on the rewards of all earlier steps: "
    why += f"difficulty.priority = {DIFFICULTY_OFF!r}"
    yield {"filter_groups.enable": False, "sampling.ahead": 0}, why
  else:
    why = "there are no priorities to correct for: another difficulty.priority"
    yield {"difficulty.importance_weights": False}, why
  if s.diagnostics.every:
    why = "the diagnosis ignores importance weights: diagnostics.every = 0"
    yield {"difficulty.importance_weights": False}, why
  if s.sampling.ahead:
    why = "rewards are unknown while sampling ahead: sampling.ahead = 0"
    yield {"filter_groups.enable": False}, why
  else:
    why = "these devices would be idle in updates: sampling.ahead = 1"
    yield {"mesh.sampling_devices": 0}, why
  if s.sampling.engine:
    yield from _engine_needs(s)
  if s.group_size == AUTO:
    why = "group_size = 'auto' minimises the error of a gradient in which all "
    why += "completions have equal weight: a number for group_size"
    yield {"loss.truncated": "keep", "loss.correction": "none"}, why
    zero = ("loss.advantage_clip", "loss.off_policy_threshold")
    yield dict.fromkeys((*zero, "sampling.ahead"), 0), why
    yield _ONE_SUM | {"loss.top_entropy_quantile": 1}, why
    why = "group_size = 'auto' needs rewards that depend on one completion, as "
    why += "in the diagnosis: a number for group_size"
    yield {"reward.length_penalty": 0}, why


def _engine_needs(s: TrainSettings) -> Needs:
  why = "needs our own sampler: sampling.engine = ()"
  ours = {"sampling.stop": (), "reward.on_device": False}
  ours |= {"environment.path": "", "environment.tools": ()}
  ours |= {"loss.router_replay": False, "mesh.sampling_devices": 0}
  formats = ("sampling.weights_dtype", "sampling.cache_dtype")
  yield ours | dict.fromkeys(formats, "model"), why
  if s.sampling.distribution.top_p < 1:
    why = "vLLM cuts by min_p before top_p, grpojax after: sampling.top_p = 1"
    yield {"sampling.min_p": 0}, why


Rows = Iterator[tuple[str, str]]
"""Name of a setting, and text that says what is wrong and what to do."""


def _finite(values: Any) -> bool:
  return all(isinstance(x, int | float) and abs(x) < 1e300 for x in values)


def _pair(value: Any, holds: Callable[[float, float], bool]) -> bool:
  return len(value) == 2 and _finite(value) and holds(*value)


def _texts(s: TrainSettings) -> Rows:
  if not s.model.path:
    yield "model.path", "give a Hugging Face directory, or ORG/NAME on the Hub"
  try:
    re.compile(s.lora.targets)
  except re.error as error:
    yield "lora.targets", f"is not a regular expression: {error}"
  if not tokenization.is_template(s.data.template):
    yield "data.template", tokenization.TEMPLATE
  urls = s.sampling.engine
  host = r"[a-zA-Z0-9_-]{1,63}"
  host = rf"({host}(\.{host})*|\[[0-9a-fA-F:.]+\])"  # a name, or IPv6
  address = rf"https?://{host}(:[0-9]{{1,5}})?"
  servers = [re.fullmatch(address, str(url)) for url in urls]
  if not all(servers) or len(set(urls)) < len(urls):
    yield "sampling.engine", "must be different addresses, http://HOST:PORT"
  stop = s.sampling.stop
  prompt = s.model.reference_prompt
  if not all(isinstance(x, str) and x for x in stop):
    yield "sampling.stop", "must be non-empty strings"
  if prompt and "prompt" not in (tokenization.fields(prompt) or ()):
    remedy = "must contain {prompt}; write other braces twice: {{ and }}"
    yield "model.reference_prompt", remedy
  texts = {
    "sampling.stop": "".join(map(str, stop)),
    "data.template": s.data.template,
    "data.system_prompt": s.data.system_prompt,
    "environment.template": s.environment.template,
    "model.reference_prompt": prompt,
  }
  for name, text in texts.items():
    # Python reads invalid bytes of the command line as these surrogates.
    if re.search("[\ud800-\udfff]", text):
      yield name, "is not valid UTF-8: re-encode it"
  try:
    steps = profiled_steps(s.profile.steps)
    if steps and steps[-1] > s.steps:
      remedy = f"the last step is {s.steps} (steps): profile earlier steps"
      yield "profile.steps", remedy
  except ValueError as error:
    yield "profile.steps", str(error)


def _loss(s: TrainSettings) -> Rows:
  loss = s.loss
  if s.sampling.distribution.temperature < 0.01:
    remedy = "must be 0.01 or more (greedy samples have no gradient)"
    yield "sampling.temperature", remedy
  if loss.beta and loss.kl not in (known := PLACEMENTS[loss.kl_placement]):
    remedy = f"with loss.kl_placement = {loss.kl_placement!r} use "
    remedy += " or ".join(known)
    if loss.kl == "k1":
      remedy += "; as a loss term k1 has a gradient of mean zero"
    yield "loss.kl", remedy
  if loss.entropy_target and loss.entropy_coef > loss.entropy_coef_max:
    most = f"loss.entropy_coef_max = {loss.entropy_coef_max}"
    yield "loss.entropy_coef", f"is more than {most}: lower it"
  surrogates = ("gmpo",)
  if loss.ratio == "sequence_ratio":
    surrogates = ("gmpo", "clipped", "sapo")
  if loss.top_entropy_quantile < 1 and loss.surrogate in surrogates:
    remedy = f"with loss.surrogate = {loss.surrogate!r} and loss.ratio = "
    remedy += f"{loss.ratio!r} each token's loss has the gradient of its whole "
    remedy += "completion: use 1, or another ratio or surrogate"
    yield "loss.top_entropy_quantile", remedy
  on_policy = s.optim.update.on_policy or loss.old_logprobs != "rollout"
  if loss.correction != "none" and not on_policy:
    remedy = "with several updates per step and loss.old_logprobs = 'rollout' "
    remedy += "ratios already correct for the sampler: use loss.old_logprobs = "
    yield "loss.correction", f"{remedy}'trainer', or no correction"
  off_policy = off_policy_conflicts(
    loss,
    s.optim.update,
    s.sampling.distribution,
    s.sampling.ahead,
    s.sampling.engine,
  )
  for name, remedy in off_policy.items():
    yield name if name == "advantage" else f"loss.{name}", remedy


def _rewards(s: TrainSettings) -> Rows:
  reward = s.reward
  names = reward.functions
  texts = all(isinstance(name, str) for name in names)
  if not (names and texts and all(names)):
    remedy = "name at least one function; the first judges correctness"
    yield "reward.functions", remedy
  if texts and len(set(names)) < len(names):
    yield "reward.functions", "names a function twice: remove one"
  if len(reward.weights) != len(names) or not _finite(reward.weights):
    remedy = "must be finite numbers, one for each of reward.functions"
    yield "reward.weights", remedy
  if not _finite([reward.model_weight]):
    yield "reward.model_weight", "must be a finite number"
  workers = workers_for(names, reward.workers) or s.environment.workers
  if s.sampling.parts > 1 and not workers and not reward.on_device:
    remedy = "no process can score a part during sampling: use 1, or "
    yield "sampling.parts", f"{remedy}reward.workers of 1 or more"
  scores_ids = len(names) == 1 and names[0] in ON_DEVICE and not reward.model
  if reward.on_device and not (scores_ids and reward.weights == (1.0,)):
    remedy = f"scores token ids: use one function ({', '.join(ON_DEVICE)}), "
    remedy += "reward.weights = (1.0,) and no reward.model"
    yield "reward.on_device", remedy
  if s.mesh.sampling_tensor not in (0, s.mesh.tensor):
    if reward.on_device:
      remedy = "reward.on_device is one program on one mesh: use 0"
      yield "mesh.sampling_tensor", remedy
    elif s.environment.on:
      remedy = "does not work with an environment (environment.path): use 0"
      yield "mesh.sampling_tensor", remedy
  if AGGREGATIONS[reward.aggregation] is None:
    return
  if s.group_size == 1:
    remedy = "a group of 1 has no spread: use group_size of 2 or more"
    yield "reward.aggregation", remedy
  if s.loss.advantage == "beta_binomial":
    remedy = "'beta_binomial' cannot read normalised rewards as successes"
    yield "reward.aggregation", f"{remedy}: use sum_then_normalize"


def _turns(s: TrainSettings) -> Rows:
  scored = "environment" in s.reward.functions
  if scored and not s.environment.on:
    remedy = "'environment' needs an environment: set environment.path"
    yield "reward.functions", remedy
  if not _has_turn_credit(s):
    return
  try:
    check_credit(s.environment.credit, s.loss, True)
  except ValueError as error:
    yield "environment.credit", f"{error}".partition(": ")[2]
  if not scored:
    remedy = "needs rewards per turn: add 'environment' to reward.functions"
    yield "environment.credit", f"{remedy}, or use 'trajectory'"


def _prompts(s: TrainSettings) -> Rows:
  options = s.filter_groups
  if options.enable and s.loss.advantage not in advantages.WITHIN_GROUPS:
    remedy = f"advantage = {s.loss.advantage!r} also uses groups of equal "
    remedy += f"rewards: use one of {', '.join(advantages.WITHIN_GROUPS)}"
    yield "filter_groups.enable", remedy
  several = len(s.reward.functions) > 1 or s.reward.model
  by_accuracy = options.enable and options.metric == "acc"
  if by_accuracy and options.rescale and several:
    remedy = "groups of equal filter_groups.metric = 'acc' may differ in other "
    remedy += "rewards, so no factor restores the gradient: use False, or "
    yield "filter_groups.rescale", f"{remedy}metric = 'reward'"
  if not _pair(s.difficulty.band, lambda a, b: 0 <= a < b <= 1):
    yield "difficulty.band", "must be two numbers, 0 <= low < high <= 1"
  if not _pair(s.difficulty.target, lambda a, b: 0 < a < 1 and 0 < b < 1):
    yield "difficulty.target", "must be two numbers inside (0, 1)"


def _group_size(s: TrainSettings) -> Rows:
  every = s.diagnostics.every
  if s.group_size != AUTO:
    if every and (s.group_size < 4 or s.batch_size < 3):
      remedy = "needs group_size of 4 or more and batch_size of 3 or more"
      yield "diagnostics.every", f"{remedy}; 0 is off"
    return
  if not every:
    remedy = "group_size = 'auto' needs diagnostics: use 1 or more"
    yield "diagnostics.every", remedy
  number = "or a number for group_size"
  if s.loss.weighting == "sequence_mean":
    remedy = "group_size = 'auto' minimises the error of a gradient with equal "
    remedy += f"token weights: use another weighting, {number}"
    yield "loss.weighting", remedy
  if s.loss.advantage not in advantages.SCALED_LEAVE_ONE_OUT:
    names = " or ".join(advantages.SCALED_LEAVE_ONE_OUT)
    remedy = f"group_size = 'auto' needs the diagnostics of {names}: use such "
    yield "advantage", f"{remedy}an advantage, {number}"


def _batches(s: TrainSettings) -> Rows:
  yield from [*_auto_sizes(s)] or _division(s)


def _auto_sizes(s: TrainSettings) -> Rows:
  if s.group_size != AUTO:
    return
  auto = s.auto_group_size
  for name in ("smallest", "start", "largest"):
    size = getattr(auto, name)
    power = size >= 4 and size & (size - 1) == 0
    if not power or not auto.smallest <= size <= auto.largest:
      remedy = "4 <= smallest <= start <= largest must be powers of two"
      yield f"auto_group_size.{name}", remedy
  samples = batches.samples_per_step(s)
  updates = s.optim.update.minibatches
  prompts, left = divmod(samples, auto.largest)
  if left or prompts % updates or prompts < 3:
    remedy = f"leaves {samples} / {auto.largest} prompts per step, which must "
    remedy += f"be 3 or more and a multiple of optim.minibatches = {updates}: "
    yield "auto_group_size.largest", f"{remedy}lower it, or use more prompts"


def _division(s: TrainSettings) -> Rows:
  """Yields the first setting that fails to divide its number of prompts."""
  update = s.optim.update
  if s.batch_size % update.minibatches:
    remedy = f"must divide batch_size = {s.batch_size}"
    yield "optim.minibatches", f"{remedy} (prompts; groups stay whole)"
    return
  parts = {"sampling.parts": s.sampling.parts}
  parts["filter_groups.gen_parts"] = batches.draw_parts(s)
  for size in batches.group_sizes(s):
    prompts = batches.samples_per_step(s) // size
    for setting, count in parts.items():
      if prompts % count:
        remedy = f"must divide a step's {prompts} prompts (groups of {size})"
        yield setting, remedy
        return
    try:
      minibatch = prompts // update.minibatches
      micro_batches.cuts(minibatch, size, update.micro_batches)
    except ValueError as error:
      yield "optim.micro_batches", str(error)
      return


def _advantage(s: TrainSettings) -> Rows:
  """Traces the advantage on the shape of a batch; yields its error, if any."""
  name = s.loss.advantage
  k = s.loss.subset_size
  advantage = bind(advantages.ADVANTAGES[name], k=k)
  takes_k = advantage is not advantages.ADVANTAGES[name]

  def trial(rewards, lengths):
    return bind(
      advantage,
      lengths=lengths,
      logit_score_sq=rewards,
      token_score_sq=rewards[..., None],
      sampled=rewards[..., None] > 0,
    )(rewards)

  sizes = batches.group_sizes(s)
  if takes_k and k >= min(sizes):
    remedy = f"advantage = {name!r} needs a group_size of {k + 1} or more, not "
    yield "subset_size", f"{remedy}{min(sizes)}: lower subset_size"
    return
  for size in sorted({min(sizes), max(sizes)}):
    # Advantages refuse only small shapes; large shapes take long to trace.
    prompts = min(batches.samples_per_step(s) // size, _TRIED)
    shape = prompts, min(size, max(_TRIED, k + 1) if takes_k else _TRIED)
    arrays = (jax.ShapeDtypeStruct(shape, x) for x in (jnp.float32, jnp.int32))
    try:
      jax.eval_shape(trial, *arrays)
    except ValueError as error:
      shapes = f"batch_size = {prompts}, group_size = {size}"
      shapes += f", subset_size = {k}" if takes_k else ""
      yield "advantage", f"does not work with {shapes}: {error}"
      return


def _hub(s: TrainSettings) -> Rows:
  path = s.model.path
  revision = s.model.revision
  remedy = ""
  if revision and "@" in path:
    remedy = f"model.path = {path!r} has a revision too: remove one of them"
  elif revision and run_storage.is_url(path):
    remedy = f"is for models on the Hub, but model.path is {path!r}: use ''"
  elif revision and hub.parse(f"{path}@{revision}") is None:
    remedy = (
      "use a branch, tag or commit, with model.path = ORG/NAME on the Hub"
    )
  if remedy:
    yield "model.revision", remedy
  for line in s.commits:
    key, _, commit = str(line).partition("=")
    kind, _, name = key.partition(":")
    good = kind in hub.KINDS and hub.parse(name) and "@" in name
    if not (good and hub.is_commit(commit)):
      remedy = "must be KIND:ORG/NAME@REVISION=COMMIT. Runs fill it in: use ()"
      yield "commits", remedy


NEEDS = (_model_needs, _reward_needs, _sampling_needs)

CHECKS = (
  _texts,
  _loss,
  _rewards,
  _turns,
  _prompts,
  _group_size,
  _batches,
  _advantage,
  _hub,
)


def errors(s: TrainSettings, flat: Mapping[str, Any]) -> list[str]:
  """Returns an error per conflict; `flat` maps dotted paths to values."""
  rows = []
  for needs, text in itertools.chain.from_iterable(f(s) for f in NEEDS):
    reason, _, alternative = text.rpartition(": ")
    rows += [
      (name, f"{reason}: use {value!r}, or {alternative}")
      for name, value in needs.items()
      if flat[name] != value
    ]
  rows += itertools.chain.from_iterable(f(s) for f in CHECKS)
  lines = [config_error(name, flat[name], remedy) for name, remedy in rows]
  return name_errors(s.name) + lines + mixtures.errors(s)
