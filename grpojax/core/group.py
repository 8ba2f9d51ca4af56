"""Arithmetic along the group axis that the advantages share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def as_float(
  rewards: Shaped[Array, "..."], name: str, least: int
) -> Float[Array, "..."]:
  """Rewards in float32 or better.

  Args:
    rewards: [..., G], of any real dtype.
    name: what needs them, for the message.
    least: smallest group size that it can work with.

  Raises:
    ValueError: if there is no group axis, or G < least.
  """
  rewards = jnp.asarray(rewards)
  if rewards.ndim < 1 or rewards.shape[-1] < least:
    raise ValueError(
      f"{name} needs rewards [..., G] with group size G >= {least}, not shape "
      f"{rewards.shape}: sample more completions a prompt (group_size), or "
      "choose an estimator without a group baseline (vanilla, oracle)"
    )
  return rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32))


def centred(rewards: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
  """Rewards minus their group's mean: exactly 0 where they are all equal."""
  # Measured from the group's first reward: the mean of equal floats rounds
  # (0.1 * 3 / 3 != 0.1), the mean of exact zeros does not.
  shifted = rewards - rewards[..., :1]
  return shifted - jnp.mean(shifted, -1, keepdims=True)


def sum_of_others(x: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
  """sum_{j != i} x_j along the last axis, for every i.

  From both ends: in "the total minus x_i" a large x_i would leave its rounding
  error behind.
  """
  axis, end = x.ndim - 1, jnp.zeros_like(x[..., :1])
  before = jax.lax.cumsum(x[..., :-1], axis)
  after = jax.lax.cumsum(x[..., 1:], axis, reverse=True)
  return jnp.concatenate([end, before], -1) + jnp.concatenate([after, end], -1)
