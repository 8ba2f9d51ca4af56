"""Examples: dicts with a prompt and its answer, which rewards receive.

An example has JSON values under the keys

    "prompt"    a text, or a list of chat messages {"role": ..., "content": ...}
                whose last message is not the assistant's
    "answer"    reference answer, a text or a number, if any
    "solution"  optional worked solution, the target of supervised fine-tuning

and further fields of the data set.
"""

import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

SPLITS = ("train", "test")
SOURCE = "data_source"  # key for the name of a mixture's data set, as in verl
MARK = "####"  # precedes the answer in a solution
READ = "prompt_read"  # key for the prompt with an environment's observation

Example = dict[str, Any]


def check_split(split: str) -> None:
  """Raises ValueError for an unknown split."""
  if split not in SPLITS:
    raise ValueError(f"unknown split {split!r}: choose one of {SPLITS}")


def prompt_key(prompt: Any) -> str:
  """Returns a key, equal for prompts that differ only in outer whitespace."""
  if isinstance(prompt, str):
    return prompt.strip()
  return json.dumps([(x["role"], x["content"].strip()) for x in prompt])


class Examples(Sequence):
  """Sequence of `size` examples; `read(i)` reads example i on the fly."""

  def __init__(self, size: int, read: Callable[[int], Example]):
    self._size = size
    self._read = read

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, index: SupportsIndex) -> Example:
    index = operator.index(index)
    if not 0 <= index < self._size:
      raise IndexError(f"no example {index} among {self._size}")
    return self._read(index)
