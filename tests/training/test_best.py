"""The best state by held-out accuracy, and the end where nothing is gained."""

import pytest

from grpojax.training.evaluation import best

BASELINE = {"accuracy": 0.3, "prompts": 10}


def row(step, accuracy, prompts=10):
  low_high = {"accuracy_low": 0.0, "accuracy_high": 1.0}
  return {"step": step, "accuracy": accuracy, "prompts": prompts} | low_high


def record(*accuracies, **options):
  state = {}
  for i, accuracy in enumerate(accuracies, 1):
    state = best.after(state, BASELINE, row(5 * i, accuracy, **options))
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


def test_an_evaluation_counts_once():
  state = record(0.4, 0.6)
  assert best.after(state, BASELINE, row(10, 0.6)) == state
  assert best.after(state, BASELINE, row(5, 0.9)) == state


def test_other_prompts_begin_anew():
  state = best.after(record(0.9, 0.5), BASELINE, row(15, 0.4, prompts=20))
  assert best.step(state) == 15 and state["without_gain"] == 0


def test_a_state_that_was_not_kept_is_not_the_best():
  state = record(0.4, 0.6, 0.5)
  assert best.without_lost(state, [10, 15]) == state
  rest = best.without_lost(state, [15, 20])
  assert best.step(rest) is None
  assert best.step(best.after(rest, BASELINE, row(20, 0.1))) == 20


def test_the_limit_ends_a_run():
  state = record(0.6, 0.5, 0.6)
  assert best.stopping(state, 0) is None and best.stopping(state, 3) is None
  assert best.stopping({}, 1) is None
  reason = best.stopping(state, 2)
  assert "in 2 evaluations" in reason and "step 15" in reason
  assert "--config.stop.no_improvement=0" in reason
