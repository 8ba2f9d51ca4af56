"""Chats as text, set by a tokenizer's (sandboxed) chat template.

Some templates write today's date, Llama 3's as "26 Jul 2024", so the same
prompt would be another one tomorrow. The option "date_string" pins it, for all
templates: those that read a `date_string`, and those that call `strftime_now`.
"""

import datetime
from typing import Any

DATE = "date_string"
_MONTHS = (
  "January February March April May June July August September October"
  " November December"
).split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_DIRECTIVES = [f"%{c}" for c in "aAbBcdDeFgGhHIjklmMpRsSTuUVwWxXyYzZ"]
_DIRECTIVES += [f"%-{c}" for c in "demyHIMSj"]

# Before a template, in place of transformers' own function (templates are given
# data only, no functions). The newline keeps the template's first line one.
_CLOCK = (
  "{%- macro strftime_now(form) -%}{%- if not pinned_clock -%}"
  "{{- raise_exception('data.template_options.date_string = \\'' + date_string"
  " + '\\', but the template asks for a date; give one like 26 Jul 2024') -}}"
  "{%- endif -%}{%- set ns = namespace(text=form.replace('%%', '\0')) -%}"
  "{%- for name, text in pinned_clock.items() -%}"
  "{%- set ns.text = ns.text.replace(name, text) -%}{%- endfor -%}"
  "{{- ns.text.replace('\0', '%') -}}{%- endmacro %}\n"
)


def asks_for_date(tokenizer: Any) -> bool:
  """Returns True where the chat template may write today's date."""
  return "strftime_now" in str(tokenizer.chat_template or "")


def today() -> str:
  """Returns today's date as Llama's template writes it: "26 Jul 2024"."""
  now = datetime.datetime.now()
  return " ".join(_format(now, name) for name in ("%d", "%b", "%Y"))


def set_messages(
  tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]
) -> str:
  """Returns the text of messages, up to where the assistant answers.

  Args:
    tokenizer: a tokenizer with a chat template.
    messages: messages of a chat. Where the template has no system role, the
      system's message goes before the text of the first other one.
    options: keywords of the chat template, and "date_string".

  Raises:
    ValueError: an option that the template lacks, messages that it does not
      take, or a date that is none, where it needs one.
  """
  import jinja2

  options = _checked(tokenizer, options)

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


def whole_chat(
  tokenizer: Any, messages: list[dict[str, Any]], date: str | None = None
) -> str:
  """Returns the text of a chat that has its answer.

  Args:
    tokenizer: a tokenizer with a chat template.
    messages: messages of the chat.
    date: value of "date_string"; None is today.
  """
  options = _checked(tokenizer, {} if date is None else {DATE: date})
  return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def _checked(tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
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
  options = options | {DATE: date}
  if not asks_for_date(tokenizer):
    return options
  template = tokenizer.get_chat_template(tools=options.get("tools"))
  clock = {"chat_template": _CLOCK + template, "pinned_clock": _clock(date)}
  return options | clock


def _clock(date: str) -> dict[str, str] | None:
  """Returns strftime's directives at the start of a day; None of no date."""
  try:
    day, month, year = date.split()
    month = [name[:3] for name in _MONTHS].index(month) + 1
    moment = datetime.datetime(int(year), month, int(day))
  except ValueError:
    return None
  return {name: _format(moment, name) for name in _DIRECTIVES}


def _format(moment: datetime.datetime, directive: str) -> str:
  """Formats by one directive, with English names whatever the locale."""
  month, day = _MONTHS[moment.month - 1], _DAYS[moment.weekday()]
  names = {"%B": month, "%b": month[:3], "%h": month[:3], "%A": day}
  names |= {"%a": day[:3], "%p": "AM" if moment.hour < 12 else "PM"}
  return names.get(directive) or moment.strftime(directive)
