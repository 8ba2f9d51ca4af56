"""Noise of a GRPO gradient, and the group size that would make it least.

Every error in `u_statistics` is quadratic in scores, so directional derivatives
estimate it, without per-sample gradients (`component_estimates`).

    score_projections -> [V, B, G] -> diagnose -> Diagnosis -> metrics
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from grpojax.core.group_axis import as_float
from grpojax.statistics.component_estimates import (
  combine,
  covariances,
  prompt_estimates,
)
from grpojax.statistics.group_size import (
  Components,
  mse_curve,
  optimal_group_size,
)
from grpojax.statistics.group_size_interval import group_size_interval
from grpojax.statistics.projections import (
  score_projections as score_projections,
)
from grpojax.statistics.u_statistics import Estimators


class Diagnosis(NamedTuple):
  """Variance of one step's policy gradient, estimated from its samples.

  Estimates of small quantities may be negative. The standard errors, over
  prompts and directions, are too small for intervals: few prompts are skewed.
  """

  components: Components
  standard_errors: Components
  mse: Estimators  # of the whole step's gradient
  snr: Float[Array, ""]  # squared gradient over the leave-one-out error
  optimal_group_size: Float[Array, ""]  # 1 + sqrt(c3 / c1); inf where c1 <= 0
  low: Float[Array, ""]  # of the 95% interval for G*
  high: Float[Array, ""]  # inf where c1 may be 0


def diagnose(
  projections: Float[Array, "V B G"],
  rewards: Real[Array, "B G"],
  num_prompts: int | None = None,
) -> Diagnosis:
  """Estimates the components of the gradient's error, and the best group size.

  V >= 2, B >= 3 and G >= 3, else a ValueError. Rewards are the inputs of the
  advantages; one that is not finite makes all estimates nan. `mse` and `snr`
  are of a step of `num_prompts` prompts, by default B.
  """
  tangents, prompts, group_size = projections.shape
  if tangents < 2 or prompts < 3 or group_size < 3:
    raise ValueError(
      f"a diagnosis with its errors needs at least 2 tangents, 3 prompts and a "
      f"group size of 3, not {tangents}, {prompts} and {group_size}"
    )
  rewards = as_float(rewards, "diagnose", least=3).astype(projections.dtype)
  estimates = prompt_estimates(projections, rewards)
  sums = jax.tree.map(lambda x: jnp.sum(x, tuple(range(1, x.ndim))), estimates)
  per_tangent = jnp.stack(combine(sums, prompts), axis=-1)  # [V, 5]
  c = Components(*jnp.mean(per_tangent, axis=0))
  over_prompts, over_tangents = covariances(estimates, per_tangent, prompts)
  errors = jnp.sqrt(jnp.diagonal(over_prompts + over_tangents))
  mse = mse_curve(c, group_size, (num_prompts or prompts) * group_size)
  low, high = group_size_interval(
    c, over_prompts, over_tangents, prompts, tangents
  )
  return Diagnosis(
    components=c,
    standard_errors=Components(*errors),
    mse=mse,
    # A negative estimate of a squared length says that it is small.
    snr=jnp.maximum(c.gradient_sq, 0) / jnp.maximum(mse.leave_one_out, 1e-30),
    optimal_group_size=optimal_group_size(c.c1, c.c2, c.c3),
    low=low,
    high=high,
  )


def metrics(diagnosis: Diagnosis) -> dict[str, Float[Array, ""]]:
  """Scalars for a log, explained in docs/group-size.md.

  Gradients by the moving parameters are in nats x reward per unit of parameter;
  components and errors are squared lengths of these.
  """
  row = {}
  for name in ("c1", "c2", "c3"):
    row[name] = getattr(diagnosis.components, name)
    row[f"{name}_se"] = getattr(diagnosis.standard_errors, name)
  return row | {
    "gradient_sq": diagnosis.components.gradient_sq,
    "gradient_mse": diagnosis.mse.leave_one_out,
    "gradient_mse_vanilla": diagnosis.mse.vanilla,
    "gradient_mse_oracle": diagnosis.mse.oracle,
    "gradient_snr": diagnosis.snr,
    "optimal_group_size": diagnosis.optimal_group_size,
    "optimal_group_size_low": diagnosis.low,
    "optimal_group_size_high": diagnosis.high,
  }
