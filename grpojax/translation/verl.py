"""verl's trainer configuration as settings of ours: the table `TABLE`, below.

Names, defaults and meanings are those of verl 0.9
(verl/trainer/config/ppo_trainer.yaml, core_algos.py);
`grpojax/core/losses/README.md` says which numbers agree.
"""

import math

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

_GPUS, _NODES = "trainer.n_gpus_per_node", "trainer.nnodes"

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
  if name not in theirs.values:
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
    for key, value in theirs.values.items():
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
  at_least = 4
  if theirs[name]:
    rows = theirs[name] * theirs[_GPUS] * theirs[_NODES]
    at_least = prompts * group_size // rows
  count = rules.micro_batches(prompts, group_size, at_least)
  yield theirs.setting("optim.micro_batches", count, name, _GPUS, _NODES)


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
    yield rules.unknown_steps(epochs, name)


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
    yield rules.own_advantage(name)
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
  if mode in ("geo_mean", "sapo"):
    comment = f"{mode} always takes it"
    yield Setting("loss.weighting", "sequence_mean", comment)
  if mode not in _SURROGATES:
    yield Missing(name, f"{mode!r}: the clipped loss is taken")
  if mode == "gspo":
    yield Differs(name, "verl bounds the ratio by e^10")
  yield from _bounds(theirs, surrogate)


def _bounds(theirs: Theirs, surrogate: str) -> Items:
  """Bounds of the importance ratios, or temperatures in their place."""
  both = f"{ACTOR}.clip_ratio"
  low_name, high_name = f"{both}_low", f"{both}_high"
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
  coefficient, penalty = "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"
  yield theirs.setting("loss.beta", theirs[coefficient], coefficient)
  yield theirs.setting("loss.kl", "k1", penalty)
  yield theirs.setting("loss.kl_placement", "reward", name)
  if theirs[penalty] not in ("kl", "k1"):
    yield Missing(penalty, "k1 is taken")


def _correction(theirs: Theirs, name: str) -> Items:
  """Corrections for a sampler that is not the policy."""
  level, limit = theirs[name], f"{name}_threshold"
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
  batches = theirs[limit] if theirs[limit] > 0 else 100
  yield theirs.setting("filter_groups.max_num_gen_batches", batches, limit)
  yield Differs(
    limit,
    "0 is no limit in verl, and 100 batches here; a limit that is met ends"
    " verl's run, and here the rest of the batch is free",
  )


TABLE = {
  # Model, data and rewards.
  f"{MODEL}.path": Rule(None, _model),
  f"{MODEL}.lora_rank": Rule(0, _lora),
  f"{MODEL}.lora_alpha": Rule(16),
  f"{MODEL}.target_modules": Rule("all-linear"),
  f"{MODEL}.enable_gradient_checkpointing": Rule(
    True, "model.remat", rules.REMAT
  ),
  "actor_rollout_ref.ref.fsdp_config.param_offload": Rule(
    False, "model.reference", _offload
  ),
  "data.train_files": Rule(None, rules.data),
  "data.val_files": Rule(
    differs="held-out problems are the test split of the same data"
  ),
  "data.prompt_key": Rule("prompt", "data.options.prompt", _prompt_key),
  "data.max_prompt_length": Rule(512, "data.max_prompt_length"),
  "data.max_response_length": Rule(512, "sampling.max_new_tokens"),
  "data.filter_overlong_prompts": Rule(
    False, "data.too_long", {True: "drop", False: "refuse"}
  ),
  "data.apply_chat_template_kwargs": Rule(None, rules.template_options),
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
  # Batches and length of the run.
  "data.seed": Rule(None, "seed", _seed),
  "data.train_batch_size": Rule(1024, "batch_size"),
  "data.gen_batch_size": Rule(
    differs="a step's first draw is a whole batch here (filter_groups.gen_parts"
    " cuts the later ones)"
  ),
  f"{ROLLOUT}.n": Rule(1, _group_size),
  f"{ACTOR}.ppo_mini_batch_size": Rule(256, _minibatches),
  f"{ACTOR}.ppo_micro_batch_size_per_gpu": Rule(None, _micro_batches),
  f"{ACTOR}.ppo_epochs": Rule(1, "optim.epochs"),
  _GPUS: Rule(8),
  _NODES: Rule(1),
  "trainer.total_training_steps": Rule(None, _steps),
  "trainer.total_epochs": Rule(30),
  "trainer.project_name": Rule("verl_examples"),
  "trainer.experiment_name": Rule("gsm8k", rules.run_name),
  "trainer.logger": Rule(("console", "wandb"), rules.trackers),
  "trainer.save_freq": Rule(-1, "checkpoint.every", _every),
  "trainer.test_freq": Rule(-1, "eval.every", _every),
  "trainer.max_actor_ckpt_to_keep": Rule(
    None, "checkpoint.keep", rules.none_for_0
  ),
  # Sampling.
  f"{ROLLOUT}.temperature": Rule(1.0, "sampling.temperature"),
  f"{ROLLOUT}.top_k": Rule(-1, rules.sampling_filter),
  f"{ROLLOUT}.top_p": Rule(1.0, rules.sampling_filter),
  # Advantages and loss.
  "algorithm.adv_estimator": Rule("gae", _advantage),
  "algorithm.norm_adv_by_std_in_grpo": Rule(True),
  f"{ACTOR}.loss_agg_mode": Rule(
    "token-mean",
    "loss.weighting",
    {
      "token-mean": "token_mean",
      "seq-mean-token-mean": "sequence_mean",
      "seq-mean-token-sum": "sequence_sum",
      "seq-mean-token-sum-norm": "fixed_length",
    },
  ),
  f"{ACTOR}.loss_scale_factor": Rule(
    differs="with loss_agg_mode = seq-mean-token-sum-norm sums are divided by"
    " sampling.max_new_tokens: scale the learning rate"
  ),
  f"{ACTOR}.policy_loss.loss_mode": Rule("vanilla", _surrogate),
  f"{ACTOR}.clip_ratio": Rule(
    0.2,
    differs="verl takes clip_ratio_low and clip_ratio_high, and this only where"
    " they are null",
  ),
  f"{ACTOR}.clip_ratio_low": Rule(0.2),
  f"{ACTOR}.clip_ratio_high": Rule(0.2),
  f"{ACTOR}.clip_ratio_c": Rule(3.0),
  f"{ACTOR}.tau_pos": Rule(1.0),
  f"{ACTOR}.tau_neg": Rule(1.05),
  f"{ACTOR}.entropy_coeff": Rule(0.0, _entropy),
  f"{ACTOR}.use_kl_loss": Rule(False, _kl),
  f"{ACTOR}.kl_loss_coef": Rule(0.001),
  f"{ACTOR}.kl_loss_type": Rule("low_var_kl"),
  "algorithm.use_kl_in_reward": Rule(
    False,
    differs="the penalty is of the whole completion here, there of each token",
  ),
  "algorithm.kl_penalty": Rule("kl"),
  "algorithm.kl_ctrl.kl_coef": Rule(0.001),
  f"{CORRECTION}.rollout_is": Rule(None, _correction),
  f"{CORRECTION}.rollout_is_threshold": Rule("2.0"),
  f"{FILTER}.enable": Rule(False, _filter_groups),
  f"{FILTER}.metric": Rule(),
  f"{FILTER}.max_num_gen_batches": Rule(0),
  # Optimizer.
  f"{ACTOR}.optim.optimizer": Rule("AdamW", rules.optimizer),
  f"{ACTOR}.optim.lr": Rule(1e-6, "optim.learning_rate"),
  f"{ACTOR}.optim.lr_warmup_steps": Rule(-1, _warmup),
  f"{ACTOR}.optim.lr_warmup_steps_ratio": Rule(0.0),
  f"{ACTOR}.optim.lr_scheduler_type": Rule("constant", rules.schedule),
  f"{ACTOR}.optim.weight_decay": Rule(0.01, "optim.weight_decay"),
  f"{ACTOR}.optim.betas": Rule((0.9, 0.999), _betas),
  f"{ACTOR}.optim.clip_grad": Rule(
    1.0, "optim.max_grad_norm", rules.max_grad_norm
  ),
  f"{ACTOR}.grad_clip": Rule(1.0, "optim.max_grad_norm", _max_norm_of_actor),
}

IGNORED = {
  "": "defaults* hydra* *_target_ data.apply_chat_template_kwargs*"
  " *custom_reward_function.reward_kwargs.*",
  "there is no critic: advantages come from groups": (
    "critic.* trainer.critic_warmup"
  ),
  "rewards are of whole completions": "algorithm.gamma* algorithm.lam*",
  "loss.beta is fixed": "algorithm.kl_ctrl.type",
  "loss.correction has token_mask and sequence_mask, which leave the tokens in"
  " the mean": f"{CORRECTION}.rollout_rs*",
  "evaluations are greedy: grpojax.evaluate has more": f"{ROLLOUT}.val_kwargs*",
  "one turn a completion": f"{ROLLOUT}.multi_turn*",
  "they are always known": f"{ROLLOUT}.calculate_log_probs",
  "training always samples": f"{ROLLOUT}.do_sample",
  "see logits_chunk, optim.micro_batches and optim.packing": (
    f"{ROLLOUT}.log_prob* {ACTOR}.ppo_max_token_len* {ACTOR}.use_dynamic_bsz"
    f" {MODEL}.use_remove_padding trainer.balance_batch"
  ),
  "there is no inference engine: sampling is in the program": f"{ROLLOUT}.*",
  "see model.reference, mesh and logits_chunk": "actor_rollout_ref.ref.*",
  "see mesh.fsdp, mesh.tensor and mesh.expert": (
    f"{ACTOR}.fsdp_config* {ACTOR}.megatron* {ACTOR}.strategy"
  ),
  "sequences are not cut over devices": f"{ACTOR}.ulysses*",
  "prompts are never cut: see data.too_long": "data.truncation",
  "prompts are always shuffled, each epoch anew": "data.shuffle*",
  "rewards get the messages, and data_source": (
    "data.return_raw_chat data.reward_fn_key"
  ),
  "see reward.*": "reward.* reward_*.* custom_reward_function.*",
  "accuracy is always measured before": "trainer.val_before_train",
  "the same command resumes": "trainer.resume_mode",
  "--run_dir says where": "trainer.default_local_dir",
  "there is no Ray: one program on all devices": "ray_kwargs* ray_init*",
  "nothing here does that": "algorithm.* actor_rollout_ref.* data.* trainer.*",
}

LIBRARY = Library(
  "verl 0.9",
  TABLE,
  IGNORED,
  nullable=(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"),
)
