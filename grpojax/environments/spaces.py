"""Reads actions from text and writes observations as text, for classes.

gymnasium's spaces are recognised by their attributes, so it is not imported.
"""

import contextlib
import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpojax.environments.protocol import is_message
from grpojax.environments.tools import has_text
from grpojax.runtime.processes.user_calls import WrongAnswer
from grpojax.runtime.processes.workers import to_plain

ACTIONS = ("auto", "text", "number", "json")
"""Forms of an action; "auto" follows the action space, or else is "text"."""

_OPENENV_FIELDS = ("done", "reward", "metadata")  # in every observation


class IllegalAction(ValueError):
  """Raised for a turn without a legal action; the model reads the message."""


def read_action(text: str, form: str, space: Any = None) -> Any:
  """Returns the action in a turn's text; `form` is one of `ACTIONS`.

  IllegalAction if the text has no action, or one outside gymnasium's `space`.
  """
  form = _form(form, space)
  if form == "text":
    return text
  try:
    value = _last_number(text) if form == "number" else _last_json(text)
    if shape := getattr(space, "shape", None):
      array = np.asarray(value)
      if form == "number":
        array = np.broadcast_to(array, shape)
      value = array.astype(space.dtype, casting="same_kind")
    if space is None or space.contains(value):
      return value
  except (LookupError, TypeError, ValueError, RecursionError):
    pass
  raise IllegalAction(legal_actions(form, space))


def legal_actions(form: str, space: Any = None) -> str:
  """Returns a sentence that tells the model which actions are legal."""
  form = _form(form, space)
  legal = {"number": "a number", "json": "JSON"}.get(form, "text")
  if hasattr(space, "n") and hasattr(space, "start"):
    legal = f"a whole number from {space.start} to {space.start + space.n - 1}"
  elif space is not None:
    legal += f" in {space}"
  return f"End your turn with a legal action: {legal}."


def instructions(environment: Any, form: str) -> str:
  """Returns gymnasium's text on the actions, then the `legal_actions` text."""
  about = inspect.getdoc(environment.unwrapped) or ""
  pattern = r"# Action Space\n(.*?)(?=^\s*#|\Z)"
  parts = re.findall(pattern, about, re.DOTALL | re.MULTILINE)
  parts.append(legal_actions(form, environment.action_space))
  return "\n\n".join(map(inspect.cleandoc, parts))


def observation(value: Any) -> Any:
  """Converts an observation to text; texts and messages stay as they are.

  A dataclass or pydantic model becomes the text in its field `text` or
  `message`, or else JSON of all fields except `_OPENENV_FIELDS`. Dicts, lists
  and tuples become JSON, other values their `str`. WrongAnswer if the text
  would differ between processes.
  """
  if value is None:
    return ""
  is_list = isinstance(value, list | tuple)
  if isinstance(value, str) or (is_list and value and is_message(value[0])):
    return value
  if hasattr(value, "model_dump") or dataclasses.is_dataclass(value):
    dump = getattr(value, "model_dump", lambda: dataclasses.asdict(value))
    fields = dump()
    for name in ("text", "message"):
      if isinstance(fields.get(name), str):
        return fields[name]
    value = {k: v for k, v in fields.items() if k not in _OPENENV_FIELDS}
  if not has_text(value):
    raise WrongAnswer(
      f"returned an observation of type {type(value).__name__}, whose text"
      " differs between processes: return text, or define `__str__`"
    )
  if isinstance(value, Mapping | list | tuple):
    with contextlib.suppress(TypeError, ValueError, RecursionError):
      return json.dumps(value, default=to_plain, ensure_ascii=False)
  return str(value)


def _form(form: str, space: Any) -> str:
  """Returns the form of actions; "auto" becomes the form that a space needs."""
  if form != "auto":
    return form
  if space is None or hasattr(space, "character_set"):
    return "text"
  shape = getattr(space, "shape", None)
  return "json" if shape is None or np.prod(shape) != 1 else "number"


def _last_number(text: str) -> int | float:
  """Returns the last number in a text; IndexError without one."""
  digits = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
  numbers = re.findall(rf"-?{digits}(?:\.\d+)?(?:[eE][-+]?\d+)?", text)
  number = numbers[-1].replace(",", "")
  return int(number) if number.lstrip("-").isdecimal() else float(number)


def _last_json(text: str) -> Any:
  """Returns the JSON of a whole text, or else the last object or list in it."""
  try:
    return json.loads(text)
  except ValueError:
    values = []
  place = 0
  while match := re.compile(r"[\[{]").search(text, place):
    place = match.end()
    with contextlib.suppress(ValueError):
      value, place = json.JSONDecoder().raw_decode(text, match.start())
      values.append(value)
  return values[-1]
