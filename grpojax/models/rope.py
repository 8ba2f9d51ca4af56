"""Rotary position embeddings: frequencies, scaled variants, rotation."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Cosines and sines of the rotary angles of tokens.
RotaryTable = tuple[Float[Array, "*tokens half"], Float[Array, "*tokens half"]]


@dataclasses.dataclass(frozen=True)
class Rope:
  """Frequencies of a rotary embedding (Su et al. 2021), which may be scaled.

  Without `low_freq_factor`, `factor` divides every frequency (linear scaling,
  Chen et al. 2023). With it (Llama 3.1), `factor` divides frequencies below
  `low_freq_factor` turns per `original_length` tokens, the context length of
  pretraining; frequencies above `high_freq_factor` turns stay, and in between
  they are interpolated.
  """

  theta: float = 10_000.0  # base of the frequencies
  factor: float = 1.0
  low_freq_factor: float | None = None  # None: linear scaling
  high_freq_factor: float = 4.0
  original_length: int | float = 8192


def frequencies(rope: Rope, dim: int) -> Float[np.ndarray, "half"]:
  """Returns the radians per position of each pair of channels of a head."""
  exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
  frequency = 1.0 / np.float32(rope.theta) ** exponents
  slow = frequency / np.float32(rope.factor)
  if rope.low_freq_factor is None:
    return slow
  # Full turns of each pair of channels within the original length
  turns = rope.original_length * frequency / (2 * math.pi)
  low = rope.low_freq_factor
  high = rope.high_freq_factor
  # Share of the unscaled frequency: 0 means fully scaled, 1 means unchanged.
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
  """Rotates the two halves of each head by `rope_tables`, in float32."""
  cos, sin = (table[:, :, :, None] for table in tables)  # same for all heads
  x1, x2 = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
