"""Mismatch of log-probabilities between trainer and rollout.

Trainer and rollout use the same weights, but programs that round differently.
The mismatch is part of the importance ratios if the old log-probabilities are
the rollout's, else it makes the gradient off-policy.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from grpojax.core.losses.kl import clean_logprobs, k3, masked_log_ratio
from grpojax.core.types import Batch


def token_mismatch(
  loss: Callable[..., Any],
  logprobs: Float[Array, "B G T"],
  batch: Batch,
  weights: Float[Array, "B G T"],
) -> dict[str, Shaped[Array, "B G T"]]:
  """Mismatch of each token; {} for a batch without `rollout_logprobs`.

  "log_ratio" is log(pi_trainer / pi_rollout) in nats, "kl" k3 of KL(rollout ||
  trainer) (both 0 on padding). Other arrays, such as "clip_fraction_low", are
  logged by the loss if its old log-probabilities are the rollout's.
  """
  if batch.rollout_logprobs is None:
    return {}
  logprobs = jax.lax.stop_gradient(logprobs)
  mask = batch.completion_mask
  sampled = batch.rollout_logprobs
  _, aux = loss(logprobs, batch.advantages, weights, mask, sampled, beta=0.0)
  clipping = {k: v for k, v in aux.items() if k not in ("ratio", "kl")}
  return {
    "log_ratio": masked_log_ratio(logprobs, sampled, mask),
    "kl": k3(clean_logprobs(sampled, mask), clean_logprobs(logprobs, mask)),
  } | clipping


def metrics(
  arrays: dict[str, Shaped[Array, "*B G T"]], mask: Bool[Array, "*B G T"]
) -> dict[str, Float[Array, ""]]:
  """Mismatch metrics: means over tokens, maximum, effective sample size.

  The effective sample size is the share (sum_i w_i)^2 / (N sum_i w_i^2) of the
  sequences' weights w_i = prod_t pi_trainer / pi_rollout for N non-empty
  sequences (Kong, 1992): 1 if rollout and trainer agree, 1 / N if a
  single sequence has all the weight, nan if N = 0.
  """
  if not arrays:
    return {}
  arrays = dict(arrays)
  log_ratio = arrays.pop("log_ratio")
  mismatch = jnp.abs(log_ratio)
  arrays["mismatch_mean"] = mismatch
  count = jnp.maximum(jnp.sum(mask), 1)
  means = {k: jnp.sum(jnp.where(mask, v, 0)) / count for k, v in arrays.items()}
  real = jnp.any(mask, axis=-1)
  log_w = jnp.where(real, jnp.sum(log_ratio, axis=-1), -jnp.inf)
  # Relative to the largest weight, which leaves shares unchanged.
  w = jnp.exp(log_w - jnp.max(log_w, initial=-1e30))
  sequences = jnp.maximum(jnp.sum(real), 1)
  squares = jnp.maximum(jnp.sum(w**2), 1e-30)
  share = jnp.sum(w) ** 2 / (sequences * squares)
  return {
    "rollout_mismatch_max": jnp.max(mismatch),
    "rollout_effective_samples": jnp.where(jnp.any(real), share, jnp.nan),
  } | {f"rollout_{name}": value for name, value in means.items()}
