import pytest

from grpojax.rewards.length import length, overlong, unfinished


def example(size, most=20480):
  return {"completion_length": size, "max_completion_length": most}


@pytest.mark.parametrize(
  "size, expected",
  [(1, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1)],
)
def test_overlong_in_the_setting_of_the_paper(size, expected):
  assert overlong("", "", example(size)) == pytest.approx(expected)
  assert overlong("", "", example(size), cache=4096) == pytest.approx(expected)


def test_overlong_is_between_minus_one_and_zero():
  assert overlong("", "", example(99, 10), cache=4) == -1
  # A cache of more than the limit is the limit: linear from the first token.
  assert overlong("", "", example(5, 10), cache=400) == -0.5


def test_length():
  assert length("", "", example(5, 10)) == -0.5
  assert length("", "", example(5, 10), target=5) == 0
  assert length("", "", example(3, 10), target=5) == -0.2
  assert length("", "", example(7, 10), target=5) == -0.2


def test_unfinished():
  assert unfinished("", "", {"finished": True}) == 0
  assert unfinished("", "", {"finished": False}) == -1
