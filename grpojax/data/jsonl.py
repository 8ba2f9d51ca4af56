"""Data sets in JSONL files: one JSON object per line.

{"prompt": "What is 6 times 7?", "answer": "42", "level": 1}
{"messages": [{"role": "user", "content": "6 * 7 = ?"}], "answer": 42}
"""

import codecs
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from grpojax.data import rows as rows_lib


def rows(file: pathlib.Path, columns: Any = ()) -> Iterator[rows_lib.Labelled]:
  """Yields a label and the object of each line; `columns` are ignored."""
  del columns
  with open(file, "rb") as lines:
    for number, line in enumerate(lines, 1):
      if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
      if line.strip():
        label = f"{file}, line {number}"
        try:
          yield label, _object(line)
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


def unique_keys(pairs: list[tuple[str, Any]]) -> rows_lib.Row:
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


def _object(line: bytes) -> rows_lib.Row:
  try:
    row = _DECODER.decode(line.decode())
  except json.JSONDecodeError as error:
    raise ValueError(f"{error.msg} at character {error.pos + 1}") from error
  except UnicodeDecodeError as error:
    raise ValueError(
      f"byte {error.start + 1} of the line is not UTF-8: save the file as UTF-8"
    ) from error
  if not isinstance(row, dict):
    raise ValueError(f"must be a JSON object, not {type(row).__name__}")
  return row


load = functools.partial(rows_lib.load, "jsonl", rows)
