"""Any data set in Parquet files, verl's among them.

    prompt: [{"role": "user", "content": "..."}]    data_source: "openai/gsm8k"
    reward_model: {"style": "rule", "ground_truth": "72"}
    ability: "math"                                 extra_info: {"index": 0}

A Parquet file is compressed in large pieces, of which one row costs as much as
all. So opening it reads it once, checks every row, and writes those of the
split to a temporary file (TMPDIR) without compression, of which only what is
asked for is in memory. That file is gone when the program ends, however it
ends.
"""

import operator
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np

from grpojax.data import fields as fields_lib
from grpojax.data import files
from grpojax.data.examples import check_split
from grpojax.data.fields import Row

_ROWS = 1024  # read at once


class Examples(Sequence):
  """Random access to rows that are on a disk; see `load`."""

  def __init__(self, batches: Sequence[Any], fields: fields_lib.Fields):
    self._batches, self._fields = batches, fields  # pyarrow's, mapped
    self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])

  def __len__(self) -> int:
    return int(self._starts[-1])

  def __getitem__(self, index: SupportsIndex) -> Row:
    index = operator.index(index)
    if not 0 <= index < len(self):
      raise IndexError(f"example {index} of {len(self)}")
    i = int(np.searchsorted(self._starts, index, side="right")) - 1
    row = self._batches[i].slice(index - int(self._starts[i]), 1)
    return fields_lib.example(
      fields_lib.plain_row(row.to_pylist()[0]), self._fields
    )


def _reader(file: pathlib.Path, columns: Sequence[str]) -> Any:
  """The file, of which nothing but its end has been read."""
  import pyarrow
  from pyarrow import parquet

  try:
    reader = parquet.ParquetFile(file, memory_map=True)
  except (pyarrow.ArrowException, OSError) as error:
    said = str(error).splitlines()[0]
    raise ValueError(f"{file} is no Parquet file: {said}") from error
  unknown = sorted({*columns} - {*reader.schema_arrow.names})
  if unknown:
    raise ValueError(
      f"--config.data.options.columns: {file} has no column {unknown[0]!r}; "
      "its columns "
      f"are {reader.schema_arrow.names}"
    )
  return reader


def _rows(
  reader: Any, columns: Sequence[str], file: pathlib.Path
) -> Iterator[tuple[tuple[Any, int], Row]]:
  """All rows, with their batch and their place in it."""
  import pyarrow

  batches = reader.iter_batches(_ROWS, columns=list(columns) or None)
  damages = pyarrow.ArrowException, OSError, OverflowError, UnicodeError
  while True:
    try:
      batch = next(batches, None)
      rows = [] if batch is None else batch.to_pylist()
    except damages as error:
      said = next(iter(str(error).splitlines()), type(error).__name__)
      raise ValueError(f"{file} is damaged: {said}") from error
    if batch is None:
      return
    for i, row in enumerate(rows):
      yield (batch, i), row


def _kept(places: Iterator[tuple[Any, int]], most: int | None) -> Iterator[Any]:
  """The chosen rows of each batch, as a batch, until there are `most`."""
  of, rows, count = None, [], 0
  for batch, i in places:
    if batch is not of and rows:
      yield of.take(rows)
      rows = []
    of, count = batch, count + 1
    rows.append(i)
    if count == most:
      break
  if rows:
    yield of.take(rows)


def _opened(
  file: pathlib.Path,
  most: int | None,
  columns: Sequence[str],
  fields: fields_lib.Fields,
  split: str,
  share: int | float,
) -> Examples:
  """A split's examples in one file, `most` of them; all rows are checked."""
  import pyarrow

  reader = _reader(file, columns)
  rows = fields_lib.numbered(_rows(reader, columns, file), str(file))
  places = fields_lib.chosen(rows, fields, split, share)
  with tempfile.NamedTemporaryFile(prefix="grpojax-", suffix=".arrow") as copy:
    try:
      writer = None
      for batch in _kept(places, most):
        writer = writer or pyarrow.ipc.new_file(copy.name, batch.schema)
        writer.write_batch(batch)
      if writer is None:
        return Examples([], fields)
      writer.close()
    except OSError as error:
      raise ValueError(
        f"{file} could not be copied to {os.path.dirname(copy.name)} "
        f"({error}): set TMPDIR to a disk with more room"
      ) from error
    mapped = pyarrow.ipc.open_file(pyarrow.memory_map(copy.name))
    return Examples(
      [mapped.get_batch(i) for i in range(mapped.num_record_batches)], fields
    )


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
  columns: Sequence[str] = (),
  test: int | float = 0.0,
) -> Sequence[Row]:
  """The examples of one split, in the order of the files.

  Args:
    split: "train" or "test".
    path: a file, a pattern of files, or a directory, as of `jsonl.load`.
    seed: not used; the order of training is that of the prompt pipeline.
    size: the first so many examples; None is all. Later rows are not read.
    prompt: as answer, messages and answer_after see `fields.Fields`.
    answer: the column with the answer.
    messages: the column with the prompt where there is no column `prompt`.
    answer_after: what the answer follows.
    columns: to read; () is all. Those with bytes (images) cannot be read.
    test: as of `jsonl.load`.

  Returns:
    A sequence of rows as `jsonl.load` gives them; dates are texts.

  Raises:
    ValueError: an unknown split, a missing or damaged file, no example, or a
      row that is malformed.
  """
  del seed
  check_split(split)
  fields_lib.check_share(test)
  fields = fields_lib.Fields(prompt, answer, messages, answer_after)
  return files.joined(
    files.of_split(path, split, test, "parquet", ".parquet"),
    lambda file, most: _opened(file, most, columns, fields, split, test),
    split,
    size,
  )
