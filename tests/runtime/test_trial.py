"""Chat templates and tokenizers of strangers, on their worst behaviour."""

import json

import pytest

from grpojax.runtime.text import tokenizer as tokenizers
from grpojax.runtime.text import trial

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
    tokenizer = tokenizers.character_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return tmp_path

  return save


@pytest.mark.slow
@pytest.mark.parametrize(
  "template", [FOREVER, "{{ 'a' * 10**10 }}", "{{ 'a' * 10**7 }}"]
)
def test_a_template_that_does_not_end_is_refused(template, save):
  with pytest.raises(ValueError, match="does not come to an end"):
    tokenizers.load(save(template))


@pytest.mark.slow
def test_a_tokenizer_that_makes_texts_long_is_refused(save):
  longer = {"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 99}
  longer = {"type": "Sequence", "normalizers": [longer] * 5}
  with pytest.raises(ValueError, match="does not come to an end"):
    tokenizers.load(save(normalizer=longer))


def test_what_ends_is_tried_once(save, monkeypatch):
  directory = save(tokenizers.CHAT_TEMPLATE)
  tokenizers.load(directory)
  monkeypatch.setattr(trial.subprocess, "run", None)
  tokenizers.load(directory)


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
def test_what_a_template_may_not_is_a_sentence(template, save):
  tokenizer = tokenizers.character_tokenizer()
  tokenizer.chat_template = template
  with pytest.raises(ValueError, match="does not take this prompt"):
    tokenizers.encode_prompt(tokenizer, "1+1")
  with pytest.raises(ValueError, match="does not take this prompt"):
    chat = [{"role": "user", "content": "1+1"}]
    tokenizers.encode_conversation(tokenizer, chat)


def test_a_pattern_that_gives_up_is_a_sentence(save):
  pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "invert": False}
  tokenizer = tokenizers.load(
    save(pre_tokenizer=pattern | {"behavior": "Isolated"})
  )
  with pytest.raises(ValueError, match="cannot read a text"):
    tokenizers.encode_prompt(tokenizer, "a" * 28 + "!")
