import itertools

import numpy as np
import pytest

from grpojax.data import arithmetic, drawn, pipeline
from grpojax.data.examples import SOURCE
from grpojax.data.pipeline import Mixture, Part

FINITE = [{"prompt": "x" * (i % 5 + 1), "answer": str(i)} for i in range(10)]


def numbered(name, count):
  return [
    {"prompt": f"{name}{i}", "answer": f"{name}{i}"} for i in range(count)
  ]


PARTS = [Part("a", 3.0, numbered("a", 7)), Part("b", 1.0, numbered("b", 5))]
ENDLESS = arithmetic.load("train", seed=1)


def encode(prompt):
  text = f"<{prompt}>"
  return text, [ord(c) for c in text]


def batches(examples=FINITE, **options):
  options = {"batch_size": 4, "max_prompt_length": 8} | options
  return pipeline.prompt_batches(examples, encode, **options)


def answers(stream, count=None):
  taken = itertools.islice(stream, count)
  return [example["answer"] for _, rows in taken for example in rows]


def test_batches_have_padded_ids_masks_targets_and_examples():
  def target(example):
    return {"value": np.full((2,), int(example["answer"]))}

  prompts, rows = next(batches(shuffle=False, pad_id=7, target=target))
  assert prompts.prompt_ids.dtype == np.int32
  assert prompts.prompt_mask.dtype == bool
  np.testing.assert_array_equal(
    prompts.prompt_ids[1], [ord("<"), ord("x"), ord("x"), ord(">"), 7, 7, 7, 7]
  )
  np.testing.assert_array_equal(prompts.prompt_mask.sum(1), [3, 4, 5, 6])
  np.testing.assert_array_equal(prompts.prompt_mask[0], [1] * 3 + [0] * 5)
  expected = [[int(row["answer"])] * 2 for row in rows]
  np.testing.assert_array_equal(prompts.targets["value"], expected)
  assert next(batches())[0].targets is None
  assert rows[2] == FINITE[2] | {"prompt_text": "<xxx>"}
  assert "prompt_text" not in FINITE[2]


@pytest.mark.slow
@pytest.mark.parametrize(
  "examples",
  [FINITE, ENDLESS, Mixture([*PARTS, Part("c", 0.5, ENDLESS)])],
  ids=["list", "arithmetic", "mixture"],
)
@pytest.mark.parametrize("start", [0, 7, 23])
def test_a_run_resumed_anywhere_continues_the_same_stream(examples, start):
  whole = answers(batches(examples, max_prompt_length=999), 10)
  stream = batches(examples, max_prompt_length=999, start=start, batch_size=3)
  assert answers(stream, 5) == whole[start : start + 15]
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


def test_without_repeat_each_example_comes_once():
  stream = list(batches(shuffle=False, repeat=False))
  assert [len(rows) for _, rows in stream] == [4, 4, 2]
  assert [p.prompt_ids.shape for p, _ in stream] == [(4, 8), (4, 8), (2, 8)]
  assert answers(stream) == [str(i) for i in range(10)]
  tail = batches(shuffle=False, repeat=False, start=9)
  assert answers(tail) == ["9"]
  assert answers(batches(repeat=False, start=10)) == []


def test_batches_of_a_mixture_have_its_shares():
  taken = list(itertools.islice(batches(Mixture(PARTS)), 35))
  sources = [[e[SOURCE] for e in examples] for _, examples in taken]
  assert all(names.count("a") == 3 for names in sources)
  prompts = answers(taken)
  for name, size in (("a", 7), ("b", 5)):
    mine = [p for p in prompts if p[0] == name]
    epochs = [mine[i : i + size] for i in range(0, len(mine) - size, size)]
    assert all(len(set(epoch)) == size for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1  # orders differ


@pytest.mark.slow
def test_the_order_of_a_data_set_ignores_other_data_sets():
  def order(parts=PARTS, **options):
    prompts = answers(batches(Mixture(parts), **options), 8)
    return [p for p in prompts if p[0] == "b"][:5]

  assert order() == order(PARTS[::-1])
  assert order() == order([PARTS[1], Part("z", 1.0, PARTS[0][2])])
  assert order() != order(seed=1)


def test_a_mixture_without_repeat_is_concatenated():
  mixture = Mixture(PARTS)
  stream = batches(mixture, shuffle=False, repeat=False, batch_size=12)
  expected = [e["answer"] for part in PARTS for e in part.examples]
  assert answers(stream, 2) == expected and len(mixture) == 12
  assert mixture[6] == PARTS[0].examples[6] | {SOURCE: "a"}
  assert mixture[7] == PARTS[1].examples[0] | {SOURCE: "b"}
  assert SOURCE not in PARTS[0].examples[6]


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
