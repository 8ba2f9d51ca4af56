"""Arithmetic along the group axis that the advantages share.

A sample whose reward is not finite takes no part in its group, as if it had not
been drawn, and its advantage is 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped


def as_array(rewards: Any, name: str) -> Shaped[Array, "..."]:
  """Rewards as an array; ValueError if they are no numbers, or ragged lists."""
  try:
    if rewards is None:
      raise TypeError("they are None")
    return jnp.asarray(rewards)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"{name} needs rewards that are numbers (nan where there is none), in an "
      f"array or in lists of equal lengths: {error}"
    ) from error


def as_float(rewards: Any, name: str, least: int) -> Float[Array, "..."]:
  """Rewards [..., G] in float32 or better, nan wherever there is none.

  ValueError, which names the function, for other things or G < least.
  """
  rewards = as_array(rewards, name)
  if rewards.ndim < 1 or rewards.shape[-1] < least:
    raise ValueError(
      f"{name} needs rewards [..., G] with group size G >= {least}, not shape "
      f"{rewards.shape}: sample more completions a prompt (group_size), or "
      "choose an estimator without a group baseline (vanilla, "
      "reinforce_plus_plus)"
    )
  rewards = rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32))
  return jnp.where(present(rewards), rewards, jnp.nan)


def present(rewards: Shaped[Array, "*B G"]) -> Bool[Array, "*B G"]:
  """True for samples that have a reward: a finite one."""
  return jnp.isfinite(rewards)


def varies(
  rewards: Shaped[Array, "*B G"] | np.ndarray,
) -> Bool[Array, "*B"] | np.ndarray:
  """True for groups with two rewards that differ; of numpy's on the host."""
  xp = np if isinstance(rewards, np.ndarray) else jnp
  rewarded = xp.isfinite(rewards)
  best = xp.max(rewards, axis=-1, where=rewarded, initial=-xp.inf)
  return best > xp.min(rewards, axis=-1, where=rewarded, initial=xp.inf)


def count(rewards: Float[Array, "*B G"]) -> Float[Array, "*B 1"]:
  """Number of samples of each group that have a reward."""
  return jnp.sum(present(rewards), -1, keepdims=True).astype(rewards.dtype)


def shifted(rewards: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Rewards minus one of their group's: exact zeros if equal; 0 if missing."""
  rewarded = present(rewards)
  clean = jnp.where(rewarded, rewards, 0)
  first = jnp.argmax(rewarded, -1)[..., None]
  return jnp.where(rewarded, clean - jnp.take_along_axis(clean, first, -1), 0)


def centred(rewards: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Rewards minus their group's mean: exactly 0 where they are all equal."""
  # Measured from one of the group's: the mean of equal floats rounds
  # (0.1 * 3 / 3 != 0.1), the mean of exact zeros does not.
  moved = shifted(rewards)
  mean = jnp.sum(moved, -1, keepdims=True) / jnp.maximum(count(rewards), 1)
  return jnp.where(present(rewards), moved - mean, 0)


def minus_others(rewards: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Rewards minus the mean of their group's others; 0 where there are none."""
  n = count(rewards)
  return centred(rewards) * (n / jnp.maximum(n - 1, 1))


def sum_of_others(x: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Returns sum_{j != i} x_j along the last axis, for every i.

  From both ends: "the total minus x_i" would keep the rounding of a large x_i.
  """
  axis, end = x.ndim - 1, jnp.zeros_like(x[..., :1])
  before = jax.lax.cumsum(x[..., :-1], axis)
  after = jax.lax.cumsum(x[..., 1:], axis, reverse=True)
  return jnp.concatenate([end, before], -1) + jnp.concatenate([after, end], -1)
