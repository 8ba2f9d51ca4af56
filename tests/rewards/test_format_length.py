import pytest

from grpojax.rewards.format import format
from grpojax.rewards.length import length, overlong, unfinished

PAPER = [(1, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1)]


@pytest.mark.parametrize(
  "reward, size, most, options, expected",
  [
    *((overlong, size, 20480, {"cache": 4096}, value) for size, value in PAPER),
    (overlong, 18432, 20480, {}, -0.5),
    (overlong, 99, 10, {"cache": 4}, -1),
    # A larger cache than the limit is the limit: linear from the first token.
    (overlong, 5, 10, {"cache": 400}, -0.5),
    (length, 5, 10, {}, -0.5),
    (length, 3, 10, {"target": 5}, -0.2),
    (length, 7, 10, {"target": 5}, -0.2),
    (unfinished, 10, 10, {}, 0),
    (unfinished, 11, 10, {}, -1),
  ],
)
def test_rewards_of_lengths(reward, size, most, options, expected):
  example = {"completion_length": size, "max_completion_length": most}
  example |= {"finished": size <= most}
  assert reward("", "", example, **options) == pytest.approx(expected)


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
  text = "a</think><answer>b</answer>"
  assert format("Q <think>\n", text, {}) == 1
  assert format("Q <think>\n", "<think>" + text, {}) == 0
  assert format("<think> Q", text, {}) == 0
  text = "<a>1</a><b>2</b><c>3</c>"
  assert format("", text, {}, tags=("a", "b", "c")) == 1
  assert format("", text, {}, tags=("a", "b")) == 0
