"""Rotary positions: frequencies, their scaled variants, and the rotation."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

RotaryTable = tuple[Float[Array, "*tokens half"], Float[Array, "*tokens half"]]
"""Cosines and sines of the rotary angles of tokens."""


@dataclasses.dataclass(frozen=True)
class Rope:
  """Frequencies of a rotary embedding (Su et al. 2021), for a longer context.

  Without `low_freq_factor` every frequency is divided by `factor` (linear
  scaling, Chen et al. 2023). With it, by Llama 3.1's rule, only frequencies
  below `low_freq_factor` turns in `original_length` positions are; those above
  `high_freq_factor` turns stay, and between the two they are interpolated.
  """

  theta: float = 10_000.0  # base of the frequencies
  # Length of the context over that of the one first trained on.
  factor: float = 1.0
  # Turns in `original_length` below which a frequency is divided by `factor`;
  # None is linear scaling.
  low_freq_factor: float | None = None
  high_freq_factor: float = 4.0  # turns above which a frequency stays as it is
  # Context that the model was first trained on, in tokens.
  original_length: int | float = 8192


def frequencies(rope: Rope, dim: int) -> Float[np.ndarray, "half"]:
  """Returns the radians a position of each pair of a head's channels."""
  exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
  frequency = 1.0 / np.float32(rope.theta) ** exponents
  slow = frequency / np.float32(rope.factor)
  if rope.low_freq_factor is None:
    return slow
  turns = rope.original_length * frequency / (2 * math.pi)
  low, high = rope.low_freq_factor, rope.high_freq_factor
  share = np.clip((turns - low) / (high - low), 0.0, 1.0)
  return ((1 - share) * slow + share * frequency).astype(np.float32)


def rope_tables(
  positions: Int[Array, "*tokens"], dim: int, rope: Rope
) -> RotaryTable:
  """Returns cosines and sines [..., dim / 2] of the rotary angles, float32."""
  position = positions[..., None].astype(jnp.float32)
  shape = (*positions.shape, dim // 2)
  angle = position * jnp.broadcast_to(frequencies(rope, dim), shape)
  return jnp.cos(angle), jnp.sin(angle)


def rotate(
  x: Float[Array, "B G S heads E"], tables: RotaryTable
) -> Float[Array, "B G S heads E"]:
  """Rotates the two halves of each head by the angles of `rope_tables`.

  The result is float32, as the tables are (transformers rounds them).
  """
  cos, sin = (table[:, :, :, None] for table in tables)  # alike for all heads
  x1, x2 = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
