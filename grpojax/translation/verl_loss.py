"""verl's advantages, losses, KL terms and corrections as ours."""

from grpojax.translation.parts import (
  NOTHING,
  Theirs,
  Translation,
  also,
  differs,
  missing,
  setting,
)
from grpojax.translation.verl_names import ACTOR, CORRECTION, FILTER

_ADVANTAGES = {
  "rloo": "leave_one_out",
  "rloo_vectorized": "leave_one_out",
  "opo": "length_weighted",
  "gdpo": "batch_std",
}
_WEIGHTINGS = {
  "token-mean": "token_mean",
  "seq-mean-token-mean": "sequence_mean",
  "seq-mean-token-sum": "sequence_sum",
  "seq-mean-token-sum-norm": "fixed_length",
}
_SURROGATES = {"vanilla": "clipped", "gspo": "clipped", "cispo": "cispo"}
_SURROGATES |= {"geo_mean": "gmpo", "sapo": "sapo"}
_KLS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}


def translate(theirs: Theirs) -> Translation:
  """All that the loss of a step is made of, and the groups that it is of."""
  found = _advantage(theirs) + _surrogate(theirs) + _kl(theirs)
  name = f"{ACTOR}.entropy_coeff"
  found += setting(theirs, "loss.entropy_coef", name, float(theirs[name]))
  if theirs[name] and theirs[f"{ACTOR}.loss_agg_mode"] != "token-mean":
    found += differs(
      name, "the bonus is the mean over tokens whatever the loss"
    )
  return found + _correction(theirs) + _filter(theirs)


def _advantage(theirs: Theirs) -> Translation:
  name = "algorithm.adv_estimator"
  kind, said = theirs[name], theirs.said(name)
  if kind in ("grpo", "grpo_vectorized"):
    by = "algorithm.norm_adv_by_std_in_grpo"
    ours = "grpo" if theirs[by] else "dr_grpo"
    return also("advantage", ours, theirs.said(name, by)) + differs(
      name,
      "grpojax's own default is advantage = 'leave_one_out', the unbiased"
      " gradient",
    )
  if kind in _ADVANTAGES:
    found = also("advantage", _ADVANTAGES[kind], said)
    if kind == "gdpo":
      found += also("reward.aggregation", "normalize_then_sum", said)
      found += differs(name, "verl whitens over tokens, here over completions")
    return found
  why = "needs a critic" if kind == "gae" else "has no counterpart"
  return also("advantage", "leave_one_out") + missing(
    name, f"{kind!r} {why}: advantage = 'leave_one_out' compares with the group"
  )


def _surrogate(theirs: Theirs) -> Translation:
  name = f"{ACTOR}.policy_loss.loss_mode"
  mode, said = theirs[name], theirs.said(name)
  found = also("loss.surrogate", _SURROGATES.get(mode, "clipped"), said)
  if mode not in _SURROGATES:
    found += missing(name, f"{mode!r}: the clipped loss is taken")
  ratio = "sequence_ratio" if mode == "gspo" else "token_ratio"
  found += also("loss.ratio", ratio, said)
  if mode == "gspo":
    found += differs(name, "verl bounds the ratio by e^10")
  found += _bounds(theirs, _SURROGATES.get(mode, "clipped"))
  name = f"{ACTOR}.loss_agg_mode"
  mean, said = theirs[name], theirs.said(name)
  if mean not in _WEIGHTINGS:
    return found + missing(name, f"{mean!r}: token_mean is taken")
  found += also("loss.weighting", _WEIGHTINGS[mean], said)
  if mode in ("geo_mean", "sapo") and mean != "seq-mean-token-mean":
    found += also("loss.weighting", "sequence_mean", f"{mode} always takes it")
  scale = f"{ACTOR}.loss_scale_factor"
  if mean == "seq-mean-token-sum-norm" and theirs[scale]:
    found += differs(
      scale,
      "sums are divided by sampling.max_new_tokens: scale the learning rate",
    )
  return found


def _bounds(theirs: Theirs, surrogate: str) -> Translation:
  """How far ratios count."""
  low, high = (theirs[f"{ACTOR}.clip_ratio_{x}"] for x in ("low", "high"))
  said = [theirs.said(f"{ACTOR}.clip_ratio_{x}") for x in ("low", "high")]
  found = NOTHING
  if f"{ACTOR}.clip_ratio" in theirs.given:
    found += differs(
      f"{ACTOR}.clip_ratio",
      "verl takes clip_ratio_low and clip_ratio_high, and this only where they"
      " are null",
    )
    low = theirs[f"{ACTOR}.clip_ratio"] if low is None else low
    high = theirs[f"{ACTOR}.clip_ratio"] if high is None else high
  if surrogate == "cispo":
    values = {"cispo_min": max(1 - low, 0.0), "cispo_max": 1 + high}
  elif surrogate == "gmpo":
    values = {"gmpo_clip_low": low, "gmpo_clip_high": high}
  else:
    values = {"clip_low": low, "clip_high": high}
  if surrogate == "sapo":
    values, said = {}, []
    for name in ("pos", "neg"):
      tau = f"{ACTOR}.tau_{name}"
      ours = f"loss.sapo_temperature_{name}"
      found += setting(theirs, ours, tau, float(theirs[tau]))
  for (name, value), text in zip(values.items(), said, strict=True):
    found += also(f"loss.{name}", float(value), text)
  if surrogate == "clipped":
    name = f"{ACTOR}.clip_ratio_c"
    found += setting(theirs, "loss.dual_clip", name, float(theirs[name]))
  return found


def _kl(theirs: Theirs) -> Translation:
  in_reward = theirs["algorithm.use_kl_in_reward"]
  name = f"{ACTOR}.use_kl_loss"
  if in_reward:
    found = _kl_in_reward(theirs)
    if theirs[name]:
      found += missing(name, "one KL term: the one in the reward is taken")
    return found
  if not theirs[name]:
    return also("loss.beta", 0.0, theirs.said(name))
  coefficient, kind = f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"
  found = setting(theirs, "loss.beta", coefficient, float(theirs[coefficient]))
  estimator = str(theirs[kind])
  found += also("loss.kl", _KLS.get(estimator, "k3"), theirs.said(kind))
  found += also("loss.kl_placement", "loss", theirs.said(name))
  if estimator not in _KLS:
    found += missing(
      kind,
      f"{estimator!r}: as a term of the loss k1 has no expected gradient, and"
      " |k1| is no estimate of the divergence; k3 is taken",
    )
  return found


def _kl_in_reward(theirs: Theirs) -> Translation:
  name = "algorithm.kl_ctrl.kl_coef"
  found = setting(theirs, "loss.beta", name, float(theirs[name]))
  found += also("loss.kl", "k1", theirs.said("algorithm.kl_penalty"))
  said = theirs.said("algorithm.use_kl_in_reward")
  found += also("loss.kl_placement", "reward", said)
  found += differs(
    "algorithm.use_kl_in_reward",
    "the penalty is of the whole completion here, in verl of each token",
  )
  if theirs["algorithm.kl_penalty"] not in ("kl", "k1"):
    found += missing("algorithm.kl_penalty", "k1 is taken")
  if theirs["algorithm.kl_ctrl.type"] != "fixed":
    found += missing("algorithm.kl_ctrl.type", "loss.beta is fixed")
  return found


def _correction(theirs: Theirs) -> Translation:
  """Of a sampler that is not the policy."""
  found, name = NOTHING, f"{CORRECTION}.rollout_is"
  if theirs[f"{CORRECTION}.rollout_rs"]:
    found += missing(
      f"{CORRECTION}.rollout_rs",
      "loss.correction has token_mask and sequence_mask, which leave the tokens"
      " in the mean",
    )
  level = theirs[name]
  if level not in ("token", "sequence"):
    return found
  limit = f"{CORRECTION}.rollout_is_threshold"
  low, _, high = str(theirs[limit]).rpartition("_")
  kind = "mask" if low else "truncate"
  found += also("loss.correction", f"{level}_{kind}", theirs.said(name))
  found += also("loss.correction_low", float(low or 0), theirs.said(limit))
  found += also("loss.correction_high", float(high), theirs.said(limit))
  return found + also("loss.old_logprobs", "trainer", "as verl does")


def _filter(theirs: Theirs) -> Translation:
  if not theirs[f"{FILTER}.enable"]:
    return NOTHING
  found = setting(theirs, "filter_groups.enable", f"{FILTER}.enable")
  metric = theirs[f"{FILTER}.metric"]
  said = theirs.said(f"{FILTER}.metric")
  ours = "acc" if metric == "acc" else "reward"
  found += also("filter_groups.metric", ours, said)
  name, most = f"{FILTER}.max_num_gen_batches", 100
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
