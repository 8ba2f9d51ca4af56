"""Noise of a GRPO gradient, and the group size that minimises it.

Errors in `u_statistics` are quadratic in scores, so directional derivatives
suffice to estimate them, without gradients per sample (`component_estimates`).

    score_projections -> [V, B, G] -> diagnose -> Diagnosis -> metrics
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from grpojax.core.group_axis import as_float
from grpojax.statistics import component_estimates, group_size
from grpojax.statistics.group_size import Components
from grpojax.statistics.group_size_interval import group_size_interval
from grpojax.statistics.projections import (
  score_projections as score_projections,
)
from grpojax.statistics.u_statistics import Estimators


class Diagnosis(NamedTuple):
  """Noise of a step's policy gradient, estimated from the step's samples.

  Estimates of small quantities may be negative. Do not build intervals from the
  standard errors: with few prompts the estimates are skewed.
  """

  components: Components
  standard_errors: Components
  mse: Estimators  # of the whole step's gradient
  snr: Float[Array, ""]  # squared gradient over the leave-one-out error
  optimal_group_size: Float[Array, ""]  # 1 + sqrt(c3 / c1); inf if c1 <= 0
  low: Float[Array, ""]  # lower end of the 95% interval for G*
  high: Float[Array, ""]  # inf if c1 may be 0


def diagnose(
  projections: Float[Array, "V B G"],
  rewards: Real[Array, "B G"],
  num_prompts: int | None = None,
) -> Diagnosis:
  """Estimates the components of the gradient's error, and the best group size.

  ValueError unless V >= 2, B >= 3 and G >= 3. Rewards are the inputs of the
  advantages; a single infinite or nan reward makes all estimates nan. `mse` and
  `snr` are for a step of `num_prompts` prompts, by default B.
  """
  tangents, prompts, size = projections.shape
  if tangents < 2 or prompts < 3 or size < 3:
    raise ValueError(
      f"a diagnosis needs at least 2 tangents, 3 prompts and a group size of "
      f"3, not {tangents}, {prompts} and {size}"
    )
  rewards = as_float(rewards, "diagnose", least=3).astype(projections.dtype)
  estimates = component_estimates.prompt_estimates(projections, rewards)
  # Sum over the prompts, or pairs of prompts, in each direction: [V].
  sums = jax.tree.map(lambda x: jnp.sum(x, tuple(range(1, x.ndim))), estimates)
  by_component = component_estimates.combine(sums, prompts)
  per_tangent = jnp.stack(by_component, axis=-1)  # [V, 5]
  c = Components(*jnp.mean(per_tangent, axis=0))
  covariances = component_estimates.covariances(estimates, per_tangent, prompts)
  errors = jnp.sqrt(jnp.diagonal(covariances[0] + covariances[1]))
  mse = group_size.mse_curve(c, size, (num_prompts or prompts) * size)
  low, high = group_size_interval(c, *covariances, prompts, tangents)
  return Diagnosis(
    components=c,
    standard_errors=Components(*errors),
    mse=mse,
    # Estimates of small squared lengths may be negative.
    snr=jnp.maximum(c.gradient_sq, 0) / jnp.maximum(mse.leave_one_out, 1e-30),
    optimal_group_size=group_size.optimal_group_size(c.c1, c.c2, c.c3),
    low=low,
    high=high,
  )


def metrics(diagnosis: Diagnosis) -> dict[str, Float[Array, ""]]:
  """Returns the scalars to log, explained in docs/group-size.md.

  Components and errors are squared lengths of gradients with respect to trained
  parameters, in nats x reward per unit of parameter.
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
