"""What of a step is shown."""

import dataclasses
import json
import math

from grpojax.training.report import reporting
from grpojax.training.report.reporting import Eta
from grpojax.training.run import progress as progress_lib
from grpojax.training.run.progress import Progress

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


def test_a_line_has_the_kl_and_the_mean_of_each_of_several_rewards(
  settings_with,
):
  rewards = {"rewards/f/mean": 0.25, "rewards/f/std": 0.1, "a/reward_mean": 1}
  row = ROW | {"kl": 3e-9, "rewards/g/mean": 0.75} | rewards
  line = reporting.step_line(settings_with(steps=40), row, Eta())
  assert (
    "  reward_mean 0.5  rewards/g/mean 0.75  rewards/f/mean 0.25"
    "  completion_length_mean 37.9" in line
  )
  assert "  entropy 0.0559  kl 0  grad_norm 0.121" in line
  row = row | {"kl": 0.0123}
  line = reporting.step_line(settings_with(steps=40), row, Eta())
  assert "  kl 0.0123  " in line


def test_skipped_updates_are_there_when_there_are_any(settings_with):
  row = ROW | {"skipped_updates": 2}
  line = reporting.step_line(settings_with(steps=40), row, Eta())
  assert line.endswith("  ! 2 updates skipped") and "left" not in line


def test_a_step_that_compiled_says_how_long(settings_with):
  row = ROW | {"seconds_compile": 83.2}
  line = reporting.step_line(settings_with(steps=40), row, Eta())
  assert line.endswith("  compiled 83 s")


def test_the_group_size_of_all_diagnoses_so_far_is_shown(settings_with):
  """Its interval is Student's over diagnoses; a single one has its own."""
  progress, words = Progress(), []
  diagnoses = [
    (0.5, 8.0, 1.0, math.inf),  # says nothing
    (1.5, 10.0, 2.0, 5.0),
    (math.nan, math.nan, math.nan, math.nan),
    (1.0, 9.0, 1.0, math.inf),
  ]
  names = "c1", "c3", "optimal_group_size_low", "optimal_group_size_high"
  for values in diagnoses:
    row = ROW | {"train_seconds": 1.0, "optimal_group_size": 7.0}
    row |= dict(zip(names, values, strict=True))
    notes = json.loads(json.dumps(dataclasses.asdict(progress)))  # a resume
    progress = progress_lib.after(progress_lib.from_notes(notes), row)
    row = progress_lib.with_pooled_group_size(progress, row)
    line = reporting.step_line(settings_with(steps=40), row, Eta())
    words.append(line.partition("best_group_size ")[2].partition("  ")[0])
    assert row["c1"] is values[0]
  # By hand: G* = 1 + sqrt(9 / 1), t = 4.303, and c1 and c3 have the variances
  # of means .25 / 3 and 1 / 3 with correlation 1, so that rho = c1 / c3 has
  # bounds (1 -+ 4.303 .2887) / (9 -+ 4.303 .5774), of which one is below 0.
  assert words == ["", "", "", "4 [3, inf]"]
  progress = progress_lib.after(Progress(), row | {"c1": 1.5, "c3": 10.0})
  row |= {"optimal_group_size_low": 2.0, "optimal_group_size_high": 5.0}
  row = progress_lib.with_pooled_group_size(progress, row)
  line = reporting.step_line(settings_with(steps=40), row, Eta())
  assert "best_group_size 4 [2, 5]" in line


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
