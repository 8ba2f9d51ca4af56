"""Prompts of the chat families, in their published formats."""

import functools

import pytest
from runtime import chats
from runtime.chats import GEMMA

from grpojax.runtime.text import chat_template, tokenization

QWEN = chats.chat(
  "{% if m.role != 'system' %}" + chats.START + "{{ c + '<|im_end|>\n' }}"
  "{% endif %}",
  chats.ASK,
  "<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' "
  "else 'You are Qwen.' }}{{ '<|im_end|>\n' }}",
)
SILENT = (
  "{%- set messages = messages | selectattr('role', 'ne', 'system') | list %}"
)
make = functools.partial(chats.make, bos=True)
TURNS = [
  {"role": "user", "content": "1+1?"},
  {"role": "assistant", "content": "2"},
  {"role": "user", "content": "2+2?\n"},
]


@pytest.mark.parametrize(
  "template, single, several",
  [
    (
      QWEN,
      "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?"
      "<|im_end|>\n<|im_start|>assistant\n",
      "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\n1+1?"
      "<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?\n"
      "<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
      GEMMA,
      "<s><start_of_turn>user\nBe brief.\n\n1+1?<end_of_turn>\n"
      "<start_of_turn>model\n",
      "<s><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n2"
      "<end_of_turn>\n<start_of_turn>user\n2+2?<end_of_turn>\n"
      "<start_of_turn>model\n",
    ),
  ],
  ids=["qwen", "gemma"],
)
def test_each_family_has_its_own_format(template, single, several):
  tokenizer = make(template)
  for prompt, system, expected in [
    ("1+1?", "Be brief.", single),
    (TURNS, "", several),
  ]:
    text, ids = tokenization.encode_prompt(
      tokenizer, prompt, "{prompt}\n", system_prompt=system
    )
    assert text == expected
    assert tokenizer.decode(ids) == text
    # The tokenizer adds no second BOS to the template's.
    for token in chats.SPECIAL:
      assert ids.count(chats.ID[token]) == text.count(token)
  assert TURNS[2]["content"] == "2+2?\n"  # not changed in place


def test_a_template_wraps_text_prompts_only():
  form = "\n{prompt}\nPut the answer in \\boxed{{}}.\n"
  tokenizer = make(QWEN)
  text = tokenization.format_prompt(tokenizer, " {x}? ", form)
  inside = " {x}? \nPut the answer in \\boxed{}."
  assert f"<|im_start|>user\n{inside}<|im_end|>" in text
  assert tokenization.format_prompt(tokenizer, TURNS, form).count("boxed") == 0
  plain = tokenization.format_prompt(make(None), " {x}? ", form)
  assert plain == f"\n{inside}\n"
  for tokenizer in (make(QWEN), make(None)):
    with pytest.raises(ValueError, match="template 'Q'"):
      tokenization.format_prompt(tokenizer, "1+1", "Q")


def test_messages_keep_one_system_message():
  system = {"system_prompt": "Be brief."}
  text = tokenization.format_prompt(make(SILENT + QWEN), "1+1?", **system)
  assert "<|im_start|>user\nBe brief.\n\n1+1?<|im_end|>" in text
  turns = [{"role": "system", "content": "Be long."}, *TURNS[:1]]
  for template in (QWEN, GEMMA):  # an example's system message
    text = tokenization.format_prompt(make(template), turns, **system)
    assert "Be long." in text and "Be brief." not in text


TWICE = {"prompt": TURNS[:1] * 2}
ALTERNATE = "must alternate.*'user', 'user'"
NO_TEMPLATE = "need a chat template"


@pytest.mark.parametrize(
  "template, options, text",
  [
    (GEMMA, TWICE, ALTERNATE),
    (GEMMA, TWICE | {"system_prompt": "x"}, ALTERNATE),
    (GEMMA, {"template_options": {"enable": 1}}, "has no .'enable'"),
    (None, {"system_prompt": "x"}, NO_TEMPLATE),
    (None, {"prompt": TURNS}, NO_TEMPLATE),
    (None, {"template_options": {"date_string": "x", "y": 1}}, NO_TEMPLATE),
  ],
)
def test_refused_prompts_and_options(template, options, text):
  with pytest.raises(ValueError, match=text):
    tokenization.format_prompt(make(template), **{"prompt": "1+1?"} | options)


# Lines with dates of published templates.
LLAMA_DATE = (
  "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
  '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}'
  '{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- endif %}'
  "Today Date: {{ date_string }}\n{{ messages[0].content }}"
)
MISTRAL_DATE = (
  '{%- set today = strftime_now("%Y-%m-%d") %}'
  "The current date is {{ today }}.\n[INST]{{ messages[0].content }}[/INST]"
)
# Calls in a macro and in a loop; the first line is indented.
MADE_UP_DATE = (
  "  {% macro day() %}{{ strftime_now('%A, %-d %B %Y, ') }}{% endmacro %}\n"
  "{% for m in messages %}{{ day() }}"
  "{{ strftime_now('%b %a %H:%M %p %%b %j') }}{% endfor %}\n\n"
)
FIXED_DATE = (
  "{{ date_string | default('26 Jul 2024') }} {{ messages[0].content }}"
)
NO_DATE = "Q: {{ messages[0].content }}"


def with_template(template):
  made = tokenization.character_tokenizer()
  made.chat_template = template
  return made


def written(template, date):
  options = {"template_options": {"date_string": date}}
  return tokenization.format_prompt(with_template(template), "Hi", **options)


@pytest.mark.parametrize(
  "template, expected, asks",
  [
    (LLAMA_DATE, "Today Date: 29 Feb 2020\nHi", True),
    (MISTRAL_DATE, "The current date is 2020-02-29.\n[INST]Hi[/INST]", True),
    (MADE_UP_DATE, "Saturday, 29 February 2020, Feb Sat 00:00 AM %b 060", True),
    (FIXED_DATE, "29 Feb 2020 Hi", False),
    (NO_DATE, "Q: Hi", False),
    (None, "Hi", False),
  ],
)
def test_dates_are_pinned(template, expected, asks):
  assert written(template, "29 Feb 2020") == expected
  made = with_template(template)
  assert chat_template.asks_for_date(made) == asks
  if template:
    chat = [{"role": "user", "content": "Hi"}]
    ids = tokenization.encode_conversation(made, chat, date="29 Feb 2020")
    assert made.decode(ids) == expected
  # transformers may store several templates of a model.
  several = with_template({"default": NO_DATE, "tool_use": template or ""})
  assert chat_template.asks_for_date(several) == asks


def test_templates_that_format_dates_need_a_valid_date():
  for date in ("spring", "30 Feb 2024", 2024):
    assert written(LLAMA_DATE, date) == f"Today Date: {date}\nHi"
    assert written(FIXED_DATE, date) == f"{date} Hi"
    with pytest.raises(ValueError, match=f"string = '{date}'.*26 Jul 2024"):
      written(MISTRAL_DATE, date)
