"""Error of a gradient with any unbiased advantages of each group by itself.

Errors of whole groups and of their halves give both terms of G MSE(G) = c2 +
c3 / (G - 1) given the prompt: exactly for leave-one-out, up to order 1 / G^2
for weighted means of the others. Notation as in `component_estimates`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from grpojax.core.group_axis import as_float
from grpojax.statistics.component_estimates import prompt_estimates
from grpojax.statistics.group_size import optimal_group_size


class AdvantageErrors(NamedTuple):
  """Components of a gradient's error with certain advantages."""

  c2: Float[Array, ""]  # error within prompts
  c3: Float[Array, ""]  # error of the baseline
  c2_se: Float[Array, ""]  # standard error of c2, over prompts and directions
  c3_se: Float[Array, ""]
  mse: Float[Array, ""]  # of one group given the prompt, a mean over prompts


def advantage_errors(
  projections: Float[Array, "V B G"],
  rewards: Shaped[Array, "B G"],
  advantage: Callable[..., Array],
  weights: dict[str, Shaped[Array, "B G"]],
) -> AdvantageErrors:
  """Estimates c2 and c3 from the errors of groups of G and G // 2.

  V >= 2, B >= 2, and rewards are finite. `advantage(rewards, **weights)` is
  unbiased, and of each group by itself.
  """
  tangents, prompts, size = projections.shape
  half = size // 2
  rewards = as_float(rewards, "advantage_errors", least=4)
  gradient_sq = prompt_estimates(projections, rewards).gradient_sq  # [V, B]

  def halves(x):  # [B, G] as [2 B, G // 2]; an odd sample is left out
    return x[:, : 2 * half].reshape(-1, half)

  whole = advantage(rewards, **weights)  # [B, G]
  split = {name: halves(x) for name, x in weights.items()}
  parts = advantage(halves(rewards), **split)  # [2 B, G // 2]
  # The gradient's estimates in each direction, [V, B] and [V, B, 2].
  estimates = jnp.mean(projections * whole, -1)
  a = projections[..., : 2 * half].reshape(tangents, prompts, 2, half)
  of_halves = jnp.mean(a * parts.reshape(prompts, 2, half), -1)
  # G MSE(G) of each prompt in each direction, [V, B].
  at_size = size * (estimates**2 - gradient_sq)
  at_half = half * (jnp.mean(of_halves**2, -1) - gradient_sq)
  c3 = (at_half - at_size) / (1 / (half - 1) - 1 / (size - 1))
  c2 = at_size - c3 / (size - 1)

  def error(x):
    by_prompt = jnp.var(jnp.mean(x, 0), ddof=1) / prompts
    by_direction = jnp.var(jnp.mean(x, 1), ddof=1) / tangents
    return jnp.sqrt(by_prompt + by_direction)

  return AdvantageErrors(
    jnp.mean(c2), jnp.mean(c3), error(c2), error(c3), jnp.mean(at_size) / size
  )


def metrics(
  errors: AdvantageErrors, c1: Float[Array, ""], prompts: int
) -> dict[str, Float[Array, ""]]:
  """Scalars for a log, in addition to those of `diagnostics.metrics`.

  c1 is the same for all unbiased advantages; `prompts` is the whole step's B.
  """
  return {
    **{f"own_{k}": getattr(errors, k) for k in ("c2", "c2_se", "c3", "c3_se")},
    "own_gradient_mse": (c1 + errors.mse) / prompts,
    "own_optimal_group_size": optimal_group_size(c1, errors.c2, errors.c3),
  }
