"""Metrics and intervals of evaluations, and the best evaluation."""

import numpy as np
import pytest

from grpojax.rewards import exact
from grpojax.rewards.pool import Failure
from grpojax.statistics import intervals
from grpojax.statistics.intervals import wilson_interval
from grpojax.training.evaluation import best, evaluation
from grpojax.training.evaluation.evaluation import numbers


def per_prompt(rewards, *args, texts=(), **options):
  rewards = np.array(rewards, np.float32)
  result = evaluation.Evaluation(
    rewards, list(texts), [{} for _ in rewards], np.ones(rewards.shape)
  )
  return evaluation.per_prompt(result, *args, **options)


def test_graded_rewards_have_a_mean_in_addition_to_the_accuracy():
  wilson = [float(x) for x in wilson_interval(1, 2)]
  assert list(numbers(per_prompt([[0], [1.0]])).values()) == wilson
  graded = numbers(per_prompt([[0.5], [1.0], [0.0]]))
  assert graded["accuracy"] == pytest.approx(1 / 3)  # 0.5 counts as wrong
  assert graded["reward"][0] == 0.5
  large = np.array([-3.0, 5.0, 10.0])
  assert evaluation.estimate(large) == intervals.mean_interval(large)
  shares = np.array([1.0] * 9 + [0.5])
  assert evaluation.estimate(shares) == intervals.share_interval(shares)
  alike = per_prompt([[0.0], [1.0]], graded=True)
  assert alike["reward"].tolist() == [0.0, 1.0]
  # A failed reward would exclude a prompt from the mean.
  assert "reward" not in per_prompt([[0.5], [np.nan]])


def test_a_single_prompt_has_only_an_accuracy(monkeypatch, settings_with):
  assert per_prompt([[0.5]]).keys() == {"accuracy"}
  rows = {"a": np.array([1]), "b": np.array([0, 2])}
  monkeypatch.setattr(evaluation.mixtures, "by_source", lambda *_: rows)
  rewards = np.array([[0, 1], [1, 0], [0.5, 1]])
  result = evaluation.Evaluation(rewards, [], [{}] * 3, rewards)
  for ks, names in ((), {"a", "b"}), ([1], {"b"}):
    values = evaluation.per_prompt(result, ks)
    each = evaluation.by_data_set(settings_with(), result, values)
    assert each.keys() == names and len(numbers(each["b"])) > 1


def test_majority_votes_count_equal_answers():
  """1,000 and 1000 are the same answer; 5 without #### is none."""
  texts = [
    ["####1,000", "####1000", "####5"],
    ["####1000", "####5", "####5"],
    ["####1000", "####5", "5"],
  ]
  rewards = [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
  answer = lambda text, _: exact.given_answer(text)
  values = per_prompt(rewards, [1, 2, 3], answer, texts=texts)
  names = [f"{x}@{k}" for x in ("pass", "maj") for k in (1, 2, 3)]
  assert list(values) == names
  np.testing.assert_allclose(values["maj@1"], [2 / 3, 1 / 3, 1 / 3])
  np.testing.assert_allclose(values["maj@2"], [2 / 3, 1 / 3, 0.5])
  np.testing.assert_allclose(values["maj@3"], [1, 0, 0.5])


def test_intervals_of_all_correct_prompts_are_not_points():
  """Student's interval of equal values would be a point."""
  values = per_prompt(np.ones((20, 4)), [1, 4])
  for mean, low, high in numbers(values).values():
    assert mean == high == 1 and 0.8 < low < 0.9
  none = per_prompt(np.zeros((20, 4)), [1, 4])
  for x in evaluation.compare(values, none).values():
    assert x.difference == x.high == 1 and x.low > 0.7 and x.p_value < 1e-5
  for x in evaluation.compare(values, values).values():
    assert x.difference == 0 and x.low == -x.high < -0.05 and x.p_value == 1


def test_control_characters_of_failures_are_escaped():
  failure = Failure("mine", "ValueError: \x1b[2Jgone", "prompt", "\x1b[2J")
  line = evaluation.failed([failure])
  assert "\x1b" not in line and "ValueError: \\x1b[2Jgone" in line


# Best state

BASELINE = {"accuracy": 0.3, "prompts": 10}


def row(step, accuracy, prompts=10):
  low_high = {"accuracy_low": 0.0, "accuracy_high": 1.0}
  return {"step": step, "accuracy": accuracy, "prompts": prompts} | low_high


def record(*accuracies):
  state = {}
  for i, accuracy in enumerate(accuracies, 1):
    state = best.after(state, BASELINE, row(5 * i, accuracy))
  return state


@pytest.mark.parametrize(
  "accuracies, step, without",
  [
    ([0.4, 0.6, 0.5], 10, 1),
    ([0.6, 0.6, 0.6], 5, 2),  # the first of equals
    ([0.2, 0.25, 0.1], 10, 3),  # never above the baseline
    ([0.5, 0.4, 0.4, 0.7], 20, 0),
  ],
)
def test_best_step_and_evaluations_without_gain(accuracies, step, without):
  state = record(*accuracies)
  assert best.step(state) == step and state["without_gain"] == without
  assert state["best"]["accuracy"] == max(accuracies)


def test_repeated_evaluations_and_changed_prompts():
  state = record(0.4, 0.6)
  assert best.after(state, BASELINE, row(10, 0.6)) == state
  assert best.after(state, BASELINE, row(5, 0.9)) == state
  state = best.after(record(0.9, 0.5), BASELINE, row(15, 0.4, prompts=20))
  assert best.step(state) == 15 and state["without_gain"] == 0


def test_a_best_state_without_a_checkpoint_is_removed():
  state = record(0.4, 0.6, 0.5)
  assert best.without_lost(state, [10, 15]) == state
  lost = best.without_lost(state, [15, 20])
  assert best.step(lost) is None
  assert best.step(best.after(lost, BASELINE, row(20, 0.1))) == 20
