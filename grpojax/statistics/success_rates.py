"""Success rates of the training prompts, and priorities based on them.

A prompt's success rate has the posterior Beta(1/2 + successes, 1/2 + failures),
from Jeffreys' prior. As the policy changes, counts are multiplied by 2^(-1 /
half_life) at every step: the posterior of a prompt that is no longer drawn
returns to the prior. Prompts are drawn in proportion to one of `PRIORITIES`
(docs/data.md).
"""

import typing
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy  # loads scipy.special at its first use
from flax import struct
from jaxtyping import Array, Float, Int

Vector = Float[np.ndarray, "n"]
PRIOR = 0.5  # successes, and failures, of a prompt before its first completion


@typing.no_type_check  # it also holds shapes and shardings
@struct.dataclass
class SuccessRates:
  """Discounted counts of right and wrong completions of n prompts."""

  successes: Float[Array, "n"]
  failures: Float[Array, "n"]


def unknown(prompts: int) -> SuccessRates:
  """Returns the counts before the first completions."""
  return SuccessRates(jnp.zeros(prompts), jnp.zeros(prompts))


def observe(
  rates: SuccessRates,
  indices: Int[Array, "B"],
  right: Float[Array, "B G"],
  *,
  half_life: int | float,
) -> SuccessRates:
  """Returns the counts after a step with the prompts `indices`.

  `right` is 1 for right completions, 0 for wrong ones, nan for uncounted ones.
  After `half_life` steps a completion counts half.
  """
  keep = 0.5 ** (1 / half_life)
  known = ~jnp.isnan(right)
  successes = jnp.sum(jnp.where(known, right, 0), axis=-1)
  failures = jnp.sum(known, axis=-1) - successes
  # `add` sums over repeated indices: a prompt may have several rows.
  return SuccessRates(
    (keep * rates.successes).at[indices].add(successes),
    (keep * rates.failures).at[indices].add(failures),
  )


def posterior(rates: Any) -> tuple[Vector, Vector]:
  """Returns (a, b) of each prompt's beta posterior, in float64, on the host."""
  a = PRIOR + np.asarray(rates.successes, np.float64)
  b = PRIOR + np.asarray(rates.failures, np.float64)
  return a, b


def _mean(a: Vector, b: Vector, x: int | float, y: int | float) -> Vector:
  """Returns E[p^x (1 - p)^y] = B(a + x, b + y) / B(a, b)."""
  betaln = scipy.special.betaln
  return np.exp(betaln(a + x, b + y) - betaln(a, b))


def varies(a: Vector, b: Vector, *, group_size: int) -> Vector:
  """Returns the probability that a group has right and wrong completions."""
  equal = _mean(a, b, group_size, 0) + _mean(a, b, 0, group_size)
  return np.maximum(1 - equal, 0)


def spread(a: Vector, b: Vector) -> Vector:
  """Returns the expected standard deviation of a reward, E[sqrt(p (1 - p))]."""
  return _mean(a, b, 0.5, 0.5)


def in_band(a: Vector, b: Vector, *, band: tuple) -> Vector:
  """Returns 1 if the expected success rate is in the band, else 0."""
  low, high = band
  mean = a / (a + b)
  return ((low <= mean) & (mean <= high)).astype(np.float64)


def density(a: Vector, b: Vector, *, target: int | float) -> Vector:
  """Returns the posterior density at the success rate `target`, in (0, 1)."""
  logs = (a - 1) * np.log(target) + (b - 1) * np.log1p(-target)
  return np.exp(logs - scipy.special.betaln(a, b))


PRIORITIES: dict[str, Callable[..., Vector]] = {
  "varies": varies,
  "spread": spread,
  "band": in_band,
  "target": density,
}
"""Priorities by name: `(a, b, *, settings) -> [n]`, at least 0. Only their
ratios matter. Each function receives the settings named by its parameters."""
