"""Examples as texts to learn; packed rows hold them whole and apart."""

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


def test_the_solution_is_learned_and_the_prompt_read():
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
  with pytest.raises(ValueError, match="3 are of more than 4 tokens"):
    encoded(longest=4)
  with pytest.raises(ValueError, match="without a solution"):
    encoded([{"prompt": "a"}], longest=9)


def test_a_tokenizer_reads_prompts_messages_and_solutions():
  chat = [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
  examples = [EXAMPLES[0], {"prompt": chat, "answer": 3}]
  assert list(texts_lib.strings(examples)) == ["ab", "cde", "x", "y", "3"]


def test_every_epoch_has_all_texts_in_its_own_order():
  texts = [([], [i]) for i in range(20)]

  def first(seed):
    stream = itertools.islice(texts_lib.epochs(texts, seed), 60)
    return [learned[0] for _, learned in stream]

  orders = [first(0)[i : i + 20] for i in (0, 20, 40)]
  assert all(sorted(order) == list(range(20)) for order in orders)
  assert len({tuple(order) for order in (*orders, range(20))}) == 4
  assert first(0) == first(0) != first(1)


def random_texts(count):
  """(context, learned) pairs of 1 to 12 ids from 1."""
  rng = np.random.default_rng(0)
  for _ in range(count):
    sizes = rng.integers([0, 1], 7)
    yield tuple(rng.integers(1, 100, size).tolist() for size in sizes)


def unpack(batches):
  """Every text of every row: (ids, positions, weights), in order."""
  for rows in batches:
    for ids, positions, segments, weights in zip(*rows, strict=True):
      padding = segments == 0
      assert not weights[padding].any() and not ids[padding].any()
      for segment in range(1, segments.max(initial=0) + 1):
        (place,) = np.nonzero(segments == segment)
        assert place.size and (np.diff(place) == 1).all()
        yield ids[place], positions[place], weights[place]


def test_texts_come_back_whole_and_in_order():
  texts = list(random_texts(200))
  batches = list(texts_lib.pack(iter(texts), rows=3, length=20))
  found = list(unpack(batches))
  assert 150 < len(found) <= 200
  for (context, learned), (ids, positions, weights) in zip(
    texts, found, strict=False
  ):
    assert ids.tolist() == context + learned
    assert positions.tolist() == list(range(len(ids)))
    expected = [0] * len(context) + [1] * len(learned)
    expected[0] = 0  # nothing stands before it
    assert weights.tolist() == expected
  for rows in batches:
    assert {x.shape for x in rows} == {(3, 20)}


def test_rows_are_filled_before_the_next_begins():
  texts = [([], [7] * n) for n in (4, 6, 5, 5, 6, 1, 4, 10)]
  first, second = texts_lib.pack(iter(texts), rows=2, length=10)
  assert [row.max() for row in first.segments] == [2, 2]
  assert (first.segments > 0).all()  # exact fits leave no gap
  assert [row.max() for row in second.segments] == [2, 1]
  second.ids[:] = 9  # batches are separate arrays
  assert first.ids.max() == 7
  with pytest.raises(ValueError, match="text of 11 tokens .* row: 10"):
    list(texts_lib.pack(iter([([1] * 5, [1] * 6)]), rows=1, length=10))
