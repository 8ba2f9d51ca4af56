import json
import socket

import numpy as np
import pytest

from grpojax.runtime import eos as eos_lib
from grpojax.runtime import tokenizer as tokenizers

TEXT = " 12*3=36 \n\n\n#### 36 , it 's <ok> ~\n\n "


@pytest.fixture
def no_network(monkeypatch):
  def refuse(*args, **kwargs):
    raise AssertionError("the network was tried")

  monkeypatch.setattr(socket.socket, "connect", refuse)
  monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write(path, name, **content):
  (path / name).write_text(json.dumps(content))


@pytest.mark.parametrize("model_type", [None, "llama", "qwen2"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_saved_tokenizer_loads_unchanged(
  tmp_path, no_network, model_type, chat
):
  original = tokenizers.character_tokenizer(chat=chat)
  original.save_pretrained(tmp_path)
  if model_type:
    write(tmp_path, "config.json", model_type=model_type)
  loaded = tokenizers.load(tmp_path)
  ids = loaded.encode(TEXT)
  assert ids == original.encode(TEXT)
  assert loaded.decode(ids) == TEXT
  assert len(loaded) == 100
  assert bool(loaded.chat_template) == chat


def test_the_character_tokenizer_writes_every_character():
  tokenizer = tokenizers.character_tokenizer()
  assert [tokenizer.pad_token_id, tokenizer.eos_token_id] == [0, 1]
  assert tokenizer.unk_token_id == 2
  characters = ["\n", *map(chr, range(32, 127))]
  ids = [tokenizer.encode(c) for c in characters]
  assert all(len(i) == 1 for i in ids)
  assert sorted(i[0] for i in ids) == list(range(3, 99))
  assert tokenizer.encode("\n\n") == [99]
  assert tokenizer.encode("\n\n\n") == [99, ids[0][0]]
  assert tokenizer.encode("é") == [2]
  for text in ("".join(characters), "a  b .", " n't", "\n\n\n\n\n"):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_prompts_are_formatted():
  plain = tokenizers.character_tokenizer()
  assert tokenizers.format_prompt(plain, "1+1", "{prompt}\n") == "1+1\n"
  assert (
    tokenizers.format_prompt(plain, "{prompt}", "[{prompt}]") == "[{prompt}]"
  )
  chat = tokenizers.character_tokenizer(chat=True)
  assert tokenizers.format_prompt(chat, "1+1", "{prompt}\n") == "Q: 1+1\nA: "
  turns = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "#### 2"},
    {"role": "user", "content": "2+2"},
  ]
  expected = "Q: 1+1\nA: #### 2\nQ: 2+2\nA: "
  assert tokenizers.format_prompt(chat, turns) == expected
  with pytest.raises(ValueError, match="no chat template"):
    tokenizers.format_prompt(plain, turns)
  with pytest.raises(ValueError, match="template 'Q'"):
    tokenizers.format_prompt(plain, "1+1", "Q")


def with_bos(chat):
  """A tokenizer that puts <|endoftext|> before each text."""
  from tokenizers.processors import TemplateProcessing

  tokenizer = tokenizers.character_tokenizer(chat=chat)
  tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
    single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 1)]
  )
  return tokenizer


@pytest.mark.parametrize("chat", [False, True])
def test_a_bos_is_added_once(chat):
  tokenizer = with_bos(chat)
  if chat:  # such templates write the BOS themselves
    tokenizer.chat_template = "<|endoftext|>" + tokenizer.chat_template
  text, ids = tokenizers.encode_prompt(tokenizer, "5")
  assert ids.count(1) == 1 and ids[0] == 1
  assert tokenizer.decode(ids[1:]) == text.removeprefix("<|endoftext|>")


def test_eos_ids_come_from_the_first_file_that_has_them_and_the_tokenizer(
  tmp_path,
):
  tokenizer = tokenizers.character_tokenizer()
  assert eos_lib.eos_ids(tmp_path, tokenizer) == (1,)
  write(tmp_path, "config.json", eos_token_id=5)
  assert eos_lib.eos_ids(tmp_path, tokenizer) == (5, 1)
  write(tmp_path, "generation_config.json", eos_token_id=None)
  assert eos_lib.eos_ids(tmp_path, tokenizer) == (5, 1)
  write(tmp_path, "generation_config.json", eos_token_id=[99, 1, 99])
  assert eos_lib.eos_ids(tmp_path, tokenizer) == (99, 1)
  write(tmp_path, "generation_config.json", eos_token_id=0)
  assert eos_lib.eos_ids(tmp_path, tokenizer) == (0, 1)


def test_eos_ids_may_be_texts_and_what_makes_no_sense_is_refused(tmp_path):
  made = tokenizers.character_tokenizer()

  def found(**content):
    write(tmp_path, "generation_config.json", **content)
    return eos_lib.eos_ids(tmp_path, made, vocab_size=100)

  assert found(eos_token_id="<|pad|>") == (0, 1)
  assert found(eos_token_id=[5, "<|endoftext|>"]) == (5, 1)
  assert found(eos_token_id=99) == (99, 1)
  for wrong, message in (
    (100, "= 100, but the model's ids end at 99"),
    ("</s>", "'</s>' is no token of the tokenizer"),
    (True, "True is neither"),
    (-1, "-1 is neither"),
    (1.5, "1.5 is neither"),
    ([1, [2]], r"\[2\] is neither"),
    ([None], "None is neither"),
    ({"a": 1}, "is neither"),
  ):
    with pytest.raises(ValueError, match=f"generation_config.json.*{message}"):
      found(eos_token_id=wrong)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff", '"x"'])
def test_malformed_files_are_named(tmp_path, text):
  made = tokenizers.character_tokenizer()
  made.save_pretrained(tmp_path)
  content = text.encode("latin-1")
  (tmp_path / "generation_config.json").write_bytes(content)
  with pytest.raises(ValueError, match="generation_config.json is not"):
    eos_lib.eos_ids(tmp_path, made)
  (tmp_path / "tokenizer_config.json").write_bytes(content)
  with pytest.raises(ValueError, match="tokenizer_config.json is not"):
    tokenizers.load(tmp_path)


def test_no_eos_and_no_pad_are_errors(tmp_path):
  tokenizer = tokenizers.character_tokenizer()
  assert eos_lib.pad_id(tokenizer) == 0
  tokenizer.pad_token = None
  assert eos_lib.pad_id(tokenizer) == 1
  tokenizer.eos_token = None
  with pytest.raises(ValueError, match="pad_token"):
    eos_lib.pad_id(tokenizer)
  with pytest.raises(ValueError, match="eos_token_id"):
    eos_lib.eos_ids(tmp_path, tokenizer)


def test_missing_files_are_named(tmp_path, no_network):
  with pytest.raises(ValueError, match="not a directory.*download"):
    tokenizers.load(tmp_path / "Qwen/Qwen2.5-0.5B")
  with pytest.raises(ValueError, match="none of tokenizer.json"):
    tokenizers.load(tmp_path)
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match="cannot read the tokenizer"):
    tokenizers.load(tmp_path)


def test_a_completion_ends_before_its_first_eos():
  tokenizer = tokenizers.character_tokenizer()
  ids = np.array([*tokenizer.encode("1<|pad|>2\n\n3"), 1, 20])
  mask = np.arange(len(ids)) < len(ids) - 1

  def decode(eos):
    return tokenizers.decode_completion(tokenizer, ids, mask, eos)

  assert decode((1,)) == "1<|pad|>2\n\n3"
  assert decode((1, 99)) == "1<|pad|>2"
  assert decode(()) == "1<|pad|>2\n\n3<|endoftext|>"
