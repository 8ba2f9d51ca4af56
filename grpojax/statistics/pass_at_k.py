"""Unbiased pass@k and maj@k from n samples per prompt."""

import collections
import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

SILENT = -1  # the label of a sample without an answer
MOST_SAMPLES = 1000  # per prompt; beyond, binomial coefficients overflow


def pass_at_k(correct: Bool[Array, "*B n"], k: int) -> Float[Array, "*B"]:
  """Unbiased estimate of the probability that at least one of k is correct.

  It is 1 - C(n - c, k) / C(n, k) if c of n samples are correct (arXiv
  2107.03374, equation 1). ValueError if k > n.
  """
  n = correct.shape[-1]
  if not 1 <= k <= n:
    raise ValueError(
      f"pass@{k} needs 1 <= k <= n, but there are n = {n} samples per prompt: "
      "sample more, or ask for a smaller k"
    )
  wrong = n - jnp.sum(correct, -1, keepdims=True)  # [*B, 1]
  drawn = jnp.arange(k)
  # Factors of C(wrong, k) / C(n, k), which is 0 for fewer than k wrong samples.
  next_is_wrong = jnp.maximum(wrong - drawn, 0) / (n - drawn)  # [*B, k]
  return 1 - jnp.prod(next_is_wrong.astype(jnp.float32), -1)


def majority_at_k(
  labels: Int[np.ndarray, "*B n"], correct: Bool[np.ndarray, "*B n"], k: int
) -> Float[np.ndarray, "*B"]:
  """Unbiased estimate of the probability that a vote of k samples is correct.

  It is the share of subsets of k samples whose most frequent answer is correct
  (self-consistency, arXiv 2203.11171, section 2). A tie counts with the share
  of its correct answers. Equal labels are equal answers; samples of label -1 do
  not vote. 1 <= k <= n <= `MOST_SAMPLES`. ValueError if `correct` differs for
  equal labels, or is True for -1.
  """
  n = labels.shape[-1]
  rows = zip(labels.reshape(-1, n), correct.reshape(-1, n), strict=True)
  values = [_majority(*_votes(*row), k) for row in rows]
  return np.array(values, np.float64).reshape(labels.shape[:-1])


def _votes(
  labels: Int[np.ndarray, "n"], correct: Bool[np.ndarray, "n"]
) -> tuple[tuple[tuple[int, bool], ...], int]:
  """Returns the answers' sorted (votes, correct), and the number of SILENT."""
  right = dict(zip(labels.tolist(), correct.tolist(), strict=True))
  if [right[x] for x in labels.tolist()] != correct.tolist():
    raise ValueError("samples with equal labels must be equally correct")
  if right.get(SILENT):
    raise ValueError("a sample without an answer (label -1) cannot be correct")
  votes = collections.Counter(labels.tolist())
  silent = votes.pop(SILENT, 0)
  return tuple(sorted((n, right[x]) for x, n in votes.items())), silent


@functools.lru_cache(maxsize=1 << 14)
def _majority(
  votes: tuple[tuple[int, bool], ...], silent: int, k: int
) -> float:
  """Computes maj@k of a prompt from its counts.

  For each number m of votes of the winner, answers are added one by one:
  ways[0, t, d] is the number of ways to draw d samples from the answers so far
  such that no answer has more than m votes and t have exactly m. ways[1] counts
  each way once per correct answer among the t. Answers of fewer than m samples
  can neither win nor exceed m votes, and are added all at once.
  """
  n = silent + sum(count for count, _ in votes)
  most_correct = max((count for count, right in votes if right), default=0)
  # added[i, j] = j - i: samples of an answer if d is i before it and j after.
  added = np.arange(k + 1) - np.arange(k + 1)[:, None]
  total = 0.0  # chance times C(n, k)
  for m in range(1, min(k, most_correct) + 1):
    can_win = [vote for vote in votes if vote[0] >= m]
    max_ties = min(k // m, len(can_win))
    ways = np.zeros((2, max_ties + 1, k + 1))
    # Ways to draw 0..k samples without an answer, or whose answer cannot win.
    ways[0, 0] = _binomials(n - sum(count for count, _ in can_win), k)
    for count, right in can_win:
      binomials = _binomials(count, k)
      # If the answer gets fewer than m votes, t stays; [k + 1, k + 1].
      fewer = np.where((added >= 0) & (added < m), binomials[added], 0.0)
      # If it gets m, t increases by 1 and d by m.
      tied = binomials[m] * ways[:, :-1, : k + 1 - m]
      ways = ways @ fewer
      ways[:, 1:, m:] += tied
      if right:
        ways[1, 1:, m:] += tied[0]
    # A tie of t answers is right with the share of its correct ones.
    total += float(np.sum(ways[1, 1:, k] / np.arange(1, max_ties + 1)))
  return total / math.comb(n, k)


@functools.lru_cache(maxsize=1 << 12)
def _binomials(n: int, k: int) -> Float[np.ndarray, "{k}+1"]:
  """Returns the binomial coefficients C(n, 0) .. C(n, k)."""
  return np.array([float(math.comb(n, i)) for i in range(k + 1)])
