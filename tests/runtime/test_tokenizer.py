"""Tokenizers: from directories, of characters, and trained ones."""

import json
import random
import socket

import pytest
from tokenizers import processors

from grpojax.runtime.text import tokenization


@pytest.fixture
def no_network(monkeypatch):
  monkeypatch.setattr(socket.socket, "connect", None)
  monkeypatch.setattr(socket, "getaddrinfo", None)


def write(path, name, **content):
  (path / name).write_text(json.dumps(content))


def test_the_character_tokenizer_covers_printable_ascii():
  tokenizer = tokenization.character_tokenizer()
  assert [tokenizer.pad_token_id, tokenizer.eos_token_id] == [0, 1]
  assert tokenizer.unk_token_id == 2
  characters = ["\n", *map(chr, range(32, 127))]
  ids = [tokenizer.encode(c) for c in characters]
  assert ids == [[i] for i in range(3, 99)]
  assert tokenizer.encode("\n\n\né") == [99, 3, 2]
  for text in ("".join(characters), "a  b .", " n't", "\n\n\n\n\n"):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_eos_ids_of_files_and_the_tokenizer(tmp_path):
  made = tokenization.character_tokenizer()
  assert tokenization.eos_ids(tmp_path, made) == (1,)
  write(tmp_path, "config.json", eos_token_id=5)
  assert tokenization.eos_ids(tmp_path, made) == (5, 1)

  def eos_ids(named):
    write(tmp_path, "generation_config.json", eos_token_id=named)
    return tokenization.eos_ids(tmp_path, made, vocab_size=100)

  assert eos_ids(None) == (5, 1)
  assert eos_ids([99, 1, 99]) == (99, 1)
  assert eos_ids(0) == eos_ids("<|pad|>") == (0, 1)
  assert eos_ids([5, "<|endoftext|>"]) == (5, 1)
  for wrong in (100, "</s>", True, -1, 1.5, [1, [2]], [None], {"a": 1}):
    message = "config.json: .* must be a token's text, an id of 0..99"
    with pytest.raises(ValueError, match=message):
      eos_ids(wrong)
  eos_ids(None)
  write(tmp_path, "config.json")
  made.pad_token = None
  assert tokenization.pad_id(made) == 1
  made.eos_token = None
  with pytest.raises(ValueError, match="set pad_token"):
    tokenization.pad_id(made)
  with pytest.raises(ValueError, match="set eos_token_id"):
    tokenization.eos_ids(tmp_path, made)


def test_malformed_and_missing_files_are_errors(tmp_path, no_network):
  for path in (tmp_path / "Qwen/Qwen2.5-0.5B", tmp_path):
    with pytest.raises(ValueError, match="none of tokenizer.json.*Download"):
      tokenization.load(path)
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match="cannot read the tokenizer"):
    tokenization.load(tmp_path)
  made = tokenization.character_tokenizer()
  made.save_pretrained(tmp_path)
  for name in ("generation_config.json", "tokenizer_config.json"):
    (tmp_path / name).write_text("[1]")
  with pytest.raises(ValueError, match="generation_config.json is not"):
    tokenization.eos_ids(tmp_path, made)
  with pytest.raises(ValueError, match="tokenizer_config.json is not"):
    tokenization.load(tmp_path)


def test_added_tokens_may_have_ids_beyond_the_model(tmp_path, capsys):
  # Such as Gemma 3's <image_soft_token>, the id after the vocabulary.
  made = tokenization.character_tokenizer()
  made.add_tokens(["<image>"], special_tokens=True)
  made.save_pretrained(tmp_path)

  def load(size):
    write(tmp_path, "config.json", vocab_size=size)
    return tokenization.load(tmp_path)

  load(101)
  assert not capsys.readouterr().out
  loaded = load(100)
  assert "'<image>' (100)), but the model has 100" in capsys.readouterr().out
  prompt = "1<image>"  # letters, like any control token's name in a prompt
  ids = made.encode("1<", add_special_tokens=False)
  assert tokenization.encode_prompt(loaded, prompt)[1][:2] == ids
  with pytest.raises(ValueError, match=r"the token '<image>' \(100\)"):
    tokenization.encode_prompt(loaded, prompt, special_tokens="control")
  with pytest.raises(ValueError, match="has 2 ids from 99 on.*same model"):
    load(99)
  made.pad_token = "<image>"
  made.save_pretrained(tmp_path)
  with pytest.raises(ValueError, match="has 1 ids from 100 on.*same model"):
    load(100)


@pytest.mark.parametrize("kind", [None, "LlamaTokenizerFast", "Qwen2Tokenizer"])
def test_a_saved_tokenizer_loads_unchanged(bpe, tmp_path, no_network, kind):
  # The class in tokenizer_config.json must not replace tokenizer.json's rules.
  bpe.save_pretrained(tmp_path)
  if kind:
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = tokenization.CHAT_TEMPLATE
    settings["tokenizer_class"] = kind
    write(tmp_path, "tokenizer_config.json", **settings)
    write(tmp_path, "config.json", model_type="qwen3")
  loaded = tokenization.load(tmp_path)
  assert loaded.chat_template == (kind and tokenization.CHAT_TEMPLATE)
  text = " Ann sells  12345 clips\n\n in May <s>"
  assert loaded.encode(text) == bpe.encode(text)
  assert loaded.decode(loaded.encode(text)) == text
  assert loaded.eos_token_id == 1


def test_a_prompt_has_one_bos_and_no_eos(tmp_path):
  made = tokenization.character_tokenizer()
  made.add_special_tokens({"bos_token": "<s>"})
  bos = made.bos_token_id
  eos = made.eos_token_id
  backend = made.backend_tokenizer
  backend.post_processor = processors.TemplateProcessing(
    single="<s> $A <|endoftext|>",
    special_tokens=[("<s>", bos), ("<|endoftext|>", eos)],
  )
  made.save_pretrained(tmp_path)
  loaded = tokenization.load(tmp_path)
  digit = loaded.encode("1", add_special_tokens=False)
  assert loaded.encode("1") == [bos, *digit, eos]

  def ids(prompt, **options):
    return tokenization.encode_prompt(loaded, prompt, **options)[1]

  assert ids("1") == [bos, *digit]
  assert ids("") == [bos]
  assert ids("1", template="{prompt}<|endoftext|>") == [bos, *digit, eos]
  letters = ids("<s>1<|endoftext|>")
  assert letters[0] == bos and not {bos, eos} & {*letters[1:]}
  with pytest.raises(ValueError, match="'<s>' twice: .*data.template"):
    ids("1", template="<s>{prompt}")


def test_ids_without_a_token():
  made = tokenization.character_tokenizer()
  vocabulary = made.get_vocab() | {"extra": 105}
  made.get_vocab = lambda: vocabulary
  assert tokenization.gaps(made, 100) == ()
  assert tokenization.gaps(made, 128) == ((100, 105), (106, 128))
  assert tokenization.gaps(made, 128, (127,)) == ((100, 105), (106, 127))


PROBLEMS = [
  "Ann sells 12 clips in May.\nShe sold 12/2 = $6 clips.\n#### 6",
  "Ben sold 48 clips in April, and half as many clips in May.",
]


@pytest.fixture(scope="module")
def bpe():
  return tokenization.train_bpe(PROBLEMS, 290)


def test_trained_tokenizers_decode_what_they_encode(bpe):
  rng = random.Random(0)
  texts = [*PROBLEMS, "", " ", "  a  b ", "a .b 's"]
  texts += ["naïve £5 – 😀 ٣٤ e\u0301 \x00\x7f\r\n\t\u200b\ufeff"]
  for _ in range(50):
    points = [rng.randrange(0x110000) for _ in range(20)]
    texts.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))
  for text in texts:
    ids = bpe.encode(text)
    assert max(ids, default=0) < len(bpe) == 290
    assert bpe.decode(ids) == text


def test_trained_tokens_merge_letters_but_not_digits(bpe):
  ids = bpe.encode("12481248")
  assert [bpe.decode([i]) for i in ids] == list("12481248")
  assert len(bpe.encode(" clips")) == 1
  again = tokenization.train_bpe(iter(PROBLEMS), 290)
  assert again.backend_tokenizer.to_str() == bpe.backend_tokenizer.to_str()
  with pytest.raises(ValueError, match="258 or more"):
    tokenization.train_bpe(PROBLEMS, 257)
  with pytest.raises(ValueError, match="no texts"):
    tokenization.train_bpe([""], 300)
