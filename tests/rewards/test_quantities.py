import random
from fractions import Fraction

import pytest

from grpojax.rewards.quantities import equal, number


def spellings(value, rng):
  """Ways to write a number, none of which the code under test knows of."""
  sign, size = "-" * (value < 0), abs(value)
  top, bottom = size.numerator, size.denominator
  scale = rng.randint(2, 9)
  yield f"{sign}{top * scale}/{bottom * scale}"
  yield f"{sign}\\frac{{{top}}}{{{bottom}}}"
  yield f"${sign}\\dfrac{{{top * scale}}}{{{bottom * scale}}}$"
  yield f"−{top} / {bottom}" if sign else f"+{top}/{bottom}"
  whole, rest = divmod(top, bottom)
  if whole and rest:
    yield f"{sign}{whole} {rest}/{bottom}"
    yield f"{sign}{whole}\\tfrac{{{rest}}}{{{bottom}}}"
  if 10**9 % bottom == 0:  # decimals, in units of 1e-9
    digits = f"{top * (10**9 // bottom):010d}"
    whole, decimals = digits[:-9], digits[-9:]
    grouped = f"{int(whole):,}"
    yield f"{sign}{whole}.{decimals}"
    yield f"{sign}${grouped}.{decimals} per hour"
    yield f"x = {sign}{grouped.replace(',', '{,}')}.{decimals}\\text{{ cm}}^2"
    yield f"{sign}{digits}e-9"
    yield f"{sign}{digits} \\times 10^{{-9}}"
    yield f"**{sign}{grouped}.{decimals.rstrip('0')}** \\%"


def test_one_number_in_all_its_spellings():
  rng = random.Random(0)
  for _ in range(300):
    kind = rng.choice([1, 2, 3, 7, 8, 100, 10**6, 2**9 * 5**9])
    value = Fraction(rng.randint(-(10**7), 10**7), kind)
    near = value + Fraction(1, 10**9)
    for text in spellings(value, rng):
      assert number(text) == value, text
      assert equal(text, str(value)) and not equal(text, str(near)), text


@pytest.mark.parametrize(
  "text",
  [
    *("5 or 6", "10-15", "2:30", "5x", "2\\pi", "x>5", "x \\ge 5", "12,34"),
    *("1.234,5", "1,2,3", "(1, 2)", "(0,100)", "5!", "x^2", "2^{10}"),
    *("1/0", "1e1000", "1e999999999", "", "five", "12/25/2020", "5 + 3", "a5"),
    *("5 and a half", "not 5", "x=5, y=3", "x != 5", "x <= 5", "5 3", "1e"),
    *("9" * 61, "9" * 501, "-", "--5", "1/2/3", "5 * 3", "(5", "0x10"),
    *("1_000", "1..2", "\\sqrt{4}", "-9e100"),
  ],
)  # fmt: skip
def test_what_is_no_number(text):
  if text == "(5":
    assert number(text) == 5  # a parenthesis left open is punctuation
  else:
    assert number(text) is None


def test_text_is_compared_without_its_format():
  assert equal(r"\text{Evelyn}", "evelyn.")
  assert equal(r"\left[ \dfrac{1}{2}, \infty \right)", "[0.5, infinity)")
  assert equal(r"\dfrac{x + 1}{2}", "(x+1)/2")
  assert equal("(B)", "b") and equal("y = 2x", "2x") and equal("2π", r"2\pi")
  assert not equal("(1,2)", "[1,2]") and not equal("(1,2)", "(1,2,3)")
  assert not equal("", "") and not equal(" . ", " . ")
  assert not equal("x" * 501, "x" * 501)
