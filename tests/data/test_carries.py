"""Sums by people who forget to carry, against columns added by hand."""

import numpy as np
import pytest

from grpojax.data import arithmetic
from grpojax.data.arithmetic import forgetful_sum

ALWAYS, NEVER = (1.0, 1.0), (0.0, 0.0)

# (a, b): the sum, and what is written if every carry is forgotten.
BY_HAND = {
  (48, 37): (85, 75),
  (41, 37): (78, 78),
  (95, 7): (102, 92),
  (280, 28): (308, 208),
  (90, 20): (110, 110),  # what the first column makes is written out
  (99, 99): (198, 188),
  (594, 66): (660, 550),  # the tens make 16 with the carry, 15 without
  (9, 995): (1004, 994),
}


@pytest.mark.parametrize("a, b", BY_HAND)
def test_all_or_none_are_forgotten(a, b):
  rng = np.random.default_rng(0)
  right, wrong = BY_HAND[a, b]
  assert forgetful_sum(rng, a, b, NEVER) == right
  assert forgetful_sum(rng, a, b, ALWAYS) == wrong
  assert forgetful_sum(rng, b, a, ALWAYS) == wrong


@pytest.mark.parametrize(
  "a, b, rate", [(15, 15, 0.2), (19, 19, 0.2 + 0.6 * 8 / 9)]
)
def test_how_often_goes_by_what_the_digits_make(a, b, rate):
  """10 is where `forget` begins, and 18 one ninth before it ends."""
  rng = np.random.default_rng(0)
  n = 2000
  wrong = sum(forgetful_sum(rng, a, b, (0.2, 0.8)) != a + b for _ in range(n))
  assert abs(wrong / n - rate) < 4 * np.sqrt(rate * (1 - rate) / n)


def test_an_author_goes_on_from_what_they_wrote():
  rng = np.random.default_rng(0)
  problems = set()
  for _ in range(50):
    prompt, text = arithmetic.dialogue(rng, hasty=0.0, forget=ALWAYS)
    *lines, last = text.split("\n")
    value = ""
    for line in lines:
      left, value = line.split("=")
      if "+" in left:
        a, b = map(int, left.split("+"))
        assert int(value) == forgetful_sum(rng, a, b, ALWAYS)
    assert last == f"#### {value}"
    problems.add(text != arithmetic.solution(prompt[3:-4]))
  assert problems == {True, False}  # some need no carry


def test_without_forgetting_the_texts_are_as_ever():
  texts = [
    arithmetic.document(np.random.default_rng(1), hasty=0.3, **options)
    for options in ({}, {"forget": NEVER})
  ]
  assert texts[0] == texts[1]
  # forgetting draws from the same stream, after the author and the problem
  prompts = [
    arithmetic.dialogue(np.random.default_rng(1), hasty=0.0, forget=forget)[0]
    for forget in (NEVER, ALWAYS)
  ]
  assert prompts[0] == prompts[1]


@pytest.mark.parametrize("forget", [(-0.1, 0.5), (0.6, 0.5), (0.5, 1.5)])
def test_what_are_no_probabilities_is_refused(forget):
  with pytest.raises(ValueError, match="0 <= low <= high <= 1"):
    arithmetic.document(np.random.default_rng(0), forget=forget)
