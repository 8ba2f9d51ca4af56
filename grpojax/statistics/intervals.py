"""95% intervals over prompts, and paired comparisons of two checkpoints.

There is one value per prompt (accuracy, pass@k or maj@k), because samples of a
prompt are dependent. All functions run on the host, in float64.
"""

import math
from typing import NamedTuple

import numpy as np
import scipy  # loads scipy.stats, which takes a second, at its first use
from jaxtyping import Bool, Real

Values = Real[np.ndarray, "B"]
_CHUNK = 1 << 20  # signs of the permutation test in memory at a time


class PairedDifference(NamedTuple):
  """Difference of two checkpoints on the same prompts."""

  difference: float  # first mean minus second mean, in their units
  low: float
  high: float
  p_value: float  # two-sided, of "both are equally good on each prompt"


def mean_interval(values: Values) -> tuple[float, float, float]:
  """Returns the mean over prompts and its Student's t interval.

  ValueError if B < 2. The interval is too short if nearly all values are 0 or
  1: use `share_interval` or, for a greedy sample per prompt, `wilson_interval`.
  """
  count = len(values)
  if count < 2:
    raise ValueError(f"an interval needs at least 2 prompts, not {count}")
  values = np.asarray(values).astype(np.float64)
  mean = float(np.mean(values))
  standard_error = float(np.std(values, ddof=1)) / math.sqrt(count)
  half_width = t_quantile(count - 1) * standard_error
  return mean, mean - half_width, mean + half_width


def wilson_interval(successes: int, n: int) -> tuple[float, float, float]:
  """Returns the success rate of n >= 1 independent trials, with its interval.

  Wilson's score interval stays within [0, 1], and keeps its coverage near 0 and
  1 (E. B. Wilson, 1927).
  """
  test = scipy.stats.binomtest(successes, n)
  low, high = test.proportion_ci(0.95, method="wilson")
  return successes / n, float(low), float(high)


def share_interval(values: Values) -> tuple[float, float, float]:
  """Returns the mean over B >= 2 prompts of values in [0, 1], and its interval.

  It is Wilson's interval for the number of independent trials with the same
  variance (E. Korn and B. Graubard, 1998, Survey Methodology 24). The variance
  includes two more prompts, of values 0 and 1, because few values may be equal
  by chance. Student's interval is similar near 1/2, but covers less near 0 and
  1.
  """
  mean, *_ = mean_interval(values)
  extended = np.append(values, [0.0, 1.0]).astype(np.float64)
  binary = extended.mean() * (1 - extended.mean())
  ratio = t_quantile(len(values) - 1) ** 2 * np.var(extended, ddof=1)
  ratio /= binary * len(extended)  # t^2 / trials
  # Wilson's bounds are (mean + ratio / 2 -+ half_width) / (1 + ratio).
  half_width = math.sqrt(ratio * (mean * (1 - mean) + ratio / 4))
  low, high = (mean + ratio / 2 + x for x in (-half_width, half_width))
  return mean, float(low / (1 + ratio)), float(high / (1 + ratio))


def paired_difference(
  a: Values, b: Values, draws: int = 20_000, seed: int = 0
) -> PairedDifference:
  """Compares two checkpoints by their values for the same prompts, in order.

  The interval is Student's, of the differences. Its width is 0 if they are all
  equal, so use `paired_proportions` for values 0 and 1. The p-value of the
  sign-flip permutation test (R. A. Fisher, 1935, "The Design of Experiments",
  section 21) is the share of random sign patterns that make the sum of
  differences at least as extreme. It is exact if `draws` is at least the number
  of sign patterns (by default for up to 14 prompts that differ); if not,
  patterns are drawn, and it is at least 2 / (1 + draws). ValueError if shapes
  differ, B < 2, or a value is not finite.
  """
  _check_pairs(a, b)
  differences = a.astype(np.float64) - b.astype(np.float64)
  if not np.all(np.isfinite(differences)):
    raise ValueError("cannot compare values that are not finite: remove them")
  difference, low, high = mean_interval(differences)
  signed = differences[differences != 0]  # 0 has no sign
  if len(signed) < 2:  # its two signs are equally extreme
    return PairedDifference(difference, low, high, 1.0)
  test = scipy.stats.permutation_test(
    (signed / np.abs(signed).max(),),
    np.sum,
    permutation_type="samples",
    n_resamples=draws,
    batch=max(1, _CHUNK // len(signed)),
    rng=np.random.default_rng(seed),
  )
  return PairedDifference(difference, low, high, float(test.pvalue))


def paired_proportions(
  a: Bool[np.ndarray, "B"], b: Bool[np.ndarray, "B"]
) -> PairedDifference:
  """Compares two checkpoints by a right or wrong completion per prompt.

  The interval is the adjusted Wald interval of A. Agresti and Y. Min (2005,
  Statistics in Medicine 24, 729-740), with half a prompt added to each cell of
  the 2 x 2 table. Unlike Student's, it has a width even if no prompts differ.
  The interval's centre is closer to 0 than the difference. The p-value is
  McNemar's exact one. ValueError if shapes differ, or B = 0.
  """
  _check_pairs(a, b)
  n = len(a)
  if n < 1:
    raise ValueError("a comparison needs at least 1 prompt, not 0")
  only_a, only_b = int(np.sum(a & ~b)), int(np.sum(b & ~a))
  # scipy has no interval for paired proportions.
  z = float(scipy.stats.norm.ppf(0.975))
  # Half a prompt per cell adds two prompts, one of which is discordant.
  centre = (only_a - only_b) / (n + 2)
  discordant = (only_a + only_b + 1) / (n + 2)
  half_width = z * math.sqrt((discordant - centre**2) / (n + 2))
  p_value = 1.0  # if no prompt differs
  if only_a + only_b:
    p_value = float(scipy.stats.binomtest(only_a, only_a + only_b).pvalue)
  return PairedDifference(
    difference=(only_a - only_b) / n,
    low=max(centre - half_width, -1.0),
    high=min(centre + half_width, 1.0),
    p_value=p_value,
  )


def t_quantile(degrees: int) -> float:
  """Returns t with P(|T| <= t) = 95% for Student's T with these degrees."""
  return float(scipy.stats.t.ppf(0.975, degrees))


def _check_pairs(a: np.ndarray, b: np.ndarray) -> None:
  if a.shape != b.shape:
    raise ValueError(
      f"values {a.shape} and {b.shape} differ in shape: a paired comparison "
      "needs a value of each checkpoint for every prompt"
    )
