"""What of a step is shown, in a file and on a terminal."""

import math

from grpojax.training.report import step_line
from grpojax.training.report.step_line import Eta

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
  "skipped_updates": 0,
  "rewards_missing": 0.0,
  "loss": 1.0,
}


def test_a_line_names_what_it_shows(settings_with):
  line = step_line.line(settings_with(steps=40), ROW, Eta(2, 4.0, 2, 1.0))
  # 37 more steps of 2 s, with half a second after each.
  assert line == (
    "step  3/40  reward_mean 0.5  completion_length_mean 37.9  truncated 0.25"
    "  zero_variance_groups 0.125  entropy 0.0559  grad_norm 0.121"
    "  tokens_per_second 366  2.00 s/step  1m32s left"
  )


def test_skipped_updates_are_there_when_there_are_any(settings_with):
  row = ROW | {"skipped_updates": 2}
  line = step_line.line(settings_with(steps=40), row, Eta())
  assert line.endswith("  ! 2 updates skipped") and "left" not in line
  assert step_line.cells(row)[""] == "2 updates skipped"
  assert "" not in step_line.cells(ROW)


def test_a_diagnosis_of_nothing_is_not_shown():
  nothing = {f"optimal_group_size{x}": math.nan for x in ("", "_low", "_high")}
  assert step_line.cells(ROW | nothing) == step_line.cells(ROW)


def test_cells_are_for_people():
  best = {"": 12.3, "_low": 7.8, "_high": 31.0}
  row = ROW | {f"optimal_group_size{end}": x for end, x in best.items()}
  assert step_line.cells(row) == {
    "step": "3",
    "reward": "0.500",
    "length": "37.9",
    "truncated": "25%",
    "no variance": "12%",
    "entropy": "0.056",
    "grad norm": "0.12",
    "tokens/s": "366",
    "seconds": "27.1",
    "best group size": "12 [8, 31]",
  }
