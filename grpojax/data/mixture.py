"""Several data sets as one, each with a weight.

    mixture = Mixture([Part("easy", 3.0, easy), Part("hard", 1.0, hard)])

As a sequence it is one data set after another. Training takes prompts from all
of them in turn, by `interleaved`.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from grpojax.data.examples import SOURCE, Example, Examples, concatenate


class Part(NamedTuple):
  """A data set of a mixture."""

  name: str  # `SOURCE` of its examples
  weight: float  # share of the prompts, up to a common factor
  examples: Any  # random access to its examples


class Mixture(Examples):
  """Random access to the examples of all parts, one part after another."""

  def __init__(self, parts: Sequence[Part]):
    self.parts = tuple(parts)

    def read(i: int, j: int) -> Example:
      return _named(parts[i].examples[j], parts[i].name)

    whole = concatenate([len(part.examples) for part in parts], read)
    super().__init__(len(whole), whole.read)


def _named(example: Example, name: str) -> Example:
  return {**example, SOURCE: name}


def interleaved(
  mixture: Mixture,
  stream: Callable[[Any, np.random.SeedSequence], grain.MapDataset],
  seed: int,
) -> grain.MapDataset:
  """Makes an endless stream in which the data sets take turns.

  Of any n prompts in a row a data set has its share, give or take one or two,
  to 1% of the share (grain rounds weights). The prompt at a place of the stream
  depends on the place and the seed alone.

  Args:
    mixture: the data sets.
    stream: `(examples, seed) -> endless stream` of one data set.
    seed: the run's. Each data set has one of its own, by its name, so its
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
