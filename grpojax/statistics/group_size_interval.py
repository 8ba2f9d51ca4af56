"""Intervals for the best group size, from noisy estimates of c1 and c3."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from grpojax.statistics.group_size import Components, optimal_group_size
from grpojax.statistics.intervals import t_quantile

Scalar = Float[Array, ""]
_NORMAL = 1.959964  # the normal distribution's 97.5% quantile
_C1, _C3 = Components._fields.index("c1"), Components._fields.index("c3")


def group_size_interval(
  components: Components,
  over_prompts: Float[Array, "5 5"],
  over_tangents: Float[Array, "5 5"],
  prompts: int,
  tangents: int,
) -> tuple[Scalar, Scalar]:
  """Returns the 95% interval of G* = 1 + sqrt(c3 / c1), from a diagnosis.

  `over_prompts` and `over_tangents` are covariances of the components. Bounds
  that they do not determine are 1 and inf.
  """
  # Degrees of freedom of the variance of c1 - rho c3, at the estimate of rho:
  # the sum of variances w1 (B - 1 degrees) and w2 (V - 1 degrees) has
  # (w1 + w2)^2 / (w1^2 / (B - 1) + w2^2 / (V - 1)) (F. E. Satterthwaite, 1946).
  rho = jnp.maximum(components.c1, 0) / jnp.maximum(components.c3, 1e-30)
  weights = jnp.zeros(5).at[_C1].set(1.0).at[_C3].set(-rho)
  from_prompts = weights @ over_prompts @ weights
  from_tangents = weights @ over_tangents @ weights
  share = from_prompts / jnp.maximum(from_prompts + from_tangents, 1e-30)
  degrees = 1 / (share**2 / (prompts - 1) + (1 - share) ** 2 / (tangents - 1))
  chosen = jnp.array([_C1, _C3])
  covariance = (over_prompts + over_tangents)[chosen][:, chosen]
  t_sq = _t_quantile(degrees) ** 2
  return _fieller(components.c1, components.c3, covariance, t_sq)


def pooled_group_size(
  c1: Float[np.ndarray, "D"],
  c3: Float[np.ndarray, "D"],
  interval: tuple[float, float] = (1.0, math.inf),
) -> tuple[float, float, float]:
  """Returns G* = 1 + sqrt(mean c3 / mean c1) of D diagnoses, with 95% bounds.

  The bounds are `interval` if D = 1, and 1 and inf if D = 2.
  """
  both = np.stack([c1, c3])
  count = len(c1)
  means = both.mean(1)
  best = float(optimal_group_size(means[0], 0.0, means[1]))
  if count < 3:
    return best, *(interval if count == 1 else (1.0, math.inf))
  covariance = jnp.asarray(np.cov(both)) / count
  t_sq = t_quantile(count - 1) ** 2
  low, high = _fieller(*jnp.asarray(means), covariance, t_sq)
  return best, float(low), float(high)


def _fieller(
  c1: Scalar, c3: Scalar, covariance: Float[Array, "2 2"], t_sq: Scalar | float
) -> tuple[Scalar, Scalar]:
  """Returns the interval of G* from E. C. Fieller's (1954) interval of c1 / c3.

  Fieller's contains all rho for which c1 - rho c3 is within t standard errors
  of 0. If it includes rho <= 0, the upper bound of G* is infinite.
  """
  # (c1 - rho c3)^2 <= t^2 Var(c1 - rho c3) expands to
  # quadratic rho^2 - 2 linear rho + constant <= 0.
  quadratic = c3**2 - t_sq * covariance[1, 1]
  linear = c1 * c3 - t_sq * covariance[0, 1]
  constant = c1**2 - t_sq * covariance[0, 0]
  # If quadratic > 0, rho is between the roots (linear -+ root) / quadratic: c3
  # differs from 0 by more than t standard errors. Otherwise rho is unbounded.
  root = jnp.sqrt(jnp.maximum(linear**2 - quadratic * constant, 0.0))
  known = (quadratic > 0) & (c3 > 0)
  quadratic = jnp.where(known, quadratic, 1.0)

  def size(rho):  # G*, which falls as rho = c1 / c3 rises
    finite = 1 + 1 / jnp.sqrt(jnp.maximum(rho, 1e-30))
    return jnp.where(rho > 0, finite, jnp.inf)

  low = jnp.where(known, size((linear + root) / quadratic), 1.0)
  high = jnp.where(known, size((linear - root) / quadratic), jnp.inf)
  return low, high


def _t_quantile(degrees: Float[Array, "*X"]) -> Float[Array, "*X"]:
  """Approximates Student's 97.5% quantile around the normal quantile.

  scipy cannot take traced degrees. The series of Abramowitz and Stegun, 26.7.5,
  to 1 / degrees^3 is too small by 24% for 1 degree, 3% for 2, 0.02% for 8.
  """
  z = _NORMAL
  inverse = 1 / degrees
  first = (z**3 + z) / 4
  second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
  third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
  return z + inverse * (first + inverse * (second + inverse * third))
