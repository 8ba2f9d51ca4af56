"""Objective of an update as one value: which loss of which advantages.

    objective = Objective(clip_high=0.28, weighting="fixed_length", beta=0.04)
    step = make_grpo_step(lm, tx, reward_fn, objective=objective, ...)

A name is looked up in `ADVANTAGES`, `SURROGATES`, `RATIOS` or `WEIGHTINGS`; a
function of your own may stand in its place. Its parameters are bound to the
fields of their names (`core.binding`).
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from grpojax.core import losses
from grpojax.core.advantages import ADVANTAGES
from grpojax.core.binding import asks_for, bind
from grpojax.core.losses import WEIGHTINGS, rollout_correction
from grpojax.core.losses.kl import PLACEMENTS
from grpojax.core.losses.rollout_correction import CORRECTIONS
from grpojax.core.losses.surrogates import RATIOS, SURROGATES
from grpojax.core.losses.truncation import TRUNCATED
from grpojax.core.options import (
  NOT_NEGATIVE,
  ONE_OR_MORE,
  POSITIVE,
  declared_options,
  frozen_options,
  option,
  option_errors,
  refuse,
)

OLD_LOGPROBS = ("rollout", "trainer")
"""Origin of the old log-probabilities, the ratios' denominators: the rollout's
own, or one more forward pass of the training program."""


@frozen_options
class Objective:
  """Objective that a step's completions are learned from.

  Advantages are described in `core.advantages`, all else in `core.losses`.
  """

  advantage: str | Callable[..., Array] = option(
    "leave_one_out", "what of a group's rewards is learned from", ADVANTAGES
  )
  subset_size: int = option(
    2, "k of max_at_k, min_at_k and max_rl", within=ONE_OR_MORE
  )
  score_power: float = option(
    2.0,
    "power of the weights of score_weighted and optimal_token_baseline",
    within=POSITIVE,
  )
  surrogate: str | Callable[..., Any] = option(
    "clipped", "what is made of ratio and advantage; clipped is PPO", SURROGATES
  )
  clip_low: float = option(
    0.2, "clipped: ratios down to 1 - this have a gradient", within="[0, 1]"
  )
  clip_high: float = option(
    0.2, "clipped: ratios up to 1 + this have a gradient", within=NOT_NEGATIVE
  )
  dual_clip: float = option(
    0.0,
    "clipped: bound (over 1) of the ratio of negative advantages; 0 = off",
    within=NOT_NEGATIVE,
  )
  cispo_min: float = option(
    0.0, "cispo: lower bound of the ratio (1 on-policy)", within="[0, 1]"
  )
  cispo_max: float = option(
    5.0, "cispo: upper bound of the ratio (1 on-policy)", within=ONE_OR_MORE
  )
  dppo_low: float = option(
    0.2,
    "dppo_tv, dppo_kl: bound of a probability's loss, or divergence in nats",
    within=NOT_NEGATIVE,
  )
  dppo_high: float = option(
    0.2,
    "dppo_tv, dppo_kl: bound of a probability's gain, or divergence in nats",
    within=NOT_NEGATIVE,
  )
  dppo_ratio_max: float = option(
    20.0, "dppo_tv, dppo_kl: upper bound of the ratio", within=ONE_OR_MORE
  )
  dro_beta: float = option(
    0.1, "dro: weight of the squared log-ratio", within=NOT_NEGATIVE
  )
  gmpo_clip_low: float = option(
    0.4, "gmpo: log-ratios down to minus this", within=NOT_NEGATIVE
  )
  gmpo_clip_high: float = option(
    0.4, "gmpo: log-ratios up to this", within=NOT_NEGATIVE
  )
  sapo_temperature_pos: float = option(
    1.0, "sapo: temperature where the advantage is positive", within=POSITIVE
  )
  sapo_temperature_neg: float = option(
    1.05, "sapo: temperature where it is negative", within=POSITIVE
  )
  vespo_k_pos: float = option(
    2.0, "vespo: k where the advantage is positive", within=NOT_NEGATIVE
  )
  vespo_lambda_pos: float = option(
    3.0, "vespo: lambda where the advantage is positive", within=POSITIVE
  )
  vespo_k_neg: float = option(
    3.0, "vespo: k where the advantage is negative", within=NOT_NEGATIVE
  )
  vespo_lambda_neg: float = option(
    2.0, "vespo: lambda where the advantage is negative", within=POSITIVE
  )
  advantage_clip: float = option(
    0.0, "bound of the advantages' size; 0 = off", within=NOT_NEGATIVE
  )
  top_entropy_quantile: float = option(
    1.0,
    "share of the tokens, those of highest entropy, in the loss; 1 is all",
    within="[0, 1]",
  )
  entropy_coef: float = option(
    0.0, "coefficient of an entropy bonus; 0 = off", within=NOT_NEGATIVE
  )
  entropy_target: float = option(
    0.0,
    "entropy that the coefficient is adapted to, nats a token; 0 = it is fixed",
    within=NOT_NEGATIVE,
  )
  entropy_coef_delta: float = option(
    0.005, "change of the adaptive coefficient an update", within=NOT_NEGATIVE
  )
  entropy_coef_max: float = option(
    1.0, "largest adaptive coefficient", within=NOT_NEGATIVE
  )
  router_aux_coef: float = option(
    0.0,
    "coefficient of the loss that keeps a mixture's experts in use; 0 = off",
    within=NOT_NEGATIVE,
  )
  router_replay: bool = option(
    False, "send each token to the experts that it had in the rollout (R3)"
  )
  ratio: str | Callable[..., Array] = option(
    "token_ratio",
    "ratio of the policy to the one that sampled: by token, by completion "
    "(GSPO), or their product over a completion",
    RATIOS,
  )
  old_logprobs: str = option(
    "rollout",
    "whose log-probabilities are the ratio's denominator when a step has "
    "several updates; trainer is one more forward pass",
    OLD_LOGPROBS,
  )
  correction: str = option(
    "none",
    "weigh losses by pi_trainer / pi_rollout, truncated or masked, by token or "
    "sequence; or leave out sequences by its geometric mean",
    CORRECTIONS,
  )
  correction_low: float = option(
    0.0,
    "lower bound of these weights, which are 1 where nothing differs; 0 is off",
    within="[0, 1]",
  )
  correction_high: float = option(
    3.0,
    "upper bound of these weights (1 or more: a weight is 1 where nothing "
    "differs); 0 is off",
    within=NOT_NEGATIVE,
  )
  off_policy_threshold: float = option(
    0.0,
    "leave out sequences of negative advantage that the sampler finds likelier "
    "than the policy by so many nats a token; 0 = off",
    within=NOT_NEGATIVE,
  )
  truncated: str = option(
    "keep",
    "completions cut off at their budget: keep; mask (not in the loss); or "
    "drop (nor in the group's baseline)",
    TRUNCATED,
  )
  weighting: str | Callable[[Array], Array] = option(
    "token_mean", "how tokens are averaged over lengths", WEIGHTINGS
  )
  kl: str = option(
    "k3",
    "estimator of the KL divergence from the reference; exact sums over the "
    "vocabulary",
    sorted({kl for kls in PLACEMENTS.values() for kl in kls}),
  )
  kl_placement: str = option(
    "loss", "where it counts: a term of the loss, or of the reward", PLACEMENTS
  )
  beta: float = option(
    0.0,
    "coefficient of the KL term; 0 = none, and no reference model in memory",
    within=NOT_NEGATIVE,
  )

  def __post_init__(self):
    errors, reasons = option_errors(self), {}
    if self.advantage == "oracle":
      errors = [line for line in errors if not line.startswith("advantage =")]
      reasons["advantage"] = (
        "needs the true value of each prompt, which a training run does not "
        f"know; use one of {', '.join(ADVANTAGES)}"
      )
    if 0 < self.dual_clip <= 1:
      reasons["dual_clip"] = "must be more than 1, or 0 for off"
    if 0 < self.correction_high < 1:
      reasons["correction_high"] = (
        "must be 1 or more: a weight is 1 where nothing differs; 0 is off"
      )
    advantage = _function(self.advantage, ADVANTAGES)
    of_tokens = advantage and asks_for(advantage, "token_score_sq")
    if of_tokens and self.one_advantage_for:
      reasons["advantage"] = f"is one a token: {self.one_advantage_for}"
    surrogate = f"surrogate = {self.surrogate!r}"
    if self.surrogate in ("dppo_tv", "dppo_kl") and self.ratio != "token_ratio":
      reasons["ratio"] = (
        f"{surrogate} bounds the probabilities of tokens: use token_ratio"
      )
    if self.surrogate == "cispo" and self.ratio == "sequence_ratio":
      reasons["ratio"] = (
        f"{surrogate} has no gradient of it, so the average over the tokens "
        "would be lost: use token_ratio"
      )
    errors += [
      f"{name} = {getattr(self, name)!r}: {reason}"
      for name, reason in reasons.items()
    ]
    refuse(errors or _unread_by_surrogate(self))

  @property
  def one_advantage_for(self) -> str:
    """Reason why an advantage must be one a completion; "" for none."""
    if self.ratio == "sequence_ratio" or self.surrogate == "gmpo":
      return (
        "sequence_ratio and gmpo average over a trajectory: use another ratio "
        "or surrogate"
      )
    if self.off_policy_threshold:
      return "off_policy_threshold needs one advantage a trajectory: use 0"
    return ""

  @property
  def needs_reference(self) -> bool:
    """True where a reference policy has to be held in memory."""
    return self.beta > 0

  @property
  def has_exact_kl(self) -> bool:
    """True where whole distributions are compared with the reference's."""
    return self.beta > 0 and self.kl == "exact"

  @property
  def has_entropy_bonus(self) -> bool:
    """True where entropy is part of the loss, if only now and then."""
    return self.entropy_coef > 0 or self.entropy_target > 0

  @property
  def kl_in_reward(self) -> float:
    """Coefficient of a KL penalty that is taken from the reward; 0 for none."""
    return self.beta if self.kl_placement == "reward" else 0.0


def _function(named: Any, functions: dict[str, Any]) -> Any:
  return functions.get(named) if isinstance(named, str) else named


def _unread_by_surrogate(objective: Objective) -> list[str]:
  """Returns a line for each option that another surrogate alone reads."""
  surrogate = _function(objective.surrogate, SURROGATES)
  read_by = {
    name: key
    for key, function in SURROGATES.items()
    for name in inspect.signature(function).parameters
  }
  return [
    f"{name} = {getattr(objective, name)!r}: surrogate = "
    f"{objective.surrogate!r} does not read it: leave it at "
    f"{declared.default!r}, or use surrogate = {read_by[name]!r}"
    for name, declared in declared_options(objective).items()
    if name in read_by
    and getattr(objective, name) != declared.default
    and surrogate
    and not asks_for(surrogate, name)
  ]


def advantage_fn(objective: Objective) -> Callable[..., Array]:
  """Returns rewards [..., G] -> advantages [..., G]; see `core.advantages`."""
  return bind(
    _function(objective.advantage, ADVANTAGES),
    k=objective.subset_size,
    power=objective.score_power,
  )


def loss_fn(objective: Objective) -> Callable[..., Any]:
  """Returns `losses.grpo_loss` with its ratio, surrogate and KL term bound."""
  options = {
    field.name: getattr(objective, field.name)
    for field in dataclasses.fields(objective)
  } | {"dual_clip": objective.dual_clip or None}
  loss = functools.partial(
    losses.grpo_loss,
    ratio=_function(objective.ratio, RATIOS),
    surrogate=bind(_function(objective.surrogate, SURROGATES), **options),
  )
  if not objective.beta:
    return loss
  estimators = PLACEMENTS[objective.kl_placement]
  if objective.kl not in estimators:
    raise ValueError(
      f"kl = {objective.kl!r}: with kl_placement = {objective.kl_placement!r} "
      f"use {' or '.join(estimators)} (see core.losses.kl)"
    )
  if objective.kl_placement == "reward":
    return loss
  return functools.partial(
    loss,
    kl=estimators[objective.kl],
    beta=objective.beta,
    kl_correction=objective.kl_placement == "ratio",
  )


def weighting_fn(
  objective: Objective, max_new_tokens: int
) -> Callable[[Array], Array]:
  """Returns mask [B, G, T] -> weights of the tokens; see `core.losses`."""
  return bind(_function(objective.weighting, WEIGHTINGS), length=max_new_tokens)


def correction_fn(objective: Objective) -> rollout_correction.Correct | None:
  """Returns what losses are corrected by; None where all of it is off."""
  return rollout_correction.make_correction(
    objective.correction,
    objective.correction_low,
    objective.correction_high or math.inf,
    objective.off_policy_threshold or None,
  )
