"""What makes a run's settings impossible, found before anything compiles."""

import functools
import math
import re
from typing import Any

from grpojax.core.advantages import ADVANTAGES
from grpojax.core.grpo_step import OLD_LOGPROBS
from grpojax.core.kl import PLACEMENTS
from grpojax.core.losses import WEIGHTINGS
from grpojax.core.multi_reward import AGGREGATIONS
from grpojax.core.sampler_correction import CORRECTIONS
from grpojax.core.surrogates import RATIOS, SURROGATES
from grpojax.core.truncation import TRUNCATED
from grpojax.data.datasets import DATASETS
from grpojax.data.survey import TOO_LONG
from grpojax.models.config import DTYPES
from grpojax.models.remat import REMAT
from grpojax.rewards.exact_ids import ON_DEVICE
from grpojax.runtime.config import problem
from grpojax.runtime.special_tokens import SPECIAL_TOKENS
from grpojax.statistics.success_rates import PRIORITIES
from grpojax.training import (
  batch_sizes,
  corrections,
  difficulty,
  filter_groups,
  group_sizes,
  loss_settings,
  mixtures,
  reference,
  score_norms,
)
from grpojax.training.group_sizes import AUTO
from grpojax.training.optimizer import MOMENTS, OPTIMIZERS, SCHEDULES
from grpojax.training.reference import REFERENCE_MEMORY

CHOICES = {
  "data.name": tuple(DATASETS),
  "difficulty.priority": (difficulty.OFF, *PRIORITIES),
  "data.special_tokens": tuple(SPECIAL_TOKENS),
  "data.too_long": tuple(TOO_LONG),
  "model.dtype": tuple(DTYPES),
  "model.remat": tuple(REMAT),
  "advantage": tuple(ADVANTAGES),
  "reward.aggregation": tuple(AGGREGATIONS),
  "filter_groups.metric": tuple(filter_groups.METRICS),
  "loss.ratio": tuple(RATIOS),
  "loss.old_logprobs": tuple(OLD_LOGPROBS),
  "loss.correction": tuple(CORRECTIONS),
  "loss.truncated": tuple(TRUNCATED),
  "loss.surrogate": tuple(SURROGATES),
  "loss.weighting": tuple(WEIGHTINGS),
  "loss.kl": tuple(sorted({kl for kls in PLACEMENTS.values() for kl in kls})),
  "loss.kl_placement": tuple(PLACEMENTS),
  "model.reference": tuple(REFERENCE_MEMORY),
  "optim.name": tuple(OPTIMIZERS),
  "optim.moments_dtype": tuple(MOMENTS),
  "optim.schedule": tuple(SCHEDULES),
}
"""The settings that name something, and the names that they may have."""

_AT_LEAST_ONE = (
  "batch_size subset_size data.max_prompt_length sampling.max_new_tokens "
  "sampling.stages sampling.parts optim.epochs optim.minibatches "
  "optim.micro_batches eval.every eval.num_prompts eval.batch_size "
  "checkpoint.every checkpoint.keep log.every log.samples_every logits_chunk "
  "auto_group_size.start auto_group_size.smallest auto_group_size.largest "
  "filter_groups.max_num_gen_batches filter_groups.gen_parts"
).split()
_NOT_NEGATIVE = (
  "seed steps sampling.top_k sampling.slots loss.clip_high loss.dual_clip "
  "loss.beta optim.warmup_steps optim.weight_decay eval.samples "
  "diagnostics.every diagnostics.last_layers mesh.sampling_tensor "
  "auto_group_size.margin auto_group_size.confidence lora.rank reward.workers "
  "stop.skipped_updates stop.rewards_missing stop.zero_variance_groups "
  "stop.truncated loss.off_policy_threshold model.reference_every "
  "log.sample_groups log.report_every"
).split()
_POSITIVE = (
  "sampling.temperature optim.learning_rate optim.max_grad_norm lora.alpha "
  "reward.timeout sampling.repetition_penalty score_power"
).split()

_WORKERS = 1024


def _ranges(leaves: dict[str, Any]) -> list[str]:
  """Values outside their range; NaN fails every comparison."""
  wrong = []

  def need(field, holds, todo):
    value = leaves[field]
    finite = math.isfinite(value)
    if not (holds(value) and finite):
      also = "" if finite else ", and finite"
      wrong.append(problem(field, value, todo + also))

  for field in _AT_LEAST_ONE:
    need(field, lambda x: x >= 1, "must be 1 or more")
  for field in _NOT_NEGATIVE:
    need(field, lambda x: x >= 0, "must be 0 or more")
  hints = {
    "sampling.temperature": "; greedy sampling has no policy gradient",
    "optim.max_grad_norm": "; a large number turns clipping off",
  }
  for field in _POSITIVE:
    todo = f"must be more than 0{hints.get(field, '')}"
    need(field, lambda x: x > 0, todo)
  need("seed", lambda x: x < 2**32, "must be less than 2**32 (4294967296)")
  todo = "must be less than 2**31: it is an int32"
  for field in ("steps", "optim.epochs", "logits_chunk"):
    need(field, lambda x: x < 2**31, todo)
  todo = f"must be {_WORKERS} or fewer: each is a process of this machine"
  need("reward.workers", lambda x: x <= _WORKERS, todo)
  need("sampling.top_p", lambda x: 0 < x <= 1, "must be in (0, 1]; 1 is off")
  need("sampling.min_p", lambda x: 0 <= x <= 1, "must be in [0, 1]; 0 is off")
  if leaves["group_size"] != AUTO:
    need("group_size", lambda x: x >= 1, "must be 1 or more, or auto")
  todo = "must be 2 or more: their spread gives the error"
  need("diagnostics.tangents", lambda x: x >= 2, todo)
  need("diagnostics.share", lambda x: 0 < x <= 1, "must be in (0, 1]")
  need("auto_group_size.decay", lambda x: 0 <= x < 1, "must be in [0, 1)")
  need("score_norms.decay", lambda x: 0 <= x < 1, "must be in [0, 1)")
  need("loss.clip_low", lambda x: 0 <= x <= 1, "must be in [0, 1]")
  need(
    "loss.dual_clip",
    lambda x: not 0 < x <= 1,
    "must be more than 1, or 0 for off",
  )
  for field in ("optim.b1", "optim.b2"):
    need(field, lambda x: 0 <= x < 1, "must be in [0, 1)")
  return wrong


def _names(leaves: dict[str, Any]) -> list[str]:
  wrong = []
  for field, names in CHOICES.items():
    value = leaves[field]
    if field == "advantage" and value == "oracle":
      todo = (
        "needs the true value of each prompt, which a training run does not "
        f"know; use one of {', '.join(names)}"
      )
      wrong.append(problem(field, value, todo))
    elif value not in names:
      todo = f"use one of {', '.join(names)}"
      wrong.append(problem(field, value, todo))
  if not re.fullmatch(r"[\w.-]+", leaves["name"]):
    todo = "names a directory: use letters, digits, '_', '-' and '.'"
    wrong.append(problem("name", leaves["name"], todo))
  if not leaves["model.path"]:
    todo = "give a Hugging Face directory or the name of an embedded model"
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
  return wrong + batch_sizes.problems(leaves) + group_sizes.problems(leaves)
