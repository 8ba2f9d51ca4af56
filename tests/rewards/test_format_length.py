import pytest

from grpojax.rewards.format import format
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


GOOD = [
  "<think>a</think><answer>b</answer>",
  "\n<think>\na < b\n</think>\n\n<answer> b </answer>\n",
]
BAD = [
  "<think>a</think><answer>b</answer> so",
  "so <think>a</think><answer>b</answer>",
  "<think>a</think> so <answer>b</answer>",
  *("<answer>b</answer><think>a</think>", "<think>a<answer>b</answer></think>"),
  "<think>a<answer>b</think></answer>",
  "<think>a</think><answer>b</answer><answer>b</answer>",
  "<think>a <answer>b</answer></think><answer>c</answer>",
  "<think> </think><answer>b</answer>",
  *("<think>a</think><answer>\n</answer>", "<think>a</think><answer>b"),
  *("</think>a<think><answer>b</answer>", "<Think>a</Think><answer>b</answer>"),
  *("a</think><answer>b</answer>", ""),
]


def test_format():
  for completion in GOOD:
    assert format("", completion, {}) == 1, completion
  for completion in [*BAD, "<think>" * 200_000]:
    assert format("", completion, {}) == 0, completion[:99]


def test_the_prompt_may_open_the_first_tag():
  text = "a</think><answer>b</answer>"
  assert format("Q <think>\n", text, {}) == 1
  assert format("Q <think>\n", "<think>" + text, {}) == 0
  assert format("<think> Q", text, {}) == 0


def test_other_tags():
  assert format("", "<a>1</a><b>2</b><c>3</c>", {}, tags=("a", "b", "c")) == 1
  assert format("", "<a>1</a><b>2</b><c>3</c>", {}, tags=("a", "b")) == 0
