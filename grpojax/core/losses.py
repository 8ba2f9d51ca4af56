"""Policy losses: token weightings, ratios and `grpo_loss`.

Everything is per token, [B, G, T], and the loss is sum(weights * per_token).
Weights are computed once for a whole optimizer batch, so micro-batches and
devices only add. Masked positions (padding) may hold anything, nan included:
they reach neither the value nor the gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from grpojax.core.kl import clean_logprobs, k1, k2, k3, masked_log_ratio
from grpojax.core.kl import kl_penalty as kl_penalty

RatioFn = Callable[[Array, Array, Array], Array]
KLFn = Callable[[Array, Array], Array]


def sequence_mean(mask: Bool[Array, "B G T"]) -> Float[Array, "B G T"]:
  """Mean over a sequence's tokens, then over sequences: GRPO's weighting.

  w_{i,t} = 1 / (N |o_i|), N the number of sequences that have a token, so every
  sequence counts the same and long ones get less weight a token (arXiv
  2402.03300, equation 3).

  Args:
    mask: True on real tokens; a row without any is padding and does not count.

  Returns:
    Weights that sum to 1; all 0 when there is no token at all.
  """
  length = jnp.sum(mask, -1, keepdims=True)
  return mask / _at_least_one(length) / _at_least_one(_sequences(mask))


def token_mean(mask: Bool[Array, "B G T"]) -> Float[Array, "B G T"]:
  """Mean over all tokens of the batch: DAPO's weighting.

  w_{i,t} = 1 / sum_i |o_i| (arXiv 2503.14476, equation 12): every token counts
  the same, and long sequences more.

  Args:
    mask: True on real tokens.

  Returns:
    Weights that sum to 1; all 0 when there is no token at all.
  """
  return mask / _at_least_one(jnp.sum(mask))


def fixed_length(
  mask: Bool[Array, "B G T"], length: int | float
) -> Float[Array, "B G T"]:
  """Sum over tokens divided by a constant: Dr. GRPO's weighting.

  w_{i,t} = 1 / (N length), N the number of sequences that have a token. The
  normaliser does not depend on what was sampled, so with `leave_one_out`
  advantages the gradient is unbiased for 1/length times the true one (arXiv
  2503.20783, section 3.2).

  Args:
    mask: True on real tokens; a row without any is padding and does not count.
    length: tokens, commonly the largest completion length allowed. With 1 the
      loss is the plain policy gradient's sum over tokens.

  Returns:
    Weights; all 0 when there is no token at all.

  Raises:
    ValueError: if length is not positive.
  """
  if not length > 0:
    raise ValueError(f"fixed_length needs a length > 0 in tokens, not {length}")
  return mask / (length * _at_least_one(_sequences(mask)))


def token_ratio(
  logprobs: Float[Array, "B G T"],
  old_logprobs: Float[Array, "B G T"],
  mask: Bool[Array, "B G T"],
) -> Float[Array, "B G T"]:
  """Importance ratio of each token, pi / pi_old: PPO's and GRPO's.

  Args:
    logprobs: under the policy being trained.
    old_logprobs: under the policy that sampled.
    mask: True on real tokens.

  Returns:
    Ratios; 1 on padding. Log-ratios above 20 count as 20.
  """
  return jnp.exp(masked_log_ratio(logprobs, old_logprobs, mask))


def sequence_ratio(
  logprobs: Float[Array, "B G T"],
  old_logprobs: Float[Array, "B G T"],
  mask: Bool[Array, "B G T"],
) -> Float[Array, "B G T"]:
  """Length-normalised importance ratio of a sequence, at each token: GSPO's.

  s_i = exp((1 / |o_i|) sum_t log(pi_t / pi_old_t)) (arXiv 2507.18071, equation
  7), repeated at every token of the sequence. With `sequence_mean` weights a
  sequence's weights sum to 1/N, so the loss is (1/N) sum_i f(s_i), exactly
  GSPO's, value and gradient. Its clip bounds are much closer to 1 than
  those of token ratios (3e-4 and 4e-4 in the paper).

  Args:
    logprobs: under the policy being trained.
    old_logprobs: under the policy that sampled.
    mask: True on real tokens.

  Returns:
    Ratios; 1 on padding.
  """
  log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
  length = _at_least_one(jnp.sum(mask, -1, keepdims=True))
  ratio = jnp.exp(jnp.sum(log_ratio, -1, keepdims=True) / length)
  return jnp.where(mask, ratio, 1.0)


def grpo_loss(
  logprobs: Float[Array, "B G T"],
  advantages: Float[Array, "B G"],
  weights: Float[Array, "B G T"],
  mask: Bool[Array, "B G T"],
  old_logprobs: Float[Array, "B G T"] | None = None,
  ref_logprobs: Float[Array, "B G T"] | None = None,
  *,
  ratio: RatioFn = token_ratio,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  kl: KLFn = k3,
  beta: float = 0.0,
  kl_correction: bool = False,
) -> tuple[Float[Array, ""], dict[str, Shaped[Array, "B G T"]]]:
  """The clipped surrogate loss with an optional KL term.

  loss = sum weights * (-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
                        + beta * kl)

  (PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300; separate bounds: DAPO, arXiv
  2503.14476). With dual_clip = c, the surrogate of a negative advantage is at
  least c A: beyond r > c it has no gradient (arXiv 1912.09729). On-policy the
  gradient is REINFORCE's, -sum weights A grad log pi. Only `logprobs` is
  differentiated.

  Args:
    logprobs: of the sampled tokens under the policy being trained.
    advantages: one a completion.
    weights: from `sequence_mean`, `token_mean` or `fixed_length` over the whole
      optimizer batch, of which the other arguments may be a part.
    mask: True on real tokens.
    old_logprobs: under the policy that sampled; None means exactly on-policy,
      the ratio is exactly 1.
    ref_logprobs: under the reference policy; needed when beta > 0, otherwise
      only monitored.
    ratio: `token_ratio` or `sequence_ratio`.
    clip_low: ratios below 1 - clip_low are clipped where A < 0.
    clip_high: ratios above 1 + clip_high are clipped where A > 0; inf is off.
    dual_clip: bound > 1 on the ratio where A < 0; None is off.
    kl: estimator in the loss, `k1` (with kl_correction only), `k2` or `k3`.
    beta: weight of the KL term; 0 leaves it out.
    kl_correction: multiplies the estimator by the token ratio, so that k1 and
      k3 have the gradient of the reverse KL, also off-policy.

  Returns:
    The loss, and per-token arrays: "ratio" (1 on padding), "clipped_low" and
    "clipped_high" (True where that bound cuts the gradient), "kl" (k3 in nats
    whatever `kl` is; 0 on padding and without a reference).

  Raises:
    ValueError: for a setting or a combination that cannot mean what it says, or
      for arrays whose shapes do not fit.
  """
  _check_clipping(clip_low, clip_high, dual_clip)
  _check_kl(kl, beta, kl_correction, ref_logprobs)
  _check_shapes(
    mask, advantages, (logprobs, weights, old_logprobs, ref_logprobs)
  )
  logprobs = clean_logprobs(logprobs, mask)
  old = logprobs if old_logprobs is None else clean_logprobs(old_logprobs, mask)
  old = jax.lax.stop_gradient(old)
  advantages = jax.lax.stop_gradient(advantages)[..., None]
  advantages = jnp.where(mask, advantages, 0.0)

  ratios = ratio(logprobs, old, mask)
  low = (ratios < 1 - clip_low) & (advantages < 0)
  high = (ratios > 1 + clip_high) & (advantages > 0)
  bounded = jnp.where(low, 1 - clip_low, ratios)
  bounded = jnp.where(high, 1 + clip_high, bounded)
  if dual_clip is not None:
    dual = (ratios > dual_clip) & (advantages < 0)
    bounded = jnp.where(dual, dual_clip, bounded)
  per_token = -bounded * advantages

  monitored_kl = jnp.zeros_like(ratios)
  if ref_logprobs is not None:
    ref = jax.lax.stop_gradient(clean_logprobs(ref_logprobs, mask))
    monitored_kl = k3(jax.lax.stop_gradient(logprobs), ref)
    if beta:
      correction = token_ratio(logprobs, old, mask) if kl_correction else 1.0
      per_token += beta * correction * kl(logprobs, ref)
  return jnp.sum(weights * jnp.where(mask, per_token, 0.0)), {
    "ratio": jax.lax.stop_gradient(ratios),
    "clipped_low": low,
    "clipped_high": high,
    "kl": monitored_kl,
  }


def _check_clipping(low: float, high: float, dual: float | None) -> None:
  if not (low >= 0 and high >= 0):
    raise ValueError(
      "clip_low and clip_high are distances from ratio 1 and must be >= 0, not "
      f"{low} and {high}"
    )
  if dual is not None and not dual > 1:
    raise ValueError(
      f"dual_clip bounds the ratio from above and must be > 1, not {dual}; "
      "None turns it off"
    )


def _check_kl(
  kl: KLFn, beta: float, correction: bool, ref: Array | None
) -> None:
  if not beta >= 0:
    raise ValueError(f"beta weighs a penalty and must be >= 0, not {beta}")
  if not beta:
    return
  if ref is None:
    raise ValueError(
      f"beta = {beta} asks for a KL term, which needs ref_logprobs; give them, "
      "or set beta = 0"
    )
  if kl is k1 and not correction:
    raise ValueError(
      "k1 in the loss has zero expected gradient on-policy: it would add noise "
      "and no penalty. Subtract beta * kl_penalty from the rewards, or set "
      "kl_correction=True, or use k2 or k3"
    )
  if kl is k2 and correction:
    raise ValueError(
      "k2 has the gradient of the reverse KL by itself; times the ratio it "
      "no longer has. Set kl_correction=False, or use k1 or k3 with it"
    )


def _check_shapes(
  mask: Array, advantages: Array, others: tuple[Array | None, ...]
) -> None:
  # Shapes that happen to broadcast would silently give another loss.
  shapes = [mask.shape] + [x.shape for x in others if x is not None]
  if len(set(shapes)) > 1 or advantages.shape != mask.shape[:2]:
    raise ValueError(
      "grpo_loss takes advantages [B, G] and everything else as [B, G, T]; got "
      f"advantages {advantages.shape} and {shapes}"
    )


def _sequences(mask: Array) -> Array:
  return jnp.sum(jnp.any(mask, -1))


def _at_least_one(count: Array) -> Array:
  return jnp.maximum(count, 1).astype(jnp.float32)
