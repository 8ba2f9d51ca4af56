"""Prompts drawn by priority, with weights that undo it.

Of prompt i there are r_i in the original distribution (1/n, or its share in a
mixture), and it is asked for with probability

    q_i = u r_i + (1 - u) r_i priority_i / sum_j r_j priority_j

so u, the share that is drawn as always, is its chance to come back when its
priority is 0. A batch of B rows has pi_i = B q_i rows of it on average (less
where that would be more than `most` rows), drawn by systematic sampling (Madow,
1949): pi_i rounded up or down. With the importance weights

    w_i = B r_i / pi_i  <=  1 / u

the mean over a batch of w f is an unbiased estimate of sum_i r_i f_i for any f,
gradients too (Horvitz and Thompson, 1952).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Stratum(NamedTuple):
  """Prompts that keep their share of each batch: a data set of a mixture.

  Attributes:
    size: number of prompts, one after another.
    weight: weight of all of them, up to a factor that all strata share.
  """

  size: int
  weight: float


class Drawn(NamedTuple):
  """Prompts of a batch.

  Attributes:
    indices: numbers of the prompts.
    weights: importance weights, whose mean over all that can be drawn is 1.
  """

  indices: Int[np.ndarray, "B"]
  weights: Float[np.ndarray, "B"]


def original(strata: Sequence[Stratum]) -> Float[np.ndarray, "n"]:
  """Probability r of each prompt without priorities; sums to 1."""
  total = sum(stratum.weight for stratum in strata)
  shares = [np.full(s.size, s.weight / total / s.size) for s in strata]
  return np.concatenate(shares)


def expected_rows(
  priorities: Float[np.ndarray, "n"],
  strata: Sequence[Stratum],
  *,
  rows: int,
  uniform: int | float,
  most: int = 1,
) -> Float[np.ndarray, "n"]:
  """Mean number pi of rows of a batch that each prompt has; sums to `rows`.

  Priorities are compared within a stratum, which keeps its share and has room
  for it: size * most, `most` rows of one prompt. `uniform` is u, in (0, 1].
  """
  total, expected, start = sum(stratum.weight for stratum in strata), [], 0
  for size, weight in strata:
    of_stratum = priorities[start : start + size]
    start += size
    even = np.full(size, 1 / size)
    by_priority = (
      of_stratum / np.sum(of_stratum) if np.sum(of_stratum) > 0 else even
    )
    q = uniform * even + (1 - uniform) * by_priority
    expected.append(_at_most(most, rows * weight / total, q))
  return np.concatenate(expected)


def _at_most(
  most: int, rows: float, q: Float[np.ndarray, "n"]
) -> Float[np.ndarray, "n"]:
  """Rows in proportion to q; an excess over `most` goes to the others."""
  full = np.zeros(len(q), bool)
  while True:
    left = rows - most * np.sum(full)
    shares = np.where(full, most, left * q / max(np.sum(q[~full]), 1e-300))
    too_much = (shares > most) & ~full
    if not np.any(too_much):
      return shares
    full |= too_much


def systematic(
  expected: Float[np.ndarray, "n"],
  strata: Sequence[Stratum],
  rng: Any,
) -> Int[np.ndarray, "B"]:
  """Draws indices, each as often as expected on average, rounded up or down.

  `rng` is a `numpy.random.Generator`. One random number u decides all: prompts
  are laid out on a line, each as long as its expected number, in random order
  within its stratum, and those at u, u + 1, u + 2, ... are drawn:

    prompt    |    3    |  0 |      1       |  2 |     4     |
    expected     0.6      0.3      0.8        0.3     1.0
    drawn            ^u=0.4              ^1.4             ^2.4
  """
  starts = np.cumsum([0, *(s.size for s in strata)])[:-1]
  orders = [
    start + rng.permutation(s.size)
    for start, s in zip(starts, strata, strict=True)
  ]
  order = np.concatenate(orders)
  edges = np.cumsum(expected[order])
  rows = round(float(edges[-1]))
  marks = (rng.random() + np.arange(rows)) * (edges[-1] / rows)
  places = np.searchsorted(edges, marks, side="right")
  return order[np.minimum(places, len(order) - 1)]


def draw(
  priorities: Float[np.ndarray, "n"],
  strata: Sequence[Stratum],
  rng: Any,
  *,
  rows: int,
  uniform: int | float,
  most: int = 1,
) -> Drawn:
  """Draws a batch in random order; arguments are those of `expected_rows`."""
  expected = expected_rows(
    priorities, strata, rows=rows, uniform=uniform, most=most
  )
  indices = rng.permutation(systematic(expected, strata, rng))
  weights = rows * original(strata)[indices] / expected[indices]
  return Drawn(indices, weights)
