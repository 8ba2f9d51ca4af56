"""Settings of what a step learns: the loss and its optimizer."""

from grpojax.core.grpo_step import OLD_LOGPROBS
from grpojax.core.kl import PLACEMENTS
from grpojax.core.losses import WEIGHTINGS
from grpojax.core.rollout_correction import CORRECTIONS
from grpojax.core.surrogates import RATIOS, SURROGATES
from grpojax.core.truncation import TRUNCATED
from grpojax.runtime.settings import section, setting
from grpojax.training.optimizer import MOMENTS, OPTIMIZERS, SCHEDULES
from grpojax.training.settings_input import NOT_NEGATIVE, ONE, POSITIVE

_LOSS = section(
  "the loss",
  surrogate=setting(
    "clipped", "what is made of ratio and advantage; clipped is PPO", SURROGATES
  ),
  clip_low=setting(
    0.2, "clipped: ratios down to 1 - this have a gradient", within="[0, 1]"
  ),
  clip_high=setting(
    0.2, "clipped: ratios up to 1 + this have a gradient", within=NOT_NEGATIVE
  ),
  dual_clip=setting(
    0.0,
    "clipped: bound (more than 1) of the ratio where the advantage is "
    "negative; 0 = off",
    within=NOT_NEGATIVE,
  ),
  cispo_min=setting(
    0.0,
    "cispo: lower bound of the ratio itself, which is 1 on-policy",
    within="[0, 1]",
  ),
  cispo_max=setting(
    5.0,
    "cispo: upper bound of the ratio itself, which is 1 on-policy",
    within=ONE,
  ),
  gmpo_clip_low=setting(
    0.4, "gmpo: log-ratios down to minus this", within=NOT_NEGATIVE
  ),
  gmpo_clip_high=setting(
    0.4, "gmpo: log-ratios up to this", within=NOT_NEGATIVE
  ),
  sapo_temperature_pos=setting(
    1.0, "sapo: temperature where the advantage is positive", within=POSITIVE
  ),
  sapo_temperature_neg=setting(
    1.05, "sapo: temperature where it is negative", within=POSITIVE
  ),
  vespo_k_pos=setting(
    2.0, "vespo: k where the advantage is positive", within=NOT_NEGATIVE
  ),
  vespo_lambda_pos=setting(
    3.0, "vespo: lambda where the advantage is positive", within=POSITIVE
  ),
  vespo_k_neg=setting(
    3.0, "vespo: k where the advantage is negative", within=NOT_NEGATIVE
  ),
  vespo_lambda_neg=setting(
    2.0, "vespo: lambda where the advantage is negative", within=POSITIVE
  ),
  advantage_clip=setting(
    0.0, "bound of the advantages' size; 0 = off", within=NOT_NEGATIVE
  ),
  top_entropy_quantile=setting(
    1.0,
    "share of the tokens, those of highest entropy, that is learned from; 1 is "
    "all",
    within="[0, 1]",
  ),
  entropy_coef=setting(
    0.0, "coefficient of an entropy bonus; 0 = off", within=NOT_NEGATIVE
  ),
  entropy_target=setting(
    0.0,
    "entropy that the coefficient is adapted to, nats a token; 0 = it is fixed",
    within=NOT_NEGATIVE,
  ),
  entropy_coef_delta=setting(
    0.005, "change of the adaptive coefficient an update", within=NOT_NEGATIVE
  ),
  entropy_coef_max=setting(
    1.0, "largest adaptive coefficient", within=NOT_NEGATIVE
  ),
  router_aux_coef=setting(
    0.0,
    "coefficient of the loss that keeps a mixture's experts in use; 0 = off",
    within=NOT_NEGATIVE,
  ),
  ratio=setting(
    "token_ratio",
    "ratio of the policy to the one that sampled: by token, by completion "
    "(GSPO), or their product over a completion",
    RATIOS,
  ),
  old_logprobs=setting(
    "rollout",
    "whose log-probabilities are the ratio's denominator when a step has "
    "several updates; trainer is one more forward pass",
    OLD_LOGPROBS,
  ),
  correction=setting(
    "none",
    "weigh losses by pi_trainer / pi_rollout, truncated or masked, by token or "
    "sequence",
    CORRECTIONS,
  ),
  correction_low=setting(
    0.0,
    "lower bound of these weights, which are 1 where nothing differs; 0 is off",
    within="[0, 1]",
  ),
  correction_high=setting(
    3.0,
    "upper bound of these weights (1 or more: a weight is 1 where nothing "
    "differs); 0 is off",
    within=NOT_NEGATIVE,
  ),
  off_policy_threshold=setting(
    0.0,
    "leave out sequences of negative advantage that the sampler finds likelier "
    "than the policy by so many nats a token; 0 = off",
    within=NOT_NEGATIVE,
  ),
  truncated=setting(
    "keep",
    "completions cut off at their budget: keep; mask (not in the loss); or "
    "drop (nor in the group's baseline)",
    TRUNCATED,
  ),
  weighting=setting(
    "token_mean", "how tokens are averaged over lengths", WEIGHTINGS
  ),
  kl=setting(
    "k3",
    "estimator of the KL divergence from the reference",
    sorted({kl for kls in PLACEMENTS.values() for kl in kls}),
  ),
  kl_placement=setting(
    "loss", "where it counts: a term of the loss, or of the reward", PLACEMENTS
  ),
  beta=setting(
    0.0,
    "coefficient of the KL term; 0 = none, and no reference model in memory",
    within=NOT_NEGATIVE,
  ),
)

_OPTIM = section(
  "the optimizer",
  name=setting(
    "adamw", "the optimizer; adafactor has b2, but no b1", OPTIMIZERS
  ),
  moments_dtype=setting(
    "float32",
    "format of AdamW's two moments between updates; bfloat16 is rounded at "
    "random",
    MOMENTS,
  ),
  learning_rate=setting(3e-4, "highest learning rate", within=POSITIVE),
  schedule=setting(
    "constant", "course of the learning rate after its warmup", SCHEDULES
  ),
  warmup_steps=setting(
    0, "optimizer updates from 0 to learning_rate", within=NOT_NEGATIVE
  ),
  b1=setting(0.9, "decay of the first moment", within="[0, 1)"),
  b2=setting(0.95, "decay of the second moment", within="[0, 1)"),
  weight_decay=setting(
    0.0, "weight decay, decoupled from the gradient", within=NOT_NEGATIVE
  ),
  max_grad_norm=setting(
    1.0,
    "gradients are scaled down to this norm; a large number turns clipping off",
    within=POSITIVE,
  ),
  epochs=setting(1, "passes over a step's completions", within="[1, 2**31)"),
  minibatches=setting(1, "optimizer updates a pass", within=ONE),
  micro_batches=setting(
    4,
    "parts of a minibatch, whose gradients are added up; packed, it has as "
    "many at most, none of them larger",
    within=ONE,
  ),
  packing=setting(
    True,
    "short completions of a group share rows: padding costs little, other "
    "lengths may compile",
  ),
)

SECTIONS = {"loss": _LOSS, "optim": _OPTIM}
