import pytest

from grpojax.rewards.format import format


@pytest.mark.parametrize(
  "completion, expected",
  [
    ("<think>a</think><answer>b</answer>", 1),
    ("\n<think>\na < b\n</think>\n\n<answer> b </answer>\n", 1),
    ("<think>a</think><answer>b</answer> so", 0),
    ("so <think>a</think><answer>b</answer>", 0),
    ("<think>a</think> so <answer>b</answer>", 0),
    ("<answer>b</answer><think>a</think>", 0),
    ("<think>a<answer>b</answer></think>", 0),
    ("<think>a<answer>b</think></answer>", 0),
    ("<think>a</think><answer>b</answer><answer>b</answer>", 0),
    ("<think>a <answer>b</answer></think><answer>c</answer>", 0),
    ("<think> </think><answer>b</answer>", 0),
    ("<think>a</think><answer>\n</answer>", 0),
    ("<think>a</think><answer>b", 0),
    ("</think>a<think><answer>b</answer>", 0),
    ("<Think>a</Think><answer>b</answer>", 0),
    ("a</think><answer>b</answer>", 0),
    ("", 0),
    ("<think>" * 200_000, 0),
  ],
)
def test_format(completion, expected):
  assert format("", completion, {}) == expected


def test_the_prompt_may_open_the_first_tag():
  text = "a</think><answer>b</answer>"
  assert format("Q <think>\n", text, {}) == 1
  assert format("Q <think>\n", "<think>" + text, {}) == 0
  assert format("<think> Q", text, {}) == 0


def test_other_tags():
  assert format("", "<a>1</a><b>2</b><c>3</c>", {}, tags=("a", "b", "c")) == 1
  assert format("", "<a>1</a><b>2</b><c>3</c>", {}, tags=("a", "b")) == 0
