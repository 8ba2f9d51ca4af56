"""Numbers of evaluations, the best of them, and the end without gains."""

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


def test_graded_rewards_have_their_mean_beside_the_accuracy():
  wilson = [float(x) for x in wilson_interval(1, 2)]
  assert list(numbers(per_prompt([[0], [1.0]])).values()) == wilson
  found = numbers(per_prompt([[0.5], [1.0], [0.0]]))
  assert found["accuracy"] == pytest.approx(1 / 3)  # partly right is wrong
  assert found["reward"][0] == 0.5
  large = np.array([-3.0, 5.0, 10.0])  # no share
  assert evaluation.estimate(large) == intervals.mean_interval(large)
  shares = np.array([1.0] * 9 + [0.5])
  assert evaluation.estimate(shares) == intervals.share_interval(shares)
  alike = per_prompt([[0.0], [1.0]], graded=True)
  assert alike["reward"].tolist() == [0.0, 1.0]
  # Of other prompts than the accuracy.
  assert "reward" not in per_prompt([[0.5], [np.nan]])


def test_a_single_prompt_has_an_interval_of_its_accuracy_alone(
  monkeypatch, settings_with
):
  assert per_prompt([[0.5]]).keys() == {"accuracy"}
  rows = {"a": np.array([1]), "b": np.array([0, 2])}
  monkeypatch.setattr(evaluation.mixtures, "by_source", lambda *_: rows)
  rewards = np.array([[0, 1], [1, 0], [0.5, 1]])
  result = evaluation.Evaluation(rewards, [], [{}] * 3, rewards)
  for ks, names in ((), {"a", "b"}), ([1], {"b"}):
    values = evaluation.per_prompt(result, ks)
    each = evaluation.by_data_set(settings_with(), result, values)
    assert each.keys() == names and len(numbers(each["b"])) > 1


def test_majority_of_texts():
  """Two of three give the answer, in two spellings; then one in three."""
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


def test_right_or_wrong_prompts_have_an_interval_with_a_width():
  """All right in all samples: Student's interval would be a point."""
  values = per_prompt(np.ones((20, 4)), [1, 4])
  for mean, low, high in numbers(values).values():
    assert mean == high == 1 and 0.8 < low < 0.9
  none = per_prompt(np.zeros((20, 4)), [1, 4])
  for x in evaluation.compare(values, none).values():
    assert x.difference == x.high == 1 and x.low > 0.7 and x.p_value < 1e-5
  for x in evaluation.compare(values, values).values():
    assert x.difference == 0 and x.low == -x.high < -0.05 and x.p_value == 1


def test_what_a_failure_quotes_does_not_act_on_the_terminal():
  failure = Failure("mine", "ValueError: \x1b[2Jgone", "prompt", "\x1b[2J")
  line = evaluation.failed([failure])
  assert "\x1b" not in line and "ValueError: \\x1b[2Jgone" in line


# The best state.

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
    ([0.2, 0.25, 0.1], 10, 3),  # never above the start
    ([0.5, 0.4, 0.4, 0.7], 20, 0),
  ],
)
def test_the_best_and_how_long_ago_it_was(accuracies, step, without):
  state = record(*accuracies)
  assert best.step(state) == step and state["without_gain"] == without
  assert state["best"]["accuracy"] == max(accuracies)


def test_an_evaluation_counts_once_and_other_prompts_begin_anew():
  state = record(0.4, 0.6)
  assert best.after(state, BASELINE, row(10, 0.6)) == state
  assert best.after(state, BASELINE, row(5, 0.9)) == state
  state = best.after(record(0.9, 0.5), BASELINE, row(15, 0.4, prompts=20))
  assert best.step(state) == 15 and state["without_gain"] == 0


def test_a_state_that_was_not_kept_is_not_the_best():
  state = record(0.4, 0.6, 0.5)
  assert best.without_lost(state, [10, 15]) == state
  rest = best.without_lost(state, [15, 20])
  assert best.step(rest) is None
  assert best.step(best.after(rest, BASELINE, row(20, 0.1))) == 20
