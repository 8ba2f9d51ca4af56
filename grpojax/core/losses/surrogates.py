"""Importance ratios and surrogate losses.

Functions are looked up by name in the dicts at the end. A ratio is (logprobs,
old_logprobs, mask) -> ratios of the trained policy to the policy that sampled,
1 on padding. A surrogate is (ratios, logprobs, advantages, *, settings) ->
(per_token, aux), all [B, G, T], where padding is ignored: `per_token` is
minimised, `aux` is logged as means over tokens. Settings are fields of
`Objective`, which checks their ranges; `mask` gets the completions' mask.

A token with ratio r and advantage A adds a multiple of -A grad log pi to the
gradient. On-policy, with one advantage per completion, the multiple is 1 for
every surrogate and ratio. The table is for off-policy tokens: c(x) clips x to
the bounds, max is dppo_ratio_max, and sg stops the gradient.

| surrogate, ratio  | minimised per token   | multiple of -A grad log pi       |
|-------------------|-----------------------|----------------------------------|
| clipped, token    | -min(r A, c(r) A)     | r; 0 above the upper bound if    |
|                   |                       | A > 0, below the lower if A < 0  |
| clipped, sequence | -min(s A, c(s) A)     | as r, with s = (prod r)^(1/|o|)  |
| clipped,          | -min(w A, c(w) A)     | as r, with w = prod r            |
| trajectory        |                       |                                  |
| gmpo, token       | -A (prod c(r))^(1/|o|)| s of the clipped ratios; 0 for   |
|                   |                       | clipped tokens                   |
| cispo, token      | -sg(c(r)) A log pi    | c(r): never 0                    |
| dppo_tv, dppo_kl, | -sg(min(r, max)) A    | min(r, max); 0 if pi(o) is too   |
| token             | log pi                | far off and A moves it further   |
| sapo, token       | -A 4 / tau            | r sech^2(tau (r - 1) / 2); for   |
|                   | sigmoid(tau (r - 1))  | large r it decays as             |
|                   |                       | r exp(-tau r), for A of any sign |
| dro, token        | -A log pi             | 1, plus dro_beta log r grad log  |
|                   | + beta / 2 (log r)^2  | pi, independent of A             |
| vespo, trajectory | -sg(phi(w)) A log pi  | phi(w) = w^k exp(lambda (1 - w)) |
|                   |                       | to 0 for w -> 0 and w -> inf     |
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float, Shaped

from grpojax.core.losses.kl import masked_log_ratio

Tokens = Float[Array, "B G T"]
Mask = Bool[Array, "B G T"]
Aux = dict[str, Shaped[Array, "B G T"]]
RatioFn = Callable[[Array, Array, Array], Array]
SurrogateFn = Callable[..., tuple[Array, Aux]]


def token_ratio(logprobs: Tokens, old_logprobs: Tokens, mask: Mask) -> Tokens:
  """Importance ratio of each token, pi / pi_old, at most exp(20): PPO's."""
  return jnp.exp(masked_log_ratio(logprobs, old_logprobs, mask))


def sequence_ratio(
  logprobs: Tokens, old_logprobs: Tokens, mask: Mask
) -> Tokens:
  """Length-normalised importance ratio of a sequence, at each token: GSPO's.

  s_i = exp((1 / |o_i|) sum_t log(pi_t / pi_old_t)) (arXiv 2507.18071, equation
  7). With `sequence_mean` weights the loss is GSPO's (1/N) sum_i f(s_i). Clip
  bounds must be much closer to 1 than for token ratios (GSPO: 3e-4 and 4e-4).
  """
  log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
  length = jnp.maximum(jnp.sum(mask, -1, keepdims=True), 1)
  ratio = jnp.exp(jnp.sum(log_ratio, -1, keepdims=True) / length)
  return jnp.where(mask, ratio, 1.0)


def trajectory_ratio(
  logprobs: Tokens, old_logprobs: Tokens, mask: Mask
) -> Tokens:
  """Importance ratio of a whole completion, at each token: VESPO's.

  The value at each token is w_i = prod_t pi_t / pi_old_t, at most exp(20); its
  gradient is w_i grad log pi_t, of the token alone, as in GSPO-token (arXiv
  2507.18071, equation 14).
  """
  log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
  value = jax.lax.stop_gradient(log_ratio)
  total = jnp.sum(value, -1, keepdims=True)
  bounded = jnp.clip(total, -1e4, 20.0)
  ratio = jnp.exp(bounded + (log_ratio - value))
  return jnp.where(mask, ratio, 1.0)


def clipped(
  ratios: Tokens,
  logprobs: Tokens,
  advantages: Tokens,
  *,
  clip_low: float | int = 0.2,
  clip_high: float | int = 0.2,
  dual_clip: float | int | None = None,
) -> tuple[Tokens, Aux]:
  """PPO's clipped surrogate, with separate lower and upper bounds.

  -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  (arXiv 1707.06347; separate
  bounds: DAPO, arXiv 2503.14476). With dual_clip = c > 1, tokens with A < 0 and
  r > c have the loss -c A, without gradient (arXiv 1912.09729).
  `clip_fraction_low` and `_high` log tokens whose gradient a bound makes 0.
  """
  bounded, aux = _clip(ratios, advantages, 1 - clip_low, 1 + clip_high)
  if dual_clip is not None:
    dual = (ratios > dual_clip) & (advantages < 0)
    bounded = jnp.where(dual, dual_clip, bounded)
  return -bounded * advantages, aux


def _clip(
  x: Tokens, advantages: Tokens, low: float | int, high: float | int
) -> tuple[Tokens, Aux]:
  """Clips x on the side to which its advantage moves it; adds metrics."""
  below = (x < low) & (advantages < 0)
  above = (x > high) & (advantages > 0)
  bounded = jnp.where(above, high, jnp.where(below, low, x))
  return bounded, {"clip_fraction_low": below, "clip_fraction_high": above}


def cispo(
  ratios: Tokens,
  logprobs: Tokens,
  advantages: Tokens,
  *,
  cispo_min: float | int = 0.0,
  cispo_max: float | int = 5.0,
) -> tuple[Tokens, Aux]:
  """CISPO: REINFORCE with clipped importance weights.

  -sg(clip(r, cispo_min, cispo_max)) A log pi (arXiv 2506.13585, equations 4 and
  5). The bounds are for the ratio itself, not for its distance from 1.
  `clip_fraction_low` and `_high` log the clipped ratios.
  """
  weights = jax.lax.stop_gradient(jnp.clip(ratios, cispo_min, cispo_max))
  aux = {
    "clip_fraction_low": ratios < cispo_min,
    "clip_fraction_high": ratios > cispo_max,
  }
  return _reinforce(weights, logprobs, advantages), aux


def dppo_tv(
  ratios: Tokens,
  logprobs: Tokens,
  advantages: Tokens,
  *,
  dppo_low: float | int = 0.2,
  dppo_high: float | int = 0.2,
  dppo_ratio_max: float | int = 20.0,
  of_kl: bool = False,
) -> tuple[Tokens, Aux]:
  """DPPO: REINFORCE without tokens whose probability has moved too far.

  -sg(min(r, dppo_ratio_max)) A log pi, and 0 if pi - pi_old of the sampled
  token is above dppo_high and A > 0, or below -dppo_low and A <= 0: a bound on
  the total variation of "this token or another" (arXiv 2602.04879, Binary-TV).
  A bound on the ratio restricts rare tokens too much and frequent ones too
  little. Needs the `token_ratio`; logs as `clipped` does. `of_kl` (surrogate
  `dppo_kl`) bounds KL(pi_old || pi) with the sign of pi - pi_old (Binary-KL).
  """
  ratio, logprob = jax.lax.stop_gradient((ratios, logprobs))
  new = jnp.exp(logprob)
  old = jnp.exp(jnp.minimum(logprob - _log(ratio), 0.0))
  moved = new - old
  if of_kl:
    tiny = 1e-8  # as in verl
    complement = jnp.log((1 - old + tiny) / (1 - new + tiny))
    divergence = (1 - old) * complement - old * _log(ratio)
    moved = jnp.sign(moved) * jnp.maximum(divergence, 0.0)
  above = (moved > dppo_high) & (advantages > 0)
  below = (moved < -dppo_low) & (advantages <= 0)
  loss = _reinforce(jnp.minimum(ratio, dppo_ratio_max), logprobs, advantages)
  aux = {"clip_fraction_low": below, "clip_fraction_high": above}
  return jnp.where(above | below, 0.0, loss), aux


dppo_kl = functools.partial(dppo_tv, of_kl=True)


def gmpo(
  ratios: Tokens,
  logprobs: Tokens,
  advantages: Tokens,
  *,
  mask: Mask,
  gmpo_clip_low: float | int = 0.4,
  gmpo_clip_high: float | int = 0.4,
) -> tuple[Tokens, Aux]:
  """GMPO: the geometric mean of a completion's clipped token ratios.

  -A (prod_t c(r_t))^(1/|o|), at each token of the completion (arXiv 2507.20673,
  equations 4 and 5). log c(r) is log r, but at most gmpo_clip_high if A > 0 and
  at least -gmpo_clip_low if A < 0. With `sequence_mean` weights the loss is the
  paper's; with `sequence_ratio` it clips GSPO's ratio. Logs as `clipped` does.
  """
  bounded, aux = _clip(_log(ratios), advantages, -gmpo_clip_low, gmpo_clip_high)
  length = jnp.maximum(jnp.sum(mask, -1, keepdims=True), 1)
  total = jnp.sum(jnp.where(mask, bounded, 0.0), -1, keepdims=True)
  return -jnp.exp(total / length) * advantages, aux


def sapo(
  ratios: Tokens,
  logprobs: Tokens,
  advantages: Tokens,
  *,
  sapo_temperature_pos: float | int = 1.0,
  sapo_temperature_neg: float | int = 1.05,
) -> tuple[Tokens, Aux]:
  """SAPO: a sigmoid in place of the clip.

  -A (4 / tau) sigmoid(tau (r - 1)), with a separate tau > 0 for A > 0 and for A
  <= 0 (arXiv 2511.20347, equations 5 and 6). On-policy it is -2 A / tau. Logs
  the multiple of REINFORCE's gradient, r sech^2(tau (r - 1) / 2), as
  `gradient_weight`.
  """
  tau = jnp.where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg)
  gate = jax.nn.sigmoid(tau * (ratios - 1))
  aux = {"gradient_weight": 4 * ratios * gate * (1 - gate)}
  return -4 / tau * gate * advantages, aux


def vespo(
  ratios: Tokens,
  logprobs: Tokens,
  advantages: Tokens,
  *,
  vespo_k_pos: float | int = 2.0,
  vespo_lambda_pos: float | int = 3.0,
  vespo_k_neg: float | int = 3.0,
  vespo_lambda_neg: float | int = 2.0,
) -> tuple[Tokens, Aux]:
  """VESPO: REINFORCE weighted by a gamma kernel of the importance ratio.

  -sg(phi(w)) A log pi, phi(w) = w^k exp(lambda (1 - w)), with separate k and
  lambda for A < 0 (arXiv 2602.10693). phi(1) = 1, and phi is largest at w = k /
  lambda. The paper's w is `trajectory_ratio`. Logs phi as `gradient_weight`.
  """
  ratios = jax.lax.stop_gradient(ratios)
  positive = advantages >= 0
  k = jnp.where(positive, vespo_k_pos, vespo_k_neg)
  rate = jnp.where(positive, vespo_lambda_pos, vespo_lambda_neg)
  phi = jnp.exp(xlogy(k, ratios) + rate * (1 - ratios))
  return _reinforce(phi, logprobs, advantages), {"gradient_weight": phi}


def dro(
  ratios: Tokens,
  logprobs: Tokens,
  advantages: Tokens,
  *,
  dro_beta: float | int = 0.1,
) -> tuple[Tokens, Aux]:
  """DRO: REINFORCE with a quadratic pull to the old policy.

  -A log pi + dro_beta / 2 (log r)^2 (arXiv 2405.19107, as in verl with a group
  advantage instead of a value function). On-policy the pull is 0; it has no
  gradient if log r is above 20 or below -87.
  """
  pull = 0.5 * dro_beta * _log(ratios) ** 2
  return _reinforce(1.0, logprobs, advantages) + pull, {}


def _log(ratios: Array) -> Array:
  # An underflowed ratio counts as the smallest normal float (-87 nats), without
  # gradient: the logarithm's infinite slope times 0 would be nan.
  least = jnp.finfo(ratios.dtype).tiny
  normal = ratios > least
  return jnp.where(
    normal, jnp.log(jnp.where(normal, ratios, 1)), jnp.log(least)
  )


def _reinforce(
  weights: Array | float, logprobs: Array, advantages: Array
) -> Array:
  # With the floor, tokens that the policy excludes have a finite loss.
  return -weights * advantages * jnp.maximum(logprobs, -1e4)


RATIOS = {
  "token_ratio": token_ratio,
  "sequence_ratio": sequence_ratio,
  "trajectory_ratio": trajectory_ratio,
}
SURROGATES = {
  "clipped": clipped,
  "cispo": cispo,
  "dppo_tv": dppo_tv,
  "dppo_kl": dppo_kl,
  "gmpo": gmpo,
  "sapo": sapo,
  "vespo": vespo,
  "dro": dro,
}
