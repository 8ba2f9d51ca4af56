"""TRL's GRPOConfig as settings of ours: the table `TABLE`, below.

Names, defaults and meanings are those of TRL 1.16 (trl/trainer/grpo_config.py,
grpo_trainer.py, and the fields of its scripts) on transformers 5, whose
trainer.py and optimization.py do epochs and learning rates;
`grpojax/core/losses/README.md` says which numbers agree.
"""

import math
from typing import NamedTuple

from grpojax.translation import rules
from grpojax.translation.rules import (
  Differs,
  Items,
  Library,
  Missing,
  Rule,
  Setting,
  Theirs,
)


class Sizes(NamedTuple):
  """Sizes of batches in TRL and here, where a step is one generation."""

  prompts: int  # of a generation
  samples: int  # completions of a generation
  per_update: int  # completions of an optimizer update of TRL
  cuts: int  # updates that TRL cuts a generation into
  minibatches: int  # the same here, where groups stay whole
  updates: int  # optimizer updates of a step, over all epochs
  steps: int | None  # of the run; None where it depends on the data


def _sizes(theirs: Theirs) -> Sizes:
  """Sizes as TRL computes them; ValueError for those that it refuses."""
  group_size = theirs["num_generations"]
  micro_batch = theirs["per_device_train_batch_size"] * theirs.processes
  per_update = micro_batch * theirs["gradient_accumulation_steps"]
  whole, count = theirs["generation_batch_size"], theirs["steps_per_generation"]
  if whole and count:
    raise ValueError(
      "generation_batch_size and steps_per_generation: TRL takes one of them"
    )
  samples = whole or (micro_batch * count if count else per_update)
  once = theirs["num_iterations"] == 1
  if once and samples < per_update and per_update % samples == 0:
    # Generations of one policy, whose gradients add up: one of their sum.
    samples = per_update
  if samples % group_size or samples % micro_batch:
    raise ValueError(
      f"a generation of {samples} completions (per_device_train_batch_size,"
      " steps_per_generation, generation_batch_size and --processes="
      f"{theirs.processes}) must be a multiple of num_generations ="
      f" {group_size} and of {micro_batch}, as TRL demands: say how many"
      " processes it ran on"
    )
  prompts, cuts = samples // group_size, max(samples // per_update, 1)
  minibatches = math.gcd(cuts, prompts)
  updates = minibatches * theirs["num_iterations"]
  in_all = theirs["max_steps"] if theirs["max_steps"] > 0 else None
  if in_all is None and theirs.examples is not None:
    # RepeatSampler leaves out what does not fill a generation.
    an_epoch = max(theirs.examples // prompts * updates, 1)
    in_all = math.ceil(theirs["num_train_epochs"] * an_epoch)
  steps = None if in_all is None else max(math.ceil(in_all / updates), 1)
  return Sizes(prompts, samples, per_update, cuts, minibatches, updates, steps)


def _batch(theirs: Theirs, name: str) -> Items:
  sizes, group_size = _sizes(theirs), theirs["num_generations"]
  name = "generation_batch_size" if theirs["generation_batch_size"] else name
  comment = theirs.comment(name, "gradient_accumulation_steps")
  comment += f", --processes={theirs.processes}: "
  comment += f"{sizes.samples} completions a generation"
  yield Setting("batch_size", sizes.prompts, comment)
  yield Differs(
    name,
    f"batch_size counts prompts of all devices: {sizes.samples} completions ="
    f" {sizes.prompts} prompts x {group_size}; a step here is one generation"
    " with all of its updates",
  )


def _minibatches(theirs: Theirs, name: str) -> Items:
  sizes = _sizes(theirs)
  if sizes.minibatches != sizes.cuts:
    yield Differs(
      name,
      f"TRL makes {sizes.cuts} updates a generation, which cut groups;"
      f" minibatches are whole groups here: {sizes.minibatches}",
    )
  comment = f"updates a generation: {sizes.cuts}"
  yield Setting("optim.minibatches", sizes.minibatches, comment)


def _micro_batches(theirs: Theirs, name: str) -> Items:
  sizes, group_size = _sizes(theirs), theirs["num_generations"]
  if sizes.samples < sizes.per_update:
    yield Differs(
      name,
      "TRL adds gradients of several generations up for one update; here each"
      " generation has one: batch_size = "
      f"{sizes.per_update // group_size} makes the update as large",
    )
  prompts = sizes.prompts // sizes.minibatches
  count = rules.micro_batches(prompts, group_size, theirs[name])
  yield theirs.setting("optim.micro_batches", count, name)


def _steps(theirs: Theirs, name: str) -> Items:
  sizes = _sizes(theirs)
  name = name if theirs["max_steps"] > 0 else "num_train_epochs"
  yield theirs.setting("steps", sizes.steps or 100, name)
  if sizes.steps is None:
    yield rules.unknown_steps("num_train_epochs", "max_steps")
  if sizes.updates > 1:
    yield Differs(
      name, f"TRL counts updates, {sizes.updates} of which are one step here"
    )


def _every(theirs: Theirs, name: str) -> int:
  """A number of updates, or a share of them all, in steps."""
  sizes, value = _sizes(theirs), theirs[name]
  if isinstance(value, float) and 0 < value < 1:
    return max(round(value * (sizes.steps or 100)), 1)
  return max(int(value) // sizes.updates, 1)


def _evaluations(theirs: Theirs, name: str) -> Items:
  if theirs[name] == "steps":
    name = "eval_steps" if theirs["eval_steps"] else "logging_steps"
    yield theirs.setting("eval.every", _every(theirs, name), name)
  else:
    every = max((_sizes(theirs).steps or 100) // 10, 1)
    yield Setting("eval.every", every, "ten times a run")


def _dtype(theirs: Theirs, name: str) -> Items:
  if theirs["fp16"] or theirs[name] is not False:
    name = "fp16" if theirs["fp16"] else name
    yield theirs.setting("model.dtype", "bfloat16", name)


def _model(theirs: Theirs, name: str) -> Items:
  return rules.model(theirs, "model" if theirs["model"] else name)


def _lora(theirs: Theirs, name: str) -> Items:
  """LoraConfig of a script, or the fields of TRL's own scripts."""
  if theirs["lora.r"]:
    names = ("lora.r", "lora.lora_alpha", "lora.target_modules")
  elif theirs[name]:
    names = ("lora_r", "lora_alpha", "lora_target_modules")
  else:
    return
  rank, alpha, targets = names
  yield from rules.lora(theirs, rank=rank, alpha=alpha, targets=targets)


def _max_prompt_length(theirs: Theirs, name: str) -> Items:
  yield theirs.setting("data.max_prompt_length", theirs[name] or 512, name)
  if not theirs[name]:
    yield Differs(
      name,
      "TRL has no limit; here prompts over data.max_prompt_length tokens are"
      " refused, or left out with data.too_long = 'drop'",
    )


def _rewards(theirs: Theirs, name: str) -> Items:
  names, weights = theirs[name], theirs["reward_weights"]
  names = [names] if isinstance(names, str) else list(names or ())
  if not names:
    yield Setting("reward.functions", ("math_answer",))
    yield Missing(
      name,
      "not in the file; name your function: reward.functions ="
      " ('file.py:function',)",
    )
    return
  weight_of = dict(zip(names, weights or [1.0] * len(names), strict=False))
  models = [one for one in names if "/" in one and ":" not in one]
  ours = {
    one if ":" in one else _qualified(one): float(weight_of.get(one, 1.0))
    for one in names
    if one not in models
  } or {"math_answer": 1.0}
  yield Setting("reward.functions", tuple(ours), name)
  yield theirs.setting("reward.weights", tuple(ours.values()), "reward_weights")
  for model in models[:1]:
    yield Setting("reward.model", model, name)
    yield Setting("reward.model_weight", float(weight_of.get(model, 1.0)))
    yield Differs(name, f"{model!r}: a directory, by its path")
  for model in models[1:]:
    yield Missing(name, f"{model!r}: there is one reward model")
  yield Differs(
    name,
    f"the first, {next(iter(ours))}, says what evaluations count as right",
  )


def _qualified(name: str) -> str:
  """TRL's reward functions run as they are: "f" is "trl.rewards:f" here."""
  module, _, function = name.rpartition(".")
  return f"{module or 'trl.rewards'}:{function}"


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


def _loss(theirs: Theirs, name: str) -> Items:
  kind, level = theirs[name], theirs["importance_sampling_level"]
  if kind not in _LOSSES:
    raise ValueError(f"{name} = {kind!r}: use one of {', '.join(_LOSSES)}")
  surrogate, weighting, ratio = _LOSSES[kind]
  if ratio is None and level not in ("token", "sequence"):
    raise ValueError(
      f"importance_sampling_level = {level!r}: token or sequence"
    )
  ratio = ratio or f"{level}_ratio"
  yield theirs.setting("loss.surrogate", surrogate, name)
  yield theirs.setting("loss.weighting", weighting, name)
  yield theirs.setting("loss.ratio", ratio, "importance_sampling_level")
  if kind == "bnpo":
    yield Differs(
      name, "'bnpo' means over a micro-batch; here over the whole batch"
    )
  if weighting != "token_mean" and theirs["mask_truncated_completions"]:
    yield Differs(name, "TRL also counts completions masked whole")
  if kind in ("dapo", "cispo", "vespo") and _sizes(theirs).minibatches > 1:
    yield Differs(
      name,
      "TRL divides by the mean number of tokens of a generation's updates; here"
      " by the update's own",
    )


def _bounds(theirs: Theirs, name: str) -> Items:
  low, high = theirs[name], theirs["epsilon_high"]
  high = float(low if high is None else high)
  comment = theirs.comment("epsilon_high", name)
  if theirs["loss_type"] != "cispo":
    yield theirs.setting("loss.clip_low", low, name)
    yield Setting("loss.clip_high", high, comment)
    return
  yield Setting("loss.cispo_max", max(high, 1.0), comment)
  if high < 1:
    yield Differs(
      "epsilon_high",
      f"with loss_type='cispo' it bounds the ratio itself, and {high} is"
      " below 1, where on-policy ratios are: 1 is taken (the paper has 5)",
    )


def _of_loss_type(theirs: Theirs, name: str) -> Items:
  """Settings that begin with the name of the loss that they are of."""
  if theirs["loss_type"] == name.partition("_")[0]:
    yield theirs.setting(f"loss.{name}", theirs[name], name)


def _advantage(theirs: Theirs, name: str) -> Items:
  scale = {True: "group", False: "none"}.get(theirs[name], theirs[name])
  advantages = {"group": "grpo", "batch": "batch_std", "none": "dr_grpo"}
  if scale not in advantages:
    raise ValueError(f"{name} = {scale!r}: use one of {', '.join(advantages)}")
  aggregation = "multi_objective_aggregation"
  if theirs[aggregation] == "normalize_then_sum":
    yield Setting("advantage", "batch_std", aggregation)
  else:
    yield theirs.setting("advantage", advantages[scale], name)
    if scale == "batch":
      yield Differs(
        name,
        "'batch' divides by the deviation of all rewards in TRL; here by that"
        " of rewards less their group's mean, which is smaller: advantages are"
        " larger",
      )
  if scale != "none":
    yield Differs(name, "1e-6 is added to a deviation here, 1e-4 in TRL")
  yield rules.own_advantage(name)


def _kl(theirs: Theirs, name: str) -> Items:
  yield theirs.setting("loss.beta", theirs[name], name)
  if not theirs[name]:
    if theirs["sync_ref_model"]:
      yield Missing("sync_ref_model", "there is no reference where beta is 0")
    return
  by_ratio = theirs["use_bias_correction_kl"]
  placement = "ratio" if by_ratio else "loss"
  yield Setting("loss.kl", "k3")
  yield theirs.setting("loss.kl_placement", placement, "use_bias_correction_kl")
  if by_ratio and theirs["importance_sampling_level"] == "sequence":
    yield Differs(
      "use_bias_correction_kl", "TRL multiplies by the sequence's ratio here"
    )
  if theirs["sync_ref_model"]:
    every, mix = "ref_model_sync_steps", "ref_model_mixup_alpha"
    yield theirs.setting("model.reference_every", _every(theirs, every), every)
    yield theirs.setting("model.reference_mix", theirs[mix], mix)
    if _sizes(theirs).updates > 1:
      yield Differs(every, "TRL counts optimizer updates")


def _adaptive_entropy(theirs: Theirs, name: str) -> Items:
  if theirs["use_adaptive_entropy"]:
    yield theirs.setting(f"loss.{name}", theirs[name], name)


def _vllm(theirs: Theirs, name: str) -> Items:
  """Corrections for a sampler that is not the policy."""
  if not theirs[name]:
    return
  yield Missing(name, "sampling is a part of the program, on the same devices")
  prefix = "vllm_importance_sampling"
  if theirs[f"{prefix}_correction"]:
    for ours, one in (
      ("correction", "mode"),
      ("correction_low", "clip_min"),
      ("correction_high", "clip_max"),
    ):
      value = theirs[f"{prefix}_{one}"] or 0.0
      yield theirs.setting(f"loss.{ours}", value, f"{prefix}_{one}")
    yield Setting("loss.old_logprobs", "trainer", "as TRL does with vLLM")


def _warmup(theirs: Theirs, name: str) -> Items:
  count, ratio = theirs[name], theirs["warmup_ratio"]
  if isinstance(count, float) and 0 < count < 1:
    count, ratio = 0, count
  if ratio and not count:
    sizes = _sizes(theirs)
    count = math.ceil(ratio * (sizes.updates * (sizes.steps or 100)))
  count = int(count or 0)
  constant = theirs["lr_scheduler_type"] == "constant"
  yield theirs.setting(
    "optim.warmup_steps",
    0 if constant else count,
    "warmup_ratio" if ratio else name,
  )
  if count and constant:
    yield Differs(
      "lr_scheduler_type",
      "'constant' has no warm-up in TRL, whatever warmup_steps is;"
      f" optim.warmup_steps = {count} would be constant_with_warmup",
    )
  elif count:
    yield Differs(
      name,
      "TRL's first update is at a rate of 0, and changes nothing; here it is at"
      f" 1/{count + 1} of learning_rate, and the rate rises by as much with"
      " each update",
    )


TABLE = {
  # Model, data and rewards.
  "model": Rule(),
  "model_name_or_path": Rule(None, _model),
  "run_name": Rule(None, rules.run_name),
  "output_dir": Rule(),
  "bf16": Rule(None, _dtype),
  "fp16": Rule(False, differs="there is no float16: bfloat16 needs no scaling"),
  "gradient_checkpointing": Rule(True, "model.remat", rules.REMAT),
  "use_peft": Rule(False, _lora),
  "lora_r": Rule(16),
  "lora_alpha": Rule(32),
  "lora_target_modules": Rule(),
  "lora.r": Rule(),
  "lora.lora_alpha": Rule(8),
  "lora.target_modules": Rule(),
  "dataset_name": Rule(None, rules.data),
  "max_prompt_length": Rule(None, _max_prompt_length),
  "chat_template_kwargs": Rule(None, rules.template_options),
  "reward_funcs": Rule(None, _rewards),
  "reward_weights": Rule(),
  # Batches and length of the run.
  "seed": Rule(42, "seed"),
  "num_generations": Rule(8, "group_size"),
  "per_device_train_batch_size": Rule(8, _batch),
  "generation_batch_size": Rule(),
  "steps_per_generation": Rule(None, _minibatches),
  "num_iterations": Rule(1, "optim.epochs"),
  "gradient_accumulation_steps": Rule(1, _micro_batches),
  "max_steps": Rule(-1, _steps),
  "num_train_epochs": Rule(3.0),
  "logging_steps": Rule(10, "log.every", _every),
  "save_steps": Rule(500, "checkpoint.every", _every),
  "save_total_limit": Rule(None, "checkpoint.keep", rules.none_for_0),
  "eval_strategy": Rule("no", _evaluations),
  "eval_steps": Rule(),
  "report_to": Rule(None, rules.trackers),
  "log_completions": Rule(False),
  # Sampling.
  "max_completion_length": Rule(512, "sampling.max_new_tokens"),
  "temperature": Rule(1.0, "sampling.temperature"),
  "top_p": Rule(1.0, rules.sampling_filter),
  "top_k": Rule(0, rules.sampling_filter),
  "min_p": Rule(None, rules.sampling_filter),
  "repetition_penalty": Rule(1.0, rules.sampling_filter),
  # Advantages and loss.
  "scale_rewards": Rule("group", _advantage),
  "multi_objective_aggregation": Rule(
    "sum_then_normalize", "reward.aggregation"
  ),
  "loss_type": Rule("dapo", _loss),
  "importance_sampling_level": Rule("token"),
  "epsilon": Rule(0.2, _bounds),
  "epsilon_high": Rule(),
  "delta": Rule(None, "loss.dual_clip", rules.none_for_0),
  "sapo_temperature_pos": Rule(1.0, _of_loss_type),
  "sapo_temperature_neg": Rule(1.05, _of_loss_type),
  "vespo_k_pos": Rule(2.0, _of_loss_type),
  "vespo_lambda_pos": Rule(3.0, _of_loss_type),
  "vespo_k_neg": Rule(3.0, _of_loss_type),
  "vespo_lambda_neg": Rule(2.0, _of_loss_type),
  "mask_truncated_completions": Rule(
    False, "loss.truncated", {True: "mask", False: None}
  ),
  "beta": Rule(0.0, _kl),
  "use_bias_correction_kl": Rule(True),
  "sync_ref_model": Rule(False),
  "ref_model_sync_steps": Rule(512),
  "ref_model_mixup_alpha": Rule(0.6),
  "router_aux_loss_coef": Rule(None, "loss.router_aux_coef", rules.none_for_0),
  "top_entropy_quantile": Rule(1.0, "loss.top_entropy_quantile"),
  "entropy_coef": Rule(0.0, "loss.entropy_coef"),
  "entropy_coef_max": Rule(1.0, _adaptive_entropy),
  "entropy_coef_delta": Rule(0.005, _adaptive_entropy),
  "entropy_target": Rule(0.2, _adaptive_entropy),
  "use_adaptive_entropy": Rule(False),
  "off_policy_mask_threshold": Rule(
    None, "loss.off_policy_threshold", rules.none_for_0
  ),
  "use_vllm": Rule(False, _vllm),
  "vllm_importance_sampling_correction": Rule(True),
  "vllm_importance_sampling_mode": Rule("sequence_mask"),
  "vllm_importance_sampling_clip_min": Rule(),
  "vllm_importance_sampling_clip_max": Rule(3.0),
  # Optimizer.
  "optim": Rule("adamw_torch_fused", rules.optimizer),
  "learning_rate": Rule(1e-6, "optim.learning_rate"),
  "lr_scheduler_type": Rule("linear", rules.schedule),
  "warmup_steps": Rule(0, _warmup),
  "warmup_ratio": Rule(),
  "weight_decay": Rule(
    0.0,
    "optim.weight_decay",
    differs="TRL leaves norms and biases out; here all parameters",
  ),
  "adam_beta1": Rule(0.9, "optim.b1"),
  "adam_beta2": Rule(0.999, "optim.b2"),
  "max_grad_norm": Rule(1.0, "optim.max_grad_norm", rules.max_grad_norm),
}

IGNORED = {
  "": "chat_template_kwargs.*",
  "there is no vLLM: sampling is part of the program": "vllm_*",
  "prompts are always shuffled, each epoch anew": "shuffle_dataset",
  "rewards get all columns of the data": "remove_unused_columns",
  "models have no dropout here": "disable_dropout",
  "shapes are fixed: data.max_prompt_length and sampling.max_new_tokens": (
    "pad_to_multiple_of"
  ),
  "evaluations are greedy: one completion a prompt": "num_generations_eval",
  "AdamW's epsilon is 1e-8": "adam_epsilon",
  "see model.remat": "gradient_checkpointing_kwargs*",
  "eval.batch_size is of all devices": "per_device_eval_batch_size",
  "accuracy is measured before, in between, and at the end": "do_train do_eval",
  "metrics have a row for every step": "logging_strategy logging_first_step",
  "checkpoints are saved every checkpoint.every steps": "save_strategy",
  "there is one, exact attention": "attn_implementation cache_implementation",
  "see model.dtype": "dtype torch_dtype model_init_kwargs* tf32",
  "no code of a model's directory is ever run": "trust_remote_code",
  "grpojax.export writes a directory to upload": "push_to_hub",
  "mesh.fsdp and mesh.tensor shard parameters": "deepspeed fsdp ds3_gather_*",
  "sampling.* has all there is": "generation_kwargs*",
  "it is 0 here": "entropy_coef_min",
  "nothing here does that": "dataloader_num_workers ddp_timeout",
}

LIBRARY = Library("TRL 1.16", TABLE, IGNORED)
