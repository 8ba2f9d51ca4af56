"""The time that is left, from steps and what is between them."""

import pytest

from grpojax.training import pace as pace_lib


def test_the_first_step_compiles_and_does_not_count():
  pace = pace_lib.after_step(pace_lib.Pace(), 60.0)
  assert pace_lib.step_seconds(pace) is None
  assert pace_lib.left(pace, 10) is None
  pace = pace_lib.after_step(pace_lib.after_pause(pace, 0.0), 2.0)
  assert pace_lib.step_seconds(pace) == 2.0
  assert pace_lib.left(pace, 10) == 20.0


def test_evaluations_are_a_part_of_the_time_left():
  pace = pace_lib.Pace()
  for step, seconds in enumerate((60.0, 2.0, 4.0, 3.0, 3.0), 1):
    pace = pace_lib.after_step(pace, seconds)
    pace = pace_lib.after_pause(pace, 5.0 if step % 5 == 0 else 0.0)
  assert pace_lib.step_seconds(pace) == 3.0  # (2 + 4 + 3 + 3) / 4
  # Five more steps of 3 s, and one more evaluation of 5 s.
  assert pace_lib.left(pace, 5) == pytest.approx(5 * 3 + 5)
  assert pace_lib.left(pace, 0) == 0
