"""Samples of a step divided among its prompts: Neyman's allocation.

A step asks B prompts, each of weight 1/B, with M groups of G completions, m_b
of them of prompt b. A prompt's gradient is the mean over its groups, without
bias for sizes that do not depend on these completions, and a group's has the
error v_b = c2_b / G + c3_b / (G (G - 1)) (`statistics.u_statistics`). Given the
prompts the step's is

    (1 / B^2) sum_b v_b / m_b  >=  (sum_b sqrt(v_b))^2 / (B^2 M),

least at m_b in proportion to sqrt(v_b) (J. Neyman, 1934). Beside equal sizes
that is at best the factor mean(sqrt(v))^2 / mean(v), and where v is guessed it
may be above 1: docs/group-size.md, "More groups for some prompts".
"""

import heapq

import numpy as np
from jaxtyping import Float, Int, Real


def allocate(
  errors: Float[np.ndarray, "B"], groups: int
) -> Int[np.ndarray, "B"]:
  """Whole numbers m_b >= 1 of groups that minimise sum_b errors_b / m_b.

  One after another each group goes where it helps most, which is optimal for a
  sum of convex functions (B. Fox, 1966).

  Args:
    errors: v_b of a group of each prompt, not negative.
    groups: M, their sum.

  Raises:
    ValueError: M < B, or errors that are negative or not finite.
  """
  if groups < len(errors):
    raise ValueError(
      f"each of {len(errors)} prompts needs a group: groups = {groups} are too "
      "few"
    )
  if not np.all(np.isfinite(errors) & (errors >= 0)):
    raise ValueError(f"errors are finite and not negative, not {errors}")
  counts = np.ones(len(errors), int)
  gains = [(-v / 2, b) for b, v in enumerate(errors)]
  heapq.heapify(gains)
  for _ in range(groups - len(errors)):
    _, b = gains[0]
    counts[b] += 1
    gain = errors[b] / (counts[b] * (counts[b] + 1))
    heapq.heapreplace(gains, (-gain, b))
  return counts


def relative_error(
  errors: Float[np.ndarray, "B"], counts: Real[np.ndarray, "B"]
) -> float:
  """Error with these numbers of groups, by that with equal ones."""
  equal = np.sum(counts) / len(counts)
  return float(np.sum(errors / counts) / np.sum(errors / equal))


def errors_of_rates(
  a: Float[np.ndarray, "B"],
  b: Float[np.ndarray, "B"],
  score_ratio: float = 1.0,
) -> Float[np.ndarray, "B"]:
  """Expected error of an oracle's group, up to a factor, from success rates.

  E[p (1 - p) ((1 - p) score_ratio + p)] for p ~ Beta(a, b)
  (`statistics.success_rates`): rewards 0 and 1, scores of right completions
  whose squared length is score_ratio times that of wrong ones and the same for
  all prompts, |g|^2 left out. At a ratio of 1 it is E[p (1 - p)].
  """
  n = a + b
  right, wrong = a * b * (b + 1), a * (a + 1) * b
  return (score_ratio * right + wrong) / (n * (n + 1) * (n + 2))
