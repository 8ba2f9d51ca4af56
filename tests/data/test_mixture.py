"""Several data sets as one stream."""

import itertools

import pytest

from grpojax.data import arithmetic, pipeline
from grpojax.data.examples import SOURCE
from grpojax.data.mixture import Mixture, Part


def numbered(name, count):
  return [{"prompt": f"{name}{i}", "answer": ""} for i in range(count)]


PARTS = [Part("a", 3.0, numbered("a", 7)), Part("b", 1.0, numbered("b", 5))]


def batches(parts=PARTS, **options):
  options = {"batch_size": 4, "max_prompt_length": 99} | options
  return pipeline.prompt_batches(
    Mixture(parts), lambda x: (x, [1] * len(x)), **options
  )


def prompts_of(stream, count):
  return [[e["prompt"] for e in b] for _, b in itertools.islice(stream, count)]


def test_every_batch_has_the_shares_and_every_epoch_its_prompts():
  taken = list(itertools.islice(batches(), 35))
  sources = [[e[SOURCE] for e in examples] for _, examples in taken]
  assert all(names.count("a") == 3 for names in sources)
  prompts = [e["prompt"] for _, examples in taken for e in examples]
  for name, size in (("a", 7), ("b", 5)):
    mine = [p for p in prompts if p[0] == name]
    epochs = [mine[i : i + size] for i in range(0, len(mine) - size, size)]
    assert all(len(set(epoch)) == size for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1  # each in an order of its own


@pytest.mark.slow
@pytest.mark.parametrize("start", [1, 29])
def test_a_run_resumed_anywhere_continues_the_same_stream(start):
  endless = Part("c", 0.5, arithmetic.load("train", seed=1))
  whole = sum(prompts_of(batches([*PARTS, endless]), 20), [])
  stream = batches([*PARTS, endless], start=start, batch_size=3)
  assert sum(prompts_of(stream, 10), []) == whole[start : start + 30]
  assert len({p[0] for p in whole} - {"a", "b"}) > 1


@pytest.mark.slow
def test_the_order_of_a_data_set_is_its_own():
  def order(name, **options):
    found = sum(prompts_of(batches(**options), 8), [])
    return [p for p in found if p[0] == name][:5]

  assert order("b") == order("b", parts=PARTS[::-1])
  assert order("b") == order("b", parts=[PARTS[1], Part("z", 1.0, PARTS[0][2])])
  assert order("b") != order("b", seed=1)


def test_held_out_examples_come_one_data_set_after_another():
  stream = batches(shuffle=False, repeat=False, batch_size=12)
  expected = [e["prompt"] for part in PARTS for e in part.examples]
  assert prompts_of(stream, 2) == [expected]
  mixture = Mixture(PARTS)
  assert len(mixture) == 12
  assert mixture[6] == PARTS[0].examples[6] | {SOURCE: "a"}
  assert mixture[7] == PARTS[1].examples[0] | {SOURCE: "b"}
  assert SOURCE not in PARTS[0].examples[6]
