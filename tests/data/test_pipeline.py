import itertools

import numpy as np
import pytest

from grpojax.data import arithmetic, drawn, pipeline

FINITE = [{"prompt": "x" * (i % 5 + 1), "answer": str(i)} for i in range(10)]


def encode(prompt):
  text = f"<{prompt}>"
  return text, [ord(c) for c in text]


def batches(examples=FINITE, **options):
  options = {"batch_size": 4, "max_prompt_length": 8} | options
  return pipeline.prompt_batches(examples, encode, **options)


def answers(stream, count=None):
  taken = itertools.islice(stream, count)
  return [example["answer"] for _, rows in taken for example in rows]


def test_a_batch_holds_padded_ids_masks_and_examples():
  prompts, rows = next(batches(shuffle=False, pad_id=7))
  assert prompts.prompt_ids.dtype == np.int32
  assert prompts.prompt_mask.dtype == bool
  np.testing.assert_array_equal(
    prompts.prompt_ids[1], [ord("<"), ord("x"), ord("x"), ord(">"), 7, 7, 7, 7]
  )
  np.testing.assert_array_equal(prompts.prompt_mask.sum(1), [3, 4, 5, 6])
  np.testing.assert_array_equal(prompts.prompt_mask[0], [1] * 3 + [0] * 5)
  assert prompts.targets is None
  assert rows[2] == FINITE[2] | {"prompt_text": "<xxx>"}
  assert "prompt_text" not in FINITE[2]


def test_targets_are_stacked():
  def target(example):
    return {"value": np.full((2,), int(example["answer"]))}

  prompts, rows = next(batches(target=target))
  expected = [[int(row["answer"])] * 2 for row in rows]
  np.testing.assert_array_equal(prompts.targets["value"], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  "examples", [FINITE, arithmetic.load("train")], ids=["list", "arithmetic"]
)
@pytest.mark.parametrize("start", [0, 7, 23])
def test_a_run_resumed_anywhere_continues_the_same_stream(examples, start):
  whole = answers(batches(examples, max_prompt_length=999), 10)
  # Another batch size, and more read ahead than consumed.
  stream = batches(examples, max_prompt_length=999, start=start, batch_size=3)
  rest = answers(stream, 5)
  assert rest == whole[start : start + 15]
  if len(examples) == drawn.ENDLESS:  # in its own order
    assert whole[:3] == [examples[i]["answer"] for i in range(3)]


def test_every_epoch_is_a_new_permutation():
  stream = answers(batches(batch_size=10), 3)
  epochs = [stream[i : i + 10] for i in (0, 10, 20)]
  for epoch in epochs:
    assert sorted(epoch) == sorted(str(i) for i in range(10))
  assert len({tuple(epoch) for epoch in epochs}) == 3
  assert stream == answers(batches(batch_size=10), 3)
  other = answers(batches(batch_size=10, seed=1), 3)
  # No epoch of one seed is an epoch of another.
  assert not {tuple(other[i : i + 10]) for i in (0, 10, 20)} & {
    tuple(epoch) for epoch in epochs
  }


def test_evaluation_reads_each_example_once_and_keeps_the_rest():
  stream = list(batches(shuffle=False, repeat=False))
  assert [len(rows) for _, rows in stream] == [4, 4, 2]
  assert [p.prompt_ids.shape for p, _ in stream] == [(4, 8), (4, 8), (2, 8)]
  assert answers(stream) == [str(i) for i in range(10)]
  tail = batches(shuffle=False, repeat=False, start=9)
  assert answers(tail) == ["9"]
  assert answers(batches(repeat=False, start=10)) == []


def test_a_subset_keeps_the_order():
  kept = pipeline.Subset(FINITE, [0, 1, 5, 8])
  assert [x["answer"] for x in kept] == list("0158")
  stream = batches(kept, max_prompt_length=6, shuffle=False)
  assert answers(stream, 1) == list("0158")


def test_bad_arguments_and_prompts_are_refused():
  with pytest.raises(ValueError, match="no examples"):
    batches([])
  empty = pipeline.prompt_batches(
    FINITE, lambda _: ("", []), batch_size=1, max_prompt_length=4
  )
  with pytest.raises(ValueError, match="without tokens"):
    next(empty)
  stream = batches(shuffle=False, max_prompt_length=6)
  assert len(next(stream)[1]) == 4
  with pytest.raises(ValueError, match="7 tokens.*max_prompt_length = 6"):
    next(stream)
