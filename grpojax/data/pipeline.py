"""Batches of prompts from examples, with grain.

    examples -> shuffle -> repeat -> encode -> batches of (Prompts, examples)

All steps before batching have random access, so the state of the stream is just
the number of prompts taken from it, for any batch size. A `Mixture` combines
several data sets with weights.
"""

import bisect
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from grpojax.core.types import Prompts
from grpojax.data.drawn import ENDLESS
from grpojax.data.examples import SOURCE, Example, Examples

Encode = Callable[[Any], tuple[str, Sequence[int]]]

_PREFETCH = 2  # batches prepared by a background thread


class Subset(Examples):
  """Random access to the examples at `indices`, in the order of `indices`."""

  def __init__(self, examples: Any, indices: Any):
    chosen = np.asarray(indices, np.int64)
    super().__init__(len(chosen), lambda i: examples[int(chosen[i])])


class Part(NamedTuple):
  """A data set of a mixture."""

  name: str  # value of `SOURCE` in its examples
  weight: float  # relative share of the prompts
  examples: Any  # with random access


class Mixture(Examples):
  """Random access to the concatenated examples of all parts."""

  def __init__(self, parts: Sequence[Part]):
    self.parts = tuple(parts)
    sizes = [len(part.examples) for part in parts]
    starts = [0, *itertools.accumulate(sizes)]

    def read(index: int) -> Example:
      i = bisect.bisect_right(starts, index) - 1
      return _named(parts[i].examples[index - starts[i]], parts[i].name)

    super().__init__(starts[-1], read)


def _named(example: Example, name: str) -> Example:
  return {**example, SOURCE: name}


def prompt_batches(
  examples: grain.sources.RandomAccessDataSource,
  encode: Encode,
  *,
  batch_size: int,
  max_prompt_length: int,
  pad_id: int = 0,
  target: Callable[[Example], dict[str, np.ndarray]] | None = None,
  seed: int = 0,
  start: int = 0,
  shuffle: bool = True,
  repeat: bool = True,
) -> Iterator[tuple[Prompts, list[Example]]]:
  """Yields batches of prompts and their examples.

  Ids (int32) and mask (bool) are [batch_size, max_prompt_length], padded on the
  right; ValueError for longer prompts. Each example gets a "prompt_text".

  - `examples`: sequence with random access. Each part of a `Mixture` has its
    share of n successive prompts, within 2 prompts and 1% (grain rounds it).
  - `encode`: `(prompt) -> (text, ids)`, the text to continue and its token ids.
  - `target`: `(example) -> arrays`, the `Prompts.targets` of jittable rewards.
  - `start`: number of prompts already taken from the stream.
  - `shuffle`: shuffle each epoch of a finite data set.
  - `repeat`: repeat endlessly; else one epoch, whose last batch may be shorter.
  """
  if not len(examples):
    raise ValueError("the data set has no examples: check data.path")

  def stream(examples, seed: np.random.SeedSequence) -> grain.MapDataset:
    dataset = grain.MapDataset.source(examples)
    if shuffle and len(examples) < ENDLESS:
      # grain shuffles epoch e with seed + e: without hashing, seeds 0 and 1
      # would share all but one of their epochs.
      dataset = dataset.shuffle(seed=int(seed.generate_state(1)[0]))
    return dataset.repeat() if repeat else dataset

  if repeat and isinstance(examples, Mixture):
    parts = []
    for name, _, part in examples.parts:
      # The order of a data set depends only on its name and the seed.
      key = zlib.crc32(name.encode())
      part_seed = np.random.SeedSequence(seed, spawn_key=(key,))
      named = functools.partial(_named, name=name)
      parts.append(stream(part, part_seed).map(named))
    weights = [part.weight for part in examples.parts]
    dataset = grain.MapDataset.mix(parts, weights)
  else:
    dataset = stream(examples, np.random.SeedSequence(seed))
  limit = max_prompt_length
  dataset = dataset[start:].map(lambda x: row(x, encode, limit, target))
  dataset = dataset.batch(
    batch_size,
    drop_remainder=repeat,  # grain overflows on the end of an endless stream
    batch_fn=lambda rows: collate(rows, limit, pad_id),
  )
  # The thread delivers batches in order, so results do not depend on timing.
  reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH)
  return iter(dataset.to_iter_dataset(reading))


def row(
  example: Example,
  encode: Encode,
  max_prompt_length: int,
  target: Callable[[Example], dict[str, np.ndarray]] | None = None,
) -> tuple[Sequence[int], Any, Example]:
  """Returns an example's `(token ids, target arrays, example)`."""
  text, ids = encode(example["prompt"])
  if not len(ids):
    raise ValueError(f"a prompt without tokens: remove {example['prompt']!r}")
  if len(ids) > max_prompt_length:
    raise ValueError(
      f"a prompt has {len(ids)} tokens, more than max_prompt_length ="
      f" {max_prompt_length}: raise it, or set --config.data.too_long = 'drop';"
      f" the prompt begins {text[:80]!r}"
    )
  arrays = None if target is None else target(example)
  return ids, arrays, {**example, "prompt_text": text}


def collate(
  rows: Sequence[tuple], width: int, pad_id: int
) -> tuple[Prompts, list[Example]]:
  """Joins results of `row`; returns the prompts and examples of a batch."""
  ids, arrays, examples = zip(*rows, strict=True)
  targets = None
  if arrays[0] is not None:
    targets = {name: np.stack([a[name] for a in arrays]) for name in arrays[0]}
  return padded(ids, width, pad_id, targets), list(examples)


def padded(
  rows: Sequence[Sequence[int]],
  width: int,
  pad_id: int,
  targets: dict[str, np.ndarray] | None = None,
) -> Prompts:
  """Pads rows of token ids on the right."""
  mask = np.arange(width) < np.array([*map(len, rows)])[:, None]
  ids = np.full(mask.shape, pad_id, np.int32)
  # The mask is filled row by row, in the order of the chained ids.
  ids[mask] = list(itertools.chain(*rows))
  return Prompts(ids, mask, targets)
