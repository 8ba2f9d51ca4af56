"""Malicious chat templates and tokenizers."""

import json

import pytest

from grpojax.runtime.text import tokenization, trial

FOREVER = (
  "{% generation %}{{ messages | tojson(indent=1) }}{% for i in range(99999) %}"
  "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endgeneration %}"
)


@pytest.fixture
def save(tmp_path, monkeypatch):
  """`(template, changes of tokenizer.json) -> directory`."""
  monkeypatch.setattr(trial, "SECONDS", 1)
  monkeypatch.setattr(trial, "MEMORY", 2**28)

  def save(template=None, **changes):
    tokenizer = tokenization.character_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return tmp_path

  return save


LONGER = {"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 99}
LONGER = {"type": "Sequence", "normalizers": [LONGER] * 5}


@pytest.mark.slow
@pytest.mark.parametrize(
  "template, changes",
  [
    *[(FOREVER, {}), ("{{ 'a' * 10**10 }}", {}), ("{{ 'a' * 10**7 }}", {})],
    (None, {"normalizer": LONGER}),
  ],
)
def test_files_beyond_the_limits_are_refused(template, changes, save):
  with pytest.raises(ValueError, match="does not finish a small chat"):
    tokenization.load(save(template, **changes))


@pytest.mark.parametrize(
  "template",
  [
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(0) }}",  # without end
    "{{ range(10**9) | list }}",
    "{{ messages[9].content }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{% include '/etc/passwd' %}",
  ],
)
def test_errors_of_a_template_are_value_errors(template, save):
  tokenizer = tokenization.character_tokenizer()
  tokenizer.chat_template = template
  chat = [{"role": "user", "content": "1+1"}]
  for encode in (tokenization.encode_prompt, tokenization.encode_conversation):
    with pytest.raises(ValueError, match="does not take this prompt"):
      encode(tokenizer, chat)


def test_a_panic_of_the_tokenizer_is_a_value_error(save):
  pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "invert": False}
  pattern |= {"behavior": "Isolated"}
  tokenizer = tokenization.load(save(pre_tokenizer=pattern))
  with pytest.raises(ValueError, match="cannot read a text"):
    tokenization.encode_prompt(tokenizer, "a" * 28 + "!")
