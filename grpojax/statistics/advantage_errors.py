"""Gradient error with an unbiased advantage that uses a single group.

Given the prompt, G MSE(G) = c2 + c3 / (G - 1), so the errors of whole and half
groups determine c2 and c3. This is exact for leave-one-out, and holds to order
1 / G^2 if the baseline is a weighted mean of the other rewards. Notation:
`component_estimates`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from grpojax.core.group_axis import as_float
from grpojax.statistics.component_estimates import prompt_estimates
from grpojax.statistics.group_size import optimal_group_size


class AdvantageErrors(NamedTuple):
  """Components of the gradient's error with a given advantage."""

  c2: Float[Array, ""]  # error within prompts
  c3: Float[Array, ""]  # error of the baseline
  c2_se: Float[Array, ""]  # standard error of c2, over prompts and directions
  c3_se: Float[Array, ""]
  mse: Float[Array, ""]  # of a group given the prompt, averaged over prompts


def advantage_errors(
  projections: Float[Array, "V B G"],
  rewards: Shaped[Array, "B G"],
  advantage: Callable[..., Array],
  weights: dict[str, Shaped[Array, "B G"]],
) -> AdvantageErrors:
  """Estimates c2 and c3 from the errors of groups of G and of G // 2 samples.

  Requires V >= 2 directions, B >= 2 prompts, finite rewards, and an unbiased
  `advantage(rewards, **weights)` that uses a single group.
  """
  tangents, prompts, size = projections.shape
  half = size // 2
  rewards = as_float(rewards, "advantage_errors", least=4)
  gradient_sq = prompt_estimates(projections, rewards).gradient_sq  # [V, B]

  def halves(x):  # [B, G] to [2 B, G // 2]; drops the last sample of odd G
    return x[:, : 2 * half].reshape(-1, half)

  whole = advantage(rewards, **weights)  # [B, G]
  split = {name: halves(x) for name, x in weights.items()}
  parts = advantage(halves(rewards), **split)  # [2 B, G // 2]
  # Estimates of the gradient in each direction, [V, B] and [V, B, 2].
  from_whole = jnp.mean(projections * whole, -1)
  in_halves = projections[..., : 2 * half].reshape(tangents, prompts, 2, half)
  from_halves = jnp.mean(in_halves * parts.reshape(prompts, 2, half), -1)
  # G MSE(G) of each prompt in each direction, [V, B].
  at_size = size * (from_whole**2 - gradient_sq)
  at_half = half * (jnp.mean(from_halves**2, -1) - gradient_sq)
  # Each is c2 + c3 / (its size - 1), so that c2 cancels in their difference.
  c3 = (at_half - at_size) / (1 / (half - 1) - 1 / (size - 1))
  c2 = at_size - c3 / (size - 1)

  def error(x):
    # x [V, B] varies with prompts and with directions: both variances add up.
    by_prompt = jnp.var(jnp.mean(x, 0), ddof=1) / prompts
    by_direction = jnp.var(jnp.mean(x, 1), ddof=1) / tangents
    return jnp.sqrt(by_prompt + by_direction)

  return AdvantageErrors(
    jnp.mean(c2), jnp.mean(c3), error(c2), error(c3), jnp.mean(at_size) / size
  )


def metrics(
  errors: AdvantageErrors, c1: Float[Array, ""], prompts: int
) -> dict[str, Float[Array, ""]]:
  """Returns scalars to log in addition to `diagnostics.metrics`.

  `c1`, the error between prompts, is that of `diagnostics`: it is the same for
  every unbiased advantage. `prompts` is B of the whole step.
  """
  return {
    **{f"own_{k}": getattr(errors, k) for k in ("c2", "c2_se", "c3", "c3_se")},
    "own_gradient_mse": (c1 + errors.mse) / prompts,
    "own_optimal_group_size": optimal_group_size(c1, errors.c2, errors.c3),
  }
