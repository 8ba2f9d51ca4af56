"""verl's PPO trainer configuration as a config of ours.

Names, defaults and meanings are those of verl 0.9
(verl/trainer/config/ppo_trainer.yaml, core_algos.py); `grpojax/core/README.md`
says which numbers agree.
"""

import math
from collections.abc import Mapping
from typing import Any

from grpojax.translation import common, verl_loss
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

LIBRARY = "verl 0.9"

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
_FILTER = "algorithm.filter_groups"
_REWARD = "reward.custom_reward_function"
_BUFFER = "reward_model.overlong_buffer"

DEFAULTS: Mapping[str, Any] = {
  **verl_loss.DEFAULTS,
  f"{MODEL}.path": None,
  f"{MODEL}.lora_rank": 0,
  f"{MODEL}.lora_alpha": 16,
  f"{MODEL}.target_modules": "all-linear",
  f"{MODEL}.enable_gradient_checkpointing": True,
  "data.train_files": None,
  "data.val_files": None,
  "data.prompt_key": "prompt",
  "data.max_prompt_length": 512,
  "data.max_response_length": 512,
  "data.train_batch_size": 1024,
  "data.gen_batch_size": None,
  "data.truncation": "error",
  "data.filter_overlong_prompts": False,
  "data.seed": None,
  f"{ROLLOUT}.n": 1,
  f"{ROLLOUT}.temperature": 1.0,
  f"{ROLLOUT}.top_k": -1,
  f"{ROLLOUT}.top_p": 1.0,
  f"{ACTOR}.ppo_mini_batch_size": 256,
  f"{ACTOR}.ppo_micro_batch_size_per_gpu": None,
  f"{ACTOR}.ppo_epochs": 1,
  f"{ACTOR}.optim.optimizer": "AdamW",
  f"{ACTOR}.optim.lr": 1e-6,
  f"{ACTOR}.optim.lr_warmup_steps": -1,
  f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
  f"{ACTOR}.optim.lr_scheduler_type": "constant",
  f"{ACTOR}.optim.weight_decay": 0.01,
  f"{ACTOR}.optim.clip_grad": 1.0,
  f"{ACTOR}.optim.betas": (0.9, 0.999),
  f"{ACTOR}.grad_clip": 1.0,
  "actor_rollout_ref.ref.fsdp_config.param_offload": False,
  f"{_FILTER}.enable": False,
  f"{_FILTER}.metric": None,
  f"{_FILTER}.max_num_gen_batches": 0,
  f"{_REWARD}.path": None,
  f"{_REWARD}.name": "compute_score",
  "custom_reward_function.path": None,
  "custom_reward_function.name": "compute_score",
  f"{_BUFFER}.enable": False,
  f"{_BUFFER}.len": 0,
  f"{_BUFFER}.penalty_factor": 1.0,
  "reward_model.enable": False,
  "reward_model.model.path": None,
  "trainer.total_epochs": 30,
  "trainer.total_training_steps": None,
  "trainer.project_name": "verl_examples",
  "trainer.experiment_name": "gsm8k",
  "trainer.logger": ("console", "wandb"),
  "trainer.save_freq": -1,
  "trainer.test_freq": -1,
  "trainer.max_actor_ckpt_to_keep": None,
  "trainer.n_gpus_per_node": 8,
  "trainer.nnodes": 1,
}
IGNORED = (  # by how their names begin; the first that fits
  ("critic.", "there is no critic: advantages come from groups"),
  ("algorithm.gamma", "rewards are of whole completions"),
  ("algorithm.lam", "rewards are of whole completions"),
  (
    f"{ROLLOUT}.val_kwargs",
    "evaluations are greedy: grpojax.evaluate has more",
  ),
  (f"{ROLLOUT}.log_prob", "see logits_chunk and optim.micro_batches"),
  (f"{ROLLOUT}.multi_turn", "one turn a completion"),
  (f"{ROLLOUT}.calculate_log_probs", "they are always known"),
  (f"{ROLLOUT}.do_sample", "training always samples"),
  (f"{ROLLOUT}.", "there is no inference engine: sampling is in the program"),
  ("actor_rollout_ref.ref.", "see model.reference, mesh and logits_chunk"),
  (f"{ACTOR}.fsdp_config", "mesh.fsdp shards parameters and optimizer state"),
  (f"{ACTOR}.megatron", "see mesh.tensor and mesh.expert"),
  (f"{ACTOR}.strategy", "see mesh"),
  (f"{ACTOR}.ulysses", "sequences are not cut over devices"),
  (f"{ACTOR}.use_dynamic_bsz", "optim.packing puts short completions together"),
  (f"{ACTOR}.ppo_max_token_len", "see optim.micro_batches and optim.packing"),
  (f"{ACTOR}.", "nothing here does that"),
  (f"{MODEL}.use_remove_padding", "optim.packing does that"),
  (f"{MODEL}.", "nothing here does that"),
  ("actor_rollout_ref.", "nothing here does that"),
  ("data.shuffle", "prompts are always shuffled, each epoch anew"),
  ("data.return_raw_chat", "rewards get the messages"),
  ("data.reward_fn_key", "reward functions find it in data_source"),
  ("data.", "nothing here does that"),
  ("reward", "see reward.*"),
  ("trainer.val_before_train", "accuracy is always measured before"),
  ("trainer.resume_mode", "the same command resumes"),
  ("trainer.default_local_dir", "--run_dir says where"),
  ("trainer.critic_warmup", "there is no critic"),
  ("trainer.balance_batch", "completions are packed"),
  ("trainer.", "nothing here does that"),
  ("ray_kwargs", "there is no Ray: one program on all devices"),
  ("ray_init", "there is no Ray: one program on all devices"),
  ("algorithm.", "nothing here does that"),
)
ROOTS = {name.partition(".")[0] for name in DEFAULTS}
ROOTS |= {"critic", "ray_kwargs", "ray_init", "global_profiler", "hydra"}


def knows(name: str) -> bool:
  """Whether a name is verl's."""
  return "." in name and name.partition(".")[0] in ROOTS


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
  return total(
    _model(theirs),
    _data(theirs),
    _rewards(theirs),
    _batch(theirs),
    _steps(theirs, examples),
    _sampling(theirs),
    _filter(theirs),
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


def _data(theirs: Theirs) -> Translation:
  found = common.data(theirs, "data.train_files")
  key = theirs["data.prompt_key"]
  jsonl = ("data.name", "jsonl") in {s[:2] for s in found.settings}
  if key != "prompt" and jsonl:
    found += also("data.options.prompt", key, theirs.said("data.prompt_key"))
  if theirs["data.val_files"]:
    found += differs(
      "data.val_files", "held-out problems are the test split of the same data"
    )
  found += setting(theirs, "data.max_prompt_length", "data.max_prompt_length")
  drop = theirs["data.filter_overlong_prompts"]
  said = theirs.said("data.filter_overlong_prompts")
  found += also("data.too_long", "drop" if drop else "refuse", said)
  if theirs["data.truncation"] != "error" and not drop:
    found += missing("data.truncation", "prompts are never cut")
  return found + also(
    "seed", theirs["data.seed"] or 1, theirs.said("data.seed")
  )


def _rewards(theirs: Theirs) -> Translation:
  place = _REWARD if theirs[f"{_REWARD}.path"] else "custom_reward_function"
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
      f"{_REWARD}.path",
      "verl chooses by data_source; here math_answer is taken (its compute_score"
      " runs too: reward.functions = ('file.py:compute_score',))",
    )
  if theirs[f"{_BUFFER}.enable"]:
    names.append("overlong")
    weights.append(float(theirs[f"{_BUFFER}.penalty_factor"]))
    size = int(theirs[f"{_BUFFER}.len"])
    found += also(
      "reward.options.overlong.cache", size, theirs.said(f"{_BUFFER}.len")
    )
  found += also("reward.functions", tuple(names), theirs.said(f"{place}.path"))
  found += also("reward.weights", tuple(weights))
  if theirs["reward_model.enable"]:
    path = theirs["reward_model.model.path"]
    if path:
      found += also(
        "reward.model", path, theirs.said("reward_model.model.path")
      )
    found += differs(
      "reward_model.enable", "a sequence classifier, added to the functions"
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
      f"{prompts} prompts are not a multiple of {mini}: {count} equal minibatches"
      f" of {prompts // count} prompts here",
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
  if theirs[f"{ACTOR}.optim.lr_scheduler_type"] != "constant":
    found += differs(
      f"{ACTOR}.optim.lr_scheduler_type", "the schedule is counted in updates"
    )
  for ours, name in (
    ("checkpoint.every", "trainer.save_freq"),
    ("eval.every", "trainer.test_freq"),
  ):
    every = theirs[name] if theirs[name] > 0 else steps
    found += also(ours, int(every), theirs.said(name))
  name = "trainer.max_actor_ckpt_to_keep"
  if theirs[name]:
    found += setting(theirs, "checkpoint.keep", name)
  return (
    found + common.trackers(theirs, "trainer.logger") + _warmup(theirs, steps)
  )


def _warmup(theirs: Theirs, steps: int) -> Translation:
  count = theirs[f"{ACTOR}.optim.lr_warmup_steps"]
  ratio = theirs[f"{ACTOR}.optim.lr_warmup_steps_ratio"]
  named = "lr_warmup_steps" if count >= 0 else "lr_warmup_steps_ratio"
  count = count if count >= 0 else int(ratio * steps)
  said = theirs.said(f"{ACTOR}.optim.{named}")
  found = also("optim.warmup_steps", int(count), said)
  if count:
    found += differs(f"{ACTOR}.optim.{named}", "it is counted in updates here")
  betas = theirs[f"{ACTOR}.optim.betas"]
  for name, beta in zip(("b1", "b2"), betas, strict=True):
    said = theirs.said(f"{ACTOR}.optim.betas")
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


def _filter(theirs: Theirs) -> Translation:
  if not theirs[f"{_FILTER}.enable"]:
    return NOTHING
  found = setting(theirs, "filter_groups.enable", f"{_FILTER}.enable")
  metric = theirs[f"{_FILTER}.metric"]
  said = theirs.said(f"{_FILTER}.metric")
  ours = "acc" if metric == "acc" else "reward"
  found += also("filter_groups.metric", ours, said)
  name, most = f"{_FILTER}.max_num_gen_batches", 100
  given = theirs[name]
  found += also(
    "filter_groups.max_num_gen_batches",
    given if given > 0 else most,
    theirs.said(name),
  )
  if given <= 0:
    found += differs(name, f"0 is no limit in verl: {most} batches here")
  found += differs(
    name,
    "a limit that is met ends verl's run; here the rest of the batch is free",
  )
  size, drawn = theirs["data.train_batch_size"], theirs["data.gen_batch_size"]
  if drawn and drawn != size:
    said = theirs.said("data.gen_batch_size")
    found += differs(
      "data.gen_batch_size",
      "a step's first draw is a whole batch here (filter_groups.gen_parts cuts"
      " the later ones)",
    )
  return found


def _unread(theirs: Theirs) -> Translation:
  """What the user's file has, and nothing here reads."""
  found = NOTHING
  for name in theirs.given:
    if name in DEFAULTS or ".reward_kwargs." in name:
      continue
    if name.startswith(("defaults", "hydra")) or name.endswith("_target_"):
      continue
    why = [text for start, text in IGNORED if name.startswith(start)]
    found += missing(name, (why or ["not known here"])[0])
  return found
