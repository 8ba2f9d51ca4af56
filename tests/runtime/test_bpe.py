"""The byte-level tokenizer: lossless, deterministic, and a plain BPE."""

import collections
import random

import pytest

from grpojax.runtime import bpe
from grpojax.runtime import tokenizer as tokenizer_lib

TEXTS = [
  "Ann sells 12 clips in May.\nShe sold 12/2 = $6 clips.\n#### 6",
  "Ben sold 48 clips in April, and half as many clips in May.",
]


@pytest.fixture(scope="module")
def tokenizer():
  return bpe.train_bpe(TEXTS, 290)


def random_texts(count):
  rng = random.Random(0)
  for _ in range(count):
    points = [rng.randrange(0x110000) for _ in range(20)]
    points += rng.choices(range(128), k=20)
    rng.shuffle(points)
    yield "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


def test_any_text_is_given_back(tokenizer):
  texts = [*TEXTS, *random_texts(50), "", " ", "\n\n \n", "  a  b ", "a .b 's"]
  texts += ["naïve £5 – 😀 ٣٤ e\u0301 \x00\x7f\r\n\t\u200b\ufeff"]
  for text in texts:
    ids = tokenizer.encode(text)
    assert max(ids, default=0) < len(tokenizer) == 290
    assert tokenizer.decode(ids) == text


def test_it_is_loaded_as_it_was_saved(tokenizer, tmp_path):
  tokenizer.save_pretrained(tmp_path)
  loaded = tokenizer_lib.load(tmp_path)
  assert loaded.get_vocab() == tokenizer.get_vocab()
  assert [loaded.pad_token_id, loaded.eos_token_id] == [0, 1]
  text, ids = tokenizer_lib.encode_prompt(loaded, TEXTS[0])
  assert text == f"Q: {TEXTS[0]}\nA: " == loaded.decode(ids)


def test_the_same_texts_give_the_same_tokenizer(tokenizer):
  again = bpe.train_bpe(iter(TEXTS), 290)
  assert again.backend_tokenizer.to_str() == (
    tokenizer.backend_tokenizer.to_str()
  )
  other = bpe.train_bpe(["quite another text, quite"] * 3, 290)
  assert other.get_vocab() != tokenizer.get_vocab()


def test_it_merges_the_most_frequent_pairs_first(tokenizer):
  # The first merge, by counting pairs of letters within words.
  pairs = collections.Counter(
    word[i : i + 2]
    for text in TEXTS
    for word in text.replace(" ", " \u0120").split(" ")
    for i in range(len(word) - 1)
    if not any(c.isdigit() for c in word[i : i + 2])
  )
  first = next(t for t, i in tokenizer.get_vocab().items() if i == 258)
  assert pairs[first] == max(pairs.values())


def test_a_number_is_written_digit_by_digit(tokenizer):
  ids = tokenizer.encode("12481248")
  assert [tokenizer.decode([i]) for i in ids] == list("12481248")
  assert len(tokenizer.encode(" clips")) == 1


@pytest.mark.parametrize(
  "texts, size, hint",
  [(TEXTS, 257, "258 or more"), ([], 300, "no texts"), ([""], 300, "no texts")],
)
def test_what_cannot_be_trained_is_refused(texts, size, hint):
  with pytest.raises(ValueError, match=hint):
    bpe.train_bpe(texts, size)
