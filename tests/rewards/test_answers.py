"""Equality of answers: labelled pairs and hostile expressions."""

import pathlib

import pytest

from grpojax.rewards import math
from grpojax.rewards.pool import Pool

DATA = pathlib.Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["right_answers.txt", "wrong_answers.txt"])
def test_pairs_of_answers(name, step):
  """Rows are "answer ~ reference"; a third part marks a known error."""
  lines = (DATA / name).read_text().splitlines()
  rows = [line.split(" ~ ") for line in lines]
  for answer, reference, *cause in rows[::step]:
    expected = (name == "right_answers.txt") != bool(cause)
    text = rf"So it is \boxed{{{answer}}}."
    value = math.math_answer("", text, {"answer": reference})
    assert value == expected, (answer, reference)
  assert sum(len(row) > 2 for row in rows) < len(rows) / 20


HOSTILE = [
  *("10^{10^{10}}", "9^{9^{9^{9}}}", "((9^{999})^{999})^{999}", "99999999!"),
  *(r"\binom{10^9}{5 \cdot 10^8}", r"\sum_{i=1}^{10^9} \sin i", "(" * 240),
  *("{" * 240, r"\sqrt{" * 60 + "x" + "}" * 60, "x^{" * 120 + "}" * 120),
  *("x+" * 240 + "x", "(x+y)" * 90, "(x+y+z)^{999}", r"\frac{1}{" * 50 + "x"),
  *("__import__('os')._exit(1)", r"\int_0^1 x^x dx", "x!^{x!^{x!}}", "1/0"),
]


@pytest.mark.slow
def test_hostile_expressions_do_not_stop_the_worker():
  for reference in ("2x+1", "(2x, 1)"):
    texts = [f"#### {answer}" for answer in HOSTILE]
    texts.append(f"#### {reference.replace('2x', 'x + x')}")
    example = {"answer": reference}
    with Pool(["math_answer"], timeout=300) as pool:
      sent = pool.submit([[("", text, example)] for text in texts], 1)
      result = pool.collect([sent])
    assert not result.failed.any(), result.failures
    assert result.rewards[:, 0].tolist() == [0.0] * len(HOSTILE) + [1.0]
