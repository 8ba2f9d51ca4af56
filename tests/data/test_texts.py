"""Texts for fine-tuning, and their packing into rows."""

import itertools

import numpy as np
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
  with pytest.raises(ValueError, match="without a solution"):
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


def random_texts(count):
  """Yields (context, learned) pairs of 1 to 12 ids."""
  rng = np.random.default_rng(0)
  for _ in range(count):
    sizes = rng.integers([0, 1], 7)
    yield tuple(rng.integers(1, 100, size).tolist() for size in sizes)


def unpack(batches):
  """Yields (ids, positions, weights) of each text, in order."""
  for rows in batches:
    for ids, positions, segments, weights in zip(*rows, strict=True):
      padding = segments == 0
      assert not weights[padding].any() and not ids[padding].any()
      for segment in range(1, segments.max(initial=0) + 1):
        (place,) = np.nonzero(segments == segment)
        assert place.size and (np.diff(place) == 1).all()
        yield ids[place], positions[place], weights[place]


def test_packing_keeps_texts_whole_and_in_order():
  texts = list(random_texts(200))
  batches = list(texts_lib.pack(iter(texts), rows=3, length=20))
  unpacked = list(unpack(batches))
  assert 150 < len(unpacked) <= 200
  for text, (ids, positions, weights) in zip(texts, unpacked, strict=False):
    context, learned = text
    assert ids.tolist() == context + learned
    assert positions.tolist() == list(range(len(ids)))
    expected = [0] * len(context) + [1] * len(learned)
    expected[0] = 0  # the first token cannot be predicted
    assert weights.tolist() == expected
  for rows in batches:
    assert {x.shape for x in rows} == {(3, 20)}


def test_rows_are_filled_one_after_another():
  texts = [([], [7] * n) for n in (4, 6, 5, 5, 6, 1, 4, 10)]
  first, second = texts_lib.pack(iter(texts), rows=2, length=10)
  assert [row.max() for row in first.segments] == [2, 2]
  assert (first.segments > 0).all()  # exact fits leave no gap
  assert [row.max() for row in second.segments] == [2, 1]
  second.ids[:] = 9  # batches are separate arrays
  assert first.ids.max() == 7
  with pytest.raises(ValueError, match="text has 11 tokens, but a row 10"):
    list(texts_lib.pack(iter([([1] * 5, [1] * 6)]), rows=1, length=10))
