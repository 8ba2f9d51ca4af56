"""The ids that end a completion, and the one that fills up after it."""

import os
import pathlib
from typing import Any

from grpojax.models.weights import read_json


def eos_ids(
  path: str | os.PathLike, tokenizer: Any, vocab_size: int | None = None
) -> tuple[int, ...]:
  """The ids that end a completion.

  Those of `generation_config.json`, or of `config.json` if it names none; and
  the tokenizer's, which ends a turn of a chat. A file may name them by number
  or by text, one or a list.

  Args:
    path: the model directory.
    tokenizer: its tokenizer.
    vocab_size: ids that the model has; None does not check them.

  Returns:
    One or more ids, without repetition; the file's, in their order, come first.

  Raises:
    ValueError: none of the three names an id, or a file names something else.
  """
  ids: list[int] = []
  for name in ("generation_config.json", "config.json"):
    file = pathlib.Path(path) / name
    if not ids and file.is_file():
      named = read_json(file).get("eos_token_id")
      for token in named if isinstance(named, list) else [named]:
        if named is not None:
          ids.append(_id(token, tokenizer, vocab_size, file))
  if tokenizer.eos_token_id is not None:
    ids.append(int(tokenizer.eos_token_id))
  if not ids:
    raise ValueError(
      f"no end-of-sequence token in {path}: set eos_token_id in its"
      " generation_config.json, or eos_token in tokenizer_config.json"
    )
  return tuple(dict.fromkeys(ids))


def _id(
  token: Any, tokenizer: Any, vocab_size: int | None, file: pathlib.Path
) -> int:
  """The id that a file names by its number or its text."""
  if isinstance(token, str):
    known = tokenizer.get_vocab().get(token)
    if known is None:
      raise ValueError(
        f"{file}: eos_token_id = {token!r} is no token of the tokenizer"
      )
    token = known
  if isinstance(token, bool) or not isinstance(token, int) or token < 0:
    raise ValueError(
      f"{file}: eos_token_id must be an id, a token's text, or a list of them:"
      f" {token!r} is neither"
    )
  if vocab_size is not None and token >= vocab_size:
    raise ValueError(
      f"{file}: eos_token_id = {token}, but the model's ids end at"
      f" {vocab_size - 1}: no completion would ever end with it"
    )
  return token


def pad_id(tokenizer: Any) -> int:
  """The id to pad with: the tokenizer's padding token, else its EOS.

  Raises:
    ValueError: the tokenizer has neither.
  """
  for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
    if token is not None:
      return int(token)
  raise ValueError(
    "the tokenizer has neither a padding nor an end-of-sequence token: set"
    " pad_token in its tokenizer_config.json"
  )
