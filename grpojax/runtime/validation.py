"""What makes a run's settings impossible, found before anything compiles."""

import math
import re
from typing import Any

# A name stands for a function or a module; tests hold that each exists.
DATASETS = ("arithmetic",)
REWARDS = ("exact_answer",)
ADVANTAGES = ("leave_one_out", "grpo", "dr_grpo", "batch_std", "vanilla")
RATIOS = ("token_ratio", "sequence_ratio")
WEIGHTINGS = ("token_mean", "sequence_mean", "fixed_length")
KL = {"loss": ("k2", "k3"), "ratio": ("k1", "k3"), "reward": ("k1",)}
SCHEDULES = ("constant", "cosine", "linear")
DTYPES = ("float32", "bfloat16")

_AT_LEAST_ONE = (
  "batch_size group_size data.max_prompt_length sampling.max_new_tokens "
  "optim.epochs optim.minibatches optim.micro_batches eval.every "
  "eval.num_prompts eval.batch_size checkpoint.every checkpoint.keep "
  "log.every log.samples_every logits_chunk"
).split()
_NOT_NEGATIVE = (
  "seed steps sampling.top_k loss.clip_high loss.dual_clip loss.beta "
  "optim.warmup_steps optim.weight_decay eval.samples"
).split()
_POSITIVE = (
  "sampling.temperature optim.learning_rate optim.max_grad_norm"
).split()
_NAMES = {
  "data.name": DATASETS,
  "reward.name": REWARDS,
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


def problems(leaves: dict[str, Any]) -> list[str]:
  """All that is wrong with the values, a line each: field, value, what to do.

  Args:
    leaves: all settings by dotted path, of the default's types.
  """
  found = _ranges(leaves) + _names(leaves) + _kl(leaves) + _divisions(leaves)
  found += _mesh(leaves)
  name, group_size = leaves["advantage"], leaves["group_size"]
  if name in ADVANTAGES and name != "vanilla" and 0 < group_size < 2:
    todo = (
      f"advantage = {name!r} compares completions of a prompt: use 2 or more"
    )
    found.append(_problem("group_size", group_size, todo))
  return found
