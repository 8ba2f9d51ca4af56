"""What makes a run's settings impossible, found before anything compiles."""

import math
import re
from collections.abc import Mapping
from typing import Any

# A name stands for a function or a module; tests hold that each exists.
DATASETS = ("arithmetic", "gsm8k", "jsonl")
TOO_LONG = ("refuse", "drop")
ADVANTAGES = (
  "leave_one_out grpo dr_grpo batch_std vanilla shrinkage beta_binomial "
  "length_weighted max_at_k min_at_k pairwise_rank"
).split()
RATIOS = ("token_ratio", "sequence_ratio")
WEIGHTINGS = ("token_mean", "sequence_mean", "fixed_length")
KL = {"loss": ("k2", "k3"), "ratio": ("k1", "k3"), "reward": ("k1",)}
SCHEDULES = ("constant", "cosine", "linear")
DTYPES = ("float32", "bfloat16")
AUTO = "auto"  # group_size: follow the best one
ON_DEVICE = ("exact_answer",)  # reward functions that exist on token ids

_AT_LEAST_ONE = (
  "batch_size subset_size data.max_prompt_length sampling.max_new_tokens "
  "optim.epochs optim.minibatches optim.micro_batches eval.every "
  "eval.num_prompts eval.batch_size checkpoint.every checkpoint.keep "
  "log.every log.samples_every logits_chunk auto_group_size.start "
  "auto_group_size.smallest auto_group_size.largest"
).split()
_NOT_NEGATIVE = (
  "seed steps sampling.top_k loss.clip_high loss.dual_clip loss.beta "
  "optim.warmup_steps optim.weight_decay eval.samples diagnostics.every "
  "diagnostics.last_layers auto_group_size.margin auto_group_size.confidence "
  "lora.rank reward.workers"
).split()
_POSITIVE = (
  "sampling.temperature optim.learning_rate optim.max_grad_norm lora.alpha "
  "reward.timeout"
).split()
_NAMES = {
  "data.name": DATASETS,
  "data.too_long": TOO_LONG,
  "model.dtype": DTYPES,
  "advantage": ADVANTAGES,
  "loss.ratio": RATIOS,
  "loss.weighting": WEIGHTINGS,
  "loss.kl": ("k1", "k2", "k3"),
  "loss.kl_placement": tuple(KL),
  "optim.schedule": SCHEDULES,
}


def _problem(field: str, value: Any, todo: str) -> str:
  return f"{field} = {value!r}: {todo}"


def _ranges(leaves: dict[str, Any]) -> list[str]:
  """Values outside their range; NaN fails every comparison."""
  found = []

  def need(field, holds, todo):
    value = leaves[field]
    if not (holds(value) and math.isfinite(value)):
      found.append(_problem(field, value, todo))

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
  need("sampling.top_p", lambda x: 0 < x <= 1, "must be in (0, 1]; 1 is off")
  need("sampling.min_p", lambda x: 0 <= x <= 1, "must be in [0, 1]; 0 is off")
  if leaves["group_size"] != AUTO:
    need("group_size", lambda x: x >= 1, "must be 1 or more, or auto")
  todo = "must be 2 or more: their spread gives the error"
  need("diagnostics.tangents", lambda x: x >= 2, todo)
  need("diagnostics.share", lambda x: 0 < x <= 1, "must be in (0, 1]")
  need("auto_group_size.decay", lambda x: 0 <= x < 1, "must be in [0, 1)")
  need("loss.clip_low", lambda x: 0 <= x <= 1, "must be in [0, 1]")
  need(
    "loss.dual_clip",
    lambda x: not 0 < x <= 1,
    "must be more than 1, or 0 for off",
  )
  for field in ("optim.b1", "optim.b2"):
    need(field, lambda x: 0 <= x < 1, "must be in [0, 1)")
  return found


def _names(leaves: dict[str, Any]) -> list[str]:
  found = []
  for field, names in _NAMES.items():
    value = leaves[field]
    if field == "advantage" and value == "oracle":
      todo = (
        "needs the true value of each prompt, which a training run does not "
        f"know; use one of {', '.join(names)}"
      )
      found.append(_problem(field, value, todo))
    elif value not in names:
      todo = f"use one of {', '.join(names)}"
      found.append(_problem(field, value, todo))
  if not re.fullmatch(r"[\w.-]+", leaves["name"]):
    todo = "names a directory: use letters, digits, '_', '-' and '.'"
    found.append(_problem("name", leaves["name"], todo))
  if not leaves["model.path"]:
    todo = "give a Hugging Face directory or the name of an embedded model"
    found.append(_problem("model.path", "", todo))
  template = leaves["data.template"]
  try:
    good = "\0" in template.format(prompt="\0")
  except (AttributeError, IndexError, KeyError, ValueError):
    good = False
  if not good:
    todo = "must hold {prompt} and no other field; write other braces doubled"
    found.append(_problem("data.template", template, todo))
  return found


def _rewards(leaves: dict[str, Any]) -> list[str]:
  """Names alone; `rewards.functions` looks them up."""
  found = []
  names, weights = leaves["reward.functions"], leaves["reward.weights"]
  if not names or not all(name and isinstance(name, str) for name in names):
    todo = "name at least one function; the first says what a right answer is"
    found.append(_problem("reward.functions", names, todo))
  elif len(set(names)) < len(names):
    found.append(_problem("reward.functions", names, "names must differ"))
  numbers = [w for w in weights if isinstance(w, (int, float))]
  if len(weights) != len(names) or not (
    len(numbers) == len(weights) and all(map(math.isfinite, numbers))
  ):
    todo = f"must be {len(names)} numbers, one for each of reward.functions"
    found.append(_problem("reward.weights", weights, todo))
  if not math.isfinite(leaves["reward.model_weight"]):
    value = leaves["reward.model_weight"]
    found.append(_problem("reward.model_weight", value, "must be finite"))
  if leaves["reward.on_device"]:
    names = tuple(names), tuple(weights), leaves["reward.model"]
    if names != (ON_DEVICE, (1.0,), ""):
      todo = (
        f"needs reward.functions = {ON_DEVICE!r}, reward.weights = (1.0,) and "
        "no reward.model: nothing else can be computed on token ids"
      )
      found.append(_problem("reward.on_device", True, todo))
  return found


def _lora(leaves: dict[str, Any]) -> list[str]:
  found, targets = [], leaves["lora.targets"]
  try:
    re.compile(targets)
  except re.error as error:
    todo = f"is no regular expression ({error})"
    found.append(_problem("lora.targets", targets, todo))
  if leaves["lora.rank"] and leaves["diagnostics.last_layers"]:
    todo = "adapters (lora.rank) are diagnosed as a whole: use 0"
    value = leaves["diagnostics.last_layers"]
    found.append(_problem("diagnostics.last_layers", value, todo))
  return found


def _kl(leaves: dict[str, Any]) -> list[str]:
  """KL estimators where they have a useful gradient (nothing if beta = 0)."""
  kl, placement = leaves["loss.kl"], leaves["loss.kl_placement"]
  known = kl in _NAMES["loss.kl"] and placement in KL
  if leaves["loss.beta"] == 0 or not known or kl in KL[placement]:
    return []
  todo = (
    f"with loss.kl_placement = {placement!r} use {' or '.join(KL[placement])}"
  )
  if (kl, placement) == ("k1", "loss"):
    todo += (
      "; k1 = log(p / p_ref) as a loss term has the gradient E[grad log p] = 0 "
      "on-policy: it adds noise and pulls nowhere. k1 works with "
      "loss.kl_placement = 'reward' or 'ratio'"
    )
  return [_problem("loss.kl", kl, todo)]


def group_sizes(leaves: Mapping[str, Any]) -> list[int]:
  """The group sizes that a run may use: one, or all powers of two between."""
  if leaves["group_size"] != AUTO:
    return [leaves["group_size"]]
  sizes = [max(leaves["auto_group_size.smallest"], 1)]
  while sizes[-1] < leaves["auto_group_size.largest"]:
    sizes.append(2 * sizes[-1])
  return sizes


def _group_size(leaves: dict[str, Any]) -> list[str]:
  """What a diagnosis, and a search for the best size need."""
  found, sizes = [], group_sizes(leaves)
  if leaves["group_size"] == AUTO:
    return _auto_group_size(leaves, sizes)
  if leaves["diagnostics.every"] and (sizes[0] < 4 or leaves["batch_size"] < 3):
    todo = "needs group_size of 4 or more and batch_size of 3 or more; 0 is off"
    every = leaves["diagnostics.every"]
    found.append(_problem("diagnostics.every", every, todo))
  return found


def _auto_group_size(leaves: dict[str, Any], sizes: list[int]) -> list[str]:
  found = []
  start = leaves["auto_group_size.start"]
  for field in ("smallest", "start", "largest"):
    size = leaves[f"auto_group_size.{field}"]
    if size < 4 or size & (size - 1) or not sizes[0] <= size <= sizes[-1]:
      todo = "4 <= smallest <= start <= largest must be powers of two"
      found.append(_problem(f"auto_group_size.{field}", size, todo))
  if not leaves["diagnostics.every"]:
    todo = "group_size = 'auto' rests on the diagnostics: give 1 or more"
    found.append(_problem("diagnostics.every", 0, todo))
  samples = leaves["batch_size"] * start
  parts = leaves["optim.minibatches"] * leaves["optim.micro_batches"]
  shards = max(leaves["mesh.data"], 1) * max(leaves["mesh.fsdp"], 1)
  if not found and min(samples, parts) > 0:
    prompts = samples // sizes[-1]
    if prompts * sizes[-1] != samples or prompts % (parts * shards):
      todo = (
        f"leaves {samples} / {sizes[-1]} prompts a step, which must be a whole "
        "multiple of optim.minibatches x optim.micro_batches x mesh.data x "
        f"mesh.fsdp = {parts * shards}: take a smaller one or more prompts"
      )
      found.append(_problem("auto_group_size.largest", sizes[-1], todo))
    elif prompts < 3:
      todo = f"leaves {prompts} prompts a step; a diagnosis needs 3"
      found.append(_problem("auto_group_size.largest", sizes[-1], todo))
  return found


def _divisions(leaves: dict[str, Any]) -> list[str]:
  batch, minibatches = leaves["batch_size"], leaves["optim.minibatches"]
  micro = leaves["optim.micro_batches"]
  if min(batch, minibatches, micro) < 1:
    return []  # reported as ranges
  if batch % minibatches:
    todo = f"must divide batch_size = {batch} (prompts; groups stay whole)"
    return [_problem("optim.minibatches", minibatches, todo)]
  if (batch // minibatches) % micro:
    todo = (
      "must divide the prompts of a minibatch, batch_size / "
      f"optim.minibatches = {batch // minibatches}"
    )
    return [_problem("optim.micro_batches", micro, todo)]
  return []


def _mesh(leaves: dict[str, Any]) -> list[str]:
  fields = ("mesh.data", "mesh.fsdp", "mesh.tensor")
  sizes = [leaves[field] for field in fields]
  todo = "must be 1 or more, or -1 for all the other devices"
  found = [
    _problem(field, size, todo)
    for field, size in zip(fields, sizes, strict=True)
    if size < 1 and size != -1
  ]
  if sizes.count(-1) > 1:
    todo = "only one axis may be -1 (all the other devices)"
    found.append(_problem("mesh", tuple(sizes), todo))
  if min(sizes[:2]) >= 1:
    parts = leaves["optim.minibatches"] * leaves["optim.micro_batches"]
    rows = leaves["batch_size"] // max(parts, 1)
    if rows % (sizes[0] * sizes[1]):
      todo = (
        f"mesh.data x mesh.fsdp = {sizes[0] * sizes[1]} must divide the "
        f"{rows} prompts of a micro-batch"
      )
      found.append(_problem("batch_size", leaves["batch_size"], todo))
  return found


def _advantage(leaves: dict[str, Any]) -> list[str]:
  """Batches too small for what the advantage compares."""
  name, group_size = leaves["advantage"], group_sizes(leaves)[0]
  batch_size, k = leaves["batch_size"], leaves["subset_size"]
  if name not in ADVANTAGES or name == "vanilla" or group_size < 1:
    return []  # reported as names or as ranges
  found = []
  if group_size < 2:
    todo = (
      f"advantage = {name!r} compares completions of a prompt: use 2 or more"
    )
    found.append(_problem("group_size", group_size, todo))
  elif name in ("max_at_k", "min_at_k") and group_size <= k:
    todo = (
      f"advantage = {name!r} compares subsets of k = {k} completions with and "
      f"without each one: use a group_size of {k + 1} or more (now "
      f"{group_size}), or a smaller subset_size"
    )
    found.append(_problem("subset_size", k, todo))
  if name == "shrinkage" and 1 <= batch_size < 3:
    todo = (
      "advantage = 'shrinkage' learns from the other prompts: use 3 or more"
    )
    found.append(_problem("batch_size", batch_size, todo))
  return found


def problems(leaves: dict[str, Any]) -> list[str]:
  """All that is wrong with the values, a line each: field, value, what to do.

  Args:
    leaves: all settings by dotted path, of the default's types.
  """
  found = _ranges(leaves) + _names(leaves) + _kl(leaves) + _divisions(leaves)
  found += _rewards(leaves) + _lora(leaves)
  return found + _mesh(leaves) + _advantage(leaves) + _group_size(leaves)
