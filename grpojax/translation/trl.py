"""Translates TRL's GRPOConfig by `TABLE`.

Sources: TRL 1.16 (trl/trainer/grpo_config.py, grpo_trainer.py and its scripts)
and, for epochs and learning rates, transformers 5 (trainer.py,
optimization.py). `grpojax/core/losses/README.md` lists which numbers agree.
"""

import math
from collections.abc import Collection
from typing import Any

from grpojax.translation import rules
from grpojax.translation.rules import Items, Note, Origin, Row, Setting


def _sizes(origin: Origin) -> rules.Sizes:
  """Computes batch sizes like TRL; ValueError for sizes TRL refuses."""
  group_size = origin["num_generations"]
  micro_batch = origin["per_device_train_batch_size"] * origin.processes
  per_update = micro_batch * origin["gradient_accumulation_steps"]
  whole = origin["generation_batch_size"]
  count = origin["steps_per_generation"]
  if whole and count:
    names = "generation_batch_size and steps_per_generation"
    raise ValueError(f"{names}: TRL accepts only one of them")
  samples = whole or (micro_batch * count if count else per_update)
  # An update over several generations is one larger generation here.
  samples = max(samples, per_update)
  if samples % group_size or samples % micro_batch:
    raise ValueError(
      f"a generation of {samples} completions on --processes="
      f"{origin.processes} must be a multiple of num_generations = {group_size}"
      f" and of {micro_batch}: change --processes or the sizes"
    )
  prompts = samples // group_size
  updates_per_generation = samples // per_update
  minibatches = math.gcd(updates_per_generation, prompts)
  updates = minibatches * origin["num_iterations"]
  total = origin["max_steps"] if origin["max_steps"] > 0 else None
  if total is None and origin.examples is not None:
    # RepeatSampler drops examples that do not fill a generation.
    per_epoch = max(origin.examples // prompts * updates, 1)
    total = math.ceil(origin["num_train_epochs"] * per_epoch)
  steps = None if total is None else max(math.ceil(total / updates), 1)
  return rules.Sizes(
    group_size, prompts, updates_per_generation, minibatches, updates, steps
  )


def _batch(origin: Origin, name: str) -> Items:
  sizes = origin.sizes
  name = "generation_batch_size" if origin["generation_batch_size"] else name
  comment = origin.comment(name, "gradient_accumulation_steps")
  comment += f", --processes={origin.processes}: "
  comment += f"{sizes.prompts * sizes.group_size} completions per generation"
  yield Setting("batch_size", sizes.prompts, comment)
  comment = f"updates per generation: {sizes.updates_per_generation}"
  yield Setting("optim.minibatches", sizes.minibatches, comment)
  if sizes.minibatches != sizes.updates_per_generation:
    text = (
      f"TRL splits groups over {sizes.updates_per_generation} updates, but here"
    )
    text += f" {sizes.minibatches} minibatches have whole groups"
    yield Note(name, text)


def _steps(origin: Origin, name: str) -> Items:
  limited = origin[name] > 0
  yield from rules.steps(origin, name, "num_train_epochs", limited)
  updates = origin.sizes.updates
  if updates > 1:
    text = f"a step here is {updates} optimizer updates, which are steps in TRL"
    yield Note(name if limited else "num_train_epochs", text)


def _every(value: Any, origin: Origin) -> int | None:
  """Converts an interval, a number or share of updates, to steps."""
  sizes = origin.sizes
  if value is None:
    return None
  if isinstance(value, float) and 0 < value < 1:
    return max(round(value * (sizes.steps or 100)), 1)
  return max(int(value) // sizes.updates, 1)


def _rewards(origin: Origin, name: str) -> Items:
  names = rules.as_list(origin[name])
  environment = origin["environment_factory"]
  flag = "reward.functions=FILE.py:FUNCTION"
  if name in origin.unread:  # else the default reward would be used
    names = ["FILE.py:FUNCTION"]
    yield Note(name, "set your functions", missing=True, flag=flag)
  elif not (names or environment):
    yield Setting("reward.functions", ("math_answer",))
    yield Note(name, "not in the file: set yours", missing=True, flag=flag)
    return
  weights = origin["reward_weights"] or [1.0] * len(names)
  if len(weights) != len(names) and name not in origin.unread:
    raise ValueError(f"reward_weights: TRL needs a weight for each of {name}")
  functions = {}
  for function, weight in zip(names, weights, strict=False):
    if "/" in function and ":" not in function:  # a model on the Hub
      yield Setting("reward.model", function, name)
      yield Setting("reward.model_weight", float(weight))
      yield Note(name, f"{function!r}: set the directory of a single model")
      continue
    module, _, local = function.rpartition(".")
    if ":" not in function:
      function = f"{module or 'trl.rewards'}:{local}"
    functions[function] = float(weight)
  if environment:
    functions["environment"] = 1.0
  functions = functions or {"math_answer": 1.0}
  if any(function.startswith("trl.") for function in functions):
    yield Note(name, "TRL's functions need PyTorch: pip install trl")
  yield Setting("reward.functions", tuple(functions), name)
  weights = tuple(functions.values())
  yield origin.setting("reward.weights", weights, "reward_weights")


_SPLITS = {
  "configuration": "dataset_config",
  "train_split": "dataset_train_split",
  "test_split": "dataset_test_split",
}


def _data(origin: Origin, name: str) -> Items:
  by_files = bool(origin["data_files"])
  yield from rules.data(origin, "data_files" if by_files else name)
  if origin["reward_funcs"]:
    yield Setting("data.options.answer", "", "reward_funcs read any column")
  held_out = "eval_data_files"
  if origin[held_out]:
    path = yield from rules.first_file(held_out, origin[held_out])
    yield origin.setting("data.options.test", path, held_out)
  elif origin["test_size"]:
    yield origin.setting("data.options.test", origin["test_size"], "test_size")
  elif by_files:
    yield Setting("data.options.test", 0.05, "no test split: holds out 5%")
  for ours, key in _SPLITS.items() if not by_files else ():
    base, _, part = str(origin[key] or "").partition("[")
    if base and base != ours.removesuffix("_split"):
      yield origin.setting(f"data.options.{ours}", base, key)
    if part:
      text = "the whole split is read; data.options.size = N reads N rows"
      yield Note(key, f"{origin[key]!r}: {text}")


def _alpha(value: int | float, origin: Origin) -> float:
  """Returns LoRA's alpha, times sqrt(rank) for rank-stabilised adapters."""
  scale = math.sqrt(origin["lora_r"]) if origin["use_rslora"] else 1.0
  return float(value * scale)


_LOSSES = {  # (surrogate, weighting, ratio)
  "grpo": ("clipped", "sequence_mean", None),
  "bnpo": ("clipped", "token_mean", None),
  "dapo": ("clipped", "token_mean", None),
  "dr_grpo": ("clipped", "fixed_length", None),
  "cispo": ("cispo", "token_mean", None),
  "sapo": ("sapo", "sequence_mean", None),
  "luspo": ("clipped", "sequence_sum", "sequence_ratio"),
  "vespo": ("vespo", "token_mean", "trajectory_ratio"),
}


def _one_of(choices: Collection[str], name: str, value: Any) -> Any:
  if value not in choices:
    raise ValueError(f"{name} = {value!r}: use one of {', '.join(choices)}")
  return value


def _loss(origin: Origin, name: str) -> Items:
  kind = _one_of(_LOSSES, name, origin[name])
  level = _one_of(("token", "sequence"), _LEVEL, origin[_LEVEL])
  surrogate, weighting, ratio = _LOSSES[kind]
  yield origin.setting("loss.surrogate", surrogate, name)
  yield origin.setting("loss.weighting", weighting, name)
  yield origin.setting("loss.ratio", ratio or f"{level}_ratio", _LEVEL)
  if weighting != "token_mean" and origin["mask_truncated_completions"]:
    yield Note(name, "TRL's mean also counts fully masked completions")
  if kind in ("dapo", "cispo", "vespo") and origin.sizes.minibatches > 1:
    text = "divides by the update's number of tokens, in TRL by the mean number"
    yield Note(name, f"{text} per update")


def _bounds(origin: Origin, name: str) -> Items:
  low = origin[name]
  high = origin["epsilon_high"]
  high = float(low if high is None else high)
  comment = origin.comment("epsilon_high", name)
  if origin["loss_type"] != "cispo":
    yield origin.setting("loss.clip_low", low, name)
    yield Setting("loss.clip_high", high, comment)
    return
  yield Setting("loss.cispo_max", max(high, 1.0), comment)
  if high < 1:
    text = f"bounds the ratio itself in cispo: 1 is used instead of {high}"
    yield Note("epsilon_high", f"{text} (the paper has 5)")


def _advantage(origin: Origin, name: str) -> Items:
  scale = {True: "group", False: "none"}.get(origin[name], origin[name])
  advantages = {"group": "grpo", "batch": "batch_std", "none": "dr_grpo"}
  _one_of(advantages, name, scale)
  if origin["multi_objective_aggregation"] == "normalize_then_sum":
    yield Setting("advantage", "batch_std", "multi_objective_aggregation")
    return
  yield origin.setting("advantage", advantages[scale], name)
  if scale == "batch":
    text = "divides by the standard deviation of rewards minus their group's"
    text += " mean; TRL divides by the larger standard deviation of all rewards"
    yield Note(name, text)


def _warmup(origin: Origin, name: str) -> Items:
  count = origin[name]
  ratio = origin["warmup_ratio"] or 0.0
  if 0 < count < 1:
    count, ratio = 0, count
  if not count:
    sizes = origin.sizes
    count = math.ceil(ratio * (sizes.updates * (sizes.steps or 100)))
  constant = origin["lr_scheduler_type"] == "constant"
  steps = 0 if constant else int(count)
  source = "warmup_ratio" if ratio else name
  yield origin.setting("optim.warmup_steps", steps, source)
  if count and constant:
    text = "no warmup, because 'constant' ignores warmup_steps in TRL"
    yield Note("lr_scheduler_type", text)
  elif count:
    text = "the first update's rate is 0 in TRL, but here learning_rate /"
    yield Note(name, f"{text} {count + 1}; both rise linearly")


_STOP = ("generation_kwargs.stop", "generation_kwargs.stop_strings")


def _generation_kwargs(origin: Origin, name: str) -> Items:
  """Yields a note on sampler options without a counterpart in grpojax."""
  below = {x for x in origin.values if x.startswith(f"{name}.")}
  if origin[name] or below - {*_STOP}:
    text = "only stop and stop_strings are known; see sampling.*"
    yield Note(name, text, missing=True)


_LEVEL = "importance_sampling_level"
_SEQUENCE_RATIO = "TRL multiplies the KL term by the sequence's ratio"
_CORRECTION = "vllm_importance_sampling"
_VLLM = ("use_vllm", f"{_CORRECTION}_correction")
_SYNC = ("beta", "sync_ref_model")
_NOT_QUANTISED = "weights are not quantised here (model.dtype = 'bfloat16')"

_READ_ELSEWHERE = (
  "model output_dir dataset_config data_files eval_data_files test_size"
  " reward_weights generation_batch_size steps_per_generation epsilon_high"
  " warmup_ratio"
).split()
TABLE = {
  **dict.fromkeys(_READ_ELSEWHERE, Row()),
  # Model, data and rewards
  "model_name_or_path": Row(
    None, lambda t, name: rules.model(t, "model" if t["model"] else name)
  ),
  "run_name": Row(None, rules.run_name),
  "bf16": Row(True, "model.dtype", {True: "bfloat16", False: None}),
  "fp16": Row(False, note="float16 is not available: bfloat16 is used"),
  "gradient_checkpointing": Row(True, "model.remat", rules.REMAT),
  "use_peft": Row(False),
  "lora_r": Row(16, "lora.rank", when=["use_peft"]),
  "lora_alpha": Row(32, "lora.alpha", _alpha, when=["use_peft"]),
  "use_rslora": Row(False),
  "use_dora": Row(False, missing="adapters have no magnitudes"),
  "lora_dropout": Row(0.0, missing="adapters have no dropout"),
  "lora_modules_to_save": Row(missing="only adapters are trained"),
  "rank_pattern": Row(missing="lora.rank is the same for all adapters"),
  "alpha_pattern": Row(missing="lora.alpha is the same for all adapters"),
  "quantization_config": Row(missing=_NOT_QUANTISED),
  "load_in_4bit": Row(False, missing=_NOT_QUANTISED),
  "load_in_8bit": Row(False, missing=_NOT_QUANTISED),
  "lora_target_modules": Row(None, rules.lora_targets),
  "dataset_name": Row(None, _data),
  "dataset_train_split": Row("train"),
  "dataset_test_split": Row("test"),
  "max_prompt_length": Row(
    None,
    "data.max_prompt_length",
    note="longer prompts are refused, or dropped by data.too_long = 'drop'",
  ),
  "chat_template_kwargs": Row(None, rules.template_options),
  "reward_funcs": Row(None, _rewards),
  "tools": Row(None, "environment.tools", note=f"{rules.TOOLS}; {rules.TURNS}"),
  "environment_factory": Row(
    None,
    "environment.path",
    lambda x, t: "FILE.py:CLASS" if "environment_factory" in t.unread else x,
    note=f"its get_reward is the reward `environment`; {rules.TURNS}",
  ),
  "max_tool_calling_iterations": Row(  # TRL does not count the first turn
    None,
    "environment.max_turns",
    lambda x, _: None if x is None else max(x, 0) + 1,
  ),
  "rollout_func": Row(note=rules.ENVIRONMENT),
  # Batches and length of the run
  "seed": Row(42, "seed"),
  "num_generations": Row(8, "group_size"),
  "per_device_train_batch_size": Row(8, _batch),
  "num_iterations": Row(1, "optim.epochs"),
  "gradient_accumulation_steps": Row(
    1, "optim.micro_batches", rules.micro_batches
  ),
  "max_steps": Row(-1, _steps),
  "num_train_epochs": Row(3.0),
  "logging_steps": Row(10, "log.every", _every),
  "save_steps": Row(500, "checkpoint.every", _every),
  "save_total_limit": Row(None, "checkpoint.keep", rules.none_for_0),
  "eval_steps": Row(None, "eval.every", _every),
  "report_to": Row(None, rules.trackers),
  # Sampling
  "max_completion_length": Row(512, "sampling.max_new_tokens"),
  "temperature": Row(1.0, "sampling.temperature"),
  "top_p": Row(1.0, "sampling.top_p", note=rules.SAMPLED),
  "top_k": Row(0, "sampling.top_k", rules.filter_size, rules.SAMPLED),
  "min_p": Row(None, "sampling.min_p", rules.filter_size, rules.SAMPLED),
  "repetition_penalty": Row(1.0, missing=rules.NO_REPETITION_PENALTY),
  "generation_kwargs": Row(None, _generation_kwargs),
  **dict.fromkeys(_STOP, Row(None, rules.stop_strings)),
  # Advantages and loss
  "scale_rewards": Row("group", _advantage),
  "multi_objective_aggregation": Row(
    "sum_then_normalize", "reward.aggregation"
  ),
  "loss_type": Row(
    "dapo",
    _loss,
    note={"bnpo": "the mean is over the batch, in TRL over a micro-batch"},
  ),
  "importance_sampling_level": Row("token"),
  "epsilon": Row(0.2, _bounds),
  "delta": Row(None, "loss.dual_clip", rules.none_for_0),
  "sapo_temperature_pos": Row(1.0, "loss.sapo_temperature_pos"),
  "sapo_temperature_neg": Row(1.05, "loss.sapo_temperature_neg"),
  "vespo_k_pos": Row(2.0, "loss.vespo_k_pos"),
  "vespo_lambda_pos": Row(3.0, "loss.vespo_lambda_pos"),
  "vespo_k_neg": Row(3.0, "loss.vespo_k_neg"),
  "vespo_lambda_neg": Row(2.0, "loss.vespo_lambda_neg"),
  "mask_truncated_completions": Row(
    False, "loss.truncated", {True: "mask", False: None}
  ),
  "beta": Row(0.0, "loss.beta"),
  "use_bias_correction_kl": Row(
    True,
    "loss.kl_placement",
    lambda x, _: "ratio" if x else "loss",
    lambda x, t: x and t[_LEVEL] == "sequence" and _SEQUENCE_RATIO,
    when=["beta"],
  ),
  "sync_ref_model": Row(False),
  "ref_model_sync_steps": Row(512, "model.reference_every", _every, when=_SYNC),
  "ref_model_mixup_alpha": Row(0.6, "model.reference_mix", when=_SYNC),
  "router_aux_loss_coef": Row(None, "loss.router_aux_coef", rules.none_for_0),
  "top_entropy_quantile": Row(1.0, "loss.top_entropy_quantile"),
  "entropy_coef": Row(0.0, "loss.entropy_coef"),
  "entropy_coef_max": Row(1.0, "loss.entropy_coef_max"),
  "entropy_coef_delta": Row(0.005, "loss.entropy_coef_delta"),
  "entropy_target": Row(
    0.2, "loss.entropy_target", when=["use_adaptive_entropy"]
  ),
  "use_adaptive_entropy": Row(False),
  "off_policy_mask_threshold": Row(
    None, "loss.off_policy_threshold", rules.none_for_0
  ),
  "use_vllm": Row(
    False,
    "loss.old_logprobs",
    lambda _, t: "trainer" if all(t[flag] for flag in _VLLM) else None,
    "sampling is part of the program; for vLLM servers set sampling.engine",
  ),
  f"{_CORRECTION}_correction": Row(True),
  f"{_CORRECTION}_mode": Row("sequence_mask", "loss.correction", when=_VLLM),
  f"{_CORRECTION}_clip_min": Row(None, "loss.correction_low", when=_VLLM),
  f"{_CORRECTION}_clip_max": Row(3.0, "loss.correction_high", when=_VLLM),
  # Optimizer
  "optim": Row("adamw_torch_fused", rules.optimizer),
  "learning_rate": Row(1e-6, "optim.learning_rate"),
  "lr_scheduler_type": Row(
    "linear", "optim.schedule", rules.SCHEDULE, missing=rules.LOWEST_RATE
  ),
  "lr_scheduler_kwargs": Row(missing="cosine and linear schedules end at 0"),
  "warmup_steps": Row(0, _warmup),
  "weight_decay": Row(0.0, "optim.weight_decay"),
  "adam_beta1": Row(0.9, "optim.b1"),
  "adam_beta2": Row(0.999, "optim.b2"),
  "max_grad_norm": Row(1.0, "optim.max_grad_norm", rules.max_grad_norm),
}

ALWAYS = (
  *rules.ALWAYS,
  Note(
    "per_device_train_batch_size",
    "batch_size counts prompts on all devices; a step is a generation",
  ),
  Note("reward_funcs", "in evaluations the first function judges answers"),
  Note(
    "scale_rewards",
    f"adds 1e-6 to a standard deviation, TRL 1e-4; {rules.OWN_ADVANTAGE}",
  ),
)

# Settings of logging, engines, memory and placement
UNNEEDED = (
  r"(vllm|dataloader|push_to|hub|log|eval|save|report|ddp|fsdp|deepspeed|ds3|env"
  r"|accelerator|torch|jit|tf32|attn|dtype|trust|trackio|disable_tqdm|pad_to"
  r"|num_completions|num_generations_eval|cache|use_cache|use_transformers|do_"
  r"|transformers|resume|gradient_checkpointing_|remove_unused|skip_memory|load_"
  r"|callbacks|model_revision|model_init|lora_task|task_type|dataset_streaming"
  r"|overwrite|include|auto_find|full_determinism|reward_processing|use_liger)"
)
OLDER = {"vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max"}

LIBRARY = rules.Library(
  "TRL 1.16", "docs/from-trl.md", TABLE, ALWAYS, UNNEEDED, OLDER, _sizes
)
