"""Records on disk and on screen: JSON, JSON lines, TensorBoard, progress.

A row is a dict with "step" and numbers. Write the rows of step k before the
checkpoint of step k, so that resuming from it loses none.
"""

import contextlib
import json
import math
import os
import pathlib
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def _plain(value: Any) -> Any:
  """JSON's own types; numbers that are not finite become null."""
  if isinstance(value, Mapping):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  if value is None or isinstance(value, (str, bool, int)):
    return value
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else None
  if hasattr(value, "dtype"):  # NumPy and JAX arrays and scalars
    return _plain(np.asarray(value).tolist())
  return value  # json says what it cannot write


def _target(path: str | os.PathLike) -> pathlib.Path:
  """The file that a link leads to: renaming would put a file in its place."""
  return pathlib.Path(os.path.realpath(path))


def check_writable(path: str | os.PathLike) -> None:
  """Whether `write_text` could write a file; leaves nothing behind.

  Raises:
    ValueError: it is a directory, or a device or a pipe, in whose place a file
      would be put.
    OSError: the operating system refuses it.
  """
  path = _target(path)
  if path.is_dir():
    raise ValueError(f"{path} is a directory: give the name of a file")
  if path.exists() and not path.is_file():
    raise ValueError(f"{path} is no file: give the name of one")
  temporary = _temporary(path)
  with open(temporary, "w"):
    pass
  temporary.unlink()


def _temporary(path: pathlib.Path) -> pathlib.Path:
  """A name beside a file's that nobody else takes, on another machine either.

  Two processes that write the same file would fill one and the same other, and
  the first to be done would take it away from the second.
  """
  return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """A path to write to that becomes the file's where the context ends well.

  The file is there whole or not at all. Of several processes that write it, the
  last one's stays.
  """
  target = _target(path)
  temporary = _temporary(target)
  try:
    yield temporary
    os.replace(temporary, target)
  except BaseException:  # Ctrl-C, too
    temporary.unlink(missing_ok=True)
    raise


@contextlib.contextmanager
def _naming(path: str | os.PathLike) -> Iterator[None]:
  """What the operating system refuses in here is said of this file."""
  try:
    yield
  except OSError as error:
    text = error.strerror or str(error)
    raise OSError(error.errno, text, os.fspath(path)) from error


def write_text(path: str | os.PathLike, text: str) -> None:
  """Writes a file whole or not at all, see `replacing`."""
  with _naming(path), replacing(path) as temporary:
    with open(temporary, "w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())


def write_json(path: str | os.PathLike, obj: Any) -> None:
  """Writes JSON whole or not at all; non-finite numbers become null."""
  write_text(path, json.dumps(_plain(obj), indent=2) + "\n")


def append_jsonl(path: str | os.PathLike, row: Mapping[str, Any]) -> None:
  """Appends one line, in one write, and hands it to the operating system."""
  with _naming(path), open(path, "a", encoding="utf-8") as file:
    file.write(json.dumps(_plain(row)) + "\n")


def _row(line: bytes) -> dict[str, Any]:
  try:
    row = json.loads(line)
  except ValueError as error:
    raise ValueError(f"not JSON: {error}") from error
  if not isinstance(row, dict):
    raise ValueError(f"a JSON object is needed, not {row!r:.40}")
  step = row.get("step", 0)
  if not isinstance(step, int) or isinstance(step, bool):
    raise ValueError(f"its step is no whole number, but {step!r:.40}")
  return row


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
  """All rows; none where there is no file. A torn last line is left out.

  Raises:
    ValueError: a line before the last is no JSON object, or its "step" is no
      whole number; the error says which line.
  """
  if not os.path.exists(path):
    return []
  rows = []
  lines = pathlib.Path(path).read_bytes().split(b"\n")
  for number, line in enumerate(lines, 1):
    if number == len(lines):
      break  # a whole line ends with a newline: this is empty or torn
    try:
      rows.append(_row(line))
    except (RecursionError, ValueError) as error:
      raise ValueError(
        f"{path}, line {number}: {error}; remove the line"
      ) from error
  return rows


def truncate_jsonl(path: str | os.PathLike, step: int) -> None:
  """Drops what a resumed run will write again: rows later than `step`.

  Also drops a torn last line. Rows without a step stay.

  Args:
    path: may be missing.
    step: the restored checkpoint's.
  """
  if os.path.exists(path):
    rows = [r for r in read_jsonl(path) if r.get("step", step) <= step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def tensorboard_writer(log_dir: str | os.PathLike, step: int = 0):
  """Opens a file for `write_scalars`; hides what a lost run wrote after `step`.

  tensorboardX's file, but not its SummaryWriter: that hands all over to a
  thread, and waits for it for ever where the disk is full.

  Returns:
    A writer, to be closed.
  """
  from tensorboardX.event_file_writer import EventsWriter
  from tensorboardX.proto.event_pb2 import Event, SessionLog

  os.makedirs(log_dir, exist_ok=True)
  writer = EventsWriter(os.path.join(log_dir, "events"), f".{os.getpid()}")
  start = SessionLog(status=SessionLog.START)
  now = time.time()
  writer.write_event(Event(wall_time=now, step=step + 1, session_log=start))
  writer.flush()
  return writer


def write_scalars(writer, step: int, values: Mapping[str, Any]) -> None:
  """Writes the finite numbers of a row, a tag each; the rest is skipped."""
  from tensorboardX.proto.event_pb2 import Event
  from tensorboardX.summary import scalar

  for name, value in _plain(values).items():
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and name != "step":
      summary, now = scalar(name, value), time.time()
      writer.write_event(Event(wall_time=now, step=step, summary=summary))
  writer.flush()


def close_writer(writer) -> None:
  """Closes a writer; what a full disk does not take was said before."""
  with contextlib.suppress(OSError):
    writer.close()


def duration(seconds: int | float) -> str:
  """For people: "12s", "3m05s", "2h07m"."""
  seconds = max(round(seconds), 0)
  if seconds < 60:
    return f"{seconds}s"
  if seconds < 3600:
    return f"{seconds // 60}m{seconds % 60:02d}s"
  return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def progress(
  step: int,
  steps: int,
  seconds: int | float | None,
  left: int | float | None,
  metrics: Mapping[str, Any],
) -> str:
  """One line for the terminal.

  Args:
    step: steps done.
    steps: steps in all.
    seconds: what one step takes, as the caller averages it; None while that
      is not known.
    left: seconds that the rest takes, with all that is between steps.
    metrics: shown in this order, numbers to three digits.
  """
  shown = [
    f"{k} {v}" if isinstance(v, str) else f"{k} {float(v):.3g}"
    for k, v in metrics.items()
  ]
  if seconds is not None:
    shown.append(f"{seconds:.2f} s/step")
  if left is not None:
    shown.append(f"{duration(left)} left")
  return "  ".join([f"step {step:>{len(str(steps))}}/{steps}", *shown])
