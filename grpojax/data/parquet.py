"""Any data set in Parquet files, verl's among them.

    prompt: [{"role": "user", "content": "..."}]    data_source: "openai/gsm8k"
    reward_model: {"style": "rule", "ground_truth": "72"}
    ability: "math"                                 extra_info: {"index": 0}

One row costs as much as its compressed piece of the file. So opening it checks
every row, and copies the examples of a split, as JSON, to a temporary file (in
TMPDIR) that is gone when the program ends, however it ends.
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

_ROWS = 1024  # read at once


def plain_rows(batch: Any) -> list[Row]:
  """Returns an Arrow table's rows in Python's types.

  Short floats have as many digits as they need: 0.1, not 0.10000000149011612.
  """
  rows = batch.to_pylist()
  for field in batch.schema:
    if "float" in str(field.type):  # float, halffloat, list<item: float>, ...
      for row in rows:
        row[field.name] = _own_digits(row[field.name], field.type)
  return rows


def _own_digits(item: Any, kind: Any) -> Any:
  from pyarrow import types

  if item is None:
    return None
  if types.is_float16(kind) or types.is_float32(kind):
    return float(str(kind.to_pandas_dtype()(item)))
  if types.is_struct(kind):
    return {part.name: _own_digits(item[part.name], part.type) for part in kind}
  if types.is_map(kind):
    return [(key, _own_digits(value, kind.item_type)) for key, value in item]
  if types.is_dictionary(kind):
    return _own_digits(item, kind.value_type)
  if isinstance(item, list):
    return [_own_digits(part, kind.value_type) for part in item]
  return item


def _rows(file: pathlib.Path, columns: Sequence[str]) -> Iterator[Keyed]:
  import pyarrow
  from pyarrow import parquet

  try:
    reader = parquet.ParquetFile(file, memory_map=True)
  except (pyarrow.ArrowException, OSError) as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f"{file} is no Parquet file: {reason}") from error
  names = reader.schema_arrow.names
  rows_lib.check_columns(columns, names, str(file))
  twice = [x for x in columns or names if names.count(x) > 1]
  if twice:
    raise ValueError(
      f"{file} has {names.count(twice[0])} columns {twice[0]!r}: write it "
      "again with one, or name the columns to read in data.options.columns"
    )
  # ValueError: a field with two parts of one name.
  damages = pyarrow.ArrowException, OSError, OverflowError, ValueError
  number = 0
  try:
    for batch in reader.iter_batches(_ROWS, columns=list(columns) or None):
      for row in plain_rows(batch):
        number += 1
        yield f"{file}, row {number}", None, row
  except damages as error:
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
      if not ends[-1]:  # an empty file cannot be mapped
        return Examples(0, lambda i: {})
      mapped = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
  except OSError as error:
    raise ValueError(
      f"{file} could not be copied to a temporary file ({error}): set TMPDIR "
      "to a disk with more room"
    ) from error
  read = lambda i: json.loads(mapped[ends[i] : ends[i + 1]])
  return Examples(len(ends) - 1, read)


load = functools.partial(rows_lib.load, "parquet", _rows, _keep)
