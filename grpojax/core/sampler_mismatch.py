"""How far the scorer is from the sampler, on the policy that sampled.

Both compute log-probabilities of the same tokens under the same weights, but by
different programs (with and without a cache, perhaps in another engine), whose
rounding differs, above all in low precision. Where the old log-probabilities
are the sampler's, the importance ratio is not 1 before the first update, but
the mismatch; where they are the scorer's, the mismatch is in no ratio, and the
gradient is off-policy by as much. Either way it should be small.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from grpojax.core.kl import masked_log_ratio
from grpojax.core.types import Batch

_OF_THE_LOSS = ("ratio", "kl")  # always logged, and not about clipping


def of_tokens(
  loss: Callable[..., Any],
  logprobs: Float[Array, "B G T"],
  batch: Batch,
  weights: Float[Array, "B G T"],
) -> dict[str, Shaped[Array, "B G T"]]:
  """The mismatch of each token, and what the loss would say to it.

  Args:
    loss: as `make_update` takes it.
    logprobs: the scorer's, of the policy that sampled.
    batch: with `sampler_logprobs`, or nothing is returned.
    weights: see `loss`.

  Returns:
    "mismatch", |log(pi_scorer / pi_sampler)| in nats (0 on padding), and what
    the loss monitors where the sampler's log-probabilities are the old ones
    ("clip_fraction_low", say).
  """
  if batch.sampler_logprobs is None:
    return {}
  logprobs = jax.lax.stop_gradient(logprobs)
  mask, sampled = batch.completion_mask, batch.sampler_logprobs
  _, monitored = loss(
    logprobs, batch.advantages, weights, mask, sampled, batch.ref_logprobs
  )
  mismatch = jnp.abs(masked_log_ratio(logprobs, sampled, mask))
  clipping = {k: v for k, v in monitored.items() if k not in _OF_THE_LOSS}
  return {"mismatch": mismatch} | clipping


def metrics(
  arrays: dict[str, Shaped[Array, "*S"]], mask: Bool[Array, "*S"]
) -> dict[str, Float[Array, ""]]:
  """Means over real tokens, and the largest mismatch: `sampler_...`."""
  if not arrays:
    return {}
  count = jnp.maximum(jnp.sum(mask), 1)
  means = {k: jnp.sum(jnp.where(mask, v, 0)) / count for k, v in arrays.items()}
  return {
    "sampler_mismatch_mean": means.pop("mismatch"),
    "sampler_mismatch_max": jnp.max(arrays["mismatch"]),
  } | {f"sampler_{name}": value for name, value in means.items()}
