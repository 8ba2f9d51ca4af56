"""The sign-flip permutation test of paired differences.

Under "each prompt is as good for either" every difference has either sign with
probability 1/2 (R. A. Fisher, 1935, "The Design of Experiments", section 21).
"""

import math

import numpy as np
import scipy  # scipy.stats, which takes a second to load, comes when first used
from jaxtyping import Float, Int

_EXACT = 1 << 20  # outcomes of the test that are enumerated
_CHUNK = 1 << 20  # numbers drawn at once, where they are not


def sign_flip_p_value(
  differences: Float[np.ndarray, "B"], draws: int, seed: int
) -> float:
  """Two-sided p-value of the sum of differences under random signs.

  Args:
    differences: finite, one a prompt; those that are 0 have no sign.
    draws: where the signs are too many to enumerate.
    seed: of the draws.
  """
  differences = differences[differences != 0]
  if not len(differences):
    return 1.0
  sizes, repeats, positives = _signs_by_size(differences)
  # A sum that is less than the one seen by rounding only is a tie.
  threshold = abs(float((2 * positives - repeats) @ sizes))
  threshold -= 1e-6 * float(sizes.max()) * math.sqrt(len(differences))
  outcomes = math.prod(int(r) + 1 for r in repeats)
  if len(sizes) == 1 or outcomes <= _EXACT:
    return _enumerated_p_value(sizes, repeats, threshold)
  return _drawn_p_value(sizes, repeats, positives, threshold, draws, seed)


def _signs_by_size(
  differences: Float[np.ndarray, "D"],
) -> tuple[Float[np.ndarray, "S"], Int[np.ndarray, "S"], Int[np.ndarray, "S"]]:
  """What the sign-flip test needs of differences, none of which is 0.

  r differences of one size, X of them positive, add up to size (2 X - r). Under
  random signs X is binomial, whatever the order of the prompts.

  Returns:
    Distinct sizes; how many differences have each; how many of those are
    positive.
  """
  magnitudes = np.abs(differences)
  # Sizes that differ by rounding only are one size.
  _, first_of_size, which_size, repeats = np.unique(
    np.round(magnitudes / magnitudes.max(), 6),
    return_index=True,
    return_inverse=True,
    return_counts=True,
  )
  positives = np.bincount(which_size[differences > 0], minlength=len(repeats))
  return magnitudes[first_of_size], repeats, positives


def _enumerated_p_value(
  sizes: Float[np.ndarray, "S"], repeats: Int[np.ndarray, "S"], threshold: float
) -> float:
  """Probability of |sum of differences| >= threshold under random signs.

  By hand: scipy.stats.permutation_test lists all 2^B outcomes, so it has to be
  random for many prompts; with few sizes only prod(repeats + 1) differ.

  Args:
    sizes: the distinct absolute differences.
    repeats: prompts with each of these sizes.
    threshold: in units of the sizes.
  """
  sums, probabilities = np.zeros(1), np.ones(1)
  for size, count in zip(sizes, repeats, strict=True):
    positives = np.arange(count + 1)
    added = size * (2 * positives - count)
    chances = scipy.stats.binom.pmf(positives, count, 0.5)
    sums = np.add.outer(sums, added).reshape(-1)
    probabilities = np.multiply.outer(probabilities, chances).reshape(-1)
  return min(1.0, float(np.sum(probabilities[np.abs(sums) >= threshold])))


def _drawn_p_value(
  sizes: Float[np.ndarray, "S"],
  repeats: Int[np.ndarray, "S"],
  positives: Int[np.ndarray, "S"],
  threshold: float,
  draws: int,
  seed: int,
) -> float:
  """As `_enumerated_p_value`, of drawn signs: (1 + count) / (1 + draws).

  scipy.stats.permutation_test would draw the sign of every prompt, not a
  binomial number for every size: 10 times slower for 1,319 prompts.
  """
  rng = np.random.default_rng(seed)

  def is_extreme(positives, axis=-1):  # the statistic of the test: 0 or 1
    sums = (2 * positives - repeats) @ sizes
    return (np.abs(sums) >= threshold).astype(float)

  test = scipy.stats.monte_carlo_test(
    positives,
    lambda size: rng.binomial(repeats, 0.5, size),
    is_extreme,
    vectorized=True,
    n_resamples=draws,
    batch=max(1, _CHUNK // len(sizes)),
    alternative="greater",
    axis=-1,
  )
  return float(test.pvalue)
