"""The date that chat templates write."""

import datetime
import locale

import pytest

from grpojax.runtime import chat_template, tokenizer

# The dates' lines of the published templates.
LLAMA = (
  "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
  '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}'
  '{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- endif %}'
  "Today Date: {{ date_string }}\n{{ messages[0].content }}"
)
MISTRAL = (
  '{%- set today = strftime_now("%Y-%m-%d") %}'
  "The current date is {{ today }}.\n[INST]{{ messages[0].content }}[/INST]"
)
# Called in a macro and in a loop; its first line is indented.
MADE_UP = (
  "  {% macro day() %}{{ strftime_now('%A, %-d %B %Y, ') }}{% endmacro %}\n"
  "{% for m in messages %}{{ day() }}"
  "{{ strftime_now('%b %a %H:%M %p %%b %j') }}{% endfor %}\n\n"
)
FIXED = "{{ date_string | default('26 Jul 2024') }} {{ messages[0].content }}"
NONE = "Q: {{ messages[0].content }}"


def with_template(template):
  made = tokenizer.character_tokenizer()
  made.chat_template = template
  return made


def written(template, date):
  options = {} if date is None else {"date_string": date}
  return tokenizer.format_prompt(
    with_template(template), "Hi", template_options=options
  )


@pytest.mark.parametrize(
  "template, expected",
  [
    (LLAMA, "Today Date: 29 Feb 2020\nHi"),
    (MISTRAL, "The current date is 2020-02-29.\n[INST]Hi[/INST]"),
    (MADE_UP, "Saturday, 29 February 2020, Feb Sat 00:00 AM %b 060"),
    (FIXED, "29 Feb 2020 Hi"),
    (NONE, "Q: Hi"),
  ],
)
def test_a_date_is_pinned_in_every_template(template, expected):
  assert written(template, "29 Feb 2020") == expected


def test_a_date_is_pinned_in_a_reward_models_chat():
  chat = [{"role": "user", "content": "Hi"}]
  for template in (LLAMA, MISTRAL, NONE):
    made = with_template(template)
    ids = tokenizer.encode_conversation(made, chat, date="29 Feb 2020")
    assert made.decode(ids) == written(template, "29 Feb 2020")


def test_who_asks_for_the_date():
  asks = lambda t: tokenizer.asks_for_date(with_template(t))
  assert [asks(t) for t in (LLAMA, MISTRAL, MADE_UP)] == [True] * 3
  assert [asks(t) for t in (FIXED, NONE, None)] == [False] * 3
  # As transformers keeps several templates of a model.
  assert asks({"default": NONE, "tool_use": MISTRAL})


def test_today_pinned_is_what_is_written_unpinned(monkeypatch):
  for template in (LLAMA, MISTRAL):
    before, text, after = (
      written(template, tokenizer.today()),
      written(template, None),
      written(template, tokenizer.today()),
    )
    assert text in (before, after)  # midnight may pass

  class May(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
      return cls(2031, 5, 3, 23, 59)

  monkeypatch.setattr(chat_template.datetime, "datetime", May)
  assert tokenizer.today() == "03 May 2031"


def test_names_are_english_in_every_locale():
  known = locale.setlocale(locale.LC_TIME)
  for name in ("de_DE.UTF-8", "fr_FR.UTF-8"):
    try:
      locale.setlocale(locale.LC_TIME, name)
    except locale.Error:
      continue
    try:
      assert written(MADE_UP, "01 May 2024").startswith("Wednesday, 1 May")
    finally:
      locale.setlocale(locale.LC_TIME, known)


def test_another_date_is_for_templates_that_write_it_as_it_is():
  for date in ("spring", "2024-07-26", "30 Feb 2024", "26 Juli 2024", 2024):
    assert written(LLAMA, date) == f"Today Date: {date}\nHi"
    assert written(FIXED, date) == f"{date} Hi"
    with pytest.raises(
      ValueError, match=f"date_string = '{date}'.*26 Jul 2024"
    ):
      written(MISTRAL, date)


def test_a_date_without_a_template_is_nobodys():
  assert written(None, "26 Jul 2024") == "Hi"
  with pytest.raises(ValueError, match="no chat template"):
    tokenizer.format_prompt(
      with_template(None),
      "Hi",
      template_options={"date_string": "26 Jul 2024", "thinking": True},
    )
