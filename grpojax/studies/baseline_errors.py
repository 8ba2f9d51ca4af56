"""Errors of gradient estimators with weighted baselines, from pools of samples.

A pool is S completions of one prompt, known by the Gram matrix of their scores
(`studies.errors`), their rewards, and what the weights are made of. All that is
compared here is unbiased, so that an estimator's mean squared error is
E|ghat|^2 - |g|^2. The first is measured on groups of the pool, each of them
within one of b blocks, several random divisions of a block into groups; the
second is a U-statistic, sum_{i != j} K_ij (Z_i - c)(Z_j - c) / (S (S - 1)),
with a constant c that other prompts chose. Blocks are independent: intervals
are jackknives over them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from grpojax.core import advantages
from grpojax.core.advantages.weighted_baselines import (
  ScoreNorms,
  score_norm_sums,
)
from grpojax.studies.errors import best_baseline, without_each


class Pool(NamedTuple):
  """S completions of one prompt."""

  gram: Float[np.ndarray, "S S"]  # inner products of their scores
  rewards: Float[np.ndarray, "S"]
  lengths: Float[np.ndarray, "S"]  # in tokens
  logit_score_sq: Float[np.ndarray, "S"]  # from `core.advantages`


Advantage = Callable[[Pool], Array]  # of groups, fields [n, G] -> [n, G]


def norms_of_others(pools: Sequence[Pool], index: int) -> ScoreNorms:
  """Sums that `norm_ratio` would learn from the other prompts' pools."""
  scaled = []
  for pool in [*pools[:index], *pools[index + 1 :]]:
    sums = score_norm_sums(
      jnp.diag(pool.gram)[None], jnp.asarray(pool.rewards)[None]
    )
    # Each prompt weighs alike: the scale of its scores is its own.
    middle = jnp.maximum(sums.middle, 1e-30)
    scaled.append([x / middle for x in (sums.level, sums.slope, sums.middle)])
  level, slope, middle = (sum(x) for x in zip(*scaled, strict=True))
  return ScoreNorms(level, slope, middle)


def estimators(
  value: float, best: float, norms: ScoreNorms
) -> dict[str, Advantage]:
  """Advantages that are compared, by name; `value` is V(x), for the oracle."""
  a = advantages

  def weighted(power):
    return lambda p: a.score_weighted(p.rewards, p.logit_score_sq, power)

  return {
    "leave_one_out": lambda p: a.leave_one_out(p.rewards),
    "vanilla": lambda p: a.vanilla(p.rewards),
    "oracle": lambda p: p.rewards - value,
    "length_weighted": lambda p: a.length_weighted(p.rewards, p.lengths),
    "score_weighted, power 1": weighted(1.0),
    "score_weighted, power 2": weighted(2.0),
    "score_weighted, power 3": weighted(3.0),
    "true |s|^2 weights": lambda p: a.score_weighted(p.rewards, p.gram, 1.0),
    "norm_ratio": lambda p: a.norm_ratio(p.rewards, norms),
    "best constant": lambda p: p.rewards - best,
  }


def _divisions(size: int, group_size: int, blocks: int, rounds: int, seed: int):
  """Draws groups within blocks: indices [blocks, groups, G].

  For 8 samples in 2 blocks, G = 2 and one round, for example
  [[[2, 0], [1, 3]], [[5, 4], [7, 6]]].
  """
  rng = np.random.default_rng(seed)
  shuffled = [
    np.concatenate([rng.permutation(block) for _ in range(rounds)])
    for block in np.arange(size).reshape(blocks, -1)
  ]
  return np.array(shuffled).reshape(blocks, -1, group_size)


def gradient_sq(pool: Pool, constant: float, samples: np.ndarray) -> float:
  """Unbiased estimate of |g|^2 from the samples of a pool with these indices.

  `constant` is a baseline that this pool did not choose.
  """
  y = pool.rewards[samples].astype(np.float64) - constant
  products = pool.gram[np.ix_(samples, samples)] * y[:, None] * y
  n = len(samples)
  return float(products.sum() - np.trace(products)) / (n * (n - 1))


def measure(
  pools: Sequence[Pool],
  index: int,
  group_size: int,
  *,
  blocks: int,
  rounds: int = 8,
) -> dict[str, tuple[float, Float[np.ndarray, "b"]]]:
  """Measures the mean squared errors of one prompt's gradient.

  Args:
    pools: pools of all prompts of a configuration, at least 2.
    index: index of the one that is measured.
    group_size: G; divides S / blocks.
    blocks: number b of blocks of the pool.
    rounds: number of divisions of each block into groups.

  Returns:
    For each of `estimators` its error, and the same without each block.
  """
  pool, n = pools[index], len(pools[index].rewards)
  others = [best_baseline(p.gram, p.rewards) for p in pools]
  constant = float(np.mean(np.delete(others, index)))

  # The pool's fields by groups, and the products within each group.
  groups = _divisions(n, group_size, blocks, rounds, index)  # [b, m, G]
  fields = pool._replace(gram=np.diag(pool.gram))
  grouped = jax.tree.map(
    lambda x: jnp.asarray(x[groups].reshape(-1, group_size), jnp.float32),
    fields,
  )
  inside = pool.gram[groups[..., :, None], groups[..., None, :]]  # [b, m, G, G]

  # |g|^2 of the whole pool, and without each of its blocks.
  subsets = [np.arange(n), *without_each(blocks, n)]
  truth = np.array([gradient_sq(pool, constant, x) for x in subsets])

  advantage_of = estimators(
    float(pool.rewards.mean()),
    others[index],
    norms_of_others(pools, index),
  )
  errors = {}
  for name, advantage in advantage_of.items():
    weights = np.asarray(advantage(grouped), np.float64) / group_size
    weights = weights.reshape(groups.shape)
    squares = np.einsum("bmg,bmgh,bmh->bm", weights, inside, weights).mean(-1)
    without = (squares.sum() - squares) / (blocks - 1)
    errors[name] = float(squares.mean() - truth[0]), without - truth[1:]
  return errors
