"""JSON files, written whole or not at all, and files of JSON lines.

A row of JSON lines is a dict with "step" and numbers. Write the rows of a step
before its checkpoint, so that a resumed run has all rows.
"""

import contextlib
import json
import math
import os
import pathlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def _plain(value: Any) -> Any:
  """Converts a value to JSON's types, with None for non-finite numbers."""
  if isinstance(value, Mapping):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else None
  if hasattr(value, "dtype"):  # NumPy and JAX arrays and scalars
    return _plain(np.asarray(value).tolist())
  return value  # json raises an error if it does not know the type


@contextlib.contextmanager
def temporary(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields an unused path next to `path`, and removes its file at the end."""
  other = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
  try:
    yield other
  finally:
    other.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Yields a temporary path; its file replaces `path` if there is no error."""
  # Renaming would replace a link itself, not its target.
  target = pathlib.Path(os.path.realpath(path))
  with temporary(target) as other:
    yield other
    os.replace(other, target)


@contextlib.contextmanager
def _naming(path: str | os.PathLike) -> Iterator[None]:
  """Adds the file's name to OSErrors."""
  try:
    yield
  except OSError as error:
    text = error.strerror or str(error)
    raise OSError(error.errno, text, os.fspath(path)) from error


def write_text(path: str | os.PathLike, text: str) -> None:
  """Writes a file whole or not at all, and waits for the disk."""
  with _naming(path), replacing(path) as other:
    with open(other, "w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())


def write_json(path: str | os.PathLike, obj: Any) -> None:
  """Writes JSON whole or not at all; non-finite numbers become null."""
  write_text(path, json.dumps(_plain(obj), indent=2) + "\n")


def append_jsonl(path: str | os.PathLike, row: Mapping[str, Any]) -> None:
  """Appends a row as a line of JSON, in a single write."""
  with _naming(path), open(path, "a", encoding="utf-8") as file:
    file.write(json.dumps(_plain(row)) + "\n")


def json_object(text: str | bytes) -> dict[str, Any] | None:
  """Parses a JSON object; returns None for any other text."""
  try:
    value = json.loads(text)
  except (RecursionError, ValueError):
    return None
  return value if isinstance(value, dict) else None


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns all rows except an incomplete last one; ValueError if damaged."""
  # Keeps a path of etils, which may be on gs://.
  file = path if isinstance(path, pathlib.PurePath) else pathlib.Path(path)
  if not file.exists():
    return []
  *lines, _ = file.read_bytes().split(b"\n")
  rows = []
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
      if not isinstance(row, dict) or type(row.get("step", 0)) is not int:
        raise ValueError(f"no object with an integer step: {row!r:.40}")
    except (RecursionError, ValueError) as error:
      reason = getattr(error, "msg", error)  # JSON's text names another line
      text = f"{path}, line {number}: no row of JSON ({reason}): remove it"
      raise ValueError(text) from error
    rows.append(row)
  return rows


def truncate_jsonl(path: str | os.PathLike, step: int) -> None:
  """Drops rows after `step`, which a resumed run writes again."""
  if os.path.exists(path):
    rows = [r for r in read_jsonl(path) if r.get("step", step) <= step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def duration(seconds: int | float) -> str:
  """Formats a duration as "12s", "3m05s" or "2h07m"."""
  seconds = max(round(seconds), 0)
  if seconds < 60:
    return f"{seconds}s"
  if seconds < 3600:
    return f"{seconds // 60}m{seconds % 60:02d}s"
  return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
