"""Rows of any data set as examples: their prompt and answer, found and checked.

Files of any kind come to this, so that they have the same options and the same
errors. A name with dots is a field of a field. Where there is no field
"answer", that of verl's files is taken: reward_model = {"ground_truth": ...}.
"""

import datetime
import decimal
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from grpojax.data.examples import Example, prompt_key

Row = dict[str, Any]

_GROUND_TRUTH = "reward_model.ground_truth"


def reader(
  prompt: str = "prompt",
  answer: str = "answer",
  messages: str = "messages",
  answer_after: str = "",
  columns: Sequence[str] = (),
) -> Callable[[Row], Example]:
  """Returns a function that makes an example of a row, and checks it.

  The arguments are called as the options of every data set of rows.

  Args:
    prompt: the field with the prompt, a text or a list of chat messages
      {"role": ..., "content": ...}, of which the last is not the assistant's.
    answer: the field with the answer, a text or a number; "" is for data
      without answers, whose rewards need none or read other fields.
    messages: the field with the prompt where there is no field `prompt`.
    answer_after: mark ("####", say) after the last of which the answer stands;
      the whole field is the example's "solution" then. "": it is all answer.
    columns: fields of the row that are read; () is all.

  Returns:
    `(row) -> example` of JSON's values; a ValueError says what is missing.
  """

  def example(row: Row) -> Example:
    names = [name for name in row if not columns or name in columns]
    row = {name: _plain(row[name], name) for name in names}
    one = row | {"prompt": _prompt(row, prompt, messages)}
    if not answer:
      return one
    value = _answer(row, answer)
    if not answer_after:
      return one | {"answer": value}
    solution = str(value)
    _, mark, end = solution.rpartition(answer_after)
    if not mark:
      raise ValueError(
        f"the answer has no {answer_after!r}, which data.options.answer_after "
        f"says comes before it: {solution[-80:]!r}"
      )
    # A field "solution" of the row comes before the answer as a solution.
    return {"solution": solution} | one | {"answer": end.strip()}

  return example


def _value(row: Row, name: str) -> Any:
  """A field, or by a name with dots a field of a field; None where none is."""
  if name in row:
    return row[name]
  for part in name.split("."):
    row = row.get(part) if isinstance(row, dict) else None
  return row


def _check_text(value: Any, name: str) -> None:
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f"{name} must be a text that is not empty, not {value!r}")
  _check_utf8(value, name)


def _check_utf8(text: str, name: str) -> None:
  """Raises ValueError for half a surrogate pair, which no tokenizer reads."""
  if half := re.search("[\ud800-\udfff]", text):
    raise ValueError(
      f"{name} is no text: its character {half.start()}, {half[0]!r}, is half "
      "of a surrogate pair: write the whole character, or remove it"
    )


def _prompt(row: Row, name: str, messages: str) -> str | list[Row]:
  value = _value(row, name)
  if value is None and _value(row, messages) is not None:
    value, name = _value(row, messages), messages
  if value is None and not {name, messages} & row.keys():
    raise ValueError(
      f"no field {name!r} and no field {messages!r}: data.options.prompt and "
      f"data.options.messages name them; the fields are {sorted(row)}"
    )
  if isinstance(value, str):
    _check_text(value, name)
    return value
  if not isinstance(value, list) or not value:
    raise ValueError(f"{name} must be a text or a list of messages: {value!r}")
  for message in value:
    if not isinstance(message, dict):
      raise ValueError(f"{name}: a message is an object, not {message!r}")
    for key in ("role", "content"):
      _check_text(message.get(key), f"{name}: a message's {key}")
  if value[-1]["role"] == "assistant":
    raise ValueError(
      f"{name} ends with an assistant's message, but the model writes that: "
      "leave it out, or move it to another field"
    )
  return value


def _answer(row: Row, name: str) -> str | int | float:
  answer = _value(row, name)
  if answer is None and name == "answer":
    answer = _value(row, _GROUND_TRUTH)
  if isinstance(answer, (int, float)) and not isinstance(answer, bool):
    if not abs(answer) < float("inf"):
      raise ValueError(f"the answer {name!r} is {answer}: not a number")
    return answer
  if not isinstance(answer, str):
    raise ValueError(
      f"the answer {name!r} must be a text or a number, not {answer!r}; "
      "data.options.answer names its field, '' if there is none"
    )
  _check_utf8(answer, f"the answer {name!r}")
  return answer


def _plain(item: Any, column: str) -> Any:
  if isinstance(item, dict):
    return {str(k): _plain(v, column) for k, v in item.items()}
  if isinstance(item, (list, tuple)):
    return [_plain(v, column) for v in item]
  if item is None or isinstance(item, (str, int, float)):
    return item
  if isinstance(item, decimal.Decimal | datetime.timedelta):
    return str(item)
  if isinstance(item, datetime.date | datetime.time):
    return item.isoformat()
  raise ValueError(
    f"the column {column!r} holds {type(item).__name__}, not text or numbers: "
    "name the columns to read in data.options.columns"
  )


def chosen(
  rows: Iterable[tuple[str, Any, Row]],
  read: Callable[[Row], Row],
  split: str,
  share: int | float,
  most: int | None,
) -> Iterator[tuple[Any, Row]]:
  """Yields (key, example) of the rows that are of a split; checks all.

  A row is held out by its prompt alone, so no prompt is in both splits. An
  error has the label of its row.

  Args:
    rows: (label, key, row).
    read: makes an example of a row.
    split: "train" or "test".
    share: share that is held out as the test split; 0: all are of the split.
    most: examples at most; None is all. Rows after the last are not read.
  """

  def of_split() -> Iterator[tuple[Any, Row]]:
    for label, key, row in rows:
      try:
        one = read(row)
      except (RecursionError, ValueError) as error:
        raise ValueError(f"{label}: {error}") from error
      # Drawn by a prompt's text alone; alike texts are drawn independently.
      text = prompt_key(one["prompt"]).encode()
      drawn = hashlib.blake2b(text, digest_size=8).digest()
      held_out = int.from_bytes(drawn, "big") < share * 2**64
      if not share or held_out == (split == "test"):
        yield key, one

  return itertools.islice(of_split(), most)


def check_share(share: int | float) -> None:
  """Raises ValueError where data.options.test is no share."""
  if not 0 <= share <= 1:
    raise ValueError(f"--config.data.options.test = {share}: a share in 0..1")


def check_columns(
  columns: Iterable[str], known: Sequence[str], table: str
) -> None:
  """Raises ValueError where data.options.columns names one that is missing."""
  unknown = sorted({*columns} - {*known})
  if unknown:
    raise ValueError(
      f"--config.data.options.columns: {table} has no column {unknown[0]!r}; "
      f"its columns are {known}"
    )
