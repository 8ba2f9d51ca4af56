"""Any data set in a JSONL file: one JSON object a line.

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
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from grpojax.data.examples import check_split

_BOM = b"\xef\xbb\xbf"

Row = dict[str, Any]


class Fields(NamedTuple):
  """Names of the fields that `load` reads, as its arguments are called."""

  prompt: str = "prompt"
  answer: str = "answer"
  messages: str = "messages"


class Examples(Sequence):
  """Random access to the lines of a file; see `load`.

  The file is opened anew for each example: there is nothing that threads could
  share, and nothing to close.
  """

  def __init__(
    self, file: pathlib.Path, places: np.ndarray, size: int, fields: Fields
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
    return _example(_object(line), self._fields)


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


def _text(value: Any, what: str) -> str:
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f"{what} must be a text that is not empty, not {value!r}")
  value.encode()  # half a surrogate pair is in no vocabulary
  return value


def _messages(value: Any, what: str) -> list[dict[str, Any]]:
  """Checks chat messages, of which the last asks for an answer."""
  if not isinstance(value, list) or not value:
    raise ValueError(f"{what} must be a text or a list of messages: {value!r}")
  for message in value:
    if not isinstance(message, dict):
      raise ValueError(f"{what}: a message is an object, not {message!r}")
    for key in ("role", "content"):
      _text(message.get(key), f"{what}: a message's {key}")
  if value[-1]["role"] == "assistant":
    raise ValueError(
      f"{what} ends with an assistant's message, but the model writes that: "
      "leave it out, or move it to another field"
    )
  return value


def _example(row: Row, fields: Fields) -> Row:
  """A row with its prompt and its answer under their usual names."""
  name = fields.prompt if fields.prompt in row else fields.messages
  if name not in row:
    raise ValueError(
      f"no field {fields.prompt!r} and no field {fields.messages!r}: "
      "--config.data.options.prompt and .messages name them; the fields are "
      f"{sorted(row)}"
    )
  text = isinstance(row[name], str)
  prompt = (_text if text else _messages)(row[name], name)
  if not fields.answer:
    return row | {"prompt": prompt}
  answer = row.get(fields.answer)
  if isinstance(answer, (int, float)) and not isinstance(answer, bool):
    if not abs(answer) < float("inf"):
      raise ValueError(f"the answer {fields.answer!r} is {answer}: no number")
    answer = json.dumps(answer)
  if not isinstance(answer, str):
    raise ValueError(
      f"the answer {fields.answer!r} must be a text or a number, not "
      f"{answer!r}; data.options.answer names its field, '' if there is none"
    )
  answer.encode()
  return row | {"prompt": prompt, "answer": answer}


def _held_out(prompt: Any, share: int | float) -> bool:
  """Whether a prompt is held out: a property of the prompt alone."""
  text = prompt if isinstance(prompt, str) else json.dumps(prompt)
  return zlib.crc32(text.encode()) < share * 2**32


def _places(
  file: pathlib.Path, fields: Fields, split: str, share: int | float
) -> Iterator[tuple[int, int]]:
  """Where the lines of a split's examples begin and end; all are checked."""
  for where, start, stop, row in rows(file):
    try:
      prompt = _example(row, fields)["prompt"]
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from error
    if not share or _held_out(prompt, share) == (split == "test"):
      yield start, stop


def _file(
  path: str | os.PathLike, split: str, share: int | float
) -> pathlib.Path:
  """The file that holds a split, alone or with the other one."""
  if not str(path):
    raise ValueError(
      "--config.data.name = 'jsonl' needs data.path: a file, or a directory "
      "with train.jsonl and test.jsonl"
    )
  file = pathlib.Path(path)
  if file.is_dir():
    if share:
      raise ValueError(
        f"--config.data.options.test = {share} is for a single file, and "
        f"{file} is a directory with a file a split: leave it out"
      )
    file = file / f"{split}.jsonl"
  elif file.is_file() and not share and split == "test":
    raise ValueError(
      f"--config.data.path = {str(path)!r} is a single file without held-out "
      "problems: give a directory with train.jsonl and test.jsonl, or hold "
      "out a share of the file's problems by data.options.test (0.05, say; 1 "
      "is all)"
    )
  if not file.is_file():
    raise ValueError(f"--config.data.path: {file} does not exist")
  if file.suffix in (".gz", ".bz2", ".xz", ".zst"):
    raise ValueError(f"{file} is compressed: uncompress it (random access)")
  return file


def load(
  split: str,
  *,
  path: str | os.PathLike = "",
  seed: int = 0,
  size: int | None = None,
  prompt: str = "prompt",
  answer: str = "answer",
  messages: str = "messages",
  test: int | float = 0.0,
) -> Examples:
  """The examples of one split, in the order of the file.

  Args:
    split: "train" or "test".
    path: a directory with train.jsonl and test.jsonl, or one file.
    seed: not used; the order of training is that of the prompt pipeline.
    size: the first so many examples; None is all. Later lines are not read.
    prompt: the field with the prompt, a text or a list of chat messages
      {"role": ..., "content": ...}, of which the last is not the assistant's.
    answer: the field with the answer, a text or a number; "" is for data
      without answers, whose rewards need none or read other fields.
    messages: the field with the prompt where there is no field `prompt`.
    test: the share of a single file's examples that is held out as the test
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
  if not 0 <= test <= 1:
    raise ValueError(f"--config.data.options.test = {test}: a share in 0..1")
  fields, file = Fields(prompt, answer, messages), _file(path, split, test)
  places = array.array("q")  # begin and end of each line, in turn
  for place in itertools.islice(_places(file, fields, split, test), size):
    places.extend(place)
  if not places:
    raise ValueError(f"{file} holds no example of the split {split!r}")
  table = np.frombuffer(places, np.int64).reshape(-1, 2)
  return Examples(file, table, os.path.getsize(file), fields)
