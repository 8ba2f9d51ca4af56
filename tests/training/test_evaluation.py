"""Numbers of evaluations: votes, intervals, differences."""

import itertools

import numpy as np
import pytest

from grpojax.rewards import exact
from grpojax.rewards.pool import Failure
from grpojax.statistics import intervals
from grpojax.statistics.intervals import paired_difference, wilson_interval
from grpojax.training.evaluation import evaluation


def evaluated(rewards, texts=()):
  rewards = np.array(rewards, np.float32)
  examples = [{} for _ in rewards]
  return evaluation.Evaluation(
    rewards, list(texts), examples, np.ones(rewards.shape)
  )


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
  rewards = np.random.default_rng(0).integers(0, 2, (3, 5)).astype(np.float32)
  numbers = evaluation.numbers(
    evaluation.per_prompt(evaluated(rewards), [1, 2, 5])
  )
  assert numbers.keys() == {"pass@1", "pass@2", "pass@5"}
  for k in (1, 2, 5):
    subsets = list(itertools.combinations(range(5), k))
    expected = np.mean([[rewards[:, s].any(1)] for s in map(list, subsets)])
    mean, low, high = numbers[f"pass@{k}"]
    assert mean == pytest.approx(expected, abs=1e-6)
    assert low <= mean <= high


def test_accuracy():
  numbers = evaluation.numbers(evaluation.per_prompt(evaluated([[0], [1.0]])))
  wilson = [float(x) for x in wilson_interval(1, 2)]
  assert list(numbers.values()) == wilson


def test_graded_rewards_have_their_mean_beside_the_accuracy():
  values = evaluation.per_prompt(evaluated([[0.5], [1.0], [0.0]]))
  numbers = evaluation.numbers(values)
  assert numbers["accuracy"] == pytest.approx(1 / 3)  # partly right is wrong
  assert numbers["reward"][0] == 0.5
  accuracy, reward = evaluation.lines(values)
  assert accuracy.startswith("greedy accuracy  33.3%")
  assert reward.startswith("mean reward  0.5  [")
  large = evaluation.estimate(np.array([-3.0, 5.0, 10.0]))  # no share
  assert large == intervals.mean_interval(np.array([-3.0, 5.0, 10.0]))
  shares = np.array([1.0] * 9 + [0.5])
  assert evaluation.estimate(shares) == intervals.share_interval(shares)
  alike = evaluation.per_prompt(evaluated([[0.0], [1.0]]), graded=True)
  assert alike["reward"].tolist() == [0.0, 1.0]
  missing = evaluation.per_prompt(evaluated([[0.5], [np.nan]]))
  assert "reward" not in missing  # of other prompts than the accuracy


def test_a_single_prompt_has_an_interval_of_its_accuracy_alone(
  monkeypatch, settings_with
):
  assert evaluation.per_prompt(evaluated([[0.5]])).keys() == {"accuracy"}
  rows = {"a": np.array([1]), "b": np.array([0, 2])}
  monkeypatch.setattr(evaluation.mixtures, "by_source", lambda *_: rows)
  result = evaluated([[0, 1], [1, 0], [0.5, 1]])
  for ks, names in ((), {"a", "b"}), ([1], {"b"}):
    values = evaluation.per_prompt(result, ks)
    each = evaluation.by_data_set(settings_with(), result, values)
    assert each.keys() == names and len(evaluation.numbers(each["b"])) > 1


def test_majority_of_texts():
  """Two of three give the answer, in two spellings; then one in three."""
  texts = [
    ["####1,000", "####1000", "####5"],
    ["####1000", "####5", "####5"],
    ["####1000", "####5", "5"],
  ]
  rewards = [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
  numbers = evaluation.per_prompt(
    evaluated(rewards, texts), [1, 2, 3], lambda x, _: exact.given_answer(x)
  )
  assert list(numbers) == [
    f"{x}@{k}" for x in ("pass", "maj") for k in (1, 2, 3)
  ]
  np.testing.assert_allclose(numbers["maj@1"], [2 / 3, 1 / 3, 1 / 3])
  np.testing.assert_allclose(numbers["maj@2"], [2 / 3, 1 / 3, 0.5])
  np.testing.assert_allclose(numbers["maj@3"], [1, 0, 0.5])


def test_right_or_wrong_prompts_have_an_interval_with_a_width():
  """All right in all samples: Student's interval would be a point."""
  values = evaluation.per_prompt(evaluated(np.ones((20, 4))), [1, 4])
  for mean, low, high in evaluation.numbers(values).values():
    assert mean == high == 1 and 0.8 < low < 0.9
  none = evaluation.per_prompt(evaluated(np.zeros((20, 4))), [1, 4])
  for x in evaluation.compare(values, none).values():
    assert x.difference == x.high == 1 and x.low > 0.7 and x.p_value < 1e-5
  for x in evaluation.compare(values, values).values():
    assert x.difference == 0 and x.low == -x.high < -0.05 and x.p_value == 1


@pytest.mark.slow
def test_comparisons_are_paired_and_signed():
  rng = np.random.default_rng(0)
  a = evaluation.per_prompt(evaluated(rng.random((30, 8)) < 0.7), [1, 2])
  b = evaluation.per_prompt(evaluated(rng.random((30, 8)) < 0.4), [1, 2])
  numbers = evaluation.compare(a, b)
  assert numbers == {k: paired_difference(a[k], b[k]) for k in a}
  assert numbers["pass@1"].low > 0
  lines = evaluation.table(a, b)
  assert len(lines) == 3 and lines[1].startswith("pass@1   ")
  mean, low, high = evaluation.estimate(b["pass@1"])
  assert f"   {mean:.1%}  [{low:.1%}, {high:.1%}]   +" in lines[1]
  assert lines[1].endswith(f"   {numbers['pass@1'].p_value:.2g}")
  columns = [line.index("[", lines[0].index("compare")) for line in lines[1:]]
  assert columns[0] == columns[1]


def test_what_a_failure_quotes_does_not_act_on_the_terminal():
  failure = Failure("mine", "ValueError: \x1b[2Jgone", "prompt", "\x1b[2J")
  line = evaluation.failed([failure])
  assert "\x1b" not in line and "ValueError: \\x1b[2Jgone" in line
