"""From examples to batches of prompts, with grain.

    examples -> shuffle -> repeat -> encode -> batches of (Prompts, examples)

Everything before the batches is random access, so the state of the stream is
the number of prompts taken from it, whatever the batch size was.

Several data sets, each with a weight, form a `Mixture`.
"""

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from grpojax.core.types import Prompts
from grpojax.data.drawn import ENDLESS
from grpojax.data.examples import SOURCE, Example, Examples, concatenate

Encode = Callable[[Any], tuple[str, Sequence[int]]]

_PREFETCH = 2  # batches made ahead by one background thread


class Subset(Examples):
  """Random access to the examples of these indices, in their order."""

  def __init__(self, examples: Any, indices: Any):
    chosen = np.asarray(indices, np.int64)
    super().__init__(len(chosen), lambda i: examples[int(chosen[i])])


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


def _interleaved(
  mixture: Mixture,
  stream: Callable[[Any, np.random.SeedSequence], grain.MapDataset],
  seed: int,
) -> grain.MapDataset:
  """Makes an endless stream in which the data sets take turns.

  Of any n prompts in a row a data set has its share, give or take one or two,
  to 1% of the share (grain rounds weights). `stream(examples, seed)` is the
  endless stream of one data set; its seed and order depend on its name alone.
  """
  streams = [
    stream(
      part.examples,
      np.random.SeedSequence(seed, spawn_key=(zlib.crc32(part.name.encode()),)),
    ).map(functools.partial(_named, name=part.name))
    for part in mixture.parts
  ]
  return grain.MapDataset.mix(streams, [part.weight for part in mixture.parts])


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
  right. The examples have their formatted text as "prompt_text".

  - `examples`: random access to examples; the parts of a `Mixture` take turns.
  - `encode`: `(prompt) -> (text, ids)` of the text that the model continues.
  - `max_prompt_length`: in tokens; a longer prompt is a ValueError.
  - `target`: `(example) -> arrays` for a jittable reward: `Prompts.targets`.
  - `start`: number of prompts that were already taken from the stream.
  - `shuffle`: shuffle every epoch anew, unless the stream is endless.
  - `repeat`: go on for ever; else one epoch, whose last batch may be shorter.
  """
  if not len(examples):
    raise ValueError("no examples to make prompts from")

  def stream(examples, seed: np.random.SeedSequence) -> grain.MapDataset:
    dataset = grain.MapDataset.source(examples)
    if shuffle and len(examples) < ENDLESS:
      # Mixed, because grain shuffles epoch e by seed + e: seeds 0 and 1 would
      # share all their epochs but one.
      dataset = dataset.shuffle(seed=int(seed.generate_state(1)[0]))
    return dataset.repeat() if repeat else dataset

  if repeat and isinstance(examples, Mixture):
    dataset = _interleaved(examples, stream, seed)
  else:
    dataset = stream(examples, np.random.SeedSequence(seed))
  options = {"max_prompt_length": max_prompt_length, "pad_id": pad_id}
  options |= {"encode": encode, "target": target}
  dataset = dataset[start:].map(functools.partial(row, **options))
  # An endless stream has no remainder (and grain overflows if it may have one).
  dataset = dataset.batch(batch_size, drop_remainder=repeat, batch_fn=collate)
  # Threads read ahead but deliver in order: the batches do not depend on them.
  reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH)
  return iter(dataset.to_iter_dataset(reading))


def row(
  example: Example,
  encode: Encode,
  max_prompt_length: int,
  pad_id: int,
  target: Callable[[Example], dict[str, np.ndarray]] | None = None,
) -> tuple[np.ndarray, int, Any, Example]:
  """Returns an example's padded ids, their number, its target, and itself."""
  text, ids = encode(example["prompt"])
  if not len(ids):
    raise ValueError(f"a prompt without tokens: {example['prompt']!r}")
  if len(ids) > max_prompt_length:
    raise ValueError(
      f"a prompt has {len(ids)} tokens, but max_prompt_length ="
      f" {max_prompt_length}; prompts are never cut: raise max_prompt_length or"
      f" set --config.data.too_long = 'drop': {text[:80]!r}"
    )
  padded = np.full(max_prompt_length, pad_id, np.int32)
  padded[: len(ids)] = ids
  arrays = None if target is None else target(example)
  return padded, len(ids), arrays, {**example, "prompt_text": text}


def collate(rows: Sequence[tuple]) -> tuple[Prompts, list[Example]]:
  """Makes a batch of prompts, and the list of their examples."""
  ids, lengths, arrays, examples = zip(*rows, strict=True)
  prompt_ids = np.stack(ids)
  mask = np.arange(prompt_ids.shape[1]) < np.array(lengths)[:, None]
  targets = None
  if arrays[0] is not None:
    targets = {name: np.stack([a[name] for a in arrays]) for name in arrays[0]}
  return Prompts(prompt_ids, mask, targets), list(examples)
