"""Endless data sets of random examples.

Example i depends only on the seed, the split, the options and i. Examples may
repeat within a split, but no problem is in both splits.
"""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from grpojax.data.examples import SPLITS, Example, Examples, check_split

ENDLESS = 2**31 - 1  # length of an unlimited training split
MOST_HELD_OUT = 100_000  # as a run first encodes all test problems


def split_of(problem: str) -> str:
  """Returns the split of a problem, by a hash: "train" (9 in 10) or "test"."""
  return "test" if zlib.crc32(problem.encode()) % 10 == 0 else "train"


def load(
  split: str,
  draw: Callable[[np.random.Generator], Example],
  *,
  seed: int,
  size: int | None,
) -> Examples:
  """Returns a sequence of `size` random examples; None: practically endless."""
  check_split(split)
  if seed < 0:
    raise ValueError(f"seed must not be negative, got {seed}")
  most = ENDLESS if split == "train" else MOST_HELD_OUT
  if size is not None and not 1 <= size <= most:
    setting = "eval.num_prompts" if split == "test" else "data.options.size"
    raise ValueError(
      f"{setting} = {size}: must be 1 to {most}, the largest size of the split "
      f"{split!r}"
    )

  def read(index: int) -> Example:
    # Each example has its own random stream, independent of the access order.
    key = (SPLITS.index(split), index)
    sequence = np.random.SeedSequence(seed, spawn_key=key)
    return draw(np.random.Generator(np.random.Philox(sequence)))

  return Examples(size or ENDLESS, read)


def bounds(name: str, value: int | Sequence[int], most: int) -> tuple[int, int]:
  """Converts an option, a number or a pair, to its bounds (low, high)."""
  pair = (value,) * 2 if isinstance(value, int) else tuple(value)
  whole = all(isinstance(x, int) for x in pair) and len(pair) == 2
  if not whole or not 1 <= pair[0] <= pair[1] <= most:
    raise ValueError(
      f"{name} = {value!r}: must be a whole number from 1 to {most}, or a pair "
      "(low, high)"
    )
  return int(pair[0]), int(pair[1])
