"""What of a step is shown."""

import math

from grpojax.training.report import reporting
from grpojax.training.report.reporting import Eta

ROW = {
  "step": 3,
  "reward_mean": 0.5,
  "completion_length_mean": 37.94,
  "truncated": 0.25,
  "zero_variance_groups": 0.125,
  "entropy": 0.0559,
  "grad_norm": 0.121,
  "tokens_per_second": 366.2,
  "seconds_step": 27.1,
  "seconds_compile": 0.4,
  "skipped_updates": 0,
  "rewards_missing": 0.0,
  "loss": 1.0,
}


def test_a_line_names_what_it_shows(settings_with):
  line = reporting.step_line(settings_with(steps=40), ROW, Eta(2, 4.0, 2, 1.0))
  # 37 more steps of 2 s, with half a second after each.
  assert line == (
    "step  3/40  reward_mean 0.5  completion_length_mean 37.9  truncated 0.25"
    "  zero_variance_groups 0.125  entropy 0.0559  grad_norm 0.121"
    "  tokens_per_second 366  2.00 s/step  1m32s left"
  )


def test_skipped_updates_are_there_when_there_are_any(settings_with):
  row = ROW | {"skipped_updates": 2}
  line = reporting.step_line(settings_with(steps=40), row, Eta())
  assert line.endswith("  ! 2 updates skipped") and "left" not in line


def test_a_step_that_compiled_says_how_long(settings_with):
  row = ROW | {"seconds_compile": 83.2}
  line = reporting.step_line(settings_with(steps=40), row, Eta())
  assert line.endswith("  compiled 83 s")


def test_a_diagnosis_is_shown_where_it_told_something(settings_with):
  for values, shown in (
    ((12.3, 7.8, 31.0), "best_group_size 12 [8, 31]"),
    ((math.nan,) * 3, None),
  ):
    ends = zip(("", "_low", "_high"), values, strict=True)
    row = ROW | {f"optimal_group_size{end}": value for end, value in ends}
    line = reporting.step_line(settings_with(steps=40), row, Eta())
    assert shown in line if shown else "best" not in line


def test_the_first_step_does_not_count_and_evaluations_do(settings_with):
  eta = reporting.after_step(Eta(), 60.0)  # it compiles
  assert reporting.step_seconds(eta) is None
  for seconds in (2.0, 4.0, 3.0, 3.0):
    eta = reporting.after_pause(eta, 0.0)
    eta = reporting.after_step(eta, seconds)
  eta = reporting.after_pause(eta, 5.0)  # one evaluation in five steps
  line = reporting.step_line(settings_with(steps=8), ROW, eta)
  # Five more steps of (2 + 4 + 3 + 3) / 4 seconds, and one more evaluation.
  assert line.endswith("  3.00 s/step  20s left")
