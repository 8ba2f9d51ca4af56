"""Mean squared errors of gradient estimators, from a pool of completions.

A pool is S completions of one prompt, known by the Gram matrix K_ij = s_i.s_j
of their scores and by their rewards. The completions of a real model cannot be
enumerated, so all that is read off a pool here is an unbiased estimate: the
errors of groups of completions, measured, and the moments that the theory's
errors are made of. Notation as in `statistics.u_statistics` (arXiv 2603.01162).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Real

from grpojax.core import advantages
from grpojax.statistics.intervals import t_quantile
from grpojax.statistics.u_statistics import Estimators, Moments


def score_moments(
  gram: Float[np.ndarray, "S S"], rewards: Real[np.ndarray, "S"]
) -> Moments:
  """Unbiased estimates of a prompt's moments, U-statistics of the pool.

  Products of expectations are averages over distinct samples, in closed form:
  ||g||^2 of K_ik (Z_i - Z_j)(Z_k - Z_l), I sigma^2 of K_ii (Z_j - Z_k)^2 / 2,
  E||s delta||^2 of K_ii (Z_i - Z_j)(Z_i - Z_k), over all distinct indices.

  Args:
    gram: of the pool's scores, S >= 4.
    rewards: of the pool.

  Returns:
    Estimates; like any unbiased estimate of a square they may be negative.

  Raises:
    ValueError: fewer than 4 samples.
  """
  n = len(rewards)
  if n < 4:
    raise ValueError(f"moments need a pool of 4 samples or more, not {n}")
  z, norms = rewards.astype(np.float64), np.diag(gram)
  first, second = z.sum(), (z**2).sum()
  # Without sample i: sum, mean, unbiased V^2 and unbiased sigma^2.
  total = first - z
  mean, square = total / (n - 1), _square(total, second - z**2, n - 1)
  variance = (second - z**2) / (n - 1) - square
  oracle = np.mean(norms * (z**2 - 2 * z * mean + square))
  # Without samples i and k.
  pair = z[:, None] + z
  total = first - pair
  square = _square(total, second - z[:, None] ** 2 - z**2, n - 2)
  kernel = z[:, None] * z - pair * total / (n - 2) + square
  products = gram * kernel
  gradient_sq = (products.sum() - np.trace(products)) / (n * (n - 1))
  return Moments(
    gradient_sq=gradient_sq,
    oracle_trace=oracle - gradient_sq,
    vanilla_trace=np.mean(norms * z**2) - gradient_sq,
    remainder=np.mean(norms * variance) + gradient_sq,
  )


def _square(total, squares, n):
  """Unbiased estimate of a squared mean: over pairs of distinct samples."""
  return (total**2 - squares) / (n * (n - 1))


def best_baseline(
  gram: Float[np.ndarray, "S S"], rewards: Real[np.ndarray, "S"]
) -> float:
  """The constant baseline with the smallest error, E[||s||^2 Z] / E||s||^2.

  It is V(x) only where the norm of the score and the reward are uncorrelated
  (E. Greensmith, P. Bartlett and J. Baxter, 2004).

  Args:
    gram: of the pool's scores.
    rewards: of the pool.

  Returns:
    An estimate; 0 where all scores are 0.
  """
  norms = np.diag(gram)
  return float(norms @ rewards / norms.sum()) if norms.any() else 0.0


class _Terms(NamedTuple):
  """What the errors of one group size are made of; b blocks of the pool.

  A form is a sum over a group of weights times scores; the four are vanilla,
  leave_one_out, centred and the mean score. A truth is an estimate of g from
  all samples of a block.

  Attributes:
    squares: products of the forms of one group, [4, 4, b], group means.
    cross: forms in one block times truths in another, [4, b, b], group means.
    truth: truths times truths, [b, b].
    sums: sums of the block's rewards and of their squares, [2, b].
  """

  squares: np.ndarray
  cross: np.ndarray
  truth: np.ndarray
  sums: np.ndarray


def _terms(gram, rewards, group_size, blocks, baseline) -> _Terms:
  size = len(rewards) // blocks

  def weights(advantage, group_size):
    groups = jnp.asarray(rewards.reshape(-1, group_size))
    return np.asarray(advantage(groups), np.float64).ravel() / group_size

  chosen = (
    advantages.vanilla,
    advantages.leave_one_out,
    advantages.dr_grpo,
    jnp.ones_like,
  )
  forms = np.stack([weights(a, group_size) for a in chosen])
  truth = (rewards - baseline) / size
  count = len(rewards) // group_size
  inside = np.einsum(
    "igih->igh", gram.reshape(count, group_size, count, group_size)
  )
  grouped = forms.reshape(len(forms), count, group_size)
  half = np.einsum("igh,eih->eig", inside, grouped)
  squares = np.einsum("fig,eig->fei", grouped, half)
  # [S, b]: each sample's score times each block's truth.
  onto = (gram * truth).reshape(len(rewards), blocks, size).sum(-1)

  def by_block(x):
    return x.reshape(len(forms), blocks, size, blocks).sum(2)

  return _Terms(
    squares=squares.reshape(*squares.shape[:2], blocks, -1).mean(-1),
    cross=by_block(forms[:, :, None] * onto) / (size // group_size),
    truth=(truth[:, None] * onto).reshape(blocks, size, blocks).sum(1),
    sums=np.stack([rewards, rewards**2]).reshape(2, blocks, size).sum(-1),
  )


def _errors(terms: _Terms, size: int, keep: np.ndarray) -> np.ndarray:
  """Mean squared errors [4] measured on the blocks in `keep`."""
  squares = terms.squares[..., keep]
  cross = terms.cross[:, keep][:, :, keep]
  truth, sums = terms.truth[np.ix_(keep, keep)], terms.sums[:, keep]
  blocks = len(keep)
  # The oracle's V is the mean reward of the other blocks. Its square is
  # estimated without bias too, so this oracle errs exactly as one that knows V:
  # what is left of the error of V multiplies mean scores, whose mean is 0.
  total, second = sums.sum(-1, keepdims=True) - sums
  n = (blocks - 1) * size
  v, v2 = total / n, _square(total, second, n)
  square = np.stack(
    [
      *(squares[i, i] for i in range(3)),
      squares[0, 0] - 2 * v * squares[0, 3] + v2 * squares[3, 3],
    ]
  )
  cross = np.stack([*cross[:3], cross[0] - v[:, None] * cross[3]])
  others = (1 - np.eye(blocks)) / (blocks * (blocks - 1))
  return (
    square.mean(-1)
    - 2 * np.sum(cross * others, (-2, -1))
    + np.sum(truth * others)
  )


def group_errors(
  gram: Float[np.ndarray, "S S"],
  rewards: Real[np.ndarray, "S"],
  group_sizes: Sequence[int],
  blocks: int,
  baseline: float = 0.0,
) -> tuple[Estimators, Estimators]:
  """Mean squared errors of groups of completions, measured.

  The pool is cut into blocks, each block into groups of G. The error of a
  group's estimate is ||ghat||^2 - 2 ghat.g + ||g||^2; the unknown g is stood in
  for by estimates from other blocks than the group's own, and ||g||^2 by
  products of two different blocks. So the mean is exactly the mean squared
  error, without knowing g. The oracle's V is replaced likewise.

  Args:
    gram: of the pool's scores.
    rewards: of the pool.
    group_sizes: each divides S / blocks.
    blocks: b >= 3. They are independent, and `jackknife` counts on that.
    baseline: subtracted from the rewards where g is stood in for. Any constant
      chosen without this pool keeps that unbiased; see `best_baseline`.

  Returns:
    The errors at each group size, [len(group_sizes)], and the same without
    each of the blocks, [b, len(group_sizes)].

  Raises:
    ValueError: the sizes do not fit, or fewer than 3 blocks.
  """
  size = len(rewards) // blocks
  if blocks < 3 or size * blocks != len(rewards):
    raise ValueError(
      f"a pool of {len(rewards)} cannot be cut into {blocks} blocks: 3 or more,"
      " of the same size"
    )
  if any(size % g for g in group_sizes):
    raise ValueError(
      f"blocks of {size} samples cannot be cut into groups of {group_sizes}"
    )
  rewards = rewards.astype(np.float64)
  kept = [np.arange(blocks), *_without_each(blocks)]
  errors = np.array(
    [
      [_errors(terms, size, keep) for keep in kept]
      for terms in (
        _terms(gram, rewards, g, blocks, baseline) for g in group_sizes
      )
    ]
  )  # [group sizes, 1 + b, 4]
  errors = errors.transpose(2, 1, 0)
  return Estimators(*errors[:, 0]), Estimators(*errors[:, 1:])


def moment_replicates(
  gram: Float[np.ndarray, "S S"], rewards: Real[np.ndarray, "S"], blocks: int
) -> Moments:
  """`score_moments` without each of the pool's blocks, [blocks]."""
  samples = np.arange(len(rewards)).reshape(blocks, -1)
  kept = [samples[keep].ravel() for keep in _without_each(blocks)]
  replicates = [score_moments(gram[np.ix_(k, k)], rewards[k]) for k in kept]
  return Moments(*np.array(replicates).T)


def _without_each(blocks: int) -> list[np.ndarray]:
  return [np.delete(np.arange(blocks), i) for i in range(blocks)]


def jackknife(
  replicates: Float[np.ndarray, "*X b"],
) -> Float[np.ndarray, "*X"]:
  """Variance of a statistic of b independent blocks (R. G. Miller, 1974).

  For U-statistics it is biased upwards only (B. Efron and C. Stein, 1981).

  Args:
    replicates: the statistic without each of the blocks.
  """
  blocks = replicates.shape[-1]
  return np.asarray(np.var(replicates, axis=-1) * (blocks - 1))


def mean_half_width(
  variances: Float[np.ndarray, "X"], degrees: int, confidence: float = 0.95
) -> float:
  """Half the width of an interval for a mean of independent estimates.

  Student's t with the degrees of freedom of Welch and Satterthwaite.

  Args:
    variances: of the estimates, each with the given degrees of freedom.
    degrees: of each variance.
    confidence: coverage.
  """
  total = float(variances.sum())
  if total == 0:
    return 0.0
  joint = int(degrees * total**2 / float(np.sum(variances**2)))
  return t_quantile(confidence, joint) * total**0.5 / len(variances)
