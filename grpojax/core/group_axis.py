"""Arithmetic along the group axis, shared by the advantages.

A sample whose reward is not finite counts as not drawn, and its advantage is 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped


def as_array(rewards: Any, name: str) -> Shaped[Array, "..."]:
  """Returns rewards as an array; ValueError if ragged or not numeric."""
  try:
    if rewards is None:
      raise TypeError("they are None")
    return jnp.asarray(rewards)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"{name} needs rewards that are numbers (nan if missing), in an array or "
      f"in lists of equal lengths: {error}"
    ) from error


def as_float(rewards: Any, name: str, least: int) -> Float[Array, "..."]:
  """Returns rewards [..., G] in float32 or better, nan if missing.

  ValueError with the function's `name` if they are not numbers, or G < least.
  """
  rewards = as_array(rewards, name)
  if rewards.ndim < 1 or rewards.shape[-1] < least:
    raise ValueError(
      f"{name} needs rewards [..., G] with group size G >= {least}, not shape "
      f"{rewards.shape}: sample more completions per prompt (group_size), or "
      "use vanilla or reinforce_plus_plus, which have no group baseline"
    )
  rewards = rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32))
  return jnp.where(present(rewards), rewards, jnp.nan)


def present(rewards: Shaped[Array, "*B G"]) -> Bool[Array, "*B G"]:
  """True for samples with a finite reward."""
  return jnp.isfinite(rewards)


def varies(
  rewards: Shaped[Array, "*B G"] | np.ndarray,
) -> Bool[Array, "*B"] | np.ndarray:
  """True for groups with different rewards; NumPy arrays give a NumPy array."""
  xp = np if isinstance(rewards, np.ndarray) else jnp
  rewarded = xp.isfinite(rewards)
  best = xp.max(rewards, axis=-1, where=rewarded, initial=-xp.inf)
  return best > xp.min(rewards, axis=-1, where=rewarded, initial=xp.inf)


def count(rewards: Float[Array, "*B G"]) -> Float[Array, "*B 1"]:
  """Number of samples with a reward in each group."""
  return jnp.sum(present(rewards), -1, keepdims=True).astype(rewards.dtype)


def shifted(rewards: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Rewards minus the group's first; 0 if missing, and if all are equal."""
  rewarded = present(rewards)
  clean = jnp.where(rewarded, rewards, 0)
  first = jnp.argmax(rewarded, -1)[..., None]
  return jnp.where(rewarded, clean - jnp.take_along_axis(clean, first, -1), 0)


def centred(rewards: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Rewards minus their group's mean: exactly 0 if they are all equal."""
  # The mean of equal floats rounds (0.1 * 3 / 3 != 0.1); that of zeros is 0.
  moved = shifted(rewards)
  mean = jnp.sum(moved, -1, keepdims=True) / jnp.maximum(count(rewards), 1)
  return jnp.where(present(rewards), moved - mean, 0)


def minus_others(rewards: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Rewards minus the mean of the group's other rewards; 0 in groups of one."""
  n = count(rewards)
  return centred(rewards) * (n / jnp.maximum(n - 1, 1))


def sum_of_others(x: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Returns sum_{j != i} x_j along the last axis, for every i.

  It sums from both ends, because "total minus x_i" would keep the rounding
  error of a large x_i.
  """
  axis = x.ndim - 1
  end = jnp.zeros_like(x[..., :1])
  before = jax.lax.cumsum(x[..., :-1], axis)
  after = jax.lax.cumsum(x[..., 1:], axis, reverse=True)
  return jnp.concatenate([end, before], -1) + jnp.concatenate([after, end], -1)
