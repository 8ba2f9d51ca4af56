"""Rows of any data set as examples: which field is the prompt, the answer.

Files of any kind come to this, so that they have the same options, are checked
alike, and say the same of what is wrong.

A name with dots is a field of a field. Where there is no field "answer", that
of verl's files is taken: reward_model = {"style": ..., "ground_truth": ...}.
"""

import datetime
import decimal
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

Row = dict[str, Any]

GROUND_TRUTH = "reward_model.ground_truth"
"""Where verl's files have the answer."""


class Fields(NamedTuple):
  """How rows are read, as the arguments of a data set's `load` are called.

  Attributes:
    prompt: the field with the prompt, a text or a list of chat messages
      {"role": ..., "content": ...}, of which the last is not the assistant's.
    answer: the field with the answer, a text or a number; "" is for data
      without answers, whose rewards need none or read other fields.
    messages: the field with the prompt where there is no field `prompt`.
    answer_after: the answer is what follows the last of these ("####", say),
      and the whole of it the example's "solution"; "" is all of it.
  """

  prompt: str = "prompt"
  answer: str = "answer"
  messages: str = "messages"
  answer_after: str = ""


def value(row: Row, name: str) -> Any:
  """A field, or by a name with dots a field of a field; None where none is."""
  if name in row:
    return row[name]
  for part in name.split("."):
    row = row.get(part) if isinstance(row, dict) else None
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


def _answer(row: Row, fields: Fields) -> str:
  answer = value(row, fields.answer)
  if answer is None and fields.answer == Fields().answer:
    answer = value(row, GROUND_TRUTH)
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
  return answer


def example(row: Row, fields: Fields) -> Row:
  """A row with its prompt and its answer under their usual names.

  Raises:
    ValueError: it has none, or they are not what they must be.
  """
  prompt, name = value(row, fields.prompt), fields.prompt
  if prompt is None and value(row, fields.messages) is not None:
    prompt, name = value(row, fields.messages), fields.messages
  if prompt is None and not {fields.prompt, fields.messages} & row.keys():
    raise ValueError(
      f"no field {fields.prompt!r} and no field {fields.messages!r}: "
      "data.options.prompt and data.options.messages name them; the fields are "
      f"{sorted(row)}"
    )
  text = isinstance(prompt, str)
  prompt = (_text if text else _messages)(prompt, name)
  if not fields.answer:
    return row | {"prompt": prompt}
  answer = _answer(row, fields)
  if not fields.answer_after:
    return row | {"prompt": prompt, "answer": answer}
  _, mark, end = answer.rpartition(fields.answer_after)
  if not mark:
    raise ValueError(
      f"the answer has no {fields.answer_after!r}, which "
      f"data.options.answer_after says comes before it: {answer[-80:]!r}"
    )
  found = {"prompt": prompt, "answer": end.strip()}
  return {"solution": answer} | row | found


def plain(item: Any, what: str) -> Any:
  """A value as one of JSON's types, which is what examples are made of.

  Raises:
    ValueError: it is of bytes.
  """
  if isinstance(item, dict):
    return {str(k): plain(v, what) for k, v in item.items()}
  if isinstance(item, (list, tuple)):
    return [plain(v, what) for v in item]
  if item is None or isinstance(item, (str, int, float)):
    return item
  if isinstance(item, decimal.Decimal | datetime.timedelta):
    return str(item)
  if isinstance(item, datetime.date | datetime.time):
    return item.isoformat()
  raise ValueError(
    f"the column {what!r} holds {type(item).__name__}, not text or numbers: "
    "name the columns to read in data.options.columns"
  )


def plain_row(row: Row) -> Row:
  """A row of a table; see `plain`."""
  return {name: plain(item, name) for name, item in row.items()}


def numbered(
  rows: Iterable[tuple[Any, Row]], where: str
) -> Iterator[tuple[str, Any, Row]]:
  """Rows of a table, for `chosen`: they are counted from 1.

  Args:
    rows: (what `chosen` gives back, row).
    where: they are from.

  Raises:
    ValueError: a value is not one of JSON's types; says where.
  """
  for number, (place, row) in enumerate(rows, 1):
    try:
      yield f"{where}, row {number}", place, plain_row(row)
    except ValueError as error:
      raise ValueError(f"{where}, row {number}: {error}") from error


def held_out(prompt: Any, share: int | float) -> bool:
  """Whether a prompt is held out: a property of the prompt alone."""
  text = prompt if isinstance(prompt, str) else json.dumps(prompt)
  return zlib.crc32(text.encode()) < share * 2**32


def chosen(
  rows: Iterator[tuple[str, Any, Row]],
  fields: Fields,
  split: str,
  share: int | float,
) -> Iterator[Any]:
  """Which rows are examples of a split; all are checked.

  Args:
    rows: "FILE, line 3" for errors, what to give back, and the row.
    fields: how to read it.
    split: "train" or "test".
    share: that is held out as the test split; 0 is where all are of the split.

  Raises:
    ValueError: a row that is malformed; says which one.
  """
  for where, place, row in rows:
    try:
      prompt = example(row, fields)["prompt"]
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from error
    if not share or held_out(prompt, share) == (split == "test"):
      yield place


def check_share(share: int | float) -> None:
  """Raises ValueError where data.options.test is no share."""
  if not 0 <= share <= 1:
    raise ValueError(f"data.options.test = {share}: a share in 0..1")
