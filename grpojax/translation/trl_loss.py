"""TRL's advantages, losses, KL terms and corrections as ours."""

from grpojax.translation import trl_names
from grpojax.translation.parts import (
  NOTHING,
  Theirs,
  Translation,
  also,
  differs,
  missing,
  setting,
)

_LOSSES = {  # surrogate, weighting, ratio
  "grpo": ("clipped", "sequence_mean", None),
  "bnpo": ("clipped", "token_mean", None),
  "dapo": ("clipped", "token_mean", None),
  "dr_grpo": ("clipped", "fixed_length", None),
  "cispo": ("cispo", "token_mean", None),
  "sapo": ("sapo", "sequence_mean", None),
  "luspo": ("clipped", "sequence_sum", "sequence_ratio"),
  "vespo": ("vespo", "token_mean", "trajectory_ratio"),
}


def translate(theirs: Theirs, updates: int) -> Translation:
  """All that the loss of a step is made of.

  Args:
    theirs: TRL's settings.
    updates: of the optimizer, a step.

  Raises:
    ValueError: a name that TRL does not know.
  """
  found = _loss(theirs, updates) + _advantage(theirs) + _kl(theirs, updates)
  name = "router_aux_loss_coef"
  if theirs[name]:
    found += setting(theirs, "loss.router_aux_coef", name, float(theirs[name]))
  return found + _entropy(theirs) + _mismatch(theirs)


def _loss(theirs: Theirs, updates: int) -> Translation:
  kind = theirs["loss_type"]
  if kind not in _LOSSES:
    raise ValueError(f"loss_type = {kind!r}: use one of {', '.join(_LOSSES)}")
  surrogate, weighting, ratio = _LOSSES[kind]
  said = theirs.said("loss_type")
  level = theirs["importance_sampling_level"]
  if ratio is None:
    ratio = {"token": "token_ratio", "sequence": "sequence_ratio"}.get(level)
  if ratio is None:
    raise ValueError(
      f"importance_sampling_level = {level!r}: token or sequence"
    )
  found = also("loss.surrogate", surrogate, said)
  found += also("loss.weighting", weighting, said)
  found += also("loss.ratio", ratio, theirs.said("importance_sampling_level"))
  if kind == "bnpo":
    found += differs(
      "loss_type", "'bnpo' means over a micro-batch; here over the whole batch"
    )
  if weighting != "token_mean" and theirs["mask_truncated_completions"]:
    found += differs("loss_type", "TRL also counts completions masked whole")
  if kind in ("dapo", "cispo", "vespo") and updates > theirs["num_iterations"]:
    found += differs(
      "loss_type",
      "TRL divides by the mean number of tokens of a generation's updates; here"
      " by the update's own",
    )
  high = theirs["epsilon_high"]
  high = theirs["epsilon"] if high is None else high
  said = theirs.said("epsilon_high", "epsilon")
  if surrogate == "cispo":
    found += also("loss.cispo_max", max(float(high), 1.0), said)
    if high < 1:
      found += differs(
        "epsilon_high",
        f"with loss_type='cispo' it bounds the ratio itself, and {high} is"
        " below 1, where on-policy ratios are: 1 is taken (the paper has 5)",
      )
  else:
    found += setting(
      theirs, "loss.clip_low", "epsilon", float(theirs["epsilon"])
    )
    found += also("loss.clip_high", float(high), said)
  if theirs["delta"]:
    found += setting(theirs, "loss.dual_clip", "delta", float(theirs["delta"]))
  for name in trl_names.DEFAULTS:
    if name.startswith(f"{surrogate}_") and surrogate in ("sapo", "vespo"):
      found += setting(theirs, f"loss.{name}", name, float(theirs[name]))
  if theirs["mask_truncated_completions"]:
    said = theirs.said("mask_truncated_completions")
    found += also("loss.truncated", "mask", said)
  return found


def _advantage(theirs: Theirs) -> Translation:
  scale = theirs["scale_rewards"]
  scale = {True: "group", False: "none"}.get(scale, scale)
  names = {"group": "grpo", "batch": "batch_std", "none": "dr_grpo"}
  if scale not in names:
    raise ValueError(
      f"scale_rewards = {scale!r}: use one of {', '.join(names)}"
    )
  said = theirs.said("scale_rewards")
  together = theirs["multi_objective_aggregation"]
  found = also("reward.aggregation", together)
  if together == "normalize_then_sum":
    found += also("advantage", "batch_std", "multi_objective_aggregation")
  else:
    found += also("advantage", names[scale], said)
  if scale == "batch" and together == "sum_then_normalize":
    found += differs(
      "scale_rewards",
      "'batch' divides by the deviation of all rewards in TRL; here by that of"
      " rewards less their group's mean, which is smaller: advantages are"
      " larger",
    )
  if scale != "none":
    found += differs(
      "scale_rewards", "1e-6 is added to a deviation here, 1e-4 in TRL"
    )
  return found + differs(
    "scale_rewards",
    "grpojax's own default is advantage = 'leave_one_out', the unbiased"
    " gradient",
  )


def _kl(theirs: Theirs, updates: int) -> Translation:
  beta = float(theirs["beta"])
  found = setting(theirs, "loss.beta", "beta", beta)
  if not beta:
    if theirs["sync_ref_model"]:
      found += missing(
        "sync_ref_model", "there is no reference where beta is 0"
      )
    return found
  place = "ratio" if theirs["use_bias_correction_kl"] else "loss"
  said = theirs.said("use_bias_correction_kl")
  found += also("loss.kl", "k3")
  found += also("loss.kl_placement", place, said)
  if place == "ratio" and theirs["importance_sampling_level"] == "sequence":
    found += differs(
      "use_bias_correction_kl", "TRL multiplies by the sequence's ratio here"
    )
  if theirs["sync_ref_model"]:
    every = max(theirs["ref_model_sync_steps"] // updates, 1)
    said = theirs.said("ref_model_sync_steps")
    found += also("model.reference_every", every, said)
    mix = float(theirs["ref_model_mixup_alpha"])
    said = theirs.said("ref_model_mixup_alpha")
    found += also("model.reference_mix", mix, said)
    if updates > 1:
      found += differs("ref_model_sync_steps", "TRL counts optimizer updates")
  return found


def _entropy(theirs: Theirs) -> Translation:
  found = NOTHING
  for name in ("top_entropy_quantile", "entropy_coef"):
    found += setting(theirs, f"loss.{name}", name, float(theirs[name]))
  if not theirs["use_adaptive_entropy"]:
    return found
  for name in ("entropy_target", "entropy_coef_delta", "entropy_coef_max"):
    found += setting(theirs, f"loss.{name}", name, float(theirs[name]))
  if theirs["entropy_coef_min"]:
    found += missing("entropy_coef_min", "it is 0 here")
  return found


def _mismatch(theirs: Theirs) -> Translation:
  """Of a sampler that is not the policy."""
  found = NOTHING
  if limit := theirs["off_policy_mask_threshold"]:
    said = theirs.said("off_policy_mask_threshold")
    found += also("loss.off_policy_threshold", float(limit), said)
  if not theirs["use_vllm"]:
    return found
  found += missing(
    "use_vllm", "sampling is a part of the program, on the same devices"
  )
  if not theirs["vllm_importance_sampling_correction"]:
    return found
  mode = "vllm_importance_sampling_mode"
  found += also("loss.correction", theirs[mode], theirs.said(mode))
  for ours, name in (("low", "clip_min"), ("high", "clip_max")):
    name = f"vllm_importance_sampling_{name}"
    value = float(theirs[name] or 0)
    found += also(f"loss.correction_{ours}", value, theirs.said(name))
  return found + also("loss.old_logprobs", "trainer", "as TRL does with vLLM")
