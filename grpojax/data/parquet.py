"""Data sets in Parquet files, including files for verl.

    prompt: [{"role": "user", "content": "..."}]    data_source: "openai/gsm8k"
    reward_model: {"style": "rule", "ground_truth": "72"}
    ability: "math"                                 extra_info: {"index": 0}

Reading a single row decompresses its whole row group. Opening a file therefore
checks every row and copies the examples of a split, as JSON, to an unnamed
temporary file in TMPDIR, which the system frees when the program ends.
"""

import array
import functools
import json
import mmap
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grpojax.data import rows as rows_lib
from grpojax.data.examples import Example, Examples
from grpojax.data.rows import Keyed, Row

_ROWS = 1024  # per batch


def plain_rows(batch: Any) -> list[Row]:
  """Converts an Arrow table to rows; float32 0.1 stays 0.1 in float64."""
  rows = batch.to_pylist()
  for field in batch.schema:
    if "float" in str(field.type):  # float, halffloat, list<item: float>, ...
      for row in rows:
        row[field.name] = _shortest(row[field.name], field.type)
  return rows


def _shortest(item: Any, kind: Any) -> Any:
  """Rounds an item's floats to the shortest decimals that identify them."""
  from pyarrow import types

  if item is None:
    return None
  if types.is_float16(kind) or types.is_float32(kind):
    return float(str(kind.to_pandas_dtype()(item)))
  if types.is_struct(kind):
    return {part.name: _shortest(item[part.name], part.type) for part in kind}
  if types.is_map(kind):
    return [(key, _shortest(value, kind.item_type)) for key, value in item]
  if types.is_dictionary(kind):
    return _shortest(item, kind.value_type)
  if isinstance(item, list):
    return [_shortest(part, kind.value_type) for part in item]
  return item


def _rows(file: pathlib.Path, columns: Sequence[str]) -> Iterator[Keyed]:
  import pyarrow
  from pyarrow import parquet

  try:
    reader = parquet.ParquetFile(file, memory_map=True)
  except (pyarrow.ArrowException, OSError) as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f"{file} is not a Parquet file: {reason}") from error
  names = reader.schema_arrow.names
  rows_lib.check_columns(columns, names, str(file))
  repeated = [x for x in columns or names if names.count(x) > 1]
  if repeated:
    raise ValueError(
      f"{file} has {names.count(repeated[0])} columns {repeated[0]!r}: rename "
      "them, or list the columns to read in data.options.columns"
    )
  # pyarrow raises ValueError for a struct with two fields of the same name.
  errors = pyarrow.ArrowException, OSError, OverflowError, ValueError
  number = 0
  try:
    for batch in reader.iter_batches(_ROWS, columns=list(columns) or None):
      for row in plain_rows(batch):
        number += 1
        yield f"{file}, row {number}", None, row
  except errors as error:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    raise ValueError(f"{file} cannot be read: {reason}") from error


def _keep(
  file: pathlib.Path,
  chosen: Iterator[tuple[Any, Example]],
  _: Callable[[Row], Example],
) -> Examples:
  ends = array.array("q", [0])
  try:
    with tempfile.TemporaryFile(prefix="grpojax-") as copy:
      for _, row in chosen:
        ends.append(ends[-1] + copy.write(json.dumps(row).encode() + b"\n"))
      copy.flush()
      if not ends[-1]:  # mmap refuses an empty file
        return Examples(0, lambda i: {})
      mapped = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
  except OSError as error:
    raise ValueError(
      f"{file} could not be copied to a temporary file ({error}): set TMPDIR "
      "to a disk with more space"
    ) from error
  read = lambda i: json.loads(mapped[ends[i] : ends[i + 1]])
  return Examples(len(ends) - 1, read)


load = functools.partial(rows_lib.load, "parquet", _rows, _keep)
