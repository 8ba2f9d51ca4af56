"""Texts for fine-tuning, and their packing into rows."""

import itertools

import pytest

from grpojax.data import texts as texts_lib

EXAMPLES = [
  {"prompt": "ab", "solution": "cde", "answer": "e"},
  {"prompt": "f", "answer": "gh"},
  {"prompt": "much too long", "answer": "for a row"},
]


def encode(text):
  return [ord(c) for c in text]


def encoded(examples=EXAMPLES, **options):
  return texts_lib.encode_examples(
    examples,
    lambda prompt: encode(prompt + ">"),
    encode,
    eos_id=0,
    **options,
  )


def test_the_loss_counts_solutions_and_optionally_prompts():
  texts, dropped = encoded(longest=7)
  assert texts == [
    (encode("ab>"), [*encode("cde"), 0]),
    (encode("f>"), [*encode("gh"), 0]),
  ]
  assert dropped == 1
  # The first text has 7 tokens, with the EOS.
  assert encoded(longest=6) == (texts[1:], 2)
  both, _ = encoded(longest=7, learn_prompts=True)
  assert both[1] == ([], [*encode("f>gh"), 0])
  with pytest.raises(ValueError, match="all 3 texts have more than 4 tokens"):
    encoded(longest=4)
  with pytest.raises(ValueError, match="has no solution"):
    encoded([{"prompt": "a"}], longest=9)


def test_tokenizers_are_trained_on_prompts_and_solutions():
  chat = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
  examples = [EXAMPLES[0], {"prompt": chat, "answer": 3}]
  assert list(texts_lib.strings(examples)) == ["ab", "cde", "x", "y", "3"]


def test_every_epoch_is_a_new_order_of_all_texts():
  texts = [([], [i]) for i in range(20)]

  def first(seed):
    stream = itertools.islice(texts_lib.epochs(texts, seed), 60)
    return [learned[0] for _, learned in stream]

  orders = [first(0)[i : i + 20] for i in (0, 20, 40)]
  assert all(sorted(order) == list(range(20)) for order in orders)
  assert len({tuple(order) for order in (*orders, range(20))}) == 4
  assert first(0) == first(0) != first(1)


def test_the_documented_texts_are_packed():
  pairs = [("ab", "cde"), ("f", "gh"), ("i", "j"), ("", "klmnopqr")]
  texts = [tuple(map(encode, pair)) for pair in pairs]
  # A row that is not full ends a batch only when another text arrives.
  (rows,) = texts_lib.pack(iter(texts), rows=2, length=8)
  zeros = [0] * 6
  assert rows.ids.tolist() == [encode("abcdefgh"), [*encode("ij"), *zeros]]
  assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, *zeros]]
  assert rows.segments.tolist() == [[1] * 5 + [2] * 3, [1, 1, *zeros]]
  assert rows.weights.tolist() == [[0, 0, 1, 1, 1, 0, 1, 1], [0, 1, *zeros]]


def test_rows_are_filled_one_after_another():
  texts = [([], [7] * n) for n in (4, 6, 5, 5, 6, 1, 4, 10)]
  first, second = texts_lib.pack(iter(texts), rows=2, length=10)
  assert [row.max() for row in first.segments] == [2, 2]
  assert (first.segments > 0).all()  # exact fits leave no gap
  # The first token of a text cannot be predicted.
  assert first.weights[0].tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 1, 1]
  assert [row.max() for row in second.segments] == [2, 1]
  second.ids[:] = 9  # batches are separate arrays
  assert first.ids.max() == 7
  with pytest.raises(ValueError, match="text has 11 tokens, but rows have 10"):
    list(texts_lib.pack(iter([([1] * 5, [1] * 6)]), rows=1, length=10))
