"""Surrogates that bound what is far off-policy in other ways than PPO's clip.

What a surrogate is, and a table that compares all of them: `core.surrogates`.
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float, Shaped

Monitored = dict[str, Shaped[Array, "B G T"]]


def cispo(
  ratios: Float[Array, "B G T"],
  logprobs: Float[Array, "B G T"],
  advantages: Float[Array, "B G T"],
  *,
  cispo_min: float | int = 0.0,
  cispo_max: float | int = 5.0,
) -> tuple[Float[Array, "B G T"], Monitored]:
  """CISPO: REINFORCE with importance weights that are clipped.

  -sg(clip(r, cispo_min, cispo_max)) A log pi, sg stops the gradient (arXiv
  2506.13585, equations 4 and 5). No token loses its gradient, however far it
  has moved; only its weight is bounded. With `sequence_ratio` or
  `trajectory_ratio` all tokens of a completion have the same weight.

  Args:
    ratios: see `core.surrogates`, as for the next two.
    logprobs: likewise.
    advantages: likewise.
    cispo_min: the least weight; 0 bounds nothing, as the paper has it.
    cispo_max: the largest one, of the ratio itself and not of its distance from
      1, as the paper's 1 + epsilon_high.

  Returns:
    The loss of each token; `clip_fraction_low` and `clip_fraction_high`: where
    that bound stands in for the ratio.

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
  ratios: Float[Array, "B G T"],
  logprobs: Float[Array, "B G T"],
  advantages: Float[Array, "B G T"],
  *,
  mask: Bool[Array, "B G T"],
  gmpo_clip_low: float | int = 0.4,
  gmpo_clip_high: float | int = 0.4,
) -> tuple[Float[Array, "B G T"], Monitored]:
  """GMPO: the geometric mean of a completion's clipped token ratios.

  -A (prod_t c(r_t))^(1/|o|), at each token of the completion (arXiv 2507.20673,
  equations 4 and 5). c is PPO's clip in logarithms: log r is at most
  gmpo_clip_high where A > 0, and at least -gmpo_clip_low where A < 0. With
  `sequence_mean` weights it is the paper's mean over completions. Of a
  `sequence_ratio`, whose tokens have one ratio, it is GSPO's clip.

  Args:
    ratios: see `core.surrogates`.
    logprobs: not used: the gradient flows through the ratios.
    advantages: see `core.surrogates`.
    mask: True on real tokens.
    gmpo_clip_low: in nats, as the next; 0.4 in the paper.
    gmpo_clip_high: likewise.

  Returns:
    The loss of each token; `clip_fraction_low` and `clip_fraction_high`: where
    that bound cuts a token's gradient.

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
  ratios: Float[Array, "B G T"],
  logprobs: Float[Array, "B G T"],
  advantages: Float[Array, "B G T"],
  *,
  sapo_temperature_pos: float | int = 1.0,
  sapo_temperature_neg: float | int = 1.05,
) -> tuple[Float[Array, "B G T"], Monitored]:
  """SAPO: a sigmoid in the place of the clip.

  -A (4 / tau) sigmoid(tau (r - 1)), with one tau for positive advantages and
  one for the others (arXiv 2511.20347, equations 5 and 6). Its slope by r is
  -A sech^2(tau (r - 1) / 2): 1 on-policy, and the larger tau is, the sooner it
  fades. (The value on-policy is -2 A / tau, not -A.)

  Args:
    ratios: see `core.surrogates`.
    logprobs: not used: the gradient flows through the ratios.
    advantages: see `core.surrogates`.
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
  ratios: Float[Array, "B G T"],
  logprobs: Float[Array, "B G T"],
  advantages: Float[Array, "B G T"],
  *,
  vespo_k_pos: float | int = 2.0,
  vespo_lambda_pos: float | int = 3.0,
  vespo_k_neg: float | int = 3.0,
  vespo_lambda_neg: float | int = 2.0,
) -> tuple[Float[Array, "B G T"], Monitored]:
  """VESPO: REINFORCE weighted by a gamma kernel of the importance ratio.

  -sg(phi(w)) A log pi, phi(w) = w^k exp(lambda (1 - w)), sg stops the gradient
  (arXiv 2602.10693). phi(1) = 1, and phi is largest at w = k / lambda. The
  paper's w is the ratio of whole completions, `trajectory_ratio`; with the
  other ratios the kernel is one of theirs.

  Args:
    ratios: see `core.surrogates`, as for the next two.
    logprobs: likewise.
    advantages: likewise.
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
