"""Examples that are drawn: what endless, seeded data sets have in common.

Example i depends on the seed, the split, the options and i alone: not on the
process, the machine or what was read before. Examples may repeat, as in any
sample with replacement, but never across splits.
"""

import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from grpojax.data.examples import SPLITS, Example, Examples, check_split

ENDLESS = 2**31 - 1
"""Length of a training split that nobody limited."""

MOST_HELD_OUT = 100_000
"""Most test problems: all are encoded before a run, and asked at every
evaluation. The interval of an accuracy is +-0.3% then."""

_BUCKETS = 10


def split_of(problem: str) -> str:
  """Returns the split of a problem: "train" (9 in 10) or "test"."""
  held_out = zlib.crc32(problem.encode()) % _BUCKETS == 0
  return "test" if held_out else "train"


def load(
  split: str,
  draw: Callable[[np.random.Generator], Example],
  *,
  seed: int,
  size: int | None,
) -> Examples:
  """Returns examples of which number i is drawn from its own random stream.

  `draw` draws an example of that split; `size` None is endless in practice.

  Raises:
    ValueError: an unknown split, or a seed or size out of range.
  """
  check_split(split)
  if seed < 0:
    raise ValueError(f"seed must not be negative, got {seed}")
  most = ENDLESS if split == "train" else MOST_HELD_OUT
  if size is not None and not 1 <= size <= most:
    setting = "eval.num_prompts" if split == "test" else "data.options.size"
    raise ValueError(
      f"{setting} = {size}: problems are drawn, and there are 1 to {most} of "
      f"the split {split!r}"
    )
  size = ENDLESS if size is None else size
  return Examples(int(size), functools.partial(_read, split, int(seed), draw))


def _read(
  split: str,
  seed: int,
  draw: Callable[[np.random.Generator], Example],
  index: int,
) -> Example:
  # Each example has its own stream: no order of access can change it.
  key = (SPLITS.index(split), index)
  sequence = np.random.SeedSequence(seed, spawn_key=key)
  return draw(np.random.Generator(np.random.Philox(sequence)))


def bounds(name: str, value: int | Sequence[int], most: int) -> tuple[int, int]:
  """Returns the (lowest, highest) value of an option that may be one number.

  Raises:
    ValueError: not 1 <= lowest <= highest <= most.
  """
  pair = (value,) * 2 if isinstance(value, int) else tuple(value)
  whole = all(isinstance(x, int) for x in pair) and len(pair) == 2
  if not whole or not 1 <= pair[0] <= pair[1] <= most:
    raise ValueError(
      f"{name} is a whole number of 1 to {most}, or a pair (low, high) of "
      f"them, got {value!r}"
    )
  return int(pair[0]), int(pair[1])
