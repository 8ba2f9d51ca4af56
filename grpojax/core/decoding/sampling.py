"""Sampling of tokens from logits, with their log-probabilities.

`transform_logits` alone defines the distribution: rollouts draw from it and the
loss computes log-probabilities under it, so both use the same policy.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Key, UInt32

from grpojax.core.options import NOT_NEGATIVE, frozen_options, option
from grpojax.core.random_keys import random_key

FORMATS = ("model", "int8")
"""Formats of a rollout's weights and cache."""

NEGATIVE = -1e30
"""Logit of tokens that are never drawn: finite, because 0 * -inf is nan."""


@frozen_options
class Sampling:
  """Distribution of the sampled tokens; settings apply in this order.

  `temperature` divides the logits (0 is greedy decoding), then tokens are cut:
  `top_p` as in arXiv 1904.09751, `min_p` as in arXiv 2407.01082. Formats
  (`models.quantization`) affect the rollout alone; they make it differ from the
  trained model, which needs a correction (`losses.rollout_correction`).
  """

  temperature: float = option(
    1.0,
    "temperature of the samples; greedy sampling (0) has no policy gradient",
    within="[0, 100]",
  )
  top_k: int = option(
    0, "number of likeliest tokens to draw from; 0 = off", within=NOT_NEGATIVE
  )
  top_p: float = option(
    1.0,
    "total probability of the likeliest tokens to draw from; 1 = off",
    within="(0, 1]",
  )
  min_p: float = option(
    0.0,
    "least probability of a token, relative to the likeliest; 0 = off",
    within="[0, 1]",
  )
  weights_dtype: str = option(
    "model",
    "format of the rollout's weights: model.dtype, or int8 with a scale per "
    "channel, which needs loss.correction",
    FORMATS,
  )
  cache_dtype: str = option(
    "model",
    "format of the completions' cached keys and values, as in weights_dtype",
    FORMATS,
  )

  @property
  def formats(self) -> dict[str, str]:
    """Options of `LM.prepare`: the formats other than "model"."""
    names = "weights_dtype", "cache_dtype"
    return {x: getattr(self, x) for x in names if getattr(self, x) != "model"}

  @property
  def uncut(self) -> "Sampling":
    """The distribution without cuts, used for references."""
    return Sampling(self.temperature)

  @property
  def is_whole(self) -> bool:
    """True if tokens are drawn from the softmax of all logits."""
    whole = Sampling(self.temperature, **self.formats)
    return self.temperature > 0 and self == whole


def _float_at(rank: UInt32[Array, "*n"]) -> Float32[Array, "*n"]:
  """Maps ranks (uint32) to float32 numbers, in ascending order.

  Ranks below 2**31 are the negative floats and -0, higher ones +0 and the
  positive floats; NaNs are at both ends, beyond the infinities.
  """
  # Positive floats ascend with their bits; negative ones descend, hence `~`.
  bits = jnp.where(rank >> 31 == 1, rank ^ jnp.uint32(1 << 31), ~rank)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _threshold(
  logits: Float32[Array, "*n V"],
  weights: Float32[Array, "*n V"] | int,
  enough: float | int,
) -> Float32[Array, "*n 1"]:
  """Returns the largest v for which logits >= v have a total weight >= enough.

  Exact, by bisection over the bits of v. It needs no sorting, so with a sharded
  vocabulary devices exchange 32 sums per row and no logits. Weights must be at
  least 0. v has no gradient. If v would be -inf, or if all logits weigh less
  than `enough`, v is NaN: `logits < NaN` is False, so no token is cut.
  """
  logits, weights = jax.lax.stop_gradient((logits, weights))

  # From the highest bit down: a bit stays if enough weight is at or above it.
  def add_bit(i, rank):  # under `jax.disable_jit` i is Python's
    higher = rank | (jnp.uint32(1 << 31) >> jnp.asarray(i, jnp.uint32))
    # No logit is >= NaN, so ranks beyond the infinities are never reached.
    above = jnp.where(logits >= _float_at(higher), weights, 0)
    reached = jnp.sum(above, axis=-1, keepdims=True) >= enough
    return jnp.where(reached, higher, rank)

  start = jnp.zeros((*logits.shape[:-1], 1), jnp.uint32)
  return _float_at(jax.lax.fori_loop(0, 32, add_bit, start))


def transform_logits(
  logits: Float[Array, "*n V"],
  sampling: Sampling = Sampling(),
  keep: Int[Array, "*n"] | None = None,
) -> Float[Array, "*n V"]:
  """Returns the logits of the sampling distribution, in float32.

  Cut tokens have -1e30. Ties at a cut all stay, so the result does not
  depend on their order. Ids in `keep` are never cut: the loss passes the
  sampled ids, because a small change of the policy could move them across a
  cut, to a log-probability of -inf.
  """
  logits = logits.astype(jnp.float32)
  vocab = logits.shape[-1]
  if sampling.temperature == 0:
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), vocab, dtype=bool)
    return jnp.where(best, 0.0, NEGATIVE)
  logits = logits / sampling.temperature
  # Cuts apply to `cut`; `logits` stay whole for the ids in `keep`.
  cut = logits
  if 0 < sampling.top_k < vocab:
    lowest = _threshold(cut, 1, sampling.top_k)
    cut = jnp.where(cut < lowest, NEGATIVE, cut)
  if sampling.top_p < 1:
    # Probabilities of the tokens that are left; cut tokens weigh 0.
    lowest = _threshold(cut, jax.nn.softmax(cut), sampling.top_p)
    cut = jnp.where(cut < lowest, NEGATIVE, cut)
  if sampling.min_p > 0:
    top = jnp.max(cut, axis=-1, keepdims=True)
    # p >= min_p * p_top, in logarithms: the normalizer cancels.
    cut = jnp.where(cut < top + jnp.log(sampling.min_p), NEGATIVE, cut)
  if keep is not None and cut is not logits:
    cut = jnp.where(jax.nn.one_hot(keep, vocab, dtype=bool), logits, cut)
  return cut


def _blocks(vocab_size: int) -> int:
  """Returns the number of blocks in which a vocabulary is searched.

  It is the divisor of `vocab_size` nearest to its root, among the multiples of
  gcd(vocab_size, 16): a device has whole blocks if the vocabulary is sharded.
  """
  even = math.gcd(vocab_size, 16)
  multiples = range(even, vocab_size + 1, even)
  divisors = [n for n in multiples if vocab_size % n == 0]
  return min(divisors, key=lambda n: abs(math.log(n * n / vocab_size)))


def uniform(keys: Key[Array, "*n"], count: int) -> Float[Array, "*n {count}"]:
  """Draws `count` numbers per key, odd multiples of 2^-24 in (0, 1)."""
  draw = lambda key: jax.random.uniform(random_key(key), (count,))

  # The number 0 would select the first weight, however small.
  return jnp.vectorize(draw, signature="()->(u)")(keys) + 2.0**-24


def share_below(
  total: Float[Array, "..."], uniform: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Returns uniform * total, which is below `total` in spite of rounding."""
  return jnp.minimum(uniform * total, total * (1 - 2.0**-23))


def _first_above(
  weights: Float[Array, "*n k"], uniform: Float[Array, "*n"]
) -> Int[Array, "*n"]:
  """Inverts the CDF of unnormalized weights at a number in (0, 1)."""
  # Rounding must not select an index of weight 0, nor pass the last index.
  sums = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0)
  total = jnp.max(sums, axis=-1, keepdims=True)
  # argmax of booleans is the index of the first True.
  above = sums > share_below(total, uniform[..., None])
  return jnp.argmax(above, axis=-1).astype(jnp.int32)


class Parts(NamedTuple):
  """A token drawn from each of n parts of the vocabulary (`LM.draw_parts`)."""

  ids: Int[Array, "*rows n"]
  logits: Float[Array, "*rows n"]  # of these tokens
  tops: Float[Array, "*rows n"]  # largest logit of each part
  sums: Float[Array, "*rows n"]  # sum of exp(logit - largest) over each part


def sample_parts(
  parts: Parts, uniform: Float[Array, "*rows"]
) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"]]:
  """Draws a part and returns its token and log-probability, like `sample`."""
  # Weights of the parts relative to the largest logit of all, [*rows, n].
  top = jnp.max(parts.tops, axis=-1, keepdims=True)
  weights = parts.sums * jnp.exp(parts.tops - top)
  part = _first_above(weights, uniform)[..., None]
  take = lambda x: jnp.take_along_axis(x, part, axis=-1)[..., 0]
  normalizer = top[..., 0] + jnp.log(jnp.sum(weights, axis=-1))
  return take(parts.ids), take(parts.logits) - normalizer


def sample(
  keys: Key[Array, "*n"],
  logits: Float[Array, "*n V"],
  sampling: Sampling = Sampling(),
) -> tuple[Int[Array, "*n"], Float[Array, "*n"]]:
  """Draws a token per key, and returns ids and log-probabilities.

  The CDF is inverted in two levels, with two random numbers: the first selects
  a block of the vocabulary, the second a token in it. This reads the vocabulary
  once. Log-probabilities are those of `transform_logits` (0 if greedy).
  """
  if sampling.temperature == 0:
    ids = jnp.argmax(logits.astype(jnp.float32), axis=-1).astype(jnp.int32)
    return ids, jnp.zeros(ids.shape, jnp.float32)
  logits = transform_logits(logits, sampling)
  choose_block, in_block = jnp.moveaxis(uniform(keys, 2), -1, 0)
  # Unnormalized probabilities, as [*n, blocks, tokens], and sums of blocks.
  top = jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(logits - top)
  blocks = weights.reshape(*logits.shape[:-1], _blocks(logits.shape[-1]), -1)
  sums = jnp.sum(blocks, axis=-1)
  block = _first_above(sums, choose_block)
  # Weights of the chosen block, [*n, 1, tokens].
  inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)
  ids = _first_above(inside[..., 0, :], in_block)
  # From the place in the block to the id.
  ids += block * blocks.shape[-1]
  chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)
  normalizer = jnp.log(jnp.sum(sums, axis=-1))
  return ids, chosen[..., 0] - top[..., 0] - normalizer
