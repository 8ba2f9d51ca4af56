"""Rotary position embeddings: frequencies, scaled variants, rotation."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class RotaryTable(NamedTuple):
  """Cosines and sines of the rotary angles of tokens."""

  cos: Float[Array, "*tokens half"]
  sin: Float[Array, "*tokens half"]
  query_scale: Float[Array, "*tokens"] | None = None  # factor of the queries


@dataclasses.dataclass(frozen=True)
class Rope:
  """Frequencies of a rotary embedding (Su et al. 2021), which may be scaled.

  Without other fields, `factor` divides every frequency (linear scaling, Chen
  et al. 2023). With `low_freq_factor` (Llama 3.1), `factor` divides frequencies
  below `low_freq_factor` turns per `original_length` tokens, the context length
  of pretraining; frequencies above `high_freq_factor` turns stay, and in
  between they are interpolated. With `beta_fast` (YaRN, Peng et al. 2023, arXiv
  2309.00071) the interpolation is linear in the index of the pair of channels,
  between the pairs of `beta_fast` and of `beta_slow` turns; `truncate` rounds
  these two indices outwards.
  """

  theta: float = 10_000.0  # base of the frequencies
  factor: float = 1.0
  low_freq_factor: float | None = None
  high_freq_factor: float = 4.0
  original_length: int | float = 8192
  beta_fast: float | None = None
  beta_slow: float = 1.0
  truncate: bool = True
  divisors: tuple[float, ...] = ()  # of each frequency, in place of `factor`
  share: float = 1.0  # rotated share of a head's channels, the first ones
  attention_factor: float = 1.0  # factor of cosines and sines
  # Queries at position p have the factor 1 + b log(1 + floor(p / length)), with
  # b = `query_beta` and length = `original_length` (Llama 4).
  query_beta: float = 0.0
  longest: int | float = (
    math.inf
  )  # number of positions for which `divisors` hold

  def rotated(self, head_dim: int) -> int:
    """Returns the number of rotated channels of a head."""
    return int(head_dim * self.share)


NO_ROTATION = Rope(factor=math.inf)  # all angles are 0


def _yarn_share(rope: Rope, dim: int) -> Float[np.ndarray, "half"]:
  """Returns the share of the unscaled frequency in YaRN's frequencies."""

  def pair_of(turns):  # index of the pair with so many turns
    length = rope.original_length / (2 * math.pi * turns)
    return dim * math.log(length) / (2 * math.log(rope.theta))

  first = pair_of(rope.beta_fast)
  last = pair_of(rope.beta_slow)
  if rope.truncate:
    first = math.floor(first)
    last = math.ceil(last)
  first = max(first, 0)
  last = min(last, dim - 1)
  width = last - first or 0.001  # a step if they are equal
  ramp = (np.arange(dim // 2, dtype=np.float32) - first) / width
  return 1 - np.clip(ramp, 0.0, 1.0)


def frequencies(rope: Rope, head_dim: int) -> Float[np.ndarray, "half"]:
  """Returns the radians per position of each rotated pair of channels."""
  dim = rope.rotated(head_dim)
  exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
  frequency = 1.0 / np.float32(rope.theta) ** exponents
  if rope.divisors:
    return frequency / np.asarray(rope.divisors, np.float32)
  slow = frequency / np.float32(rope.factor)
  # Share of the unscaled frequency: 0 means fully scaled, 1 means unchanged.
  if rope.beta_fast is not None:
    share = _yarn_share(rope, dim)
  elif rope.low_freq_factor is not None:
    # Full turns of each pair of channels within the original length
    turns = rope.original_length * frequency / (2 * math.pi)
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
  else:
    return slow
  return ((1 - share) * slow + share * frequency).astype(np.float32)


def rope_tables(
  positions: Int[Array, "*tokens"], dim: int, rope: Rope
) -> RotaryTable:
  """Returns the float32 table of tokens; `dim` is the width of a head."""
  position = positions[..., None].astype(jnp.float32)
  shape = (*positions.shape, rope.rotated(dim) // 2)
  angle = position * jnp.broadcast_to(frequencies(rope, dim), shape)
  cos = jnp.cos(angle)
  sin = jnp.sin(angle)
  if rope.attention_factor != 1:
    cos = rope.attention_factor * cos
    sin = rope.attention_factor * sin
  if not rope.query_beta:
    return RotaryTable(cos, sin)
  spans = jnp.floor(positions / rope.original_length)
  return RotaryTable(cos, sin, 1 + rope.query_beta * jnp.log1p(spans))


def rotate(
  x: Float[Array, "B G S heads E"], table: RotaryTable
) -> Float[Array, "B G S heads E"]:
  """Rotates the first channels of each head, as two halves, in float32."""
  cos, sin = (x[:, :, :, None] for x in table[:2])  # same for all heads
  half = cos.shape[-1]
  x1, x2, unrotated = jnp.split(x, [half, 2 * half], axis=-1)
  parts = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
  if unrotated.size:
    parts.append(unrotated)
  return jnp.concatenate(parts, axis=-1)
