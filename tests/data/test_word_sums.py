import functools
import re

import numpy as np
import pytest

from grpojax.data import datasets, drawn, word_sums
from grpojax.environments import tools
from grpojax.environments.calculator import calculator

SIGNS = dict.fromkeys(["buys", "finds", "gets"], 1)
SIGNS |= dict.fromkeys(["gives away", "loses", "sells"], -1)


def read(problem):
  """Returns the signed numbers of a problem."""
  first, *steps, question = re.split(r"(?<=[.?]) ", problem)
  pattern = r"(\w+) has (\d+) (\w+)\."
  name, count, thing = re.fullmatch(pattern, first).groups()
  assert question == f"How many {thing} does {name} have now?"
  numbers = [int(count)]
  for step in steps:
    verb, number, more = re.fullmatch(
      r"(?:S?[Hh]e|Then s?he) (\w+(?: away)?) (\d+)( more)?\.", step
    ).groups()
    assert name not in step
    assert bool(more) == (SIGNS[verb] > 0)
    numbers.append(SIGNS[verb] * int(number))
  return numbers


@pytest.mark.parametrize("steps, largest", [((1, 3), 20), (2, 10), (3, 99)])
def test_answers_are_the_sums_of_the_stories(steps, largest):
  options = {"steps": steps, "largest": largest}
  examples = datasets.load("word_sums", "train", options=options)
  lengths = []
  added = 0
  for i in range(300):
    numbers = read(examples[i]["prompt"])
    assert int(examples[i]["answer"]) == sum(numbers)
    assert np.cumsum(numbers).min() >= 0
    assert all(2 <= abs(number) <= largest for number in numbers)
    lengths.append(len(numbers) - 1)
    added += numbers[1] > 0
  low, high = (steps, steps) if isinstance(steps, int) else steps
  counts = np.bincount(lengths, minlength=high + 1)
  assert counts[:low].sum() == 0 and len(counts) == high + 1
  assert counts[low:].min() > 0.7 * 300 / (high - low + 1)
  assert 110 < added < 190  # 4.6 standard deviations around a half


def test_examples_do_not_depend_on_the_machine():
  assert word_sums.load("test")[0] == {
    "prompt": "Emma has 16 shells. She gets 13 more. Then she loses 3. "
    "How many shells does Emma have now?",
    "answer": "26",
  }


def test_shots_are_solved_problems_in_the_chat():
  example = word_sums.load("test", steps=(1, 3), shots=3)[5]
  *chat, question = example["prompt"]
  alone = word_sums.load("test", steps=(1, 3))[5]["prompt"]
  assert question == {"role": "user", "content": alone}
  assert [turn["role"] for turn in chat] == ["user", "assistant"] * 3
  pairs = zip(chat[::2], chat[1::2], strict=True)
  for length, (problem, solved) in enumerate(pairs, 1):
    assert drawn.split_of(problem["content"]) == "train"
    numbers = read(problem["content"])
    assert len(numbers) == length + 1
    assert solved["content"] == word_sums.solution(numbers)
  assert word_sums.solution([12, 7, -5]) == "12 + 7 = 19\n19 - 5 = 14"


def test_shots_can_call_a_tool():
  load = functools.partial(word_sums.load, "test", steps=(1, 3), shots=3)
  *chat, question = load(tool="calculator")[5]["prompt"]
  assert question == load()[5]["prompt"][-1]
  for solved, answer in zip(chat[1::3], chat[2::3], strict=True):
    step = tools.answer(
      tools.hermes(solved["content"]), {"calculator": calculator}
    )
    assert step.observation == [answer | {"name": "calculator"}]


def test_bad_options_are_refused():
  for options, message in (
    ({"steps": (3, 2)}, r"steps = \(3, 2\): must be a whole number from 1 to"),
    ({"largest": 1}, "largest = 1: must be 2 to 1000000"),
    ({"shots": -1}, "shots = -1: must be 0 to 100"),
  ):
    with pytest.raises(ValueError, match=message):
      word_sums.load("train", **options)
