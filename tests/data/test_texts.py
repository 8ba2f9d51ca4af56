"""Examples as texts to learn."""

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
  options = {"eos_id": 0, "longest": 6} | options
  return texts_lib.encode_examples(
    examples, lambda prompt: encode(prompt + ">"), encode, **options
  )


def test_the_solution_is_learned_and_the_prompt_read():
  texts, dropped = encoded(longest=7)
  assert texts == [
    (encode("ab>"), [*encode("cde"), 0]),
    (encode("f>"), [*encode("gh"), 0]),
  ]
  assert dropped == 1


def test_what_is_too_long_is_left_out_and_counted():
  # The first text has 7 tokens, with the EOS.
  texts, dropped = encoded(longest=6)
  assert len(texts) == 1 and dropped == 2
  with pytest.raises(ValueError, match="3 are of more than 4 tokens"):
    encoded(longest=4)
  with pytest.raises(ValueError, match="no examples"):
    encoded([])


def test_prompts_can_be_learned_too():
  texts, _ = encoded(longest=7, learn_prompts=True)
  assert texts[1] == ([], [*encode("f>gh"), 0])


def test_an_example_without_an_answer_is_refused():
  with pytest.raises(ValueError, match="without a solution"):
    encoded([{"prompt": "a"}])


def test_a_tokenizer_reads_prompts_messages_and_solutions():
  chat = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
  examples = [EXAMPLES[0], {"prompt": chat, "answer": 3}]
  assert list(texts_lib.strings(examples)) == ["ab", "cde", "x", "y", "3"]


def test_every_epoch_has_all_texts_in_its_own_order():
  texts = [([], [i]) for i in range(20)]

  def first(seed, count=60):
    return [
      learned[0]
      for _, learned in itertools.islice(texts_lib.epochs(texts, seed), count)
    ]

  orders = [first(0)[i : i + 20] for i in (0, 20, 40)]
  assert all(sorted(order) == list(range(20)) for order in orders)
  assert len({tuple(order) for order in (*orders, range(20))}) == 4
  assert first(0) == first(0) != first(1)
