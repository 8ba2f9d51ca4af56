"""Stop strings, against `str.find` on texts and against rollouts."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as tokenizers_lib
from tokenizers import decoders, models

from grpojax.core.ends import Ends
from grpojax.core.rollout import completion_mask, rollout
from grpojax.core.types import Prompts
from grpojax.runtime.text import stop_strings, tokenization

WORDS = "<|endoftext|> a b c d <f> ab bc ca aa dab".split()  # eleven, as `tiny`


def of_words(words, decoder, **options):
  vocab = {word: i for i, word in enumerate(words)}
  backend = tokenizers_lib.Tokenizer(models.BPE(vocab, [], **options))
  backend.decoder = decoder
  return tokenization._wrapped(backend)


def byte_fallback():
  """Like Llama 2's: bytes, spaces in tokens, and no space before a text."""
  words = [f"<0x{i:02X}>" for i in range(256)]
  words += "▁ a b é ▁a ab ▁ab ba ! ▁▁ </s>".split()
  parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  parts.append(decoders.Strip(" ", 1, 0))
  return of_words(words, decoders.Sequence(parts), byte_fallback=True)


def word_pieces():
  words = "a ##b b ##ab ! ##! <f>".split()
  return of_words(words, decoders.WordPiece(cleanup=False))


def byte_level():
  return tokenization.train_bpe(["a né€ü, a né\n\n", "€€ü!?"] * 9, 275)


KINDS = {
  "characters": (tokenization.character_tokenizer, 80),
  "bytes": (byte_level, 0),
  "fallback": (byte_fallback, 256),
  "pieces": (word_pieces, 0),
  "words": (lambda: of_words(WORDS, decoders.Fuse()), 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_completions_end_at_the_first_stop_string(kind):
  make, start = KINDS[kind]
  tokenizer = make()
  rng = random.Random(0)
  count = max(tokenizer.get_vocab().values()) + 1
  eos = count - 1
  several = [*range(start, count)]
  if kind == "bytes":  # more parts of characters
    several += [i for t in "é€ü, a né\n" for i in tokenizer.encode(t)] * 9
  rows = np.array([rng.choices(several, k=24) for _ in range(40)])
  decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
  ended = 0
  for _ in range(6):
    strings = set()
    while len(strings) < 3:
      text = decode(rng.choice(rows))
      i = rng.randrange(24)
      piece = text[i : i + rng.randint(1, 5)]
      strings |= {piece.strip(" ")} - {""} if "\ufffd" not in piece else set()
    ends = Ends((eos,), stop_strings.build(tokenizer, [*strings], count))
    masks = np.asarray(completion_mask(jnp.asarray(rows), ends))
    for row, mask in zip(rows, masks, strict=True):
      for n in range(1, 25):
        text = decode(row[:n])
        places = [i for x in strings if (i := text.find(x)) >= 0]
        if row[n - 1] == eos or places:
          break
      expected = decode(row[: n - 1]) if row[n - 1] == eos else text
      if places and row[n - 1] != eos:
        expected = text[: min(places)]
        ended = ended + 1
      assert mask.tolist() == [i < n for i in range(24)]
      args = tokenizer, row, mask, ends
      assert tokenization.decode_completion(*args) == expected
  assert ended > 10


@pytest.mark.parametrize(
  "ids, string, text",
  [
    ([260, 261, 265], " a", ""),  # the decoder drops the first space
    ([257, 255, 10, 257], "\n", "a\ufffd"),  # after an invalid byte
    ([257, 0xC3, 257], "é", "a\ufffda"),
  ],
)
def test_decoding_may_change_the_text_at_a_stop_string(ids, string, text):
  tokenizer = byte_fallback()
  ends = Ends((266,), stop_strings.build(tokenizer, [string], 267))
  mask = np.asarray(completion_mask(jnp.asarray(ids), ends))
  ids = np.array(ids)
  assert tokenization.decode_completion(tokenizer, ids, mask, ends) == text


def test_invalid_strings_are_refused():
  build = functools.partial(
    stop_strings.build, tokenization.character_tokenizer(), count=100
  )
  with pytest.raises(ValueError, match="have 'é', which"):
    build(["a", "é"])
  with pytest.raises(ValueError, match="have 700001 bytes, which take 467"):
    build(["a" * 700001])
  assert build(["ab+" * 3000]).table.shape == (9000, 4)  # fast enough
  assert build(["ab", "xaby"]).table.shape[0] == 2  # "ab" always ends first


def test_rollouts_equal_cut_rollouts_without_strings(tiny):
  tokenizer = of_words(WORDS, decoders.Fuse())
  prompts = Prompts(jnp.array([[1, 2], [3, 4]]), jnp.ones((2, 2), bool))
  run = lambda ends: jax.jit(
    lambda params: rollout(
      tiny.lm,
      params,
      prompts,
      jax.random.key(0),
      group_size=8,
      max_new_tokens=112,
      eos_ids=ends,
    )
  )(tiny.params)
  strings = ["bcaaa", "ddab", "cabcd"]
  ends = Ends((0,), stop_strings.build(tokenizer, strings, 11))
  free = run(0)
  cut = run(ends)
  mask = completion_mask(free.completion_ids, ends) & free.completion_mask
  mask = np.asarray(mask)
  np.testing.assert_array_equal(cut.completion_mask, mask)
  for name in ("completion_ids", "logprobs"):
    mine = getattr(cut, name)
    other = np.asarray(getattr(free, name))
    np.testing.assert_allclose(mine, np.where(mask, other, 0), atol=1e-5)
  shorter = mask.sum(-1) < np.asarray(free.completion_mask).sum(-1)
  np.testing.assert_array_equal(cut.finished, free.finished | shorter)
  assert shorter.sum() > 4 and mask.sum(-1).max() > 56
