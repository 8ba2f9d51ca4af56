"""Any data set in JSONL files: one JSON object a line.

    {"prompt": "What is 6 times 7?", "answer": "42", "level": 1}
    {"messages": [{"role": "user", "content": "6 * 7 = ?"}], "answer": 42}

Opening a file reads it once, from its start to its end: every line is checked,
and only where each line begins is kept. Examples are read when they are asked
for, so a file may be larger than memory.
"""

import array
import itertools
import json
import operator
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import numpy as np

from grpojax.data import fields as fields_lib
from grpojax.data import files
from grpojax.data.examples import check_split
from grpojax.data.fields import Row

_BOM = b"\xef\xbb\xbf"


class Examples(Sequence):
  """Random access to the lines of a file; see `load`.

  The file is opened anew for each example: there is nothing that threads could
  share, and nothing to close.
  """

  def __init__(
    self,
    file: pathlib.Path,
    places: np.ndarray,
    size: int,
    fields: fields_lib.Fields,
  ):
    self._file, self._places, self._fields = file, places, fields
    self._size = size  # bytes of the file when it was opened

  def __len__(self) -> int:
    return len(self._places)

  def __getitem__(self, index: SupportsIndex) -> Row:
    index = operator.index(index)
    if not 0 <= index < len(self._places):
      raise IndexError(f"example {index} of {len(self._places)}")
    start, stop = self._places[index].tolist()
    with open(self._file, "rb", buffering=0) as file:
      if os.fstat(file.fileno()).st_size != self._size:
        raise ValueError(
          f"{self._file} changed while it was in use: start the program again"
        )
      file.seek(start)
      line = file.read(stop - start)
    return fields_lib.example(_object(line), self._fields)


def rows(file: pathlib.Path) -> Iterator[tuple[str, int, int, Row]]:
  """Reads the JSON objects of a file in turn; blank lines are skipped.

  Args:
    file: UTF-8 text, with or without a byte order mark.

  Yields:
    "FILE, line 3" for errors, the bytes where the line begins and ends, and its
    object.

  Raises:
    ValueError: a line is no JSON object; the error says which one.
  """
  stop = 0
  with open(file, "rb") as lines:
    for number, line in enumerate(lines, 1):
      start, stop = stop, stop + len(line)
      if number == 1 and line.startswith(_BOM):
        start, line = start + len(_BOM), line.removeprefix(_BOM)
      if line.strip():
        where = f"{file}, line {number}"
        try:
          yield where, start, stop, _object(line)
        except (RecursionError, ValueError) as error:
          raise ValueError(f"{where}: {error}") from error


def _object(line: bytes) -> Row:
  row = json.loads(line.decode())
  if not isinstance(row, dict):
    raise ValueError(f"a JSON object is needed, not {type(row).__name__}")
  return row


def _opened(
  file: pathlib.Path,
  most: int | None,
  fields: fields_lib.Fields,
  split: str,
  share: int | float,
) -> Examples:
  """A split's examples in one file, `most` of them; all lines are checked."""
  if file.suffix in (".gz", ".bz2", ".xz", ".zst"):
    raise ValueError(f"{file} is compressed: uncompress it (random access)")
  lines = ((where, (i, j), row) for where, i, j, row in rows(file))
  chosen = fields_lib.chosen(lines, fields, split, share)
  places = array.array("q")  # begin and end of each line, in turn
  for place in itertools.islice(chosen, most):
    places.extend(place)
  table = np.array(places, np.int64).reshape(-1, 2)
  return Examples(file, table, os.path.getsize(file), fields)


def load(
  split: str,
  *,
  path: str | os.PathLike = "",
  seed: int = 0,
  size: int | None = None,
  prompt: str = "prompt",
  answer: str = "answer",
  messages: str = "messages",
  answer_after: str = "",
  test: int | float = 0.0,
) -> Sequence[Row]:
  """The examples of one split, in the order of the file.

  Args:
    split: "train" or "test".
    path: a file, a pattern of files ("part-*.jsonl"), or a directory with
      files of each split: train.jsonl, train-*.jsonl or train/*.jsonl.
    seed: not used; the order of training is that of the prompt pipeline.
    size: the first so many examples; None is all. Later lines are not read.
    prompt: as answer, messages and answer_after see `fields.Fields`.
    answer: the field with the answer.
    messages: the field with the prompt where there is no field `prompt`.
    answer_after: what the answer follows.
    test: the share of one set of files' examples that is held out as the test
      split, about: whether an example is one of them depends on its prompt
      alone, so no prompt is in both splits.

  Returns:
    A sequence of the lines' objects, with "prompt" and "answer" (a text) set
    from the fields above; all other fields are as they are.

  Raises:
    ValueError: an unknown split, a missing file, no example, or a line that is
      malformed.
  """
  del seed
  check_split(split)
  fields_lib.check_share(test)
  fields = fields_lib.Fields(prompt, answer, messages, answer_after)
  return files.joined(
    files.of_split(path, split, test, "jsonl", ".jsonl"),
    lambda file, most: _opened(file, most, fields, split, test),
    split,
    size,
  )
