"""Data sets in JSONL files: one JSON object per line.

    {"prompt": "What is 6 times 7?", "answer": "42", "level": 1}
    {"messages": [{"role": "user", "content": "6 * 7 = ?"}], "answer": 42}

Opening a file checks every line and keeps only its position and checksum, so
files may be larger than memory.
"""

import array
import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from grpojax.data import rows as rows_lib
from grpojax.data.examples import Changed, Example, Examples
from grpojax.data.rows import Keyed, Row

_BOM = b"\xef\xbb\xbf"


def rows(file: pathlib.Path) -> Iterator[Keyed]:
  """Yields a label, a key (start, stop, CRC-32) and the object of each line."""
  stop = 0
  with open(file, "rb") as lines:
    for number, line in enumerate(lines, 1):
      start = stop
      stop = stop + len(line)
      if number == 1 and line.startswith(_BOM):
        start = start + len(_BOM)
        line = line.removeprefix(_BOM)
      if line.strip():
        label = f"{file}, line {number}"
        try:
          yield label, (start, stop, zlib.crc32(line)), _object(line)
        except (RecursionError, ValueError) as error:
          advice = _format_advice(line) if number == 1 else ""
          raise ValueError(f"{label}: {error}{advice}") from error


def _format_advice(line: bytes) -> str:
  """Returns advice on a file whose first line is not a JSON object."""
  if line.startswith(b"PAR1"):
    return "; this is a Parquet file: set data.name = 'parquet'"
  kinds = {b"[": "a JSON array", b"{": "JSON over several lines"}
  kind = kinds.get(line.strip()[:1], "CSV")
  return f"; if this file is {kind}, convert it to JSONL: one object per line"


def unique_keys(pairs: list[tuple[str, Any]]) -> Row:
  """Converts a JSON object's pairs to a dict; ValueError for a repeated key."""
  row = dict(pairs)
  if len(row) < len(pairs):
    keys = [key for key, _ in pairs]
    key = next(key for key in keys if keys.count(key) > 1)
    raise ValueError(f"the key {key!r} is repeated in an object: remove one")
  return row


def _constant(name: str) -> None:
  raise ValueError(f"{name} is not valid JSON: write null, or a text")


_DECODER = json.JSONDecoder(
  object_pairs_hook=unique_keys, parse_constant=_constant
)


def _object(line: bytes) -> Row:
  try:
    row = _DECODER.decode(line.decode())
  except UnicodeDecodeError as error:
    raise ValueError(
      f"byte {error.start + 1} of the line is not UTF-8: save the file as UTF-8"
    ) from error
  if not isinstance(row, dict):
    raise ValueError(f"must be a JSON object, not {type(row).__name__}")
  return row


def _keep(
  file: pathlib.Path,
  chosen: Iterator[tuple[Any, Example]],
  reader: Callable[[Row], Example],
) -> Examples:
  places = array.array("q")  # start, stop, CRC-32 of a line, then of the next
  for place, _ in chosen:
    places.extend(place)
  table = np.array(places, np.int64).reshape(-1, 3)

  def read(index: int) -> Example:
    # Each read opens the file: threads need no lock, and no file stays open.
    start, stop, checksum = table[index].tolist()
    with open(file, "rb", buffering=0) as opened:
      opened.seek(start)
      line = opened.read(stop - start)
    if zlib.crc32(line) != checksum:
      raise Changed(f"{file} changed during the run: restore the old version")
    return reader(_object(line))

  return Examples(len(table), read)


load = functools.partial(
  rows_lib.load, "jsonl", lambda file, columns: rows(file), _keep
)
