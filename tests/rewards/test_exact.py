import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core.ends import Ends
from grpojax.core.types import Rollout
from grpojax.data import pipeline
from grpojax.rewards import exact, exact_ids
from grpojax.runtime.text import tokenization

TOKENIZER = tokenization.character_tokenizer()
PAD = 0
EOS = 1
UNK = 2
BLANK = TOKENIZER.encode("\n\n")[0]

on_text = lambda text, answer: exact.exact_answer("", text, {"answer": answer})

RIGHT = [
  *[("#### 194", "194"), ("92+17=109\n#### 194\n\n", "194")],
  *[("####194", " 194 "), ("#### 3\n#### 194", "194"), ("##### 194", "194")],
  *[("#### 5", 5.0), ("#### 2.5", 2.5), ("#### 1,234", 1234)],
  *[("#### 1,234,567", "1234567"), ("#### 1234567", "1,234,567")],
  *[("#### -1,080.50", "-1080.50"), ("#### 1,23", "1,23")],
  ("#### two, three", "two, three"),
]
WRONG = [
  *[("#### 194\n#### 3", "194"), ("### 194", "194"), ("194", "194")],
  *[("#### 194.", "194"), ("#### 194 195", "194"), ("#### 100+94", "194")],
  *[("#### 0194", "194"), ("####", "194"), ("#### ,194", "194")],
  *[("", ""), ("####", ""), ("#### ", " ")],
  *[("#### 12,34,567", "1234567"), ("#### 1234,567", "1234567")],
]


def test_exact_answer():
  for completion, answer in [*RIGHT, *WRONG]:
    expected = float((completion, answer) in RIGHT)
    assert on_text(completion, answer) == expected, (completion, answer)


def test_equal_votes_have_equal_rewards():
  assert exact.given_answer("2\n#### -1,080.50\n\n") == "-1080.50"
  assert exact.given_answer("### 1194") is None
  assert exact.given_answer("#### \n") is None
  texts = "1234 1,234 12,34 +1234 01234 1234. 1,234.0 1234.0 ,1234 x".split()
  for answer in texts:
    expected = exact.given_answer(f"#### {answer}")
    for text in texts:
      vote = exact.given_answer(f"####{text}")
      assert on_text(f"####{text}", answer) == (vote == expected)


@functools.cache
def functions(eos_ids, longest):
  target, reward = exact_ids.exact_answer_ids(TOKENIZER, eos_ids, longest)
  return target, jax.jit(reward)


def rewards(eos_ids, longest, rows, answer, width):
  """Returns the rewards of id lists, computed as a rollout [B, G = 2, T]."""
  target, reward = functions(eos_ids, longest)
  tokens = pipeline.padded(rows + [[]] * (len(rows) % 2), width, PAD)
  shape = (-(-len(rows) // 2), 2, width)
  rollout = Rollout(
    prompt_ids=jnp.zeros((shape[0], 1), jnp.int32),
    prompt_mask=jnp.ones((shape[0], 1), bool),
    completion_ids=jnp.asarray(tokens.prompt_ids.reshape(shape)),
    completion_mask=jnp.asarray(tokens.prompt_mask.reshape(shape)),
    logprobs=jnp.zeros(shape),
    finished=jnp.ones(shape[:2], bool),
  )
  arrays = target({"answer": answer})
  targets = {k: np.stack([v] * shape[0]) for k, v in arrays.items()}
  result = reward(rollout, jax.tree.map(jnp.asarray, targets))
  assert result.shape == shape[:2] and result.dtype == jnp.float32
  return np.asarray(result).reshape(-1)


def assert_same(eos_ids, rows, answer, width=32, longest=16):
  """Compares the rewards on ids and on text, and returns them."""
  values = rewards(eos_ids, longest, rows, answer, width)[: len(rows)]
  for row, value in zip(rows, values, strict=True):
    ids = np.array(row, int)
    mask = np.ones(len(row), bool)
    text = tokenization.decode_completion(TOKENIZER, ids, mask, Ends(eos_ids))
    assert value == on_text(text, answer), (row, text, answer)
  return values


ADVERSARIAL = [
  *("", "#", "###", "####", "####7", "##### 7", "######## 7", "#### #7"),
  *("#### 7 #", "#### 7####", "#### 7\n#### ", "#### 8 #### 7"),
  *("#### 7 #### 8", "#### 7\n", "#### 7\n\n", "####\n\n7\n\n\n"),
  *("\n\n#### \n 7 \n ", "## ## 7", "####<|endoftext|> 7"),
  *("####<|endoftext|>7", "#### 7<|endoftext|>", "#### 7<|endoftext|>8"),
  *("#### 7<|pad|>", "#### <|pad|>7", "##<|pad|>## 7", "##<|endoftext|>## 7"),
  *("#### 7\n\n8", "#### 8\n\n#### 7", "#### 77", "7", "#### é7"),
]


@pytest.mark.slow
@pytest.mark.parametrize("eos_ids", [(EOS,), (EOS, BLANK)])
@pytest.mark.parametrize("answer", ["7", "#7", "7 7", "", "####", "#"])
def test_ids_and_adversarial_texts_agree(eos_ids, answer):
  texts = [a.replace("7", f) for a in ADVERSARIAL for f in ("7", "7 7")]
  rows = [TOKENIZER.encode(text) for text in texts]
  values = assert_same(eos_ids, rows, answer)
  if answer == "7":
    assert 5 < values.sum() < len(values) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
  "eos_ids, answer",
  [((EOS,), "1234"), ((EOS, BLANK), "-12.5"), ((BLANK, UNK, PAD), "5,5")],
)
def test_random_ids_and_their_texts_agree(eos_ids, answer):
  rng = np.random.default_rng(0)
  # Few characters, so that marks and answers occur; ids 100 and 127 are outside
  # the vocabulary, as with a padded embedding.
  few = [PAD, EOS, UNK, BLANK, 100, 127, *TOKENIZER.encode("####\n 5,-")]
  forms = [TOKENIZER.encode(t) for t in ("####", *exact.spellings(answer))]
  rows = []
  for _ in range(1500):
    row = []
    for _ in range(rng.integers(0, 6)):
      kind = rng.integers(3)
      row += forms[rng.integers(3)] if kind else [int(rng.choice(few))]
    rows.append(row)
  rows += [rng.integers(0, 128, rng.integers(12)).tolist() for _ in range(500)]
  assert assert_same(eos_ids, rows, answer).sum() > 50


@pytest.mark.slow
def test_very_short_and_too_long_texts_agree():
  for width in (1, 4, 5):
    texts = ["####7"[-width:], "####"[:width]]
    values = assert_same((EOS,), [*map(TOKENIZER.encode, texts)], "7", width)
    assert values[0] == (width == 5)
  texts = ["####7", "####77", "####7 7", "####7 ", "#### 7#"]
  rows = [TOKENIZER.encode(text) for text in texts]
  assert assert_same((EOS,), rows, "7", longest=1).tolist() == [1, 0, 0, 1, 0]


def test_long_and_ambiguous_answers_are_refused_on_ids():
  target, _ = exact_ids.exact_answer_ids(TOKENIZER, (EOS,), max_answer_length=4)
  assert target({"answer": " 123 "})["answer"].astype(bool).sum() == 6
  # "1,234" has five characters; no token is é; "\n\n" is a longer token.
  for answer in ("1234", "é", "a\n\nb"):
    with pytest.raises(ValueError, match="max_answer_length = 4\\) must"):
      target({"answer": answer})


def tokenizer_with(extra, merges=()):
  import tokenizers as library
  from transformers import PreTrainedTokenizerFast

  tokens = ["<|endoftext|>", *map(chr, range(32, 127)), *extra]
  model = library.models.BPE(
    vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)
  )
  backend = library.Tokenizer(model)
  backend.decoder = library.decoders.Fuse()
  return PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token="<|endoftext|>"
  )


@pytest.mark.parametrize(
  "pair", [("#", "#"), ("1", "0"), (" ", "a"), ("a", "#"), ("a", "1")]
)
def test_tokenizers_with_longer_tokens_are_refused(pair):
  with pytest.raises(ValueError, match="single-character.*on_device"):
    exact_ids.exact_answer_ids(tokenizer_with(["".join(pair)], [pair]), (0,))


def test_tokens_of_words_are_allowed_but_not_in_answers():
  tokenizer = tokenizer_with(["ab"], [("a", "b")])
  target, _ = exact_ids.exact_answer_ids(tokenizer, (0,))
  assert target({"answer": "ba"})["answer"].astype(bool).sum() == 4
  with pytest.raises(ValueError, match="'cab' cannot be compared on ids"):
    target({"answer": "cab"})
