"""Intervals over prompts, and paired comparisons of two checkpoints."""

import math
from statistics import NormalDist
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

_EXACT = 1 << 20  # outcomes of a permutation test that are enumerated
_CHUNK = 1 << 20  # numbers drawn at once, where they are not


class PairedDifference(NamedTuple):
  """How much better the first of two checkpoints is, on the same prompts.

  Attributes:
    difference: mean of the first less mean of the second, in their units.
    low: lower bound of the difference.
    high: upper bound.
    p_value: two-sided, of "each prompt is as good for either".
  """

  difference: float
  low: float
  high: float
  p_value: float


def mean_interval(
  values: Real[Array, "B"], confidence: float = 0.95
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
  """Mean over prompts with Student's t interval.

  mean -+ t_{B-1} s / sqrt(B), s the sample standard deviation over prompts. A
  prompt is a cluster: `values` holds one number a prompt (its accuracy, or its
  pass@k), because samples of one prompt are not independent of each other when
  prompts are what varies. For two checkpoints on the same prompts use
  `paired_difference`. Where nearly all values are equal to 0 or 1 the interval
  is too short: use `wilson_interval` for one greedy sample a prompt.

  Args:
    values: one a prompt, B >= 2.
    confidence: coverage, within (0, 1).

  Returns:
    Mean, lower and upper bound, in units of the values.

  Raises:
    ValueError: for fewer than two prompts, or a confidence outside (0, 1).
  """
  count = values.shape[0]
  if count < 2:
    raise ValueError(
      f"an interval over prompts needs at least 2 prompts, not {count}"
    )
  values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
  mean = jnp.mean(values)
  half = t_quantile(confidence, count - 1) * jnp.std(values, ddof=1)
  half /= math.sqrt(count)
  return mean, mean - half, mean + half


def wilson_interval(
  successes: Int[Array, "*S"] | int, n: int, confidence: float = 0.95
) -> tuple[Float[Array, "*S"], Float[Array, "*S"], Float[Array, "*S"]]:
  """Success rate of n independent trials with Wilson's score interval.

  For greedy accuracy, one trial a prompt. Unlike the normal interval it stays
  within [0, 1] and keeps its coverage near 0 and 1 (E. B. Wilson, 1927,
  "Probable inference, the law of succession, and statistical inference").

  Args:
    successes: within 0 .. n.
    n: trials.
    confidence: coverage, within (0, 1).

  Returns:
    Rate, lower and upper bound, all within [0, 1].

  Raises:
    ValueError: for n < 1, or a confidence outside (0, 1).
  """
  if n < 1:
    raise ValueError(f"a success rate needs at least 1 trial, not {n}")
  _check_confidence(confidence)
  z = NormalDist().inv_cdf((1 + confidence) / 2)
  rate = jnp.asarray(successes, jnp.float32) / n
  centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
  half = jnp.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
  half *= z / (1 + z * z / n)
  # At 0 and at n successes one bound is the rate itself, up to rounding.
  low = jnp.where(rate == 0, 0.0, centre - half)
  high = jnp.where(rate == 1, 1.0, centre + half)
  return rate, low, high


def paired_difference(
  a: Real[np.ndarray, "B"],
  b: Real[np.ndarray, "B"],
  confidence: float = 0.95,
  draws: int = 20_000,
  seed: int = 0,
) -> PairedDifference:
  """Compares two checkpoints by one number a prompt.

  A prompt is a cluster: give its accuracy, its pass@k or its maj@k, not its
  samples. The interval is Student's, of the differences (`mean_interval`). The
  p-value is that of the sign-flip permutation test (R. A. Fisher, 1935, "The
  Design of Experiments", section 21): how often |sum of differences| is at
  least what was seen when each difference has either sign with probability 1/2.
  It is exact where the differences have few enough signs to enumerate: always
  up to 20 prompts that differ, and for any number of prompts where all
  differences are of one size. For values 0 and 1 this is McNemar's exact test.
  Elsewhere it is (1 + count) / (1 + draws), which is valid for any number of
  draws, in bounded memory.

  The interval has width 0 where all differences are equal: for values 0 and 1
  use `paired_proportions`.

  Args:
    a: of the first checkpoint, one a prompt, B >= 2.
    b: of the second one, on the same prompts in the same order.
    confidence: coverage of the interval, within (0, 1).
    draws: of the permutation test, where it is not exact.
    seed: of the draws.

  Returns:
    a less b, with interval and p-value.

  Raises:
    ValueError: for different shapes, fewer than two prompts, values that are
      not finite, draws < 1, or a confidence outside (0, 1).
  """
  _check_pairs(a, b)
  if draws < 1:
    raise ValueError(f"a permutation test needs at least 1 draw, not {draws}")
  differences = a.astype(np.float64) - b.astype(np.float64)
  if not np.all(np.isfinite(differences)):
    raise ValueError("some values are not finite: nothing can be compared")
  mean, low, high = map(
    float, mean_interval(jnp.asarray(differences), confidence)
  )
  return PairedDifference(mean, low, high, _sign_flip(differences, draws, seed))


def paired_proportions(
  a: Bool[np.ndarray, "B"], b: Bool[np.ndarray, "B"], confidence: float = 0.95
) -> PairedDifference:
  """Compares two checkpoints by one right or wrong completion a prompt.

  The interval is the adjusted Wald interval of A. Agresti and Y. Min (2005,
  "Simple improved confidence intervals for comparing matched proportions",
  Statistics in Medicine 24, 729-740): the usual one of paired proportions with
  half a prompt added to each cell of the 2 x 2 table. Unlike Student's it has a
  width where few prompts or none differ. It is cut to [-1, 1]. The p-value is
  that of McNemar's exact test: of the prompts that differ, either checkpoint
  wins each with probability 1/2.

  Args:
    a: of the first checkpoint, one a prompt, B >= 1.
    b: of the second one, on the same prompts in the same order.
    confidence: coverage of the interval, within (0, 1).

  Returns:
    Rate of a less rate of b, with interval and p-value. The interval is around
    a point nearer to 0 than the difference.

  Raises:
    ValueError: for different shapes, no prompts, or a confidence outside
      (0, 1).
  """
  _check_pairs(a, b)
  _check_confidence(confidence)
  n = len(a)
  if n < 1:
    raise ValueError("a comparison needs at least 1 prompt")
  first, second = int(np.sum(a & ~b)), int(np.sum(b & ~a))
  z = NormalDist().inv_cdf((1 + confidence) / 2)
  centre = (first - second) / (n + 2)
  discordant = (first + second + 1) / (n + 2)
  half = z * math.sqrt((discordant - centre**2) / (n + 2))
  return PairedDifference(
    (first - second) / n,
    max(centre - half, -1.0),
    min(centre + half, 1.0),
    _sign_flip(a.astype(np.float64) - b),
  )


def _sign_flip(
  differences: Float[np.ndarray, "B"], draws: int = 1, seed: int = 0
) -> float:
  """Two-sided p-value of the sum of differences under random signs.

  Differences of one size, r of them, have a sum of size (2 X - r), X binomial:
  so only the number of positive ones of each size is enumerated or drawn.
  """
  differences = differences[differences != 0]
  if not len(differences):
    return 1.0
  # Sizes that differ by rounding only are one size.
  sizes = np.abs(differences)
  _, first, group, repeats = np.unique(
    np.round(sizes / sizes.max(), 6),
    return_index=True,
    return_inverse=True,
    return_counts=True,
  )
  size = sizes[first]
  # A sum that is less than the one seen by rounding only is a tie.
  seen = abs(float(np.sum(np.sign(differences) * size[group])))
  seen -= 1e-6 * float(size.max()) * math.sqrt(len(sizes))
  outcomes = math.prod(int(r) + 1 for r in repeats)
  if len(size) == 1 or outcomes <= _EXACT:
    sums, weights = np.zeros(1), np.ones(1)
    for one, r in zip(size, repeats, strict=True):
      step = one * (2 * np.arange(r + 1) - r)
      sums = np.add.outer(sums, step).reshape(-1)
      weights = np.multiply.outer(weights, _half_binomial(int(r))).reshape(-1)
    return min(1.0, float(np.sum(weights[np.abs(sums) >= seen])))
  rng, count = np.random.default_rng(seed), 0
  chunk = max(1, _CHUNK // len(size))
  for start in range(0, draws, chunk):
    shape = (min(chunk, draws - start), len(size))
    sums = (2 * rng.binomial(repeats, 0.5, shape) - repeats) @ size
    count += int(np.sum(np.abs(sums) >= seen))
  return (1 + count) / (1 + draws)


def _half_binomial(r: int) -> Float[np.ndarray, "{r}+1"]:
  """The binomial distribution of r trials with probability 1/2."""
  i = np.arange(1, r + 1)
  logs = np.concatenate([[0.0], np.cumsum(np.log((r + 1 - i) / i))])
  return np.exp(logs - r * math.log(2))


def _check_pairs(a: np.ndarray, b: np.ndarray) -> None:
  if a.shape != b.shape:
    raise ValueError(
      f"values {a.shape} and {b.shape} are not of the same prompts: a paired "
      "comparison needs one of each checkpoint for every prompt"
    )


def _check_confidence(confidence: float) -> None:
  if not 0 < confidence < 1:
    raise ValueError(
      f"confidence is a probability within (0, 1), not {confidence}"
    )


def t_quantile(confidence: float, degrees: int) -> float:
  """The t with P(|T| <= t) = confidence, T Student with `degrees` of freedom.

  Bisection on the angle theta = atan(t / sqrt(degrees)), in which the
  distribution function is a finite sum (Abramowitz and Stegun, 26.7.3 and
  26.7.4).
  """
  _check_confidence(confidence)
  degrees = min(degrees, 20_000)  # By then normal to 1e-4.
  even = degrees % 2 == 0
  i = np.arange(1, degrees // 2)
  ratios = (2 * i - 1) / (2 * i) if even else 2 * i / (2 * i + 1)
  terms = np.cumprod(np.concatenate([[1.0], ratios]))
  low, high = 0.0, math.pi / 2
  for _ in range(60):
    theta = (low + high) / 2
    cosine = math.cos(theta)
    powers = cosine ** (2 * np.arange(len(terms)))
    series = math.sin(theta) * float(terms @ powers)
    if even:
      probability = series
    else:
      inner = cosine * series if degrees > 1 else 0.0
      probability = 2 / math.pi * (theta + inner)
    if probability < confidence:
      low = theta
    else:
      high = theta
  return math.sqrt(degrees) * math.tan(low)
