"""TRL's GRPOConfig as a config of ours.

Names, defaults and meanings are those of TRL 1.16 (trl/trainer/grpo_config.py,
grpo_trainer.py) on transformers 5; `grpojax/core/README.md` says which numbers
agree.
"""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.translation import common
from grpojax.translation.parts import (
  NOTHING,
  Theirs,
  Translation,
  also,
  differs,
  missing,
  setting,
  total,
)

LIBRARY = "TRL 1.16"

DEFAULTS: Mapping[str, Any] = {
  "model": None,
  "model_name_or_path": None,
  "dataset_name": None,
  "reward_funcs": None,
  "reward_weights": None,
  "multi_objective_aggregation": "sum_then_normalize",
  "run_name": None,
  "output_dir": None,
  "seed": 42,
  "num_generations": 8,
  "per_device_train_batch_size": 8,
  "gradient_accumulation_steps": 1,
  "generation_batch_size": None,
  "steps_per_generation": None,
  "num_iterations": 1,
  "max_steps": -1,
  "num_train_epochs": 3.0,
  "max_completion_length": 512,
  "max_prompt_length": None,
  "temperature": 1.0,
  "top_p": 1.0,
  "top_k": 0,
  "min_p": None,
  "repetition_penalty": 1.0,
  "chat_template_kwargs": None,
  "loss_type": "dapo",
  "importance_sampling_level": "token",
  "scale_rewards": "group",
  "epsilon": 0.2,
  "epsilon_high": None,
  "delta": None,
  "beta": 0.0,
  "use_bias_correction_kl": True,
  "sync_ref_model": False,
  "ref_model_mixup_alpha": 0.6,
  "ref_model_sync_steps": 512,
  "mask_truncated_completions": False,
  "off_policy_mask_threshold": None,
  "top_entropy_quantile": 1.0,
  "entropy_coef": 0.0,
  "entropy_coef_min": 0.0,
  "entropy_coef_max": 1.0,
  "entropy_coef_delta": 0.005,
  "use_adaptive_entropy": False,
  "entropy_target": 0.2,
  "sapo_temperature_pos": 1.0,
  "sapo_temperature_neg": 1.05,
  "vespo_k_pos": 2.0,
  "vespo_lambda_pos": 3.0,
  "vespo_k_neg": 3.0,
  "vespo_lambda_neg": 2.0,
  "use_vllm": False,
  "vllm_importance_sampling_correction": True,
  "vllm_importance_sampling_mode": "sequence_mask",
  "vllm_importance_sampling_clip_max": 3.0,
  "vllm_importance_sampling_clip_min": None,
  "optim": "adamw_torch_fused",
  "learning_rate": 1e-6,
  "lr_scheduler_type": "linear",
  "warmup_steps": 0,
  "warmup_ratio": None,
  "weight_decay": 0.0,
  "adam_beta1": 0.9,
  "adam_beta2": 0.999,
  "max_grad_norm": 1.0,
  "bf16": None,
  "fp16": False,
  "gradient_checkpointing": True,
  "use_peft": False,
  "lora_r": 16,
  "lora_alpha": 32,
  "lora_target_modules": None,
  "lora.r": None,
  "lora.lora_alpha": 8,
  "lora.target_modules": None,
  "logging_steps": 10,
  "save_steps": 500,
  "save_total_limit": None,
  "eval_strategy": "no",
  "eval_steps": None,
  "report_to": None,
  "log_completions": False,
}

IGNORED = {
  "shuffle_dataset": "prompts are always shuffled, each epoch anew",
  "remove_unused_columns": "rewards get all columns of the data",
  "disable_dropout": "models have no dropout here",
  "pad_to_multiple_of": "shapes are fixed: data.max_prompt_length and"
  " sampling.max_new_tokens",
  "cache_implementation": "there is one cache",
  "ds3_gather_for_generation": "weights are laid out anew for each rollout",
  "num_generations_eval": "evaluations are greedy: one completion a prompt",
  "adam_epsilon": "AdamW's epsilon is 1e-8",
  "gradient_checkpointing_kwargs": "see model.remat",
  "per_device_eval_batch_size": "eval.batch_size is of all devices",
  "do_train": "a program trains or evaluates",
  "do_eval": "accuracy is measured before, in between, and at the end",
  "logging_strategy": "every step is in metrics.jsonl",
  "logging_first_step": "every step is in metrics.jsonl",
  "save_strategy": "checkpoints are saved every checkpoint.every steps",
  "attn_implementation": "there is one, exact attention",
  "torch_dtype": "see model.dtype",
  "dtype": "see model.dtype",
  "trust_remote_code": "no code of a model's directory is ever run",
  "push_to_hub": "grpojax.export writes a directory to upload",
  "deepspeed": "mesh.fsdp and mesh.tensor shard parameters",
  "fsdp": "mesh.fsdp shards parameters",
  "generation_kwargs": "sampling.* has all there is",
  "tf32": "model.dtype says what is computed",
  "router_aux_loss_coef": "not translated",
  "entropy_coef_min": "it is 0 here",
  "dataloader_num_workers": "one thread reads ahead",
  "ddp_timeout": "there is no such limit",
}
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


def knows(name: str) -> bool:
  """Whether a name is TRL's."""
  return name in DEFAULTS or name in IGNORED or name.startswith("vllm_")


def translate(
  given: Mapping[str, Any], processes: int = 1, examples: int | None = None
) -> Translation:
  """The whole of a GRPOConfig.

  Args:
    given: its fields, and those of TRL's scripts (ScriptArguments, ModelConfig).
    processes: that TRL was started with: per_device_* counts for each.
    examples: of the training data, where epochs are to be counted.

  Raises:
    ValueError: values that TRL refuses, or that are none of its own.
  """
  theirs = Theirs(LIBRARY, given, DEFAULTS)
  updates, batch = _batch(theirs, processes)
  prompts = dict((s.name, s.value) for s in batch.settings)["batch_size"]
  steps = _steps_in_all(theirs, updates, prompts, examples)
  return total(
    _model(theirs),
    _data(theirs),
    _rewards(theirs),
    batch,
    _steps(theirs, updates, steps),
    _sampling(theirs),
    _loss(theirs),
    _kl(theirs, updates),
    _entropy(theirs),
    _mismatch(theirs),
    common.optimizer(theirs, _OPTIM),
    _warmup(theirs, updates * (steps or 100)),
    _unread(theirs),
  )


_OPTIM = common.OptimizerNames(
  "optim", "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm"
)


def _model(theirs: Theirs) -> Translation:
  name = "model" if theirs["model"] else "model_name_or_path"
  found = common.model(theirs, name)
  found += common.run_name(theirs, "run_name", theirs["output_dir"])
  if theirs["fp16"]:
    found += also("model.dtype", "bfloat16", theirs.said("fp16"))
    found += differs("fp16", "there is no float16: bfloat16 needs no scaling")
  elif theirs["bf16"] in (None, True):
    found += also("model.dtype", "bfloat16", theirs.said("bf16"))
  remat = "full" if theirs["gradient_checkpointing"] else "none"
  said = theirs.said("gradient_checkpointing")
  found += also("model.remat", remat, said)
  prefix = "lora." if theirs["lora.r"] else "lora_"
  if not (theirs["use_peft"] or theirs["lora.r"]):
    return found
  alpha = "lora.lora_alpha" if theirs["lora.r"] else "lora_alpha"
  return found + common.lora(
    theirs, f"{prefix}r", alpha, f"{prefix}target_modules"
  )


def _data(theirs: Theirs) -> Translation:
  found = common.data(theirs, "dataset_name")
  longest = theirs["max_prompt_length"]
  found += also(
    "data.max_prompt_length", longest or 512, theirs.said("max_prompt_length")
  )
  if not longest:
    found += differs(
      "max_prompt_length",
      "TRL has no limit; here prompts over data.max_prompt_length tokens are"
      " refused, or left out with data.too_long = 'drop'",
    )
  options = theirs["chat_template_kwargs"]
  for name, value in (options or {}).items():
    found += also(
      f"data.template_options.{name}", value, "chat_template_kwargs"
    )
  return found


def _rewards(theirs: Theirs) -> Translation:
  names, weights = theirs["reward_funcs"], theirs["reward_weights"]
  names = [names] if isinstance(names, str) else list(names or ())
  if not names:
    todo = "name your function: reward.functions = ('file.py:function',)"
    found = also("reward.functions", ("math_answer",))
    return found + missing("reward_funcs", f"not in the file; {todo}")
  models = [n for n in names if "/" in n]
  functions = tuple(_reward(n) for n in names if n not in models)
  found = also(
    "reward.functions", functions or ("math_answer",), "reward_funcs"
  )
  if models:
    found += also("reward.model", models[0], "reward_funcs")
    found += differs("reward_funcs", f"{models[0]!r}: a directory, by its path")
  for name in models[1:]:
    found += missing("reward_funcs", f"{name!r}: there is one reward model")
  of = dict(zip(names, weights or [1.0] * len(names), strict=False))
  kept = tuple(float(of.get(n, 1.0)) for n in names if n not in models)
  found += also("reward.weights", kept or (1.0,), theirs.said("reward_weights"))
  if models:
    found += also("reward.model_weight", float(of.get(models[0], 1.0)))
  first = functions[0] if functions else "math_answer"
  return found + differs(
    "reward_funcs", f"the first, {first}, says what evaluations count as right"
  )


def _reward(name: str) -> str:
  """A function's name here: those of TRL are run as they are."""
  if ":" in name:
    return name
  module, _, function = name.rpartition(".")
  return f"{module or 'trl.rewards'}:{function}"


def _batch(theirs: Theirs, processes: int) -> tuple[int, Translation]:
  """Optimizer updates a step, and the settings of batches."""
  size = theirs["num_generations"]
  micro = theirs["per_device_train_batch_size"] * processes
  cuts = theirs["gradient_accumulation_steps"]
  whole = theirs["generation_batch_size"]
  count = theirs["steps_per_generation"]
  if whole and count:
    raise ValueError(
      "generation_batch_size and steps_per_generation: TRL takes one of them"
    )
  samples = whole or micro * (count or cuts)
  if samples % size or samples % micro:
    raise ValueError(
      f"a generation of {samples} completions (per_device_train_batch_size,"
      " steps_per_generation, generation_batch_size and --processes="
      f"{processes}) must be a multiple of num_generations = {size} and of"
      f" {micro}, as TRL demands: say how many processes it ran on"
    )
  prompts, updates = samples // size, max(samples // (micro * cuts), 1)
  named = "generation_batch_size" if whole else "per_device_train_batch_size"
  said = theirs.said(named, "gradient_accumulation_steps")
  said += f", {processes} processes: {samples} completions a generation"
  found = also("batch_size", prompts, said)
  found += setting(theirs, "group_size", "num_generations")
  found += differs(
    named,
    f"batch_size counts prompts of all devices: {samples} completions ="
    f" {prompts} prompts x {size}; a step here is one generation with all of its"
    " updates",
  )
  if samples < micro * cuts:
    found += differs(
      "gradient_accumulation_steps",
      "TRL adds gradients of several generations up for one update; here each"
      " generation has one: batch_size = "
      f"{micro * cuts // size} makes the update as large",
    )
  minibatches = math.gcd(updates, prompts)
  if minibatches != updates:
    found += differs(
      "steps_per_generation",
      f"TRL makes {updates} updates a generation, which cut groups; minibatches"
      f" are whole groups here: {minibatches}",
    )
  found += also("optim.minibatches", minibatches, f"{updates} updates in TRL")
  found += setting(theirs, "optim.epochs", "num_iterations")
  micro = common.micro_batches(prompts // minibatches, size, cuts)
  said = theirs.said("gradient_accumulation_steps")
  found += also("optim.micro_batches", micro, said)
  return minibatches * theirs["num_iterations"], found


def _steps(
  theirs: Theirs, updates: int, total_steps: int | None
) -> Translation:
  names = ["max_steps" if theirs["max_steps"] > 0 else "num_train_epochs"]
  found = also("steps", total_steps or 100, theirs.said(*names))
  if total_steps is None:
    found += missing(
      "num_train_epochs",
      "epochs are steps here, and how many is not known without the data: give"
      " --examples=N, or max_steps",
    )
  if updates > 1:
    found += differs(
      names[0], f"TRL counts updates, {updates} of which are one step here"
    )

  def steps(name):
    value = theirs[name]
    if isinstance(value, float) and 0 < value < 1:  # a ratio of all
      return max(round(value * (total_steps or 100)), 1)
    return max(int(value) // updates, 1)

  for ours, name in (
    ("log.every", "logging_steps"),
    ("checkpoint.every", "save_steps"),
  ):
    found += also(ours, steps(name), theirs.said(name))
  if theirs["eval_strategy"] == "steps":
    name = "eval_steps" if theirs["eval_steps"] else "logging_steps"
    found += also("eval.every", steps(name), theirs.said(name))
  else:
    every = max((total_steps or 100) // 10, 1)
    found += also("eval.every", every, "ten times a run")
  if theirs["save_total_limit"]:
    found += setting(theirs, "checkpoint.keep", "save_total_limit")
  return found + common.trackers(theirs, "report_to")


def _steps_in_all(
  theirs: Theirs, updates: int, prompts: int, examples: int | None
) -> int | None:
  """Steps of the run; None where that depends on the data."""
  if theirs["max_steps"] > 0:
    return max(math.ceil(theirs["max_steps"] / updates), 1)
  if examples is None:
    return None
  return max(math.ceil(examples * theirs["num_train_epochs"] / prompts), 1)


def _sampling(theirs: Theirs) -> Translation:
  found = setting(theirs, "sampling.max_new_tokens", "max_completion_length")
  for name in ("temperature", "top_p", "repetition_penalty"):
    found += setting(theirs, f"sampling.{name}", name, float(theirs[name]))
  found += also(
    "sampling.top_k", max(theirs["top_k"] or 0, 0), theirs.said("top_k")
  )
  found += also("sampling.min_p", theirs["min_p"] or 0.0, theirs.said("min_p"))
  filters = ("top_p", "top_k", "min_p", "repetition_penalty")
  if any(theirs[n] not in (None, 0, 1.0) for n in filters):
    found += differs(
      "top_p, top_k, min_p, repetition_penalty",
      "the loss is of the distribution that was sampled from; TRL scores the"
      " policy without them",
    )
  return found


def _loss(theirs: Theirs) -> Translation:
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
  if kind == "grpo" and theirs["mask_truncated_completions"]:
    found += differs("loss_type", "TRL also counts completions masked whole")
  high = theirs["epsilon_high"]
  high = theirs["epsilon"] if high is None else high
  said = theirs.said("epsilon_high", "epsilon")
  if surrogate == "cispo":
    found += also("loss.cispo_max", max(float(high), 1.0), said)
    if high < 1:
      found += differs(
        "epsilon_high",
        f"with loss_type='cispo' it bounds the ratio itself, and {high} is below"
        " 1, where on-policy ratios are: 1 is taken (the paper has 5)",
      )
  else:
    found += setting(
      theirs, "loss.clip_low", "epsilon", float(theirs["epsilon"])
    )
    found += also("loss.clip_high", float(high), said)
  if theirs["delta"]:
    found += setting(theirs, "loss.dual_clip", "delta", float(theirs["delta"]))
  for name in DEFAULTS:
    if name.startswith(f"{surrogate}_") and surrogate in ("sapo", "vespo"):
      found += setting(theirs, f"loss.{name}", name, float(theirs[name]))
  if theirs["mask_truncated_completions"]:
    said = theirs.said("mask_truncated_completions")
    found += also("loss.truncated", "mask", said)
  return found + _advantage(theirs)


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
  if scale != "none":
    found += differs(
      "scale_rewards", "1e-6 is added to a deviation here, 1e-4 in TRL"
    )
  return found + differs(
    "scale_rewards",
    "grpojax's own default is advantage = 'leave_one_out', the unbiased gradient",
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
  return found + also("loss.old_logprobs", "scorer", "as TRL does with vLLM")


def _warmup(theirs: Theirs, updates: int) -> Translation:
  steps, ratio = theirs["warmup_steps"], theirs["warmup_ratio"]
  if isinstance(steps, float) and 0 < steps < 1:
    steps, ratio = 0, steps
  if ratio:
    steps = math.ceil(ratio * updates)
  said = theirs.said("warmup_ratio" if ratio else "warmup_steps")
  found = also("optim.warmup_steps", int(steps or 0), said)
  for ours, name in (("b1", "adam_beta1"), ("b2", "adam_beta2")):
    found += setting(theirs, f"optim.{ours}", name, float(theirs[name]))
  return found + setting(theirs, "seed", "seed")


def _unread(theirs: Theirs) -> Translation:
  """What the user's file has, and nothing here reads."""
  found = NOTHING
  for name in theirs.given:
    if name in IGNORED:
      found += missing(name, IGNORED[name])
    elif name not in DEFAULTS and name.startswith("vllm_"):
      found += missing(
        name, "there is no vLLM: sampling is part of the program"
      )
    elif name not in DEFAULTS:
      found += missing(name, "not known here")
  return found
