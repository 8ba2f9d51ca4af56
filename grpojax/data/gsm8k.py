"""GSM8K: grade-school word problems with worked solutions (arXiv 2110.14168).

Reads the original files, train.jsonl and test.jsonl (7,473 and 1,319 problems,
each {"question": ..., "answer": "... #### 72"}), from a directory of yours.
"""

import json
import operator
import os
import pathlib
from collections.abc import Sequence
from typing import Any, SupportsIndex

SPLITS = ("train", "test")
MARK = "####"


class Examples(Sequence):
  """Random access to problems; see `load`."""

  def __init__(self, rows: list[dict[str, str]]):
    self._rows = rows

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: SupportsIndex) -> dict[str, str]:
    index = operator.index(index)
    if not 0 <= index < len(self._rows):
      raise IndexError(f"example {index} of {len(self._rows)}")
    return dict(self._rows[index])


def _example(line: str, where: str) -> dict[str, str]:
  try:
    row: Any = json.loads(line)
    question, solution = row["question"], row["answer"]
    _, mark, answer = solution.rpartition(MARK)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{where}: not a GSM8K problem, an object with the texts question and "
      f"answer ({type(error).__name__}: {error})"
    ) from error
  if not mark or not question:
    raise ValueError(f"{where}: the answer has no {MARK}, or no question")
  return {"prompt": question, "answer": answer.strip(), "solution": solution}


def load(
  split: str,
  *,
  path: str | os.PathLike,
  seed: int = 0,
  size: int | None = None,
) -> Examples:
  """The problems of one split, in the order of the file.

  Args:
    split: "train" or "test".
    path: directory with train.jsonl and test.jsonl.
    seed: not used; the order of training is that of the prompt pipeline.
    size: the first so many problems; None is all.

  Returns:
    A sequence of {"prompt": the question, "answer": "72", "solution": ...}.

  Raises:
    ValueError: an unknown split, a missing file, or a line that is no problem.
  """
  del seed
  if split not in SPLITS:
    raise ValueError(f"unknown split {split!r}: choose one of {SPLITS}")
  file = pathlib.Path(path) / f"{split}.jsonl"
  if not str(path) or not file.is_file():
    raise ValueError(
      f"{file} does not exist: give the directory of GSM8K's train.jsonl and "
      "test.jsonl as data.options.path"
    )
  rows = []
  with open(file, encoding="utf-8") as lines:
    for number, line in enumerate(lines, 1):
      if size is not None and len(rows) == size:
        break
      if line.strip():
        rows.append(_example(line, f"{file}, line {number}"))
  return Examples(rows)
