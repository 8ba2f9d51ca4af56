"""Importance ratios, and what a loss makes of them: surrogates.

What plugs in here, each by its name in a dict at the end of this file:

- a ratio (`RATIOS`): (logprobs, old_logprobs, mask) -> ratios, 1 on padding.
- a surrogate (`SURROGATES`): (ratios, logprobs, advantages, **settings) ->
  (per_token, aux), all [B, G, T]. Advantages are constants, one a token,
  0 on padding; ratios and log-probabilities carry the gradient, on padding they
  are 1 and 0. `per_token` is what each token adds to the loss, to be minimised;
  what it says on padding is not used. `aux` maps names to arrays, which
  are logged by these names ("ratio", "kl" and "entropy" are taken), as means
  over real tokens. Settings are keyword-only: a run gives each surrogate those
  keys of its config's section `loss` that it has a parameter for; a setting
  that is new also stands in `training.config`. One with a parameter `mask` gets
  that of the completions.

What a token with ratio r and advantage A adds to the gradient is a multiple of
-A grad log pi. On-policy that multiple is 1, for every surrogate and ratio:
all of them have REINFORCE's gradient there. Off-policy, with the settings of
these names, c(x) for x within the bounds and s for a sequence:

| surrogate, ratio  | minimised, a token    | multiple of -A grad log pi       |
|-------------------|-----------------------|----------------------------------|
| clipped, token    | -min(r A, c(r) A)     | r; 0 beyond the bound that A > 0 |
|                   |                       | has above, and A < 0 below       |
| clipped, sequence | -min(s A, c(s) A)     | the same of s = (prod r)^(1/|o|) |
| clipped,          | -min(w A, c(w) A)     | the same of w = prod r           |
| trajectory        |                       |                                  |
| gmpo, token       | -A (prod c(r))^(1/|o|)| s of the clipped ratios; 0 for   |
|                   |                       | the tokens that are clipped      |
| cispo, token      | -sg(c(r)) A log pi    | c(r): never 0                    |
| sapo, token       | -A 4 / tau            | r sech^2(tau (r - 1) / 2), to 0  |
|                   | sigmoid(tau (r - 1))  | as exp(-tau r), on both sides    |
| vespo, trajectory | -sg(phi(w)) A log pi  | phi(w) = w^k exp(lambda (1 - w)) |
|                   |                       | to 0 for w -> 0 and w -> inf     |

| far off-policy (r or s large or small)                    | paper            |
|-----------------------------------------------------------|------------------|
| clipped: what moves away further is cut off at once; what | arXiv 1707.06347 |
| moves back is not (r A, unbounded where A < 0; dual_clip) |                  |
| clipped, sequence (GSPO): whole completions are cut off   | arXiv 2507.18071 |
| gmpo: single tokens are; an outlier moves s by its root   | arXiv 2507.20673 |
| cispo: no token is, each weighs cispo_max at most         | arXiv 2506.13585 |
| sapo: every token fades, faster where A < 0               | arXiv 2511.20347 |
| vespo: whole completions fade, with their length too      | arXiv 2602.10693 |

LUSPO (arXiv 2602.05261) is `clipped` with `sequence_ratio` and the weighting
`sequence_sum`. Any surrogate takes any ratio.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpojax.core.kl import masked_log_ratio
from grpojax.core.soft_surrogates import Monitored, cispo, gmpo, sapo, vespo

RatioFn = Callable[[Array, Array, Array], Array]
SurrogateFn = Callable[..., tuple[Array, Monitored]]


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
  length = jnp.maximum(jnp.sum(mask, -1, keepdims=True), 1)
  ratio = jnp.exp(jnp.sum(log_ratio, -1, keepdims=True) / length)
  return jnp.where(mask, ratio, 1.0)


def trajectory_ratio(
  logprobs: Float[Array, "B G T"],
  old_logprobs: Float[Array, "B G T"],
  mask: Bool[Array, "B G T"],
) -> Float[Array, "B G T"]:
  """Importance ratio of a whole completion, at each token: VESPO's.

  w_i = prod_t pi_t / pi_old_t, the ratio of the probabilities of what was
  sampled, whose logarithm's variance grows with the length (`sequence_ratio`
  takes the root). The value at each token is w_i; its gradient is w_i grad log
  pi_t, of that token alone, as in GSPO-token (arXiv 2507.18071, equation 14):
  summed over the tokens, that of w_i.

  Args:
    logprobs: under the policy being trained.
    old_logprobs: under the policy that sampled.
    mask: True on real tokens.

  Returns:
    Ratios; 1 on padding. Log-ratios above 20 count as 20.
  """
  log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
  value = jax.lax.stop_gradient(log_ratio)
  total = jnp.sum(value, -1, keepdims=True)
  bounded = jnp.clip(total, -1e4, 20.0)
  ratio = jnp.exp(bounded + (log_ratio - value))
  return jnp.where(mask, ratio, 1.0)


def clipped(
  ratios: Float[Array, "B G T"],
  logprobs: Float[Array, "B G T"],
  advantages: Float[Array, "B G T"],
  *,
  clip_low: float | int = 0.2,
  clip_high: float | int = 0.2,
  dual_clip: float | int | None = None,
) -> tuple[Float[Array, "B G T"], Monitored]:
  """PPO's clipped surrogate, with a bound of its own on either side.

  -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  (arXiv 1707.06347; separate
  bounds: DAPO, arXiv 2503.14476). With dual_clip = c, the surrogate of a
  negative advantage is at least c A: beyond r > c it has no gradient (arXiv
  1912.09729).

  Args:
    ratios: see the module.
    logprobs: not used: the gradient flows through the ratios.
    advantages: see the module.
    clip_low: ratios below 1 - clip_low are clipped where A < 0.
    clip_high: ratios above 1 + clip_high are clipped where A > 0; inf is off.
    dual_clip: bound > 1 on the ratio where A < 0; None is off.

  Returns:
    The loss of each token; `clip_fraction_low` and `clip_fraction_high`: where
    that bound cuts the gradient.

  Raises:
    ValueError: for a bound out of its range.
  """
  del logprobs
  _check_clipping(clip_low, clip_high, dual_clip)
  low = (ratios < 1 - clip_low) & (advantages < 0)
  high = (ratios > 1 + clip_high) & (advantages > 0)
  bounded = jnp.where(low, 1 - clip_low, ratios)
  bounded = jnp.where(high, 1 + clip_high, bounded)
  if dual_clip is not None:
    dual = (ratios > dual_clip) & (advantages < 0)
    bounded = jnp.where(dual, dual_clip, bounded)
  aux = {"clip_fraction_low": low, "clip_fraction_high": high}
  return -bounded * advantages, aux


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


RATIOS = {
  "token_ratio": token_ratio,
  "sequence_ratio": sequence_ratio,
  "trajectory_ratio": trajectory_ratio,
}
SURROGATES = {
  "clipped": clipped,
  "cispo": cispo,
  "gmpo": gmpo,
  "sapo": sapo,
  "vespo": vespo,
}
