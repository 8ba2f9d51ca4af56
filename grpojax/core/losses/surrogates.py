"""Importance ratios, and what a loss makes of them: surrogates.

What plugs in here, each by its name in a dict at the end of this file:

- a ratio (`RATIOS`): (logprobs, old_logprobs, mask) -> ratios, 1 on padding:
  of the policy being trained to the policy that sampled.
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

sg stops the gradient. LUSPO (arXiv 2602.05261) is `clipped` with
`sequence_ratio` and the weighting `sequence_sum`. Any surrogate takes any
ratio. `clipped`, `gmpo` and `sapo` do not use the log-probabilities: their
gradient flows through the ratios.
"""

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
  """Importance ratio of each token, pi / pi_old: PPO's and GRPO's.

  Log-ratios above 20 count as 20.
  """
  return jnp.exp(masked_log_ratio(logprobs, old_logprobs, mask))


def sequence_ratio(
  logprobs: Tokens, old_logprobs: Tokens, mask: Mask
) -> Tokens:
  """Length-normalised importance ratio of a sequence, at each token: GSPO's.

  s_i = exp((1 / |o_i|) sum_t log(pi_t / pi_old_t)) (arXiv 2507.18071, equation
  7), repeated at every token of the sequence. With `sequence_mean` weights a
  sequence's weights sum to 1/N, so the loss is (1/N) sum_i f(s_i), exactly
  GSPO's, value and gradient. Its clip bounds are much closer to 1 than
  those of token ratios (3e-4 and 4e-4 in the paper).
  """
  log_ratio = masked_log_ratio(logprobs, old_logprobs, mask)
  length = jnp.maximum(jnp.sum(mask, -1, keepdims=True), 1)
  ratio = jnp.exp(jnp.sum(log_ratio, -1, keepdims=True) / length)
  return jnp.where(mask, ratio, 1.0)


def trajectory_ratio(
  logprobs: Tokens, old_logprobs: Tokens, mask: Mask
) -> Tokens:
  """Importance ratio of a whole completion, at each token: VESPO's.

  w_i = prod_t pi_t / pi_old_t, the ratio of the probabilities of what was
  sampled, whose logarithm's variance grows with the length (`sequence_ratio`
  takes the root). The value at each token is w_i; its gradient is w_i grad log
  pi_t, of that token alone, as in GSPO-token (arXiv 2507.18071, equation 14):
  summed over the tokens, that of w_i. Log-ratios above 20 count as 20.
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
  """PPO's clipped surrogate, with a bound of its own on either side.

  -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  (arXiv 1707.06347; separate
  bounds: DAPO, arXiv 2503.14476). With dual_clip = c, the surrogate of a
  negative advantage is at least c A: beyond r > c it has no gradient (arXiv
  1912.09729).

  Args:
    ratios: importance ratios.
    logprobs: not used.
    advantages: one a token.
    clip_low: ratios below 1 - clip_low are clipped where A < 0.
    clip_high: ratios above 1 + clip_high are clipped where A > 0; inf is off.
    dual_clip: bound > 1 on the ratio where A < 0; None is off.

  Returns:
    The loss of each token; `clip_fraction_low` and `clip_fraction_high`, True
    where that bound cuts the gradient.

  Raises:
    ValueError: for a bound out of its range.
  """
  del logprobs
  if not (clip_low >= 0 and clip_high >= 0):
    raise ValueError(
      "clip_low and clip_high are distances from ratio 1 and must be >= 0, not "
      f"{clip_low} and {clip_high}"
    )
  if dual_clip is not None and not dual_clip > 1:
    raise ValueError(
      "dual_clip bounds the ratio from above and must be > 1, not "
      f"{dual_clip}; None turns it off"
    )
  low = (ratios < 1 - clip_low) & (advantages < 0)
  high = (ratios > 1 + clip_high) & (advantages > 0)
  bounded = jnp.where(low, 1 - clip_low, ratios)
  bounded = jnp.where(high, 1 + clip_high, bounded)
  if dual_clip is not None:
    dual = (ratios > dual_clip) & (advantages < 0)
    bounded = jnp.where(dual, dual_clip, bounded)
  aux = {"clip_fraction_low": low, "clip_fraction_high": high}
  return -bounded * advantages, aux


def cispo(
  ratios: Tokens,
  logprobs: Tokens,
  advantages: Tokens,
  *,
  cispo_min: float | int = 0.0,
  cispo_max: float | int = 5.0,
) -> tuple[Tokens, Aux]:
  """CISPO: REINFORCE with importance weights that are clipped.

  -sg(clip(r, cispo_min, cispo_max)) A log pi (arXiv 2506.13585, equations 4 and
  5). No token loses its gradient, however far it has moved; only its weight is
  bounded. With `sequence_ratio` or `trajectory_ratio` all tokens of a
  completion have the same weight.

  Args:
    ratios: importance ratios.
    logprobs: log-probabilities under the policy being trained.
    advantages: one a token.
    cispo_min: the least weight; 0 bounds nothing, as the paper has it.
    cispo_max: the largest one, of the ratio itself and not of its distance from
      1, as the paper's 1 + epsilon_high.

  Returns:
    The loss of each token; `clip_fraction_low` and `clip_fraction_high`, True
    where that bound stands in for the ratio.

  Raises:
    ValueError: for bounds that would rescale the gradient on-policy.
  """
  if not 0 <= cispo_min <= 1 <= cispo_max:
    raise ValueError(
      "cispo_min and cispo_max bound the ratio, which is 1 on-policy: need 0 "
      f"<= cispo_min <= 1 <= cispo_max, not {cispo_min} and {cispo_max}"
    )
  weights = jax.lax.stop_gradient(jnp.clip(ratios, cispo_min, cispo_max))
  aux = {
    "clip_fraction_low": ratios < cispo_min,
    "clip_fraction_high": ratios > cispo_max,
  }
  return _reinforce(weights, logprobs, advantages), aux


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
  equations 4 and 5). c is PPO's clip in logarithms: log r is at most
  gmpo_clip_high where A > 0, and at least -gmpo_clip_low where A < 0. With
  `sequence_mean` weights it is the paper's mean over completions. Of a
  `sequence_ratio`, whose tokens have one ratio, it is GSPO's clip.

  Args:
    ratios: importance ratios.
    logprobs: not used.
    advantages: one a token.
    mask: True on real tokens.
    gmpo_clip_low: bound in nats, as the next; 0.4 in the paper.
    gmpo_clip_high: likewise.

  Returns:
    The loss of each token; `clip_fraction_low` and `clip_fraction_high`, True
    where that bound cuts a token's gradient.

  Raises:
    ValueError: for a negative bound.
  """
  del logprobs
  if not (gmpo_clip_low >= 0 and gmpo_clip_high >= 0):
    raise ValueError(
      "gmpo_clip_low and gmpo_clip_high bound the log-ratio and must be >= 0, "
      f"not {gmpo_clip_low} and {gmpo_clip_high}"
    )
  # A ratio that has underflowed counts as the least normal number (-87 nats).
  log_ratios = jnp.log(jnp.maximum(ratios, jnp.finfo(ratios.dtype).tiny))
  low = (log_ratios < -gmpo_clip_low) & (advantages < 0)
  high = (log_ratios > gmpo_clip_high) & (advantages > 0)
  bounded = jnp.where(low, -gmpo_clip_low, log_ratios)
  bounded = jnp.where(high, gmpo_clip_high, bounded)
  length = jnp.maximum(jnp.sum(mask, -1, keepdims=True), 1)
  total = jnp.sum(jnp.where(mask, bounded, 0.0), -1, keepdims=True)
  aux = {"clip_fraction_low": low, "clip_fraction_high": high}
  return -jnp.exp(total / length) * advantages, aux


def sapo(
  ratios: Tokens,
  logprobs: Tokens,
  advantages: Tokens,
  *,
  sapo_temperature_pos: float | int = 1.0,
  sapo_temperature_neg: float | int = 1.05,
) -> tuple[Tokens, Aux]:
  """SAPO: a sigmoid in the place of the clip.

  -A (4 / tau) sigmoid(tau (r - 1)), with one tau for positive advantages and
  one for the others (arXiv 2511.20347, equations 5 and 6). Its slope by r is
  -A sech^2(tau (r - 1) / 2): 1 on-policy, and the larger tau is, the sooner it
  fades. (The value on-policy is -2 A / tau, not -A.)

  Args:
    ratios: importance ratios.
    logprobs: not used.
    advantages: one a token.
    sapo_temperature_pos: tau where A > 0.
    sapo_temperature_neg: tau where A <= 0.

  Returns:
    The loss of each token; `gradient_weight`, r sech^2(tau (r - 1) / 2): the
    multiple of REINFORCE's gradient, 1 on-policy.

  Raises:
    ValueError: for a temperature that is not positive.
  """
  del logprobs
  if not (sapo_temperature_pos > 0 and sapo_temperature_neg > 0):
    raise ValueError(
      "sapo_temperature_pos and sapo_temperature_neg must be > 0, not "
      f"{sapo_temperature_pos} and {sapo_temperature_neg}"
    )
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

  -sg(phi(w)) A log pi, phi(w) = w^k exp(lambda (1 - w)) (arXiv 2602.10693).
  phi(1) = 1, and phi is largest at w = k / lambda. The paper's w is the ratio
  of whole completions, `trajectory_ratio`; with the other ratios the kernel is
  one of theirs.

  Args:
    ratios: importance ratios.
    logprobs: log-probabilities under the policy being trained.
    advantages: one a token.
    vespo_k_pos: k where A >= 0: how fast small ratios fade.
    vespo_lambda_pos: lambda where A >= 0: how fast large ratios fade.
    vespo_k_neg: k where A < 0.
    vespo_lambda_neg: lambda where A < 0.

  Returns:
    The loss of each token; `gradient_weight`, phi: the multiple of REINFORCE's
    gradient, 1 on-policy.

  Raises:
    ValueError: for a negative k, or a lambda that is not positive.
  """
  ks, lambdas = (vespo_k_pos, vespo_k_neg), (vespo_lambda_pos, vespo_lambda_neg)
  if not (min(ks) >= 0 and min(lambdas) > 0):
    raise ValueError(
      f"vespo_k must be >= 0 and vespo_lambda > 0, not {ks} and {lambdas}: "
      "large ratios would not be bounded"
    )
  ratios, positive = jax.lax.stop_gradient(ratios), advantages >= 0
  k = jnp.where(positive, vespo_k_pos, vespo_k_neg)
  rate = jnp.where(positive, vespo_lambda_pos, vespo_lambda_neg)
  phi = jnp.exp(xlogy(k, ratios) + rate * (1 - ratios))
  loss = _reinforce(phi, logprobs, advantages)
  return loss, {"gradient_weight": phi}


def _reinforce(weights: Array, logprobs: Array, advantages: Array) -> Array:
  # What a policy excludes has a value that is finite, and no gradient.
  return -weights * advantages * jnp.maximum(logprobs, -1e4)


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
