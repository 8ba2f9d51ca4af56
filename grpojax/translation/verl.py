"""verl's PPO trainer configuration as a config of ours.

Names, defaults and meanings are those of verl 0.9
(verl/trainer/config/ppo_trainer.yaml, core_algos.py); `grpojax/core/README.md`
says which numbers agree.
"""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.translation import common, verl_loss, verl_names
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
from grpojax.translation.verl_names import (
  ACTOR,
  BUFFERS,
  MODEL,
  REWARD,
  ROLLOUT,
)

LIBRARY = "verl 0.9"
DEFAULTS = verl_names.DEFAULTS


def knows(name: str) -> bool:
  """Whether a name is verl's."""
  return "." in name and name.partition(".")[0] in verl_names.ROOTS


def translate(
  given: Mapping[str, Any], processes: int = 1, examples: int | None = None
) -> Translation:
  """The whole of a configuration.

  Args:
    given: the user's values by dotted path.
    processes: not read: all sizes are of the whole batch.
    examples: of the training data, where epochs are to be counted.

  Raises:
    ValueError: values that verl refuses.
  """
  del processes
  theirs = Theirs(LIBRARY, given, DEFAULTS)
  batch, steps = _batch(theirs), _steps(theirs, examples)
  sizes = {one.name: one.value for one in (batch + steps).settings}
  updates = sizes["optim.minibatches"] * sizes["optim.epochs"]
  return total(
    _model(theirs),
    _data(theirs),
    _rewards(theirs),
    batch,
    steps,
    _warmup(theirs, sizes["steps"], updates),
    _sampling(theirs),
    verl_loss.translate(theirs),
    common.optimizer(theirs, _OPTIM),
    _unread(theirs),
  )


_OPTIM = common.OptimizerNames(
  *(
    f"{ACTOR}.{name}"
    for name in (
      "optim.optimizer",
      "optim.lr",
      "optim.lr_scheduler_type",
      "optim.weight_decay",
      "optim.clip_grad",
    )
  )
)


def _model(theirs: Theirs) -> Translation:
  found = common.model(theirs, f"{MODEL}.path")
  found += common.run_name(theirs, "trainer.experiment_name")
  found += also("model.dtype", "bfloat16", "verl computes in bfloat16")
  name = f"{MODEL}.enable_gradient_checkpointing"
  remat = "full" if theirs[name] else "none"
  found += also("model.remat", remat, theirs.said(name))
  name = "actor_rollout_ref.ref.fsdp_config.param_offload"
  if theirs[name] and theirs[f"{ACTOR}.use_kl_loss"]:
    found += also("model.reference", "host", theirs.said(name))
  if not theirs[f"{MODEL}.lora_rank"]:
    return found
  names = (
    f"{MODEL}.{n}" for n in ("lora_rank", "lora_alpha", "target_modules")
  )
  return found + common.lora(theirs, *names)


_TEMPLATE = "data.apply_chat_template_kwargs"


def _data(theirs: Theirs) -> Translation:
  found = common.data(theirs, "data.train_files")
  key = theirs["data.prompt_key"]
  gsm8k = ("data.name", "gsm8k") in {s[:2] for s in found.settings}
  if key != "prompt" and not gsm8k:
    found += also("data.options.prompt", key, theirs.said("data.prompt_key"))
  if theirs["data.val_files"]:
    found += differs(
      "data.val_files", "held-out problems are the test split of the same data"
    )
  found += setting(theirs, "data.max_prompt_length", "data.max_prompt_length")
  found += common.template_options(theirs, _TEMPLATE)
  drop = theirs["data.filter_overlong_prompts"]
  said = theirs.said("data.filter_overlong_prompts")
  found += also("data.too_long", "drop" if drop else "refuse", said)
  if theirs["data.truncation"] != "error" and not drop:
    found += missing("data.truncation", "prompts are never cut")
  return found + also(
    "seed", theirs["data.seed"] or 1, theirs.said("data.seed")
  )


def _rewards(theirs: Theirs) -> Translation:
  place = REWARD if theirs[f"{REWARD}.path"] else "custom_reward_function"
  path = theirs[f"{place}.path"]
  names, weights, found = ["math_answer"], [1.0], NOTHING
  if path:
    names = [f"{path}:{theirs[f'{place}.name']}"]
    prefix = f"{place}.reward_kwargs."
    for name in theirs.given:
      if name.startswith(prefix):
        label = names[0].rpartition(":")[2]
        option = f"reward.options.{label}.{name.removeprefix(prefix)}"
        found += also(option, theirs.given[name], name)
  else:
    found += differs(
      f"{REWARD}.path",
      "verl chooses by data_source; here math_answer is taken (a compute_score"
      " of verl's runs as it is: reward.functions ="
      " ('file.py:compute_score',))",
    )
  for buffer in [b for b in BUFFERS if theirs[f"{b}.enable"]][:1]:
    names.append("overlong")
    weights.append(float(theirs[f"{buffer}.penalty_factor"]))
    size = int(theirs[f"{buffer}.len"])
    said = theirs.said(f"{buffer}.len")
    found += also("reward.options.overlong.cache", size, said)
  found += also("reward.functions", tuple(names), theirs.said(f"{place}.path"))
  found += also("reward.weights", tuple(weights))
  return found + _reward_model(theirs)


def _reward_model(theirs: Theirs) -> Translation:
  found = NOTHING
  for place, path in (
    ("reward_model", "reward_model.model.path"),
    ("reward.reward_model", "reward.reward_model.model_path"),
  ):
    if theirs[f"{place}.enable"]:
      model = theirs[path] or ""
      found += also("reward.model", str(model), theirs.said(path))
      found += differs(
        path, "a sequence classifier, added to what the functions say"
      )
  return found


def _batch(theirs: Theirs) -> Translation:
  prompts, size = theirs["data.train_batch_size"], theirs[f"{ROLLOUT}.n"]
  mini = theirs[f"{ACTOR}.ppo_mini_batch_size"]
  if mini > prompts:
    raise ValueError(
      f"{ACTOR}.ppo_mini_batch_size = {mini} is more than"
      f" data.train_batch_size = {prompts}, which verl refuses"
    )
  found = setting(theirs, "batch_size", "data.train_batch_size")
  found += setting(theirs, "group_size", f"{ROLLOUT}.n")
  count = math.gcd(math.ceil(prompts / mini), prompts)
  name = f"{ACTOR}.ppo_mini_batch_size"
  found += also("optim.minibatches", count, theirs.said(name))
  if count * mini != prompts:
    found += differs(
      name,
      f"{prompts} prompts are not a multiple of {mini}: {count} equal"
      f" minibatches of {prompts // count} prompts here",
    )
  found += setting(theirs, "optim.epochs", f"{ACTOR}.ppo_epochs")
  name = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
  devices = theirs["trainer.n_gpus_per_node"] * theirs["trainer.nnodes"]
  rows = (theirs[name] or 1) * devices
  wanted = max(prompts // count * size // rows, 1) if theirs[name] else 4
  micro = common.micro_batches(prompts // count, size, wanted)
  said = theirs.said(name, "trainer.n_gpus_per_node", "trainer.nnodes")
  found += also("optim.micro_batches", micro, said)
  if size < 2:
    found += differs(
      f"{ROLLOUT}.n", "a group of 1 has nothing to compare with: use 2 or more"
    )
  return found


def _steps(theirs: Theirs, examples: int | None) -> Translation:
  steps, name = theirs["trainer.total_training_steps"], "trainer.total_epochs"
  said = theirs.said(name)
  found = NOTHING
  if steps:
    said = theirs.said("trainer.total_training_steps")
  elif examples:
    steps = examples // theirs["data.train_batch_size"] * theirs[name]
  else:
    found += missing(
      name,
      "epochs are steps here, and how many is not known without the data: give"
      " --examples=N, or trainer.total_training_steps",
    )
  steps = max(int(steps or 100), 1)
  found += also("steps", steps, said)
  for ours, name in (
    ("checkpoint.every", "trainer.save_freq"),
    ("eval.every", "trainer.test_freq"),
  ):
    every = theirs[name] if theirs[name] > 0 else steps
    found += also(ours, int(every), theirs.said(name))
  name = "trainer.max_actor_ckpt_to_keep"
  if theirs[name]:
    found += setting(theirs, "checkpoint.keep", name)
  return found + common.trackers(theirs, "trainer.logger")


def _warmup(theirs: Theirs, steps: int, updates: int) -> Translation:
  """The warm-up, which verl counts in steps, and Adam's betas.

  Args:
    theirs: verl's settings.
    steps: of the run.
    updates: of the optimizer, a step.
  """
  count = theirs[f"{ACTOR}.optim.lr_warmup_steps"]
  ratio = theirs[f"{ACTOR}.optim.lr_warmup_steps_ratio"]
  named = "lr_warmup_steps" if count > 0 else "lr_warmup_steps_ratio"
  name = f"{ACTOR}.optim.{named}"
  count = int(count if count > 0 else ratio * steps)
  found = also("optim.warmup_steps", count * updates, theirs.said(name))
  if count:
    found += differs(
      name,
      "verl's rate changes once a step, and is 0 in the first one; here it"
      f" rises with each of a step's {updates} updates, from the first on",
    )
  said = theirs.said(f"{ACTOR}.optim.betas")
  betas = zip(("b1", "b2"), theirs[f"{ACTOR}.optim.betas"], strict=True)
  for name, beta in betas:
    found += also(f"optim.{name}", float(beta), said)
  return found


def _sampling(theirs: Theirs) -> Translation:
  name = "data.max_response_length"
  found = setting(theirs, "sampling.max_new_tokens", name)
  for key in ("temperature", "top_p"):
    name = f"{ROLLOUT}.{key}"
    found += setting(theirs, f"sampling.{key}", name, float(theirs[name]))
  name = f"{ROLLOUT}.top_k"
  found += also("sampling.top_k", max(theirs[name], 0), theirs.said(name))
  if theirs[name] > 0 or theirs[f"{ROLLOUT}.top_p"] != 1:
    found += differs(
      f"{ROLLOUT}.top_p, top_k",
      "the loss is of the distribution that was sampled from; verl scores the"
      " policy without them",
    )
  return found


def _unread(theirs: Theirs) -> Translation:
  """What the user's file has, and nothing here reads."""
  found = NOTHING
  for name in theirs.given:
    if name in DEFAULTS or name.startswith(_TEMPLATE):
      continue
    if "custom_reward_function.reward_kwargs." in name:
      continue
    if name.startswith(("defaults", "hydra")) or name.endswith("_target_"):
      continue
    why = [text for start, text in verl_names.IGNORED if name.startswith(start)]
    found += missing(name, (why or ["not known here"])[0])
  return found
