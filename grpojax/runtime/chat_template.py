"""Chats as text, set by a tokenizer's (sandboxed) chat template.

Some templates write today's date, Llama 3's as "26 Jul 2024", so the same
prompt would be another one tomorrow. The option "date_string" pins it, for all
templates: those that read a `date_string`, and those that call `strftime_now`.
"""

import datetime
from collections.abc import Callable
from typing import Any

DATE = "date_string"
_MONTHS = (
  "January February March April May June July August September October"
  " November December"
).split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def asks_for_date(tokenizer: Any) -> bool:
  """Whether the tokenizer's chat template may write today's date."""
  return "strftime_now" in str(tokenizer.chat_template or "")


def today() -> str:
  """Today's date as Llama's template writes it: "26 Jul 2024"."""
  return _format(datetime.datetime.now(), "%d %b %Y")


def set_messages(
  tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]
) -> str:
  """The text of messages, up to where the assistant answers.

  Args:
    tokenizer: has a chat template.
    messages: of a chat. Where the template has no system role, the system's
      message goes before the text of the first other one.
    options: keywords of the chat template, and "date_string".

  Raises:
    ValueError: an option that the template lacks, what it does not take, or a
      date that is none, where it needs one.
  """
  import jinja2

  options = _options(tokenizer, options)

  def apply(messages):
    return tokenizer.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=True, **options
    )

  has_system = messages[0]["role"] == "system" and len(messages) > 1
  try:
    try:
      text = apply(messages)
      refused = has_system and messages[0]["content"].strip() not in text
    except jinja2.TemplateError:
      refused = has_system
      if not refused:
        raise
    if refused:  # by an error or, worse, by leaving it out
      system, first, *rest = messages
      content = f"{system['content'].strip()}\n\n{first['content']}"
      text = apply([first | {"content": content}, *rest])
  except (jinja2.TemplateError, TypeError) as error:
    raise ValueError(
      f"the model's chat template does not take this prompt ({error}); roles: "
      f"{[message['role'] for message in messages]}"
    ) from error
  return text


def _options(tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
  """Checks the options, and adds the clock that stands still, if any."""
  template = str(tokenizer.chat_template)
  unknown = [n for n in options if n not in template and n != DATE]
  if unknown:
    raise ValueError(
      f"data.template_options: the model's chat template has no {unknown}"
    )
  if DATE not in options:
    return options
  date = str(options[DATE])
  return options | {DATE: date, "strftime_now": _clock(date)}


def _clock(date: str) -> Callable[[str], str]:
  """`strftime_now` at the beginning of a day; it shadows transformers' own."""

  def strftime_now(form: str) -> str:
    try:
      day, month, year = date.split()
      short = [name[:3] for name in _MONTHS]
      moment = datetime.datetime(int(year), short.index(month) + 1, int(day))
    except ValueError:
      raise ValueError(
        f"data.template_options.date_string = {date!r}: the model's chat"
        f" template asks for a date as {form!r}; give one like '26 Jul 2024'"
      ) from None
    return _format(moment, form)

  return strftime_now


def _format(moment: datetime.datetime, form: str) -> str:
  """strftime, with English names whatever the locale."""
  month, day = _MONTHS[moment.month - 1], _DAYS[moment.weekday()]
  names = {"%B": month, "%b": month[:3], "%h": month[:3], "%A": day}
  names |= {"%a": day[:3], "%p": "AM" if moment.hour < 12 else "PM"}
  parts = form.split("%%")  # a percent sign
  for directive, name in names.items():
    parts = [part.replace(directive, name) for part in parts]
  return moment.strftime("%%".join(parts))
