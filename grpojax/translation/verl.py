"""Translates verl's trainer configuration by `TABLE`.

Source: verl 0.9 (verl/trainer/config/ppo_trainer.yaml, core_algos.py).
`grpojax/core/losses/README.md` lists which numbers agree.
"""

import math
import re

from grpojax.translation import rules
from grpojax.translation.rules import Items, Note, Origin, Row, Setting

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
KL_TYPE = f"{ACTOR}.kl_loss_type"
FILTER = "algorithm.filter_groups"
CORRECTION = "algorithm.rollout_correction"
REWARD = "reward.custom_reward_function"
REWARD_MODEL = "reward.reward_model"
BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"
OLDER = {
  "custom_reward_function.": f"{REWARD}.",
  "reward_model.reward_kwargs.overlong_buffer_cfg.": f"{BUFFER}.",
  "reward_model.overlong_buffer.": f"{BUFFER}.",
  "reward_model.model.path": f"{REWARD_MODEL}.model_path",
  "reward_model.": f"{REWARD_MODEL}.",
  f"{ACTOR}.optim.clip_grad": f"{ACTOR}.grad_clip",
}
"""Prefixes of current names, by the prefix in other versions."""


def _sizes(origin: Origin) -> rules.Sizes:
  """Computes batch sizes like verl; ValueError for sizes verl refuses."""
  prompts = origin["data.train_batch_size"]
  name = f"{ACTOR}.ppo_mini_batch_size"
  size = origin[name]
  if size > prompts:
    text = f"verl allows at most data.train_batch_size = {prompts}"
    raise ValueError(f"{name} = {size}: {text}")
  updates_per_generation = math.ceil(prompts / size)
  minibatches = math.gcd(
    updates_per_generation, prompts
  )  # of equal size, unlike verl's
  updates = minibatches * origin[f"{ACTOR}.ppo_epochs"]
  steps = None
  if origin["trainer.total_training_steps"]:
    steps = max(int(origin["trainer.total_training_steps"]), 1)
  elif origin.examples is not None:
    per_epoch = origin.examples // prompts
    steps = max(int(per_epoch * origin["trainer.total_epochs"]), 1)
  group_size = origin[f"{ROLLOUT}.n"]
  return rules.Sizes(
    group_size, prompts, updates_per_generation, minibatches, updates, steps
  )


def _rewards(origin: Origin, name: str) -> Items:
  """Translates the reward function, and DAPO's penalty for long completions."""
  weights = {"math_answer": 1.0}
  if origin[name]:
    function = origin[f"{REWARD}.name"]
    weights = {f"{origin[name]}:{function}": 1.0}
    label = str(function).rpartition(":")[2]
    kwargs = f"{REWARD}.reward_kwargs"
    yield from origin.below(kwargs, f"reward.options.{label}")
  else:
    text = "math_answer is used, while verl chooses by data_source: to use your"
    yield Note(name, f"{text} function set reward.functions = ('file.py:f',)")
  if origin[f"{BUFFER}.enable"]:
    weights["overlong"] = float(origin[f"{BUFFER}.penalty_factor"])
    size = f"{BUFFER}.len"
    yield origin.setting("reward.options.overlong.cache", origin[size], size)
  yield origin.setting("reward.functions", tuple(weights), name)
  yield Setting("reward.weights", tuple(weights.values()))


def _turns(origin: Origin, name: str) -> Items:
  user = f"{ROLLOUT}.multi_turn.max_user_turns"
  limits = [origin[name], origin[user] and origin[user] + 1]
  if limits := [limit for limit in limits if limit]:
    yield origin.setting("environment.max_turns", min(limits), name, user)


def _minibatches(origin: Origin, name: str) -> Items:
  prompts = origin.sizes.prompts
  size = origin[name]
  count = origin.sizes.minibatches
  yield origin.setting("optim.minibatches", count, name)
  if count * size != prompts:
    text = f"a minibatch has {prompts // count} prompts here"
    yield Note(name, f"{prompts} prompts are not a multiple of {size}: {text}")


def _micro_batches(value: int | None, origin: Origin) -> int:
  """Converts the micro-batches' size to their number, or 4 if it is unset."""
  if not value:
    return rules.micro_batches(4, origin)
  sizes = origin.sizes
  rows = value * origin["trainer.n_gpus_per_node"] * origin["trainer.nnodes"]
  samples = sizes.prompts // sizes.minibatches * sizes.group_size
  return rules.micro_batches(samples // rows, origin)


def _every(value: int, origin: Origin) -> int:
  return value if value > 0 else origin.sizes.steps or 100


def _warmup(origin: Origin, name: str) -> Items:
  """Translates the warmup, which verl counts in steps."""
  sizes = origin.sizes
  count = origin[name]
  if count <= 0:
    name = f"{name}_ratio"
    count = origin[name] * (sizes.steps or 100)
  updates = sizes.updates
  yield origin.setting("optim.warmup_steps", int(count) * updates, name)
  if int(count):
    text = f"the rate rises at each of a step's {updates} updates; in verl it"
    yield Note(name, f"{text} rises once per step, from 0")


def _betas(origin: Origin, name: str) -> Items:
  first, second = origin[name]
  yield origin.setting("optim.b1", first, name)
  yield origin.setting("optim.b2", second, name)


_WHITENS = "advantages are whitened over completions, in verl over tokens"
_UNBIASED = "the baseline excludes the completion's own reward, unlike verl's"
_WEIGHTED = f"{_UNBIASED}; weights use (1 - p)^2"
_GPG = "verl also multiplies by samples / (samples with a nonzero reward)"
_ADVANTAGES = {  # (our estimator, difference)
  "grpo": ("grpo", ""),
  "grpo_vectorized": ("grpo", ""),
  "rloo": ("leave_one_out", ""),
  "rloo_vectorized": ("leave_one_out", ""),
  "opo": ("length_weighted", _UNBIASED),
  "gdpo": ("batch_std", _WHITENS),
  "reinforce_plus_plus": ("reinforce_plus_plus", ""),
  "reinforce_plus_plus_baseline": ("batch_std", _WHITENS),
  "optimal_token_baseline": ("optimal_token_baseline", _WEIGHTED),
  "tir_optimal_token_baseline": ("optimal_token_baseline", _WEIGHTED),
  "gpg": ("dr_grpo", _GPG),
}


def _advantage(origin: Origin, name: str) -> Items:
  kind = origin[name]
  ours, differs = _ADVANTAGES.get(kind, ("leave_one_out", ""))
  if ours == "grpo" and not origin["algorithm.norm_adv_by_std_in_grpo"]:
    ours = "dr_grpo"
  yield origin.setting("advantage", ours, name)
  if kind == "gdpo":
    yield origin.setting("reward.aggregation", "normalize_then_sum", name)
  if ours == "optimal_token_baseline":
    yield Setting("score_power", 1.0, "as verl does")
  if differs:
    yield Note(name, differs)
  if kind not in _ADVANTAGES:
    text = f"{kind!r}: advantage = 'leave_one_out' is used, within groups"
    yield Note(name, text, missing=True)


_CLIPPED = ("loss.clip_low", "loss.clip_high")
_DPPO = ("loss.dppo_low", "loss.dppo_high")
_SURROGATES = {  # (surrogate, bounds, setting for clip_ratio_c)
  "vanilla": ("clipped", _CLIPPED, "loss.dual_clip"),
  "gspo": ("clipped", _CLIPPED, "loss.dual_clip"),
  "cispo": ("cispo", ("loss.cispo_min", "loss.cispo_max"), None),
  "dppo_tv": ("dppo_tv", _DPPO, "loss.dppo_ratio_max"),
  "dppo_kl": ("dppo_kl", _DPPO, "loss.dppo_ratio_max"),
  "geo_mean": ("gmpo", ("loss.gmpo_clip_low", "loss.gmpo_clip_high"), None),
  "sapo": ("sapo", _CLIPPED, None),  # ignores bounds
  "dro": ("dro", _CLIPPED, None),  # ignores bounds
}


def _surrogate(origin: Origin, name: str) -> Items:
  mode = origin[name]
  if mode not in _SURROGATES:
    yield Note(name, f"{mode!r}: the clipped loss is used", missing=True)
  surrogate, bounds, most = _SURROGATES.get(mode, _SURROGATES["vanilla"])
  ratio = "sequence_ratio" if mode == "gspo" else "token_ratio"
  yield origin.setting("loss.surrogate", surrogate, name)
  yield origin.setting("loss.ratio", ratio, name)
  if mode in ("geo_mean", "sapo"):
    comment = f"always used by {mode}"
    yield Setting("loss.weighting", "sequence_mean", comment)
  for ours, side, sign in zip(bounds, ("low", "high"), (-1, 1), strict=True):
    key = f"{ACTOR}.clip_ratio_{side}"
    value = origin.values.get(key, 0.2)
    value = float(origin[f"{ACTOR}.clip_ratio"] if value is None else value)
    if surrogate == "cispo":  # bounds of the ratio itself
      value = max(1 + sign * value, 0.0)
    yield origin.setting(ours, value, key)
  if most:
    key = f"{ACTOR}.clip_ratio_c"
    yield origin.setting(most, origin[key], key)


_KLS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}
_KLS |= {"full": "exact"}
# Straight-through estimators, with the gradient of k2.
_KLS |= {f"{kind}+": "k2" for kind in ("low_var_kl", "k3", "kl", "k1", "abs")}


def _kl(origin: Origin, name: str) -> Items:
  in_reward, penalty = "algorithm.use_kl_in_reward", "algorithm.kl_penalty"
  coefficient = f"{ACTOR}.kl_loss_coef"
  kind = KL_TYPE
  in_loss = origin[name]
  ours = _KLS.get(origin[kind], "k3")
  placement = "loss"
  if origin[in_reward]:
    if in_loss or origin[penalty] not in ("kl", "k1"):
      text = "only one KL term is available, k1 in the reward"
      yield Note(in_reward, text, missing=True)
    coefficient = "algorithm.kl_ctrl.kl_coef"
    kind = penalty
    name = in_reward
    ours, placement = "k1", "reward"
  elif not in_loss:
    yield origin.setting("loss.beta", 0.0, name)
    return
  elif str(origin[kind]).endswith("+"):
    yield Note(kind, "k2, with verl's gradient but another logged value")
  elif origin[kind] not in _KLS:
    text = "k3 is used: k1 has no gradient in a loss, |k1| is not a divergence"
    yield Note(kind, f"{origin[kind]!r}: {text}", missing=True)
  elif ours == "k3":
    yield Note(kind, "verl also limits k3 to 10 per token")
  yield origin.setting("loss.beta", origin[coefficient], coefficient)
  yield origin.setting("loss.kl", ours, kind)
  yield origin.setting("loss.kl_placement", placement, name)


_BAD_BOUNDS = "{} = {!r}: must be one or two positive bounds, HIGH or LOW_HIGH"


def _bounds(origin: Origin, name: str) -> tuple[float | None, float]:
  """Reads the bounds "0.5_5.0", or "2.0" without a lower bound."""
  low, _, high = str(origin[name]).rpartition("_")
  try:
    return float(low) if low else None, float(high)
  except ValueError:
    raise ValueError(_BAD_BOUNDS.format(name, origin[name])) from None


def _correct(
  origin: Origin, name: str, kind: str, low: float, high: float
) -> Items:
  """Yields the settings of an importance correction, set by verl's `name`."""
  limit = f"{name}_threshold"
  yield origin.setting("loss.correction", kind, name)
  yield origin.setting("loss.correction_low", low, limit)
  yield origin.setting("loss.correction_high", high, limit)
  yield Setting("loss.old_logprobs", "trainer", "as verl does")


def _correction(origin: Origin, name: str) -> Items:
  """Translates the importance weights of sampled completions."""
  level = origin[name]
  if level in ("token", "sequence"):
    low, high = _bounds(origin, f"{name}_threshold")
    kind = "truncate" if low is None else "mask"
    yield from _correct(origin, name, f"{level}_{kind}", low or 0.0, high)


def _rejection(origin: Origin, name: str) -> Items:
  """Translates the rejection of completions by their geometric-mean ratio."""
  kind = origin[name]
  limit = f"{name}_threshold"
  if not kind:
    return
  text = ""
  if origin[f"{CORRECTION}.rollout_is"] in ("token", "sequence"):
    text = "ignored with rollout_is: only one loss.correction is available"
  elif kind != "seq_mean_k1":
    text = f"{kind!r}: only seq_mean_k1 has a counterpart (geometric_mask)"
  if text:
    yield Note(name, text, missing=True)
    return
  low, high = _bounds(origin, limit)
  if low is None and high > 0:  # a single bound h means 1/h to h
    low = 1 / high
  if not 0 < (low or 0.0) <= high < math.inf:
    raise ValueError(_BAD_BOUNDS.format(limit, origin[limit]))
  # verl bounds the inverse ratio, rollout / trainer.
  yield from _correct(origin, name, "geometric_mask", 1 / high, 1 / low)
  yield Note(name, "verl also excludes rejected tokens from the mean")


_ROUTER_REPLAY = Row(
  "disabled",
  missing={"R2": "loss.router_replay replays only the rollout's experts (R3)"},
)
_TOOL_FORMATS = {"hermes": "hermes", "llama3_json": "llama3"}
_WEIGHTINGS = {
  "token-mean": "token_mean",
  "seq-mean-token-mean": "sequence_mean",
  "seq-mean-token-sum": "sequence_sum",
  "seq-mean-token-sum-norm": "fixed_length",
}

_ROWS = {  # names without a leading "actor_rollout_ref."
  # Model, data and rewards
  "model.path": Row(None, rules.model),
  "model.lora_rank": Row(0, "lora.rank", rules.none_for_0),
  "model.lora_alpha": Row(16, "lora.alpha", when=[f"{MODEL}.lora_rank"]),
  "model.target_modules": Row("all-linear", rules.lora_targets),
  "model.enable_gradient_checkpointing": Row(True, "model.remat", rules.REMAT),
  "ref.fsdp_config.param_offload": Row(  # full KL needs a reference on devices
    False,
    "model.reference",
    lambda x, t: "host" if x and t[KL_TYPE] != "full" else None,
    when=[f"{ACTOR}.use_kl_loss"],
  ),
  "data.train_files": Row(None, rules.data),
  "data.val_files": Row(note="held-out problems: the data's test split"),
  "data.prompt_key": Row(
    "prompt", "data.options.prompt", lambda x, _: None if x == "prompt" else x
  ),
  "data.max_prompt_length": Row(512, "data.max_prompt_length"),
  "data.max_response_length": Row(512, "sampling.max_new_tokens"),
  "data.filter_overlong_prompts": Row(
    False, "data.too_long", {True: "drop", False: "refuse"}
  ),
  "data.apply_chat_template_kwargs": Row(None, rules.template_options),
  f"{REWARD}.path": Row(None, _rewards),
  f"{REWARD}.name": Row("compute_score"),
  f"{REWARD}.reward_kwargs": Row(),
  f"{BUFFER}.enable": Row(False),
  f"{BUFFER}.len": Row(0),
  f"{BUFFER}.penalty_factor": Row(1.0),
  f"{REWARD_MODEL}.enable": Row(False),
  f"{REWARD_MODEL}.model_path": Row(
    None,
    "reward.model",
    note="a sequence classifier, added to the rewards of functions",
    when=[f"{REWARD_MODEL}.enable"],
  ),
  # Several turns
  "rollout.multi_turn.enable": Row(False, note=rules.TURNS),
  "rollout.multi_turn.max_assistant_turns": Row(None, _turns),
  "rollout.multi_turn.max_user_turns": Row(),
  "rollout.multi_turn.tool_config_path": Row(note=rules.TOOLS),
  "rollout.multi_turn.function_tool_path": Row(note=rules.TOOLS),
  "rollout.multi_turn.interaction_config_path": Row(note=rules.ENVIRONMENT),
  "rollout.agent.agent_loop_config_path": Row(note=rules.ENVIRONMENT),
  "rollout.multi_turn.format": Row(
    "hermes", "environment.tool_format", _TOOL_FORMATS
  ),
  "rollout.multi_turn.max_tool_response_length": Row(
    256,
    "environment.max_observation",
    note="verl limits characters per answer, here tokens of a turn's answers",
    when=[f"{ROLLOUT}.multi_turn.enable"],
  ),
  # Batches and length of the run
  "data.seed": Row(None, "seed", lambda x, _: x or 1),
  "data.train_batch_size": Row(1024, "batch_size"),
  "data.gen_batch_size": Row(note="filter_groups.gen_parts is similar"),
  "rollout.n": Row(1, "group_size"),
  "actor.ppo_mini_batch_size": Row(256, _minibatches),
  "actor.ppo_micro_batch_size_per_gpu": Row(
    None, "optim.micro_batches", _micro_batches
  ),
  "actor.ppo_epochs": Row(1, "optim.epochs"),
  "trainer.n_gpus_per_node": Row(8),
  "trainer.nnodes": Row(1),
  "trainer.total_training_steps": Row(
    None, lambda t, x: rules.steps(t, x, "trainer.total_epochs", bool(t[x]))
  ),
  "trainer.total_epochs": Row(30),
  "trainer.project_name": Row(),
  "trainer.experiment_name": Row("gsm8k", rules.run_name),
  "trainer.logger": Row(("console", "wandb"), rules.trackers),
  "trainer.save_freq": Row(-1, "checkpoint.every", _every),
  "trainer.test_freq": Row(-1, "eval.every", _every),
  "trainer.max_actor_ckpt_to_keep": Row(
    None, "checkpoint.keep", rules.none_for_0
  ),
  # Sampling
  "rollout.temperature": Row(1.0, "sampling.temperature"),
  "rollout.top_k": Row(-1, "sampling.top_k", rules.filter_size, rules.SAMPLED),
  "rollout.top_p": Row(1.0, "sampling.top_p", note=rules.SAMPLED),
  "rollout.repetition_penalty": Row(1.0, missing=rules.NO_REPETITION_PENALTY),
  "rollout.stop": Row(None, rules.stop_strings),
  # Advantages and loss
  "algorithm.adv_estimator": Row("gae", _advantage),
  "algorithm.norm_adv_by_std_in_grpo": Row(True),
  "actor.loss_agg_mode": Row("token-mean", "loss.weighting", _WEIGHTINGS),
  "actor.loss_scale_factor": Row(
    note="sampling.max_new_tokens is used instead: scale the learning rate"
  ),
  "actor.policy_loss.loss_mode": Row(
    "vanilla", _surrogate, note={"gspo": "verl bounds the ratio by e^10"}
  ),
  "actor.policy_loss.dro_beta": Row(None, "loss.dro_beta"),
  "actor.clip_ratio": Row(
    0.2, note="only used if clip_ratio_low or clip_ratio_high is null"
  ),
  "actor.clip_ratio_low": Row(),
  "actor.clip_ratio_high": Row(),
  "actor.clip_ratio_c": Row(3.0),
  "actor.tau_pos": Row(1.0, "loss.sapo_temperature_pos"),
  "actor.tau_neg": Row(1.05, "loss.sapo_temperature_neg"),
  "actor.entropy_coeff": Row(
    0.0,
    "loss.entropy_coef",
    note=lambda x, t: (
      x
      and t[f"{ACTOR}.loss_agg_mode"] != "token-mean"
      and "the bonus is always a mean over tokens"
    ),
  ),
  "actor.use_kl_loss": Row(False, _kl),
  "actor.kl_loss_coef": Row(0.001),
  "actor.kl_loss_type": Row("low_var_kl"),
  "algorithm.use_kl_in_reward": Row(
    False, note="penalises whole completions, in verl each token"
  ),
  "algorithm.kl_penalty": Row("kl"),
  "algorithm.kl_ctrl.kl_coef": Row(0.001),
  f"{CORRECTION}.rollout_is": Row(None, _correction),
  f"{CORRECTION}.rollout_is_threshold": Row("2.0"),
  f"{CORRECTION}.rollout_rs": Row(None, _rejection),
  f"{CORRECTION}.rollout_rs_threshold": Row(),
  f"{FILTER}.enable": Row(False, "filter_groups.enable"),
  f"{FILTER}.metric": Row(
    None,
    "filter_groups.metric",
    lambda x, _: "acc" if x == "acc" else "reward",
    when=[f"{FILTER}.enable"],
  ),
  f"{FILTER}.max_num_gen_batches": Row(
    0,
    "filter_groups.max_num_gen_batches",
    lambda x, _: x if x > 0 else 100,
    "0 becomes 100; at the limit verl ends, while here the batch is smaller",
    when=[f"{FILTER}.enable"],
  ),
  "rollout.enable_rollout_routing_replay": Row(
    False, "loss.router_replay", {True: True, False: None}
  ),
  "actor.megatron.router_replay.mode": _ROUTER_REPLAY,
  "actor.veomni.router_replay.mode": _ROUTER_REPLAY,
  # Optimizer
  "actor.optim.optimizer": Row("AdamW", rules.optimizer),
  "actor.optim.lr": Row(1e-6, "optim.learning_rate"),
  "actor.optim.lr_warmup_steps": Row(-1, _warmup),
  "actor.optim.lr_warmup_steps_ratio": Row(0.0),
  "actor.optim.lr_scheduler_type": Row(
    "constant", "optim.schedule", rules.SCHEDULE, missing=rules.LOWEST_RATE
  ),
  "actor.optim.weight_decay": Row(
    0.01, "optim.weight_decay", note="verl decays norms and biases too"
  ),
  "actor.optim.betas": Row((0.9, 0.999), _betas),
  "actor.grad_clip": Row(1.0, "optim.max_grad_norm", rules.max_grad_norm),
}
TABLE = {
  re.sub(r"^(actor|rollout|model|ref)\.", r"actor_rollout_ref.\g<0>", name): row
  for name, row in _ROWS.items()
}

ALWAYS = (
  *rules.ALWAYS,
  Setting("model.dtype", "bfloat16", "verl computes in bfloat16"),
  Note("algorithm.adv_estimator", rules.OWN_ADVANTAGE),
)

# Settings of logging, engines, memory and placement
UNNEEDED = (
  r"(trainer|ray|critic|global_profiler|transfer_queue|hydra)\b|data\.(shuffle"
  r"|return|trust|image|video|dataloader|truncation)|.*\.(fsdp|use_dynamic_bsz"
  r"|use_remove_padding|use_shm|ppo_max_token|log_prob|tensor_model|gpu_memory"
  r"|enforce_eager|free_cache|max_num|load_format|dtype|nnodes|strategy|name$"
  r"|mode$|enable_chunked|prefix|checkpoint|profiler|ulysses|num_workers)"
)

LIBRARY = rules.Library(
  "verl 0.9", "docs/from-verl.md", TABLE, ALWAYS, UNNEEDED, OLDER, _sizes
)
