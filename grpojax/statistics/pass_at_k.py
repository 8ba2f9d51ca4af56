"""Success of k samples: pass@k and maj@k, unbiased, from n samples a prompt."""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

SILENT = -1  # the label of a sample that gives no answer
MOST_SAMPLES = 1000  # of a prompt; beyond, binomial coefficients overflow


def pass_at_k(correct: Bool[Array, "*B n"], k: int) -> Float[Array, "*B"]:
  """Probability that at least one of k samples is correct, unbiased.

  1 - C(n - c, k) / C(n, k) with c correct among n: the mean, over all subsets
  of k samples, of "one of them is correct", an order-k U-statistic (arXiv
  2107.03374, equation 1). Computed as a product of k ratios, none of which is
  above 1, so no binomial coefficient overflows.

  Args:
    correct: one a sample.
    k: subset size, 1 <= k <= n.

  Returns:
    Estimates in [0, 1], float32.

  Raises:
    ValueError: if k is not within 1 .. n.
  """
  n = correct.shape[-1]
  if not 1 <= k <= n:
    raise ValueError(
      f"pass@{k} needs 1 <= k <= n, but there are n = {n} samples a prompt: "
      "sample more, or ask for a smaller k"
    )
  wrong = n - jnp.sum(correct, -1, keepdims=True)
  drawn = jnp.arange(k)
  # Exactly 0 as soon as the wrong samples run out.
  still_wrong = jnp.maximum(wrong - drawn, 0) / (n - drawn)
  return 1 - jnp.prod(still_wrong.astype(jnp.float32), -1)


def majority_at_k(
  labels: Int[np.ndarray, "*B n"], correct: Bool[np.ndarray, "*B n"], k: int
) -> Float[np.ndarray, "*B"]:
  """Probability that the plurality vote of k samples is correct, unbiased.

  The mean, over all subsets of k samples, of "the most frequent answer is
  correct" (self-consistency, arXiv 2203.11171, section 2): an order-k
  U-statistic. Among answers with equally many votes each is as likely to be
  chosen, so a tie counts with the share of its correct answers. Exact up to
  rounding, without enumerating subsets, on the host; see `_majority`.

  Args:
    labels: one a sample: samples with equal labels gave the same answer; -1
      gave none and does not vote. A subset in which nobody votes is wrong.
    correct: one a sample, equal where labels of a prompt are equal. Several
      answers may be correct; their votes are counted apart.
    k: subset size, 1 <= k <= n.

  Returns:
    Estimates in [0, 1], float64.

  Raises:
    ValueError: if k is not within 1 .. n, n is above 1000, a label is below
      -1, or `correct` contradicts the labels.
  """
  n = labels.shape[-1]
  if labels.shape != correct.shape:
    raise ValueError(
      f"labels {labels.shape} and correct {correct.shape} differ in shape"
    )
  if not 1 <= k <= n:
    raise ValueError(
      f"maj@{k} needs 1 <= k <= n, but there are n = {n} samples a prompt: "
      "sample more, or ask for a smaller k"
    )
  if n > MOST_SAMPLES:
    raise ValueError(
      f"maj@k takes up to {MOST_SAMPLES} samples a prompt, not {n}"
    )
  if np.any(labels < SILENT):
    raise ValueError("labels are 0 or more, or -1 for a sample without answer")
  rows = zip(labels.reshape(-1, n), correct.reshape(-1, n), strict=True)
  values = [_majority(*_votes(*row), k) for row in rows]
  return np.array(values, np.float64).reshape(labels.shape[:-1])


def _votes(
  labels: Int[np.ndarray, "n"], correct: Bool[np.ndarray, "n"]
) -> tuple[tuple[tuple[int, bool], ...], int]:
  """(votes, whether correct) of each answer, sorted; and who does not vote."""
  names, place = np.unique(labels, return_inverse=True)
  counts = np.bincount(place, minlength=len(names))
  right = np.bincount(place, weights=correct, minlength=len(names))
  if np.any((right > 0) & (right < counts)):
    raise ValueError("samples with equal labels must be equally correct")
  if np.any(right[names == SILENT]):
    raise ValueError("a sample without an answer (label -1) cannot be correct")
  votes = sorted(
    (int(count), bool(r))
    for name, count, r in zip(names, counts, right, strict=True)
    if name != SILENT
  )
  return tuple(votes), int(np.sum(labels == SILENT))


@functools.lru_cache(maxsize=1 << 14)
def _majority(
  votes: tuple[tuple[int, bool], ...], silent: int, k: int
) -> float:
  """maj@k of one prompt, which depends on nothing but these counts.

  For each number m of votes that wins, the answers join one after the other:
  ways[0, t, d] is the number of ways to draw d samples so that nobody has more
  than m votes and t answers have m; ways[1] is the same, each way counted once
  for each correct answer among the t. Answers with fewer than m samples can
  neither win nor be limited, and join all at once; so all m together join at
  most n answers.
  """
  n = silent + sum(count for count, _ in votes)
  most = max((count for count, right in votes if right), default=0)
  after = np.arange(k + 1) - np.arange(k + 1)[:, None]
  total = 0.0
  for m in range(1, min(k, most) + 1):
    large = [vote for vote in votes if vote[0] >= m]
    ties = min(k // m, len(large))
    ways = np.zeros((2, ties + 1, k + 1))
    ways[0, 0] = _binomials(n - sum(count for count, _ in large), k)
    for count, right in large:
      binomials = _binomials(count, k)
      fewer = np.where((after >= 0) & (after < m), binomials[after], 0.0)
      tied = binomials[m] * ways[:, :-1, : k + 1 - m]
      ways = ways @ fewer
      ways[:, 1:, m:] += tied
      if right:
        ways[1, 1:, m:] += tied[0]
    total += float(np.sum(ways[1, 1:, k] / np.arange(1, ties + 1)))
  return total / math.comb(n, k)


@functools.lru_cache(maxsize=1 << 12)
def _binomials(n: int, k: int) -> np.ndarray:
  """C(n, 0) .. C(n, k)."""
  return np.array([float(math.comb(n, i)) for i in range(k + 1)])
