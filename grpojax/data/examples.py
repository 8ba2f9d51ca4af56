"""Examples: the one thing that data sets, prompts and rewards share.

An example is a dict of JSON values with

    "prompt"    a text, or a list of chat messages {"role": ..., "content": ...}
                of which the last is not the assistant's
    "answer"    the reference answer, a text or, where the data have one, a
                number; not in data without answers
    "solution"  optional: a text to learn from, which ends with the answer

and whatever else the data set has: rewards get all of it. A solution gives its
answer as GSM8K's do, after `MARK`. In a mixture of data sets `SOURCE` is the
name of the one that an example comes from.
"""

import bisect
import itertools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

SPLITS = ("train", "test")
SOURCE = "data_source"  # as in verl, so that its reward functions find it
MARK = "####"  # the answer follows the last one
READ = "prompt_read"  # the prompt with what an environment's reset observed

Example = dict[str, Any]


class Changed(ValueError):
  """A data set's file is another one than when it was opened."""


def check_split(split: str) -> None:
  """Raises ValueError where there is no such split."""
  if split not in SPLITS:
    raise ValueError(f"unknown split {split!r}: choose one of {SPLITS}")


def prompt_key(prompt: Any) -> str:
  """Returns a text that is the same for prompts that templates make equal.

  They strip the blanks around a text, and read the role and content of turns.
  """
  if isinstance(prompt, str):
    return prompt.strip()
  return json.dumps([(x["role"], x["content"].strip()) for x in prompt])


class Examples(Sequence):
  """Random access to `size` examples that are read when they are asked for."""

  def __init__(self, size: int, read: Callable[[int], Example]):
    self._size, self.read = size, read

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, index: SupportsIndex) -> Example:
    index = operator.index(index)
    if not 0 <= index < self._size:
      raise IndexError(f"example {index} of {self._size}")
    return self.read(index)


def concatenate(
  sizes: Sequence[int], read: Callable[[int, int], Example]
) -> Examples:
  """Joins parts of these sizes, one after another, of `read(part, index)`.

  Of sizes (3, 2), example 4 is number 1 of part 1.
  """
  starts = [0, *itertools.accumulate(sizes)]

  def located(index: int) -> Example:
    part = bisect.bisect_right(starts, index) - 1
    return read(part, index - starts[part])

  return Examples(starts[-1], located)
