"""The pass over a data set before a run."""

import numpy as np
import pytest

from grpojax.data import arithmetic, survey

EXAMPLES = [{"prompt": "x" * (i % 5 + 1), "answer": str(i)} for i in range(10)]


def encode(prompt):
  return prompt, [1] * len(prompt)


def test_all_prompts_are_measured():
  found = survey.survey(EXAMPLES, encode)
  np.testing.assert_array_equal(found.lengths, [1, 2, 3, 4, 5] * 2)


def test_the_fingerprint_is_of_the_examples_and_their_order():
  def fingerprint(examples):
    return survey.survey(examples, encode).fingerprint

  first = fingerprint(EXAMPLES)
  assert fingerprint([dict(reversed(e.items())) for e in EXAMPLES]) == first
  others = [
    EXAMPLES[:-1],
    EXAMPLES[::-1],
    [*EXAMPLES[:-1], EXAMPLES[-1] | {"answer": "10"}],
    [*EXAMPLES[:-1], EXAMPLES[-1] | {"level": 1}],
  ]
  assert len({first, *map(fingerprint, others)}) == 5


def test_an_endless_data_set_is_read_as_far_as_it_is_used():
  read, measured = [], []

  class Endless:
    def __len__(self):
      return arithmetic.ENDLESS

    def __getitem__(self, i):
      read.append(i)
      return {"prompt": "x"}

  def counted(prompt):
    measured.append(prompt)
    return encode(prompt)

  short = survey.survey(Endless(), counted, most=3, cached=lambda _: 1 / 0)
  assert len(short.lengths) == len(measured) == 3
  assert max(read) + 1 == survey.FINGERPRINTED
  long = survey.survey(Endless(), counted, most=500)
  assert len(long.lengths) == 500 and max(read) == 499
  assert long.fingerprint == short.fingerprint


def test_what_is_known_is_not_measured_again():
  known = np.arange(1, 11)
  asked = []

  def cached(fingerprint):
    asked.append(fingerprint)
    return known

  found = survey.survey(EXAMPLES, lambda prompt: 1 / 0, cached=cached)
  assert found.lengths is known and asked == [found.fingerprint]


def test_a_long_pass_may_be_ended_and_says_how_far_it_is(monkeypatch, capsys):
  class Ended(Exception):
    pass

  calls = iter(range(99))

  def check_signals():
    if next(calls) == 14:  # in the middle of the second pass
      raise Ended

  monkeypatch.setattr(survey, "_REPORT_EVERY", -1)
  with pytest.raises(Ended):
    survey.survey(EXAMPLES, encode, check_signals=check_signals)
  said = capsys.readouterr().out.splitlines()
  assert said[0] == "read 0 of 10 prompts"
  assert said[-1] == "measured 3 of 10 prompts"


def test_a_prompt_without_tokens_is_refused():
  examples = [*EXAMPLES, {"prompt": ""}]
  with pytest.raises(ValueError, match="example 10: a prompt without tokens"):
    survey.survey(examples, encode)


LENGTHS = np.array([3, 9, 5, 7])


def test_long_prompts_are_refused_by_their_number():
  assert survey.refuse(LENGTHS, 9, endless=False) is None
  with pytest.raises(ValueError) as error:
    survey.refuse(LENGTHS, 6, endless=False)
  assert "2 of 4 prompts" in str(error.value)
  assert "example 1 has 9" in str(error.value)


def test_long_prompts_are_dropped():
  kept = survey.drop(LENGTHS, 6, endless=False)
  np.testing.assert_array_equal(kept, [0, 2])
  with pytest.raises(ValueError, match="all 4 prompts are longer"):
    survey.drop(LENGTHS, 2, endless=False)
  with pytest.raises(ValueError, match="endless: use 'refuse'"):
    survey.drop(LENGTHS, 6, endless=True)
