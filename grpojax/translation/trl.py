"""TRL's GRPOConfig as a config of ours.

Names, defaults and meanings are those of TRL 1.16 (trl/trainer/grpo_config.py,
grpo_trainer.py) on transformers 5; `grpojax/core/README.md` says which numbers
agree.
"""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.translation import common, trl_loss, trl_names, trl_schedule
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
DEFAULTS = trl_names.DEFAULTS


def knows(name: str) -> bool:
  """Whether a name is TRL's."""
  return (
    name in DEFAULTS or name in trl_names.IGNORED or name.startswith("vllm_")
  )


def translate(
  given: Mapping[str, Any], processes: int = 1, examples: int | None = None
) -> Translation:
  """The whole of a GRPOConfig.

  Args:
    given: its fields, and those of TRL's scripts (see `trl_names`).
    processes: that TRL was started with: per_device_* counts for each.
    examples: of the training data, where epochs are to be counted.

  Raises:
    ValueError: values that TRL refuses, or that are none of its own.
  """
  theirs = Theirs(LIBRARY, given, DEFAULTS)
  updates, batch = _batch(theirs, processes)
  prompts = dict((s.name, s.value) for s in batch.settings)["batch_size"]
  steps = trl_schedule.steps(theirs, updates, prompts, examples)
  return total(
    _model(theirs),
    _data(theirs),
    _rewards(theirs),
    batch,
    _steps(theirs, updates, steps),
    _sampling(theirs),
    trl_loss.translate(theirs, updates),
    trl_schedule.translate(theirs, updates * (steps or 100)),
    setting(theirs, "seed", "seed"),
    _unread(theirs),
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


_TEMPLATE = "chat_template_kwargs"


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
  return found + common.template_options(theirs, _TEMPLATE)


def _rewards(theirs: Theirs) -> Translation:
  names, weights = theirs["reward_funcs"], theirs["reward_weights"]
  names = [names] if isinstance(names, str) else list(names or ())
  if not names:
    todo = "name your function: reward.functions = ('file.py:function',)"
    found = also("reward.functions", ("math_answer",))
    return found + missing("reward_funcs", f"not in the file; {todo}")
  models = [n for n in names if "/" in n and ":" not in n]
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
  once = theirs["num_iterations"] == 1
  if once and samples < micro * cuts and micro * cuts % samples == 0:
    # Generations of one policy, whose gradients add up: one of their sum.
    samples = micro * cuts
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
  said += f", --processes={processes}: {samples} completions a generation"
  found = also("batch_size", prompts, said)
  found += setting(theirs, "group_size", "num_generations")
  found += differs(
    named,
    f"batch_size counts prompts of all devices: {samples} completions ="
    f" {prompts} prompts x {size}; a step here is one generation with all of"
    " its updates",
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
  found += also(
    "optim.minibatches", minibatches, f"updates a generation: {updates}"
  )
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


def _unread(theirs: Theirs) -> Translation:
  """What the user's file has, and nothing here reads."""
  found = NOTHING
  for name in theirs.given:
    if name in trl_names.IGNORED:
      found += missing(name, trl_names.IGNORED[name])
    elif name not in DEFAULTS and name.startswith("vllm_"):
      found += missing(
        name, "there is no vLLM: sampling is part of the program"
      )
    elif name not in DEFAULTS and not name.startswith(_TEMPLATE):
      found += missing(name, "not known here")
  return found
