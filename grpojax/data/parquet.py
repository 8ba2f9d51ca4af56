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

import functools
import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpojax.data import fields as fields_lib
from grpojax.data import files
from grpojax.data.examples import Examples, concatenate
from grpojax.data.fields import Row

_ROWS = 1024  # read at once


def _reader(file: pathlib.Path, columns: Sequence[str]) -> Any:
  """The file, of which nothing but its end has been read."""
  import pyarrow
  from pyarrow import parquet

  try:
    reader = parquet.ParquetFile(file, memory_map=True)
  except (pyarrow.ArrowException, OSError) as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f"{file} is no Parquet file: {reason}") from error
  fields_lib.check_columns(columns, reader.schema_arrow.names, str(file))
  return reader


def _rows(
  reader: Any, columns: Sequence[str], file: pathlib.Path
) -> Iterator[tuple[str, tuple[Any, int], Row]]:
  """All rows: a label for errors, their batch and their place in it."""
  import pyarrow

  batches = reader.iter_batches(_ROWS, columns=list(columns) or None)
  damages = pyarrow.ArrowException, OSError, OverflowError, UnicodeError
  number = 0
  while True:
    try:
      batch = next(batches, None)
      rows = [] if batch is None else batch.to_pylist()
    except damages as error:
      reason = next(iter(str(error).splitlines()), type(error).__name__)
      raise ValueError(f"{file} is damaged: {reason}") from error
    if batch is None:
      return
    for i, row in enumerate(rows):
      number += 1
      yield f"{file}, row {number}", (batch, i), row


def _taken(
  places: Iterator[tuple[Any, int]], most: int | None
) -> Iterator[Any]:
  """The first `most` chosen rows: of each batch those that are, as a batch."""
  first = itertools.islice(places, most)
  for _, group in itertools.groupby(first, key=lambda place: id(place[0])):
    batches, indices = zip(*group, strict=True)
    yield batches[0].take(list(indices))


def _opened(
  file: pathlib.Path,
  most: int | None,
  columns: Sequence[str],
  example: Callable[[Row], Row],
  split: str,
  share: int | float,
) -> Examples:
  """A split's examples in one file, `most` of them; all rows are checked."""
  import pyarrow

  rows = _rows(_reader(file, columns), columns, file)
  places = fields_lib.chosen(rows, example, split, share)
  with tempfile.NamedTemporaryFile(prefix="grpojax-", suffix=".arrow") as copy:
    try:
      writer = None
      for batch in _taken(places, most):
        writer = writer or pyarrow.ipc.new_file(copy.name, batch.schema)
        writer.write_batch(batch)
      if writer is None:
        return concatenate([], lambda i, j: {})
      writer.close()
    except OSError as error:
      raise ValueError(
        f"{file} could not be copied to {os.path.dirname(copy.name)} "
        f"({error}): set TMPDIR to a disk with more room"
      ) from error
    mapped = pyarrow.ipc.open_file(pyarrow.memory_map(copy.name))
  batches = [mapped.get_batch(i) for i in range(mapped.num_record_batches)]

  def read(batch: int, index: int) -> Row:
    (row,) = batches[batch].slice(index, 1).to_pylist()
    return example(row)

  return concatenate([batch.num_rows for batch in batches], read)


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
  """Reads the rows of one split as `jsonl.load` does; dates are texts.

  `columns` are those to read; () is all. Bytes (images) cannot be read.
  """
  del seed
  fields = fields_lib.Fields(prompt, answer, messages, answer_after)
  example = functools.partial(fields_lib.table_example, fields=fields)
  opened = functools.partial(
    _opened, columns=columns, example=example, split=split, share=test
  )
  return files.load("parquet", opened, split, path, test, size)
