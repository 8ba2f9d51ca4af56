"""Several data sets as one, each with a weight.

    mixture = Mixture([Part("easy", 3.0, easy), Part("hard", 1.0, hard)])

As a sequence it is one data set after another, which is what evaluations and
the pass before a run read. Training takes prompts from all of them in turn: see
`interleaved`.
"""

import functools
import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import grain
import numpy as np

from grpojax.data.examples import SOURCE

Example = dict[str, Any]


class Part(NamedTuple):
  """A data set of a mixture.

  Attributes:
    name: in the mixture; its examples say it as `SOURCE`.
    weight: its share of the prompts, up to a factor that all parts share.
    examples: random access to them.
  """

  name: str
  weight: float
  examples: Any


class Mixture(Sequence):
  """Random access to the examples of all parts, one part after another."""

  def __init__(self, parts: Sequence[Part]):
    self.parts = tuple(parts)
    sizes = [len(part.examples) for part in self.parts]
    self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

  def __len__(self) -> int:
    return int(self._starts[-1])

  def __getitem__(self, index: SupportsIndex) -> Example:
    index = operator.index(index)
    if not 0 <= index < len(self):
      raise IndexError(f"example {index} of {len(self)}")
    i = int(np.searchsorted(self._starts, index, side="right")) - 1
    part = self.parts[i]
    return _named(part.examples[index - int(self._starts[i])], part.name)


def _named(example: Example, name: str) -> Example:
  return {**example, SOURCE: name}


def interleaved(
  mixture: Mixture,
  stream: Callable[[Any, np.random.SeedSequence], grain.MapDataset],
  seed: int,
) -> grain.MapDataset:
  """An endless stream in which the data sets take turns.

  Their shares are kept all along, by `grain.MapDataset.mix`: of any n prompts
  in a row a data set has its share of n, give or take one or two. So every
  batch has the mixture's shares, not only the average batch. Which prompt comes
  when depends on nothing but its number in the stream and the seed. A share is
  kept to 1% of itself: grain rounds weights.

  Args:
    mixture: the data sets.
    stream: `(examples, seed) -> endless stream` of one data set.
    seed: of the run. Each data set has one of its own, by its name, so its
      order does not depend on the others.
  """
  streams = [
    stream(
      part.examples,
      np.random.SeedSequence(seed, spawn_key=(zlib.crc32(part.name.encode()),)),
    ).map(functools.partial(_named, name=part.name))
    for part in mixture.parts
  ]
  return grain.MapDataset.mix(streams, [part.weight for part in mixture.parts])
