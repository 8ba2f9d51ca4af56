"""Corrections for a mismatch between rollout policy and trained policy.

Tokens are drawn from the rollout policy mu, whose probabilities differ from the
trainer's (another program, engine or precision). The surrogate has the ratio pi
/ pi_old of the trainer's probabilities; here the remaining factor, r_t =
pi_old(o_t) / mu(o_t), becomes a constant weight of each token's loss.

| correction          | w, a factor of a token's loss           | also called |
|---------------------|-----------------------------------------|-------------|
| `token_truncate`    | r_t clipped to [low, high]              | TIS         |
| `token_mask`        | r_t; 0 outside of [low, high]           | MIS, IcePop |
| `sequence_truncate` | prod_t r_t clipped to [low, high]       | seq-TIS     |
| `sequence_mask`     | prod_t r_t; 0 outside of [low, high]    | seq-MIS     |
| `geometric_mask`    | 1; 0 if the geometric mean of r_t       | seq_mean_k1 |
|                     | lies outside of [low, high]             |             |

The KL term and the entropy bonus are means over the same samples, so they take
the same weights (not in TRL and verl). The loss is divided by the number of all
tokens, as in TRL; verl leaves masked tokens out.

Without bounds, sequence weights give the gradient of pi_old without bias, on
three conditions: the loss is divided by numbers independent of the samples
(`fixed_length` or `sequence_sum`, no completion left out); the advantage is a
sum of rewards less a baseline of other samples; mu draws without top_k, top_p
and min_p. Their variance grows with the length; token weights do not correct
the distribution of prefixes. `sequence_ratio` and `gmpo` average weights over a
completion: use sequence weights. `geometric_mask` only drops completions whose
tokens are, on average, too far off (SkyRL's bounds are .99 and 1.01).

Sources: TIS, Yao et al. (2025), "Your Efficient RL Framework Secretly Brings
You Off-Policy RL Training"; MIS, Liu et al. (2025), "When Speed Kills
Stability"; names and bounds as in TRL 1.16 (vllm_importance_sampling_mode).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpojax.core.losses.kl import masked_log_ratio
from grpojax.core.losses.surrogates import Aux
from grpojax.core.types import Batch

_LARGEST = 20.0  # log of the largest weight, so that exp does not overflow
_INF = float("inf")


CORRECTIONS = (
  "none",
  "token_truncate",
  "token_mask",
  "sequence_truncate",
  "sequence_mask",
  "geometric_mask",
)
UNWEIGHTED = ("none", "geometric_mask")
"""Corrections without importance weights."""


def is_weights(
  log_ratio: Float[Array, "B G T"],
  mask: Bool[Array, "B G T"],
  correction: str,
  low: float = 0.0,
  high: float = _INF,
) -> tuple[Float[Array, "B G T"], Bool[Array, "B G T"]]:
  """Importance-sampling weights of the tokens' losses (see the module's table).

  `log_ratio` is log(pi_old / mu), 0 on padding. Padding gets weight 1. Also
  returns a mask that is True for weights out of bounds.
  """
  unit, bound = correction.split("_")
  if unit == "sequence":
    total = jnp.sum(log_ratio, axis=-1, keepdims=True)
    log_ratio = jnp.minimum(total, _LARGEST)
  elif unit == "geometric":
    length = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
    log_ratio = jnp.sum(log_ratio, axis=-1, keepdims=True) / length
  weights = jnp.exp(log_ratio)
  outside = mask & ((weights < low) | (weights > high))
  if unit == "geometric":  # the mean over tokens only selects sequences
    weights = jnp.ones_like(weights)
  if bound == "truncate":
    bounded = jnp.clip(weights, low, high)
  else:
    bounded = jnp.where(outside, 0.0, weights)
  return jnp.where(mask, bounded, 1.0), outside


def off_policy_sequences(
  logprobs: Float[Array, "B G T"],
  rollout_logprobs: Float[Array, "B G T"],
  advantages: Float[Array, "B G"],
  mask: Bool[Array, "B G T"],
  threshold: float,
) -> Bool[Array, "B G"]:
  """True for off-policy sequences that are worse than their group.

  A < 0 and (1 / |o|) sum_t log(mu / pi) > threshold in nats per token
  (DeepSeek-V3.2, arXiv 2512.02556, equation 9). As in TRL, the log-ratio
  includes the change by updates and the mismatch between rollout and trainer.
  """
  drift = -jnp.sum(masked_log_ratio(logprobs, rollout_logprobs, mask), axis=-1)
  mean = drift / jnp.maximum(jnp.sum(mask, axis=-1), 1)
  return (advantages < 0) & (mean > threshold)


def make_correction(
  correction: str = "none",
  low: float = 0.0,
  high: float = _INF,
  threshold: float | None = None,
) -> Callable[..., tuple[Array | None, Array | None, Aux]] | None:
  """Makes the correction that `make_update` applies to its losses.

  In a single update pi_old is the policy that is updated. Several updates need
  old_logprobs = "trainer" (with "rollout" all correction weights are 1).
  `off_policy_sequences` above `threshold` nats per token are left out.

  Returns None if both are off, else `(logprobs, batch) -> (is_weights,
  left_out, aux)`: weights [B, G, T], or None for correction "none"; True for
  sequences [B, G, 1] left out of the surrogate, or None without a `threshold`;
  `is_weight`, `is_weight_bounded` (out of bounds) and `off_policy_masked`,
  logged as means over tokens.
  """
  if correction == "none" and threshold is None:
    return None

  def correct(logprobs: Float[Array, "B G T"], batch: Batch):
    rollout_logprobs = batch.rollout_logprobs
    mask = batch.completion_mask
    if rollout_logprobs is None:
      raise ValueError(
        "a correction needs the rollout's log-probabilities, and the batch has "
        "none: set Batch.rollout_logprobs, as make_batch does"
      )
    logprobs = jax.lax.stop_gradient(logprobs)
    weights = None
    left_out = None
    aux = {}
    if correction != "none":
      old = logprobs if batch.old_logprobs is None else batch.old_logprobs
      log_ratio = masked_log_ratio(old, rollout_logprobs, mask)
      weights, outside = is_weights(log_ratio, mask, correction, low, high)
      aux |= {"is_weight": weights, "is_weight_bounded": outside}
    if threshold is not None:
      left_out = off_policy_sequences(
        logprobs, rollout_logprobs, batch.advantages, mask, threshold
      )[..., None]
      aux["off_policy_masked"] = left_out & mask
    return weights, left_out, aux

  return correct
