"""The time that is left, from steps and what is between them."""

import pytest

from grpojax.training.report import step_line as eta_lib


def test_the_first_step_compiles_and_does_not_count():
  eta = eta_lib.after_step(eta_lib.Eta(), 60.0)
  assert eta_lib.step_seconds(eta) is None
  assert eta_lib.left(eta, 10) is None
  eta = eta_lib.after_step(eta_lib.after_pause(eta, 0.0), 2.0)
  assert eta_lib.step_seconds(eta) == 2.0
  assert eta_lib.left(eta, 10) == 20.0


def test_evaluations_are_a_part_of_the_time_left():
  eta = eta_lib.Eta()
  for step, seconds in enumerate((60.0, 2.0, 4.0, 3.0, 3.0), 1):
    eta = eta_lib.after_step(eta, seconds)
    eta = eta_lib.after_pause(eta, 5.0 if step % 5 == 0 else 0.0)
  assert eta_lib.step_seconds(eta) == 3.0  # (2 + 4 + 3 + 3) / 4
  # Five more steps of 3 s, and one more evaluation of 5 s.
  assert eta_lib.left(eta, 5) == pytest.approx(5 * 3 + 5)
  assert eta_lib.left(eta, 0) == 0
