"""How noisy is a GRPO gradient, and which group size would make it less so?

Every error in `u_statistics` is quadratic in scores, so it can be read off
directional derivatives: for a random direction v with E[v v^T] = I, the numbers
a_i = s_i . v have E_v[a_i a_j] = s_i . s_j. Products of expectations are taken
over disjoint samples, around a baseline from other prompts: all is unbiased.

    score_projections -> [V, B, G] -> diagnose -> Diagnosis -> metrics
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from grpojax.statistics.group_size import (
  Components,
  mse_curve,
  optimal_group_size,
)
from grpojax.statistics.projections import (
  score_projections as score_projections,
)
from grpojax.statistics.u_statistics import Estimators

_NORMAL = 1.959964  # the 97.5% quantile


class Diagnosis(NamedTuple):
  """The variance of one step's policy gradient, estimated from its samples.

  Attributes:
    components: unbiased estimates; those of small quantities may be negative.
    standard_errors: over prompts and tangents, one for each component.
    mse: of the step's gradient with each estimator's advantages, for all the
      prompts of the step.
    snr: squared length of the gradient over the leave-one-out error.
    optimal_group_size: G* = 1 + sqrt(c3 / c1); inf where c1 <= 0.
    low: lower bound of the 95% interval for G*.
    high: upper bound; inf where c1 may be 0.
  """

  components: Components
  standard_errors: Components
  mse: Estimators
  snr: Float[Array, ""]
  optimal_group_size: Float[Array, ""]
  low: Float[Array, ""]
  high: Float[Array, ""]


class _Parts(NamedTuple):
  """Unbiased for one prompt, or two, in one direction; "V B" or "V B B"."""

  gradient_sq: Array  # ||g||^2
  oracle: Array  # E[||s||^2 delta^2]
  vanilla: Array  # E[||s||^2 Z^2]
  product: Array  # I sigma^2
  pairs: Array  # g(x) . g(x') of different prompts; 0 on the diagonal


def _baselines(norms: Array, weighted: Array) -> tuple[Array, Array]:
  """E[||s||^2 Z] / E||s||^2 of all but one prompt [B], and but two [B, B].

  The constant baseline with the least variance. It may depend on the directions
  and on other prompts: the mean of s is 0 in every direction, so only samples
  of the prompt itself would bias what it is subtracted from.

  Args:
    norms: group means of a^2, [V, B].
    weighted: group means of a^2 Z.
  """

  def without(x):
    x = jnp.sum(x, 0)
    one = jnp.sum(x) - x
    return one, one[:, None] - x

  def ratio(over, under):
    some = under > 0
    return jnp.where(some, over / jnp.where(some, under, 1.0), 0.0)

  tops, bottoms = without(weighted), without(norms)
  return ratio(tops[0], bottoms[0]), ratio(tops[1], bottoms[1])


def _parts(a: Array, rewards: Array) -> _Parts:
  """U-statistics of groups, in closed form.

  Over distinct samples i, j, k of a group: a_i a_j (Z_i - b)(Z_j - b) for
  ||g||^2, a_i^2 (Z_i - Z_j)(Z_i - Z_k) for the oracle, a_i^2 (Z_j - Z_k)^2 / 2
  for the product.
  """
  n = rewards.shape[-1]
  c = rewards - jnp.mean(rewards, -1, keepdims=True)
  squares = jnp.sum(c**2, -1, keepdims=True)
  delta_sq = (n * (n - 1) * c**2 - squares) / ((n - 1) * (n - 2))
  variance = (squares - n / (n - 1) * c**2) / (n - 2)
  norms, weighted = jnp.mean(a**2, -1), jnp.mean(a**2 * rewards, -1)
  vanilla = jnp.mean(a**2 * rewards**2, -1)
  one, two = _baselines(norms, weighted)
  score, product = jnp.mean(a, -1), jnp.mean(a * rewards, -1)
  own = vanilla - 2 * one * weighted + one**2 * norms
  left = product[:, :, None] - two * score[:, :, None]
  right = product[:, None, :] - two * score[:, None, :]
  different = ~jnp.eye(rewards.shape[0], dtype=bool)
  return _Parts(
    gradient_sq=(n * (product - one * score) ** 2 - own) / (n - 1),
    oracle=jnp.mean(a**2 * delta_sq, -1),
    vanilla=vanilla,
    product=jnp.mean(a**2 * variance, -1),
    pairs=jnp.where(different, left * right, 0.0),
  )


def _combine(sums: _Parts, count: int) -> Components:
  """Components from sums over `count` prompts, and over all their pairs."""
  mean = _Parts(*(x / count for x in sums))
  gradient_sq = mean.pairs / (count - 1)
  return Components(
    c1=mean.gradient_sq - gradient_sq,
    c2=mean.oracle - mean.gradient_sq,
    c3=mean.product + mean.gradient_sq,
    c2_vanilla=mean.vanilla - mean.gradient_sq,
    gradient_sq=gradient_sq,
  )


def _covariances(parts: _Parts, per_tangent: Array, count: int):
  """Covariances [5, 5] of the components: over prompts, and over tangents.

  A jackknife over prompts (the components are no plain means over them), and
  the spread of the tangents. What varies with both is in both: a little is
  counted twice, which errs on the safe side.
  """
  tangents = per_tangent.shape[0]
  each = parts._replace(pairs=2 * jnp.sum(parts.pairs, -1))
  total = [jnp.sum(x, -1, keepdims=True) for x in each]
  total[-1] /= 2
  sums = _Parts(*(t - x for t, x in zip(total, each, strict=True)))
  left_out = jnp.stack(_combine(sums, count - 1)).mean(1)  # [5, B]
  d = left_out - jnp.mean(left_out, -1, keepdims=True)
  e = per_tangent.T - jnp.mean(per_tangent, 0)[:, None]
  return (
    d @ d.T * (count - 1) / count,
    e @ e.T / (tangents * (tangents - 1)),
  )


def _t_quantile(degrees: Array) -> Array:
  """Student's 97.5% quantile by its expansion around the normal one."""
  z, inverse = _NORMAL, 1 / degrees
  first = (z**3 + z) / 4
  second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
  third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
  return z + inverse * (first + inverse * (second + inverse * third))


def _group_size_interval(c: Components, over_prompts, over_tangents, count, v):
  """95% interval of 1 + sqrt(c3 / c1), by Fieller's for the ratio c1 / c3.

  Fieller's interval needs no c1 away from 0: where c1 may be 0, G* may be
  infinite. The degrees of freedom are Satterthwaite's.
  """

  def variance_at(ratio, covariance):
    w = jnp.zeros(5).at[0].set(1.0).at[2].set(-ratio)
    return w @ covariance @ w

  ratio = jnp.maximum(c.c1, 0) / jnp.maximum(c.c3, 1e-30)
  x, y = (variance_at(ratio, m) for m in (over_prompts, over_tangents))
  share = x / jnp.maximum(x + y, 1e-30)
  degrees = 1 / (share**2 / (count - 1) + (1 - share) ** 2 / (v - 1))
  t_sq = _t_quantile(degrees) ** 2
  m = over_prompts + over_tangents
  a = c.c3**2 - t_sq * m[2, 2]
  b = c.c1 * c.c3 - t_sq * m[0, 2]
  root = jnp.sqrt(jnp.maximum(b**2 - a * (c.c1**2 - t_sq * m[0, 0]), 0.0))
  known = (a > 0) & (c.c3 > 0)  # else nothing is known of the ratio
  a = jnp.where(known, a, 1.0)

  def size(ratio):
    return jnp.where(
      ratio > 0, 1 + 1 / jnp.sqrt(jnp.maximum(ratio, 1e-30)), jnp.inf
    )

  low = jnp.where(known, size((b + root) / a), 1.0)
  return low, jnp.where(known, size((b - root) / a), jnp.inf)


def diagnose(
  projections: Float[Array, "V B G"],
  rewards: Real[Array, "B G"],
  num_prompts: int | None = None,
) -> Diagnosis:
  """Estimates what the gradient's error is made of, and the best group size.

  Args:
    projections: from `score_projections`, V >= 2 directions.
    rewards: those that the advantages are computed from; B >= 3, G >= 3.
    num_prompts: prompts of the whole step, where only some are given here.

  Returns:
    A `Diagnosis`; every component is unbiased.

  Raises:
    ValueError: too few tangents, prompts or samples a prompt.
  """
  v, b, g = projections.shape
  if v < 2 or b < 3 or g < 3:
    raise ValueError(
      f"a diagnosis with its errors needs at least 2 tangents, 3 prompts and a "
      f"group size of 3, not {v}, {b} and {g}"
    )
  rewards = rewards.astype(projections.dtype)
  parts = _parts(projections, rewards)
  sums = _Parts(*(jnp.sum(x, tuple(range(1, x.ndim))) for x in parts))
  per_tangent = jnp.stack(_combine(sums, b), axis=-1)  # [V, 5]
  c = Components(*jnp.mean(per_tangent, axis=0))
  over_prompts, over_tangents = _covariances(parts, per_tangent, b)
  errors = jnp.sqrt(jnp.diagonal(over_prompts + over_tangents))
  mse = mse_curve(c, g, (num_prompts or b) * g)
  low, high = _group_size_interval(c, over_prompts, over_tangents, b, v)
  return Diagnosis(
    components=c,
    standard_errors=Components(*errors),
    mse=mse,
    snr=jnp.maximum(c.gradient_sq, 0) / jnp.maximum(mse.leave_one_out, 1e-30),
    optimal_group_size=optimal_group_size(c.c1, c.c2, c.c3),
    low=low,
    high=high,
  )


def metrics(diagnosis: Diagnosis) -> dict[str, Float[Array, ""]]:
  """Scalars for a log, all of one space: squared nats of the scores.

  `c1`, `c2`, `c3` and their `_se`; `gradient_sq`; `gradient_mse` of the step
  and what it would be with `vanilla` advantages or an `oracle`'s;
  `gradient_snr`; `optimal_group_size` with `_low` and `_high` of 95%.
  """
  c, errors = diagnosis.components, diagnosis.standard_errors
  row = {}
  for name in ("c1", "c2", "c3"):
    row |= {name: getattr(c, name), f"{name}_se": getattr(errors, name)}
  return row | {
    "gradient_sq": c.gradient_sq,
    "gradient_mse": diagnosis.mse.leave_one_out,
    "gradient_mse_vanilla": diagnosis.mse.vanilla,
    "gradient_mse_oracle": diagnosis.mse.oracle,
    "gradient_snr": diagnosis.snr,
    "optimal_group_size": diagnosis.optimal_group_size,
    "optimal_group_size_low": diagnosis.low,
    "optimal_group_size_high": diagnosis.high,
  }
