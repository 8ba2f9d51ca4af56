"""Estimators of the KL divergence between the policy and its reference.

Each maps log-probabilities of sampled tokens, under the policy and under the
reference, to nats per token. In the loss, the value and the gradient of an
estimator may belong to different divergences:

| in the loss | expected value, on-policy | expected gradient, on-policy |
|-------------|---------------------------|------------------------------|
| k1          | KL(pi || ref)             | 0                            |
| k2          | biased                    | of KL(pi || ref)             |
| k3          | KL(pi || ref)             | of KL(ref || pi)             |
| rho k1      | KL(pi || ref)             | of KL(pi || ref)             |
| rho k3      | KL(pi || ref)             | of KL(pi || ref)             |
| exact       | KL(pi || ref)             | of KL(pi || ref)             |

rho = pi / pi_old is the token ratio, 1 if a step has a single update; with
several updates, the last three rows also hold off-policy. `exact` is the sum
over the vocabulary (`core.logprobs.Reference`). The table is about a token
given a sampled prefix; only `kl_penalty` accounts for the prefix's dependence
on the policy. If top_k, top_p or min_p restrict the policy to a set S of
tokens, the reference stays whole: k3's value is then too low by 1 - ref(S), and
its gradient is ref(S) times that of KL(ref given S || pi).

Sources: J. Schulman, "Approximating KL divergence" (2020); arXiv 2506.09477.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Bounds of log-ratios; the gradient is 0 outside. The upper one keeps exp from
# overflowing. The lower one only keeps sums and squares finite: k2 and k3 still
# have gradients at tokens that the reference excludes.
_LOG_RATIO_BOUNDS = (-1e4, 20.0)


def k1(
  logprobs: Float[Array, "*S"], ref_logprobs: Float[Array, "*S"]
) -> Float[Array, "*S"]:
  """Noisy log(pi / ref); its expected gradient is 0: in the loss use rho k1."""
  return -log_ratio(ref_logprobs, logprobs)


def k2(
  logprobs: Float[Array, "*S"], ref_logprobs: Float[Array, "*S"]
) -> Float[Array, "*S"]:
  """Half the squared log-ratio, exact to second order near ref = pi."""
  return 0.5 * log_ratio(ref_logprobs, logprobs) ** 2


def k3(
  logprobs: Float[Array, "*S"], ref_logprobs: Float[Array, "*S"]
) -> Float[Array, "*S"]:
  """GRPO's ref / pi - 1 - log(ref / pi) >= 0 (arXiv 2402.03300, eq. 4)."""
  difference = log_ratio(ref_logprobs, logprobs)
  # expm1, because near ref = pi the terms cancel to second order.
  return jnp.expm1(difference) - difference


def kl_penalty(
  logprobs: Float[Array, "B G T"],
  ref_logprobs: Float[Array, "B G T"],
  mask: Bool[Array, "B G T"],
) -> Float[Array, "B G"]:
  """Log-ratio log(pi / ref) of a whole completion, in nats, for its reward.

  With rewards - beta * kl_penalty and an unbiased advantage the policy gradient
  is that of E[reward] - beta KL(pi || ref), the KL of whole sequences.
  """
  return -jnp.sum(masked_log_ratio(ref_logprobs, logprobs, mask), -1)


def clean_logprobs(logprobs: Array, mask: Array) -> Array:
  """Log-probabilities in float32 or better, 0 on padding, never -inf."""
  dtype = jnp.promote_types(logprobs.dtype, jnp.float32)
  # The floor avoids -inf - (-inf) = nan if both policies exclude a token.
  floored = jnp.maximum(logprobs.astype(dtype), jnp.finfo(dtype).min)
  return jnp.where(mask, floored, 0.0)


def log_ratio(numerator: Array, denominator: Array) -> Array:
  """Bounded log(numerator / denominator), from log-probabilities."""
  dtype = jnp.promote_types(numerator.dtype, jnp.float32)
  difference = numerator.astype(dtype) - denominator.astype(dtype)
  return jnp.clip(difference, *_LOG_RATIO_BOUNDS)


def masked_log_ratio(
  numerator: Array, denominator: Array, mask: Array
) -> Array:
  """Log-ratio on real tokens; 0, with zero gradient, on padding."""
  return log_ratio(
    clean_logprobs(numerator, mask), clean_logprobs(denominator, mask)
  )


PLACEMENTS = {
  "loss": {"k2": k2, "k3": k3, "exact": None},
  "ratio": {"k1": k1, "k3": k3},
  "reward": {"k1": kl_penalty},
}
"""Estimators by placement. `loss`: a loss term; `ratio`: a loss term times rho;
`reward`: a penalty in the reward. None: `grpo_loss` gets `exact_kl`."""
