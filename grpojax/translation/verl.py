"""verl's trainer configuration as settings of ours: the table `TABLE`, below.

Names, defaults and meanings are those of verl 0.9
(verl/trainer/config/ppo_trainer.yaml, core_algos.py); `grpojax/core/README.md`
says which numbers agree.
"""

import math
from typing import Any

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

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
FILTER = "algorithm.filter_groups"
CORRECTION = "algorithm.rollout_correction"
REWARD = "reward.custom_reward_function"
BUFFERS = (
  "reward_model.overlong_buffer",
  "reward_model.reward_kwargs.overlong_buffer_cfg",
  "reward.reward_kwargs.overlong_buffer_cfg",
)
"""Places of DAPO's buffer in older and newer configurations."""


def _max_norm_of_actor(theirs: Theirs, name: str) -> float | None:
  """actor.grad_clip, of which optim.clip_grad is the newer name."""
  if name not in theirs.given:
    return None
  return rules.max_grad_norm(theirs, name)


def _model(theirs: Theirs, name: str) -> Items:
  yield from rules.model(theirs, name)
  yield Setting("model.dtype", "bfloat16", "verl computes in bfloat16")


def _offload(theirs: Theirs, name: str) -> str | None:
  return "host" if theirs[name] and theirs[f"{ACTOR}.use_kl_loss"] else None


def _lora(theirs: Theirs, name: str) -> Items:
  if theirs[name]:
    alpha, targets = f"{MODEL}.lora_alpha", f"{MODEL}.target_modules"
    yield from rules.lora(theirs, rank=name, alpha=alpha, targets=targets)


def _prompt_key(theirs: Theirs, name: str) -> str | None:
  files = theirs["data.train_files"]
  files = files[0] if isinstance(files, list) and files else files
  is_default = theirs[name] == "prompt" or rules.is_gsm8k(files)
  return None if is_default else theirs[name]


def _held_out(theirs: Theirs, name: str) -> Items:
  if theirs[name]:
    yield Differs(name, "held-out problems are the test split of the same data")


def _too_long(theirs: Theirs, name: str) -> str:
  return "drop" if theirs[name] else "refuse"


def _truncation(theirs: Theirs, name: str) -> Items:
  if theirs[name] != "error" and not theirs["data.filter_overlong_prompts"]:
    yield Missing(name, "prompts are never cut")


def _seed(theirs: Theirs, name: str) -> int:
  return theirs[name] or 1


def _rewards(theirs: Theirs, name: str) -> Items:
  """The reward function, and DAPO's penalty of long completions."""
  place = REWARD if theirs[name] else "custom_reward_function"
  path = theirs[f"{place}.path"]
  weights = {"math_answer": 1.0}
  if path:
    function = theirs[f"{place}.name"]
    weights = {f"{path}:{function}": 1.0}
    prefix = f"{place}.reward_kwargs."
    label = str(function).rpartition(":")[2]
    for key, value in theirs.given.items():
      if key.startswith(prefix):
        option = key.removeprefix(prefix)
        yield Setting(f"reward.options.{label}.{option}", value, key)
  else:
    yield Differs(
      name,
      "verl chooses by data_source; here math_answer is taken (a compute_score"
      " of verl's runs as it is: reward.functions ="
      " ('file.py:compute_score',))",
    )
  for buffer in [b for b in BUFFERS if theirs[f"{b}.enable"]][:1]:
    weights["overlong"] = float(theirs[f"{buffer}.penalty_factor"])
    size = f"{buffer}.len"
    yield theirs.setting("reward.options.overlong.cache", theirs[size], size)
  yield theirs.setting("reward.functions", tuple(weights), f"{place}.path")
  yield Setting("reward.weights", tuple(weights.values()))


def _reward_model(theirs: Theirs, name: str) -> Items:
  if not theirs[name]:
    return
  older = "reward_model.model.path"
  newer = "reward.reward_model.model_path"
  path = newer if name.startswith("reward.") else older
  yield theirs.setting("reward.model", str(theirs[path] or ""), path)
  yield Differs(path, "a sequence classifier, added to what the functions say")


def _group_size(theirs: Theirs, name: str) -> Items:
  yield theirs.setting("group_size", theirs[name], name)
  if theirs[name] < 2:
    yield Differs(
      name, "a group of 1 has nothing to compare with: use 2 or more"
    )


def _minibatch_count(theirs: Theirs) -> int:
  """Number of minibatches of equal size, nearest to verl's."""
  prompts = theirs["data.train_batch_size"]
  size = theirs[f"{ACTOR}.ppo_mini_batch_size"]
  return math.gcd(math.ceil(prompts / size), prompts)


def _minibatches(theirs: Theirs, name: str) -> Items:
  prompts, size = theirs["data.train_batch_size"], theirs[name]
  if size > prompts:
    raise ValueError(
      f"{name} = {size} is more than data.train_batch_size = {prompts}, which"
      " verl refuses"
    )
  count = _minibatch_count(theirs)
  yield theirs.setting("optim.minibatches", count, name)
  if count * size != prompts:
    yield Differs(
      name,
      f"{prompts} prompts are not a multiple of {size}: {count} equal"
      f" minibatches of {prompts // count} prompts here",
    )


def _micro_batches(theirs: Theirs, name: str) -> Items:
  prompts = theirs["data.train_batch_size"] // _minibatch_count(theirs)
  group_size = theirs[f"{ROLLOUT}.n"]
  devices = ("trainer.n_gpus_per_node", "trainer.nnodes")
  at_least = 4
  if theirs[name]:
    rows = theirs[name] * theirs[devices[0]] * theirs[devices[1]]
    at_least = prompts * group_size // rows
  count = rules.micro_batches(prompts, group_size, at_least)
  yield theirs.setting("optim.micro_batches", count, name, *devices)


def _run_steps(theirs: Theirs) -> int | None:
  """Number of steps of the run; None where it depends on the data."""
  if theirs["trainer.total_training_steps"]:
    return max(int(theirs["trainer.total_training_steps"]), 1)
  if theirs.examples is None:
    return None
  an_epoch = theirs.examples // theirs["data.train_batch_size"]
  return max(int(an_epoch * theirs["trainer.total_epochs"]), 1)


def _steps(theirs: Theirs, name: str) -> Items:
  steps = _run_steps(theirs)
  epochs = "trainer.total_epochs"
  comment = name if theirs[name] else epochs
  yield theirs.setting("steps", steps or 100, comment)
  if steps is None:
    yield Missing(
      epochs,
      "epochs are steps here, and how many is not known without the data: give"
      " --examples=N, or trainer.total_training_steps",
    )


def _every(theirs: Theirs, name: str) -> int:
  return theirs[name] if theirs[name] > 0 else _run_steps(theirs) or 100


def _warmup(theirs: Theirs, name: str) -> Items:
  """The warm-up, which verl counts in steps."""
  updates = _minibatch_count(theirs) * theirs[f"{ACTOR}.ppo_epochs"]
  count = theirs[name]
  if count <= 0:
    name = f"{name}_ratio"
    count = int(theirs[name] * (_run_steps(theirs) or 100))
  count = int(count)
  yield theirs.setting("optim.warmup_steps", count * updates, name)
  if count:
    yield Differs(
      name,
      "verl's rate changes once a step, and is 0 in the first one; here it"
      f" rises with each of a step's {updates} updates, from the first on",
    )


def _betas(theirs: Theirs, name: str) -> Items:
  for ours, beta in zip(("b1", "b2"), theirs[name], strict=True):
    yield theirs.setting(f"optim.{ours}", beta, name)


def _filters(theirs: Theirs, name: str) -> Items:
  yield theirs.setting("sampling.top_p", theirs[name], name)
  if theirs[f"{ROLLOUT}.top_k"] > 0 or theirs[name] != 1:
    yield Differs(
      f"{name}, top_k",
      "the loss is of the distribution that was sampled from; verl scores the"
      " policy without them",
    )


_ADVANTAGES = {
  "rloo": "leave_one_out",
  "rloo_vectorized": "leave_one_out",
  "opo": "length_weighted",
  "gdpo": "batch_std",
}


def _advantage(theirs: Theirs, name: str) -> Items:
  kind, by_std = theirs[name], "algorithm.norm_adv_by_std_in_grpo"
  if kind in ("grpo", "grpo_vectorized"):
    ours = "grpo" if theirs[by_std] else "dr_grpo"
    yield theirs.setting("advantage", ours, name, by_std)
    yield Differs(
      name,
      "grpojax's own default is advantage = 'leave_one_out', the unbiased"
      " gradient",
    )
  elif kind in _ADVANTAGES:
    yield theirs.setting("advantage", _ADVANTAGES[kind], name)
    if kind == "gdpo":
      yield theirs.setting("reward.aggregation", "normalize_then_sum", name)
      yield Differs(name, "verl whitens over tokens, here over completions")
  else:
    why = "needs a critic" if kind == "gae" else "has no counterpart"
    yield Setting("advantage", "leave_one_out")
    yield Missing(
      name,
      f"{kind!r} {why}: advantage = 'leave_one_out' compares with the group",
    )


_SURROGATES = {
  "vanilla": "clipped",
  "gspo": "clipped",
  "cispo": "cispo",
  "geo_mean": "gmpo",
  "sapo": "sapo",
}


def _surrogate(theirs: Theirs, name: str) -> Items:
  mode = theirs[name]
  surrogate = _SURROGATES.get(mode, "clipped")
  ratio = "sequence_ratio" if mode == "gspo" else "token_ratio"
  yield theirs.setting("loss.surrogate", surrogate, name)
  yield theirs.setting("loss.ratio", ratio, name)
  if mode not in _SURROGATES:
    yield Missing(name, f"{mode!r}: the clipped loss is taken")
  if mode == "gspo":
    yield Differs(name, "verl bounds the ratio by e^10")
  yield from _bounds(theirs, surrogate)


def _bounds(theirs: Theirs, surrogate: str) -> Items:
  """How far ratios count."""
  both = f"{ACTOR}.clip_ratio"
  low_name, high_name = f"{both}_low", f"{both}_high"
  if both in theirs.given:
    yield Differs(
      both,
      "verl takes clip_ratio_low and clip_ratio_high, and this only where they"
      " are null",
    )
  if surrogate == "sapo":
    for sign in ("pos", "neg"):
      tau = f"{ACTOR}.tau_{sign}"
      ours = f"loss.sapo_temperature_{sign}"
      yield theirs.setting(ours, theirs[tau], tau)
    return
  low, high = theirs[low_name], theirs[high_name]
  low = float(theirs[both] if low is None else low)
  high = float(theirs[both] if high is None else high)
  if surrogate == "cispo":  # bounds of the ratio itself
    low, high = max(1 - low, 0.0), 1 + high
    ours = ("cispo_min", "cispo_max")
  else:
    prefix = "gmpo_" if surrogate == "gmpo" else ""
    ours = (f"{prefix}clip_low", f"{prefix}clip_high")
  yield theirs.setting(f"loss.{ours[0]}", low, low_name)
  yield theirs.setting(f"loss.{ours[1]}", high, high_name)
  if surrogate == "clipped":
    dual = f"{both}_c"
    yield theirs.setting("loss.dual_clip", theirs[dual], dual)


_WEIGHTINGS = {
  "token-mean": "token_mean",
  "seq-mean-token-mean": "sequence_mean",
  "seq-mean-token-sum": "sequence_sum",
  "seq-mean-token-sum-norm": "fixed_length",
}


def _weighting(theirs: Theirs, name: str) -> Items:
  mean, mode = theirs[name], theirs[f"{ACTOR}.policy_loss.loss_mode"]
  if mean not in _WEIGHTINGS:
    yield Missing(name, f"{mean!r}: token_mean is taken")
    return
  if mode in ("geo_mean", "sapo") and mean != "seq-mean-token-mean":
    comment = f"{mode} always takes it"
    yield Setting("loss.weighting", "sequence_mean", comment)
  else:
    yield theirs.setting("loss.weighting", _WEIGHTINGS[mean], name)
  scale = f"{ACTOR}.loss_scale_factor"
  if mean == "seq-mean-token-sum-norm" and theirs[scale]:
    yield Differs(
      scale,
      "sums are divided by sampling.max_new_tokens: scale the learning rate",
    )


def _entropy(theirs: Theirs, name: str) -> Items:
  yield theirs.setting("loss.entropy_coef", theirs[name], name)
  if theirs[name] and theirs[f"{ACTOR}.loss_agg_mode"] != "token-mean":
    yield Differs(name, "the bonus is the mean over tokens whatever the loss")


_KLS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}


def _kl(theirs: Theirs, name: str) -> Items:
  """KL as a term of the loss, or in the reward."""
  in_reward = "algorithm.use_kl_in_reward"
  coefficient, kind = f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"
  if theirs[in_reward]:
    yield from _kl_in_reward(theirs, in_reward)
    if theirs[name]:
      yield Missing(name, "one KL term: the one in the reward is taken")
  elif not theirs[name]:
    yield theirs.setting("loss.beta", 0.0, name)
  else:
    estimator = str(theirs[kind])
    yield theirs.setting("loss.beta", theirs[coefficient], coefficient)
    yield theirs.setting("loss.kl", _KLS.get(estimator, "k3"), kind)
    yield theirs.setting("loss.kl_placement", "loss", name)
    if estimator not in _KLS:
      yield Missing(
        kind,
        f"{estimator!r}: as a term of the loss k1 has no expected gradient, and"
        " |k1| is no estimate of the divergence; k3 is taken",
      )


def _kl_in_reward(theirs: Theirs, name: str) -> Items:
  control, penalty = "algorithm.kl_ctrl", "algorithm.kl_penalty"
  coefficient = f"{control}.kl_coef"
  yield theirs.setting("loss.beta", theirs[coefficient], coefficient)
  yield theirs.setting("loss.kl", "k1", penalty)
  yield theirs.setting("loss.kl_placement", "reward", name)
  yield Differs(
    name, "the penalty is of the whole completion here, in verl of each token"
  )
  if theirs[penalty] not in ("kl", "k1"):
    yield Missing(penalty, "k1 is taken")
  if theirs[f"{control}.type"] != "fixed":
    yield Missing(f"{control}.type", "loss.beta is fixed")


def _correction(theirs: Theirs, name: str) -> Items:
  """Corrections for a sampler that is not the policy."""
  rejection, limit = f"{CORRECTION}.rollout_rs", f"{name}_threshold"
  if theirs[rejection]:
    yield Missing(
      rejection,
      "loss.correction has token_mask and sequence_mask, which leave the tokens"
      " in the mean",
    )
  level = theirs[name]
  if level not in ("token", "sequence"):
    return
  low, _, high = str(theirs[limit]).rpartition("_")  # "0.5_5.0" or "2.0"
  kind = "mask" if low else "truncate"
  yield theirs.setting("loss.correction", f"{level}_{kind}", name)
  yield theirs.setting("loss.correction_low", float(low or 0), limit)
  yield theirs.setting("loss.correction_high", float(high), limit)
  yield Setting("loss.old_logprobs", "trainer", "as verl does")


def _filter_groups(theirs: Theirs, name: str) -> Items:
  """DAPO's dynamic sampling."""
  if not theirs[name]:
    return
  metric, limit = f"{FILTER}.metric", f"{FILTER}.max_num_gen_batches"
  yield theirs.setting("filter_groups.enable", theirs[name], name)
  ours = "acc" if theirs[metric] == "acc" else "reward"
  yield theirs.setting("filter_groups.metric", ours, metric)
  batches = theirs[limit]
  if batches <= 0:
    batches = 100
    yield Differs(limit, f"0 is no limit in verl: {batches} batches here")
  yield theirs.setting("filter_groups.max_num_gen_batches", batches, limit)
  yield Differs(
    limit,
    "a limit that is met ends verl's run; here the rest of the batch is free",
  )
  drawn = "data.gen_batch_size"
  if theirs[drawn] and theirs[drawn] != theirs["data.train_batch_size"]:
    yield Differs(
      drawn,
      "a step's first draw is a whole batch here (filter_groups.gen_parts cuts"
      " the later ones)",
    )


def _below(prefix: str, table: dict[str, Any]) -> dict[str, Any]:
  """A table of names below a prefix."""
  return {f"{prefix}.{name}": value for name, value in table.items()}


TABLE: dict[str, Rule] = {}
TABLE |= _below(
  "algorithm",
  {
    "adv_estimator": Rule("gae", _advantage),
    "norm_adv_by_std_in_grpo": Rule(True),
    "use_kl_in_reward": Rule(False),
    "kl_penalty": Rule("kl"),
    "kl_ctrl.type": Rule("fixed"),
    "kl_ctrl.kl_coef": Rule(0.001),
    "rollout_correction.rollout_is": Rule(None, _correction),
    "rollout_correction.rollout_is_threshold": Rule("2.0"),
    "rollout_correction.rollout_rs": Rule(),
    "filter_groups.enable": Rule(False, _filter_groups),
    "filter_groups.metric": Rule(),
    "filter_groups.max_num_gen_batches": Rule(0),
  },
)
TABLE |= _below(
  ACTOR,
  {
    "policy_loss.loss_mode": Rule("vanilla", _surrogate),
    "clip_ratio": Rule(0.2),
    "clip_ratio_low": Rule(0.2),
    "clip_ratio_high": Rule(0.2),
    "clip_ratio_c": Rule(3.0),
    "tau_pos": Rule(1.0),
    "tau_neg": Rule(1.05),
    "loss_agg_mode": Rule("token-mean", _weighting),
    "loss_scale_factor": Rule(),
    "entropy_coeff": Rule(0.0, _entropy),
    "use_kl_loss": Rule(False, _kl),
    "kl_loss_coef": Rule(0.001),
    "kl_loss_type": Rule("low_var_kl"),
    "ppo_mini_batch_size": Rule(256, _minibatches),
    "ppo_micro_batch_size_per_gpu": Rule(None, _micro_batches),
    "ppo_epochs": Rule(1, "optim.epochs"),
    "optim.optimizer": Rule("AdamW", rules.optimizer),
    "optim.lr": Rule(1e-6, "optim.learning_rate"),
    "optim.lr_warmup_steps": Rule(-1, _warmup),
    "optim.lr_warmup_steps_ratio": Rule(0.0),
    "optim.lr_scheduler_type": Rule("constant", rules.schedule),
    "optim.weight_decay": Rule(0.01, "optim.weight_decay"),
    "optim.clip_grad": Rule(1.0, "optim.max_grad_norm", rules.max_grad_norm),
    "optim.betas": Rule((0.9, 0.999), _betas),
    "grad_clip": Rule(1.0, "optim.max_grad_norm", _max_norm_of_actor),
  },
)
TABLE |= _below(
  MODEL,
  {
    "path": Rule(None, _model),
    "lora_rank": Rule(0, _lora),
    "lora_alpha": Rule(16),
    "target_modules": Rule("all-linear"),
    "enable_gradient_checkpointing": Rule(True, "model.remat", rules.remat),
  },
)
TABLE |= _below(
  ROLLOUT,
  {
    "n": Rule(1, _group_size),
    "temperature": Rule(1.0, "sampling.temperature"),
    "top_k": Rule(-1, "sampling.top_k", rules.at_least_0),
    "top_p": Rule(1.0, _filters),
  },
)
TABLE |= {
  "actor_rollout_ref.ref.fsdp_config.param_offload": Rule(
    False, "model.reference", _offload
  )
}
TABLE |= _below(
  "data",
  {
    "train_files": Rule(None, rules.data),
    "val_files": Rule(None, _held_out),
    "prompt_key": Rule("prompt", "data.options.prompt", _prompt_key),
    "max_prompt_length": Rule(512, "data.max_prompt_length"),
    "max_response_length": Rule(512, "sampling.max_new_tokens"),
    "train_batch_size": Rule(1024, "batch_size"),
    "gen_batch_size": Rule(),
    "truncation": Rule("error", _truncation),
    "filter_overlong_prompts": Rule(False, "data.too_long", _too_long),
    "apply_chat_template_kwargs": Rule(None, rules.template_options),
    "seed": Rule(None, "seed", _seed),
  },
)
TABLE |= {
  f"{REWARD}.path": Rule(None, _rewards),
  f"{REWARD}.name": Rule("compute_score"),
  "custom_reward_function.path": Rule(),
  "custom_reward_function.name": Rule("compute_score"),
  **{f"{buffer}.enable": Rule(False) for buffer in BUFFERS},
  **{f"{buffer}.len": Rule(0) for buffer in BUFFERS},
  **{f"{buffer}.penalty_factor": Rule(1.0) for buffer in BUFFERS},
  "reward_model.enable": Rule(False, _reward_model),
  "reward_model.model.path": Rule(),
  "reward.reward_model.enable": Rule(False, _reward_model),
  "reward.reward_model.model_path": Rule(),
}
TABLE |= _below(
  "trainer",
  {
    "total_training_steps": Rule(None, _steps),
    "total_epochs": Rule(30),
    "project_name": Rule("verl_examples"),
    "experiment_name": Rule("gsm8k", rules.run_name),
    "logger": Rule(("console", "wandb"), rules.trackers),
    "save_freq": Rule(-1, "checkpoint.every", _every),
    "test_freq": Rule(-1, "eval.every", _every),
    "max_actor_ckpt_to_keep": Rule(None, "checkpoint.keep", rules.none_for_0),
    "n_gpus_per_node": Rule(8),
    "nnodes": Rule(1),
  },
)

_NOTHING = "nothing here does that"
IGNORED = {
  "defaults*": "",
  "hydra*": "",
  "*_target_": "",
  "data.apply_chat_template_kwargs*": "",
  "*custom_reward_function.reward_kwargs.*": "",
  "critic.*": "there is no critic: advantages come from groups",
  "algorithm.gamma*": "rewards are of whole completions",
  "algorithm.lam*": "rewards are of whole completions",
  "algorithm.*": _NOTHING,
  f"{ROLLOUT}.val_kwargs*": "evaluations are greedy: grpojax.evaluate has more",
  f"{ROLLOUT}.log_prob*": "see logits_chunk and optim.micro_batches",
  f"{ROLLOUT}.multi_turn*": "one turn a completion",
  f"{ROLLOUT}.calculate_log_probs": "they are always known",
  f"{ROLLOUT}.do_sample": "training always samples",
  f"{ROLLOUT}.*": "there is no inference engine: sampling is in the program",
  "actor_rollout_ref.ref.*": "see model.reference, mesh and logits_chunk",
  f"{ACTOR}.fsdp_config*": "mesh.fsdp shards parameters and optimizer state",
  f"{ACTOR}.megatron*": "see mesh.tensor and mesh.expert",
  f"{ACTOR}.strategy": "see mesh",
  f"{ACTOR}.ulysses*": "sequences are not cut over devices",
  f"{ACTOR}.use_dynamic_bsz": "optim.packing puts short completions together",
  f"{ACTOR}.ppo_max_token_len*": "see optim.micro_batches and optim.packing",
  f"{MODEL}.use_remove_padding": "optim.packing does that",
  "actor_rollout_ref.*": _NOTHING,
  "data.shuffle*": "prompts are always shuffled, each epoch anew",
  "data.return_raw_chat": "rewards get the messages",
  "data.reward_fn_key": "reward functions find it in data_source",
  "data.*": _NOTHING,
  "reward.*": "see reward.*",
  "reward_*.*": "see reward.*",
  "custom_reward_function.*": "see reward.*",
  "trainer.val_before_train": "accuracy is always measured before",
  "trainer.resume_mode": "the same command resumes",
  "trainer.default_local_dir": "--run_dir says where",
  "trainer.critic_warmup": "there is no critic",
  "trainer.balance_batch": "completions are packed",
  "trainer.*": _NOTHING,
  "ray_kwargs*": "there is no Ray: one program on all devices",
  "ray_init*": "there is no Ray: one program on all devices",
}

LIBRARY = Library(
  "verl 0.9",
  TABLE,
  IGNORED,
  nullable=(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"),
)
