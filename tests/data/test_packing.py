"""Packed rows hold every text whole, in order, and apart from the others."""

import itertools

import numpy as np
import pytest

from grpojax.data.texts import pack


def random_texts(count, seed=0, most=6):
  """(context, learned) pairs of 1 to 2 * most ids from 1."""
  rng = np.random.default_rng(seed)
  return [
    (
      rng.integers(1, 100, rng.integers(0, most + 1)).tolist(),
      rng.integers(1, 100, rng.integers(1, most + 1)).tolist(),
    )
    for _ in range(count)
  ]


def unpack(batches):
  """Every text of every row: (ids, positions, weights), in order."""
  for rows in batches:
    for ids, positions, segments, weights in zip(*rows, strict=True):
      padding = segments == 0
      assert not weights[padding].any() and not ids[padding].any()
      for segment in range(1, segments.max(initial=0) + 1):
        (here,) = np.nonzero(segments == segment)
        assert here.size and (np.diff(here) == 1).all()
        yield ids[here], positions[here], weights[here]


def test_texts_come_back_whole_and_in_order():
  texts = random_texts(200)
  batches = list(pack(iter(texts), rows=3, length=20))
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
  first, second = pack(iter(texts), rows=2, length=10)
  assert [row.max() for row in first.segments] == [2, 2]
  assert (first.segments > 0).all()  # exact fits leave no gap
  assert [row.max() for row in second.segments] == [2, 1]


def test_batches_are_separate_arrays():
  texts = itertools.cycle([([1], [2, 3])])
  first, second = itertools.islice(pack(texts, rows=1, length=7), 2)
  assert first.ids.tolist() == second.ids.tolist() == [[1, 2, 3, 1, 2, 3, 0]]
  second.ids[:] = 9
  assert first.ids.max() == 3


def test_too_long_a_text_is_an_error():
  with pytest.raises(ValueError, match="text of 11 tokens .* row: 10"):
    list(pack(iter([([1] * 5, [1] * 6)]), rows=1, length=10))
