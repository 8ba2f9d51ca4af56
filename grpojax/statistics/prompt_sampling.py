"""Draws prompts by priority, with importance weights that remove the bias.

Without priorities prompt i has the probability r_i (1/n, or its share in a
mixture). With them its probability is

    q_i = u r_i + (1 - u) r_i priority_i / sum_j r_j priority_j

The uniform share u lets every prompt return. A batch of B rows has on average
pi_i = B q_i rows of prompt i, limited to `most`; systematic sampling (Madow,
1949) rounds this number up or down. With the importance weights

    w_i = B r_i / pi_i  <=  1 / u

the mean of w f over a batch is an unbiased estimate of sum_i r_i f_i for every
f, such as gradients (Horvitz and Thompson, 1952).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

Vector = Float[np.ndarray, "n"]


class Stratum(NamedTuple):
  """Prompts with a fixed share of each batch: a data set of a mixture."""

  size: int  # number of consecutive prompts
  weight: float  # of the whole stratum, up to a factor shared by all strata


def original(strata: Sequence[Stratum]) -> Vector:
  """Returns the probability r of each prompt without priorities; sums to 1."""
  total = sum(stratum.weight for stratum in strata)
  shares = [np.full(s.size, s.weight / total / s.size) for s in strata]
  return np.concatenate(shares)


def _by_stratum(values: np.ndarray, strata: Sequence[Stratum]) -> list:
  return np.split(values, np.cumsum([stratum.size for stratum in strata])[:-1])


def expected_rows(
  priorities: Vector,
  strata: Sequence[Stratum],
  *,
  rows: int,
  uniform: int | float,
  most: int = 1,
) -> Vector:
  """Returns each prompt's expected number pi of rows in a batch of `rows`.

  Each stratum has a fixed number of rows, at most its size times `most`, which
  priorities divide among its prompts. `uniform` is u, in (0, 1].
  """
  total = sum(stratum.weight for stratum in strata)
  expected = []
  parts = _by_stratum(priorities, strata)
  for (size, weight), part in zip(strata, parts, strict=True):
    # Prompts are drawn evenly if all priorities of the stratum are 0.
    even = np.full(size, 1 / size)
    by_priority = part / np.sum(part) if np.any(part) else even
    q = uniform * even + (1 - uniform) * by_priority
    expected.append(_at_most(most, rows * weight / total, q))
  return np.concatenate(expected)


def _at_most(most: int, rows: float, q: Vector) -> Vector:
  """Divides rows among prompts in proportion to q, at most `most` for each."""
  full = np.zeros(len(q), bool)
  while True:
    # Full prompts get `most` rows, and the others share the remaining rows in
    # proportion to q. This may fill more prompts, so it is repeated.
    remaining = rows - most * np.sum(full)
    shares = np.where(full, most, remaining * q / max(np.sum(q[~full]), 1e-300))
    too_much = (shares > most) & ~full
    if not np.any(too_much):
      return shares
    full |= too_much


def systematic(
  expected: Vector, strata: Sequence[Stratum], rng: Any
) -> Int[np.ndarray, "B"]:
  """Draws indices: each as often as `expected`, rounded up or down at random.

  `rng` is a `numpy.random.Generator`. Prompts are laid out on a line, each as
  long as its expected number, in random order within its stratum. A random
  number u selects the prompts at u, u + 1, u + 2, ...:

    prompt    |    3    |  0 |      1       |  2 |     4     |
    expected     0.6      0.3      0.8        0.3     1.0
    drawn            ^u=0.4              ^1.4             ^2.4
  """
  parts = _by_stratum(np.arange(len(expected)), strata)
  order = np.concatenate([rng.permutation(part) for part in parts])
  edges = np.cumsum(expected[order])
  # Rounding errors change the line's length, `rows`: marks are scaled to it.
  rows = round(float(edges[-1]))
  marks = (rng.random() + np.arange(rows)) * (edges[-1] / rows)
  places = np.searchsorted(edges, marks, side="right")
  # A rounding error may put the last mark on the end of the line.
  return order[np.minimum(places, len(order) - 1)]


def draw(
  priorities: Vector,
  strata: Sequence[Stratum],
  rng: Any,
  *,
  rows: int,
  uniform: int | float,
  most: int = 1,
) -> tuple[Int[np.ndarray, "B"], Float[np.ndarray, "B"]]:
  """Draws the prompts of a batch in random order.

  Returns their indices and importance weights, 1 on average; `expected_rows`
  explains the arguments.
  """
  expected = expected_rows(
    priorities, strata, rows=rows, uniform=uniform, most=most
  )
  indices = rng.permutation(systematic(expected, strata, rng))
  return indices, rows * original(strata)[indices] / expected[indices]
