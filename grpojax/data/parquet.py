"""Data sets in Parquet files, including files for verl.

prompt: [{"role": "user", "content": "..."}]    data_source: "openai/gsm8k"
reward_model: {"style": "rule", "ground_truth": "72"}
ability: "math"                                 extra_info: {"index": 0}
"""

import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from grpojax.data import rows as rows_lib
from grpojax.data.rows import Labelled, Row

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


def _rows(file: pathlib.Path, columns: Sequence[str]) -> Iterator[Labelled]:
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
        yield f"{file}, row {number}", row
  except errors as error:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    raise ValueError(f"{file} cannot be read: {reason}") from error


load = functools.partial(rows_lib.load, "parquet", _rows)
