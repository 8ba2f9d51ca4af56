"""Policy losses: token weightings, and `grpo_loss`.

Arrays are per token, [B, G, T], and the loss is sum(weights * per_token).
Weights are computed once over a whole optimizer batch, so the losses of its
micro-batches and devices add up. Padding may hold anything, nan included: it
reaches neither the value nor the gradient.

| weighting     | w_{i,t}         | sum of all weights   | paper            |
|---------------|-----------------|----------------------|------------------|
| token_mean    | 1 / sum_j |o_j| | 1                    | arXiv 2503.14476 |
| sequence_mean | 1 / (N |o_i|)   | 1                    | arXiv 2402.03300 |
| sequence_sum  | 1 / N           | mean length          | arXiv 2602.05261 |
| fixed_length  | 1 / (N length)  | mean length / length | arXiv 2503.20783 |

|o_i| is the number of tokens of sequence i, N the number of non-empty
sequences; weights are 0 if there are no tokens. docs/objectives.md says when to
use which. To add a weighting, enter (mask) -> weights in `WEIGHTINGS`; its
parameter `length`, if any, gets the longest completion allowed, in tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpojax.core.binding import bind
from grpojax.core.losses.kl import clean_logprobs, k3
from grpojax.core.losses.kl import kl_penalty as kl_penalty
from grpojax.core.losses.surrogates import (
  Aux,
  RatioFn,
  SurrogateFn,
  clipped,
  token_ratio,
)


def sequence_mean(mask: Bool[Array, "B G T"]) -> Float[Array, "B G T"]:
  """Mean over a sequence's tokens, then over sequences: GRPO's weighting."""
  length = jnp.sum(mask, -1, keepdims=True)
  return mask / _at_least_one(length) / _at_least_one(_sequences(mask))


def token_mean(mask: Bool[Array, "B G T"]) -> Float[Array, "B G T"]:
  """Mean over all tokens of the batch: DAPO's weighting."""
  return mask / _at_least_one(jnp.sum(mask))


def fixed_length(
  mask: Bool[Array, "B G T"], length: int | float
) -> Float[Array, "B G T"]:
  """Sum over tokens divided by a constant length: Dr. GRPO's weighting.

  With `leave_one_out` advantages the gradient is unbiased for 1 / length times
  the true gradient. ValueError unless the length is positive and finite.
  """
  if not 0 < length < float("inf"):
    raise ValueError(
      f"length = {length!r}: must be a positive number of tokens, such as the "
      "longest completion allowed"
    )
  return mask / (length * _at_least_one(_sequences(mask)))


def sequence_sum(mask: Bool[Array, "B G T"]) -> Float[Array, "B G T"]:
  """Sum over a sequence's tokens, then mean over sequences: LUSPO's weighting.

  LUSPO uses it with `sequence_ratio`, so each ratio counts once per token.
  """
  return mask / _at_least_one(_sequences(mask))


def grpo_loss(
  logprobs: Float[Array, "B G T"],
  advantages: Float[Array, "B G *t"],
  weights: Float[Array, "B G T"],
  mask: Bool[Array, "B G T"],
  old_logprobs: Float[Array, "B G T"] | None = None,
  ref_logprobs: Float[Array, "B G T"] | None = None,
  is_weights: Float[Array, "B G T"] | None = None,
  exact_kl: Float[Array, "B G T"] | None = None,
  *,
  ratio: RatioFn = token_ratio,
  surrogate: SurrogateFn = clipped,
  kl: Callable[[Array, Array], Array] | None = k3,
  beta: float = 0.0,
  kl_correction: bool = False,
  token_mask: Bool[Array, "B G T"] | None = None,
  **settings: Any,
) -> tuple[Float[Array, ""], Aux]:
  """A surrogate of the policy gradient, with an optional KL term.

    loss = sum weights * (surrogate(ratios, logprobs, advantages) + beta * kl)

  With `clipped` this is GRPO's loss (arXiv 2402.03300, equation 3). On-policy
  its gradient is REINFORCE's, -sum weights A grad log pi, for any surrogate,
  except that `sequence_ratio` and `gmpo` average advantages over tokens. Only
  `logprobs` and `exact_kl` are differentiated.

  The arrays may be a micro-batch, with `weights` computed over the whole
  optimizer batch. `old_logprobs` is None if the policy itself sampled; without
  beta `ref_logprobs` is only for the log. `is_weights` are constant factors
  of each token's loss (`rollout_correction`); `token_mask` is True on the
  tokens in the surrogate (None: all). `kl` is an estimator (`kl.PLACEMENTS`),
  or None to use `exact_kl`, the KL divergences of the tokens' distributions;
  `kl_correction` multiplies the estimator by the token ratio. `settings` go to
  the surrogate.

  Returns the loss and arrays to be logged: "ratio" (1 on padding), "kl" (exact
  or k3; 0 on padding and without a reference), and the surrogate's arrays.
  ValueError for beta without ref_logprobs or exact_kl, and for wrong shapes.
  """
  if beta and kl is None and exact_kl is None:
    raise ValueError(
      "kl = 'exact' needs the KL divergence of each token's distribution: pass "
      "the reference policy, ref_params, to make_batch and the update"
    )
  if beta and kl and ref_logprobs is None:
    raise ValueError(
      f"beta = {beta} adds a KL term, which needs ref_logprobs: pass the "
      "reference's parameters, ref_params, to make_batch, or set beta = 0"
    )
  optional = old_logprobs, ref_logprobs, exact_kl, token_mask, is_weights
  arrays = mask, logprobs, weights, *(x for x in optional if x is not None)
  shapes = [x.shape for x in arrays]
  fits = advantages.shape in (mask.shape[:2], mask.shape)
  if len(set(shapes)) > 1 or not fits:
    # Other shapes may broadcast and silently give another loss.
    raise ValueError(
      "grpo_loss takes advantages [B, G] or [B, G, T], and all other arrays as "
      f"[B, G, T]; got advantages {advantages.shape} and {shapes}"
    )
  logprobs = clean_logprobs(logprobs, mask)
  old = logprobs if old_logprobs is None else clean_logprobs(old_logprobs, mask)
  old = jax.lax.stop_gradient(old)
  advantages = jax.lax.stop_gradient(advantages)
  # [B, G, 1] or [B, G, T], then 0 on padding.
  advantages = advantages.reshape(*mask.shape[:2], -1)
  advantages = jnp.where(mask, advantages, 0.0)

  # Surrogate, on the tokens of `token_mask`
  ratios = ratio(logprobs, old, mask)
  surrogate = bind(surrogate, mask=mask)
  per_token, surrogate_aux = surrogate(ratios, logprobs, advantages, **settings)
  _check_surrogate(per_token, surrogate_aux, mask)
  if token_mask is not None:
    per_token = jnp.where(token_mask, per_token, 0.0)
  # KL term of all tokens, including those outside the surrogate.
  logged_kl = jnp.zeros_like(ratios)
  if beta and kl is None:
    logged_kl = jnp.where(mask, exact_kl, 0.0)
    per_token += beta * logged_kl
  elif ref_logprobs is not None:
    ref = jax.lax.stop_gradient(clean_logprobs(ref_logprobs, mask))
    # The log has k3, whatever the estimator in the loss.
    logged_kl = k3(jax.lax.stop_gradient(logprobs), ref)
    if beta:
      correction = token_ratio(logprobs, old, mask) if kl_correction else 1.0
      per_token += beta * correction * kl(logprobs, ref)
  # Correction weights apply to both terms: each is a mean over samples.
  if is_weights is not None:
    per_token *= jax.lax.stop_gradient(is_weights)
  # Selecting instead of multiplying keeps nan on padding out of the sum.
  loss = jnp.sum(weights * jnp.where(mask, per_token, 0.0))
  aux = {"ratio": ratios, "kl": logged_kl} | surrogate_aux
  return loss, jax.tree.map(jax.lax.stop_gradient, aux)


def _check_surrogate(per_token: Any, aux: dict[str, Any], mask: Array) -> None:
  shapes = {name: jnp.shape(x) for name, x in aux.items()}
  if {jnp.shape(per_token), *shapes.values()} != {mask.shape}:
    raise ValueError(
      f"a surrogate must return arrays {mask.shape}, a number per token: got a "
      f"loss {jnp.shape(per_token)} and logged arrays {shapes}"
    )
  taken = sorted({"ratio", "kl", "entropy"} & set(aux))
  if taken:
    raise ValueError(f"a surrogate must not log {taken}: grpo_loss logs them")


def _sequences(mask: Array) -> Array:
  return jnp.sum(jnp.any(mask, -1))


def _at_least_one(count: Array) -> Array:
  return jnp.maximum(count, 1).astype(jnp.float32)


WEIGHTINGS = {
  "token_mean": token_mean,
  "sequence_mean": sequence_mean,
  "sequence_sum": sequence_sum,
  "fixed_length": fixed_length,
}
