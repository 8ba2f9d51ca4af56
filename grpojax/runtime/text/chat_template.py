"""Texts of chats, written by a tokenizer's (sandboxed) chat template.

Some templates write today's date (Llama 3's: "26 Jul 2024"). The template
option "date_string" sets another date, for templates that read `date_string`
or call `strftime_now`.
"""

import datetime
import functools
import re
from typing import Any

DATE = "date_string"
_FORMAT = "%d %b %Y"  # of dates in Llama's template
_DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])(?P<form>.*?)\1\s*\)""")


def asks_for_date(tokenizer: Any) -> bool:
  """Returns True if the chat template may write today's date."""
  return "strftime_now" in str(tokenizer.chat_template or "")


def today() -> str:
  """Returns today's date as Llama's template writes it: "26 Jul 2024"."""
  return datetime.datetime.now().strftime(_FORMAT)


def render_prompt(
  tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]
) -> str:
  """Returns the text of messages up to the start of the assistant's answer.

  If the template has no system role, the system message is put before the
  next message's text, as Gemma 3's template does. `options` are keyword
  arguments of the template, or "date_string". ValueError if the template fails.
  """
  import jinja2

  options = _checked(tokenizer, options) | {"add_generation_prompt": True}
  has_system = messages[0]["role"] == "system" and len(messages) > 1
  try:
    text = _apply(tokenizer, messages, options)
  except ValueError as error:
    if not (has_system and isinstance(error.__cause__, jinja2.TemplateError)):
      raise
    text = None
  if has_system and (
    text is None or messages[0]["content"].strip() not in text
  ):
    # The template raised an error, or left the system message out.
    system, first, *rest = messages
    content = f"{system['content'].strip()}\n\n{first['content']}"
    text = _apply(tokenizer, [first | {"content": content}, *rest], options)
  return text


def _apply(tokenizer, messages, options) -> str:
  try:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)
  except Exception as error:  # a template is a program
    raise ValueError(
      "the model's chat template does not take this prompt "
      f"({str(error) or type(error).__name__}); the prompt's roles are "
      f"{[message['role'] for message in messages]}"
    ) from error


def whole_chat(
  tokenizer: Any, messages: list[dict[str, Any]], date: str | None = None
) -> str:
  """Returns the text of a chat with its answers; `date` is today by default."""
  options = _checked(tokenizer, {} if date is None else {DATE: date})
  return _apply(tokenizer, messages, options)


def _checked(tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
  """Checks options; a date in them replaces today's in the chat template."""
  template = str(tokenizer.chat_template)
  unknown = [n for n in options if n not in template and n != DATE]
  if unknown:
    problem = f"the model's chat template has no {unknown}: remove it"
    raise ValueError(f"data.template_options: {problem}")
  if DATE not in options:
    return options
  date = str(options[DATE])
  template = tokenizer.get_chat_template(tools=options.get("tools"))
  # Options cannot be functions, so the date replaces the template's calls.
  template = _DATE_CALL.sub(functools.partial(_pinned, date), template)
  return options | {DATE: date, "chat_template": template}


def _pinned(date: str, call: re.Match) -> str:
  """Returns template code for a `strftime_now` call: a date, or an error."""
  try:
    day = datetime.datetime.strptime(date, _FORMAT)
    return repr(day.strftime(call["form"]))
  except ValueError:
    message = (
      f"data.template_options.date_string = {date!r}, but the template needs "
      "a date like 26 Jul 2024"
    )
    return f"raise_exception({message!r})"
