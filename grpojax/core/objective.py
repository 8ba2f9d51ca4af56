"""Objective of an update: the loss, the advantages and their settings.

    objective = Objective(clip_high=0.28, weighting="fixed_length", beta=0.04)
    step = make_grpo_step(lm, tx, reward_fn, objective=objective, ...)

A name is looked up in `ADVANTAGES`, `SURROGATES`, `RATIOS` or `WEIGHTINGS`; you
can give your own function instead. Its parameters are bound to the fields of
the same names (`core.binding`).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from grpojax.core import losses
from grpojax.core.advantages import ADVANTAGES
from grpojax.core.binding import asks_for, bind
from grpojax.core.losses import WEIGHTINGS
from grpojax.core.losses.kl import PLACEMENTS
from grpojax.core.losses.rollout_correction import CORRECTIONS
from grpojax.core.losses.surrogates import RATIOS, SURROGATES
from grpojax.core.losses.truncation import TRUNCATED
from grpojax.core.options import (
  declared_options,
  frozen_options,
  not_negative,
  one_or_more,
  option,
  option_errors,
  positive,
  refuse,
)

OLD_LOGPROBS = ("rollout", "trainer")
"""Sources of the old log-probabilities, the ratios' denominators. `rollout`:
sampling; `trainer`: another forward pass of the training program."""


@frozen_options
class Objective:
  """Objective of the policy update.

  `core.advantages` describes the advantages, `core.losses` everything else.
  """

  advantage: str | Callable[..., Array] = option(
    "leave_one_out", "advantage estimator", ADVANTAGES
  )
  subset_size: int = one_or_more(
    2, "subset size k of max_at_k, min_at_k and max_rl"
  )
  score_power: float = positive(
    2.0, "power of the weights of score_weighted and optimal_token_baseline"
  )
  surrogate: str | Callable[..., Any] = option(
    "clipped", "surrogate loss; clipped is PPO's", SURROGATES
  )
  clip_low: float = option(
    0.2, "clipped: lower bound of the ratio is 1 - this", within="[0, 1]"
  )
  clip_high: float = not_negative(
    0.2, "clipped: upper bound of the ratio is 1 + this"
  )
  dual_clip: float = not_negative(
    0.0, "clipped: for negative advantages, bound of the ratio (> 1); 0 = off"
  )
  cispo_min: float = option(
    0.0, "cispo: lower bound of ratios, which are 1 on-policy", within="[0, 1]"
  )
  cispo_max: float = one_or_more(
    5.0, "cispo: upper bound of ratios, which are 1 on-policy"
  )
  dppo_low: float = not_negative(
    0.2,
    "largest fall of a probability (dppo_tv), or its KL in nats (dppo_kl)",
  )
  dppo_high: float = not_negative(
    0.2,
    "largest rise of a probability (dppo_tv), or its KL in nats (dppo_kl)",
  )
  dppo_ratio_max: float = one_or_more(
    20.0, "dppo_tv, dppo_kl: upper bound of the ratio"
  )
  dro_beta: float = not_negative(0.1, "dro: weight of the squared log-ratio")
  gmpo_clip_low: float = not_negative(
    0.4, "gmpo: lower bound of log-ratios is minus this"
  )
  gmpo_clip_high: float = not_negative(0.4, "gmpo: upper bound of log-ratios")
  sapo_temperature_pos: float = positive(
    1.0, "sapo: temperature of positive advantages"
  )
  sapo_temperature_neg: float = positive(
    1.05, "sapo: temperature of negative advantages"
  )
  vespo_k_pos: float = not_negative(2.0, "vespo: k of positive advantages")
  vespo_lambda_pos: float = positive(
    3.0, "vespo: lambda of positive advantages"
  )
  vespo_k_neg: float = not_negative(3.0, "vespo: k of negative advantages")
  vespo_lambda_neg: float = positive(
    2.0, "vespo: lambda of negative advantages"
  )
  advantage_clip: float = not_negative(
    0.0, "bound of the advantages' magnitude; 0 = off"
  )
  top_entropy_quantile: float = option(
    1.0,
    "share of tokens in the surrogate, those of highest entropy; 1 = all",
    within="[0, 1]",
  )
  entropy_coef: float = not_negative(
    0.0, "coefficient of an entropy bonus; 0 = off"
  )
  entropy_target: float = not_negative(
    0.0, "target entropy (nats per token) of an adaptive entropy_coef; 0 = off"
  )
  entropy_coef_delta: float = not_negative(
    0.005, "change of the adaptive entropy_coef per update"
  )
  entropy_coef_max: float = not_negative(1.0, "largest adaptive entropy_coef")
  router_aux_coef: float = not_negative(
    0.0, "coefficient of the load-balancing loss of experts; 0 = off"
  )
  router_replay: bool = option(
    False, "send each token to the experts it had in the rollout (R3)"
  )
  ratio: str | Callable[..., Array] = option(
    "token_ratio",
    "importance ratio to the policy that sampled; token_ratio: of a token; "
    "sequence_ratio: geometric mean over a completion (GSPO); "
    "trajectory_ratio: product over a completion",
    RATIOS,
  )
  old_logprobs: str = option(
    "rollout",
    "source of the ratio's denominator if a step has several updates; rollout: "
    "sampling; trainer: an additional forward pass",
    OLD_LOGPROBS,
  )
  correction: str = option(
    "none",
    "weights pi_trainer / pi_rollout in the loss; truncate: clip to bounds; "
    "mask: 0 out of bounds; geometric_mask: drop sequences by mean weight",
    CORRECTIONS,
  )
  correction_low: float = option(
    0.0,
    "lower bound of the correction's weights (1 without mismatch); 0 = off",
    within="[0, 1]",
  )
  correction_high: float = not_negative(
    3.0, "upper bound of the correction's weights (at least 1); 0 = off"
  )
  off_policy_threshold: float = not_negative(
    0.0,
    "drop sequences of negative advantage whose log-probability fell by more "
    "than this since sampling, in nats per token; 0 = off",
  )
  truncated: str = option(
    "keep",
    "completions cut off at their budget; keep: use them; mask: leave them out "
    "of the loss; drop: also leave them out of the group's baseline",
    TRUNCATED,
  )
  weighting: str | Callable[[Array], Array] = option(
    "token_mean", "how token weights depend on completion length", WEIGHTINGS
  )
  kl: str = option(
    "k3",
    "estimator of the KL divergence from the reference; exact: sum over "
    "the vocabulary",
    sorted({kl for kls in PLACEMENTS.values() for kl in kls}),
  )
  kl_placement: str = option(
    "loss",
    "place of the KL term; loss: in the loss; ratio: in the loss, times the "
    "token ratio; reward: a penalty in the reward",
    PLACEMENTS,
  )
  beta: float = not_negative(
    0.0,
    "coefficient of the KL term; 0 = none, and no reference model in memory",
  )

  def __post_init__(self):
    errors = option_errors(self)
    reasons = {}
    if self.advantage == "oracle":
      errors = [line for line in errors if not line.startswith("advantage =")]
      reasons["advantage"] = (
        "needs the true value of each prompt, which training does not know: "
        f"use one of {', '.join(ADVANTAGES)}"
      )
    if 0 < self.dual_clip <= 1:
      reasons["dual_clip"] = "must be more than 1, or 0 for off"
    if 0 < self.correction_high < 1:
      reasons["correction_high"] = (
        "must be 1 or more, the weight without mismatch, or 0 for off"
      )
    advantage = _function(self.advantage, ADVANTAGES)
    per_token = advantage and asks_for(advantage, "token_score_sq")
    if per_token and self.one_advantage_for:
      reasons["advantage"] = f"is per token: {self.one_advantage_for}"
    surrogate = f"surrogate = {self.surrogate!r}"
    if self.surrogate in ("dppo_tv", "dppo_kl") and self.ratio != "token_ratio":
      reasons["ratio"] = (
        f"{surrogate} bounds the probabilities of tokens: use token_ratio"
      )
    if self.surrogate == "cispo" and self.ratio == "sequence_ratio":
      reasons["ratio"] = (
        f"{surrogate} stops the gradient of the ratio, and with it the average "
        "over a sequence's tokens: use token_ratio"
      )
    errors += [
      f"{name} = {getattr(self, name)!r}: {reason}"
      for name, reason in reasons.items()
    ]
    refuse(errors or _unread_by_surrogate(self))

  @property
  def one_advantage_for(self) -> str:
    """Reason why the loss needs one advantage per completion, or ""."""
    if self.ratio == "sequence_ratio" or self.surrogate == "gmpo":
      return (
        "sequence_ratio and gmpo average over a trajectory: use another ratio "
        "or surrogate"
      )
    if self.off_policy_threshold:
      return "off_policy_threshold needs one advantage per trajectory: use 0"
    return ""

  @property
  def needs_reference(self) -> bool:
    """True if a reference policy has to be in memory."""
    return self.beta > 0

  @property
  def has_exact_kl(self) -> bool:
    """True if the KL term compares whole distributions."""
    return self.beta > 0 and self.kl == "exact"

  @property
  def has_entropy_bonus(self) -> bool:
    """True if entropy is part of the loss, at least in some updates."""
    return self.entropy_coef > 0 or self.entropy_target > 0

  @property
  def kl_in_reward(self) -> float:
    """Coefficient of the KL penalty subtracted from the reward; 0 for none."""
    return self.beta if self.kl_placement == "reward" else 0.0


def _function(named: Any, functions: dict[str, Any]) -> Any:
  return functions.get(named) if isinstance(named, str) else named


def _unread_by_surrogate(objective: Objective) -> list[str]:
  """Returns an error line per changed option that the surrogate ignores."""
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
  """Returns the function from rewards [..., G] to advantages [..., G]."""
  return bind(
    _function(objective.advantage, ADVANTAGES),
    k=objective.subset_size,
    power=objective.score_power,
  )


def loss_fn(objective: Objective) -> Callable[..., Any]:
  """Returns `losses.grpo_loss` with its ratio, surrogate and KL term bound."""
  options = vars(objective) | {"dual_clip": objective.dual_clip or None}
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
  """Returns the function from a mask [B, G, T] to weights of tokens."""
  return bind(_function(objective.weighting, WEIGHTINGS), length=max_new_tokens)
