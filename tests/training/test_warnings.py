"""Lines that warn of a run that may go wrong."""

import pytest

from grpojax.training.report import reporting
from grpojax.training.run import start


@pytest.mark.parametrize(
  "parameters, warned, changes",
  [
    (135_000_000, "150 times the usual 1e-06", {}),
    (900_000, None, {}),  # an embedded model
    (135_000_000, None, {"optim__learning_rate": 1e-5}),
    (135_000_000, None, {"lora__rank": 8}),
    (135_000_000, "adapters", {"lora__rank": 8, "optim__learning_rate": 1e-3}),
    (
      135_000_000,
      "1/10 of the usual 1e-05 of adapters",
      {"lora__rank": 8, "optim__learning_rate": 1e-6},
    ),
  ],
)
def test_a_learning_rate_far_from_the_usual(
  parameters, warned, changes, settings_with, capsys
):
  settings = settings_with(**{"optim__learning_rate": 1.5e-4} | changes)
  start._warn_of_learning_rate(settings, parameters)
  output = capsys.readouterr().out
  assert warned in output if warned else not output


@pytest.mark.parametrize(
  "accuracy, reward, length, warned",
  [
    (0.0, 0.4, 20.0, True),
    (0.1, 0.4, 20.0, False),  # some are right
    (0.0, 0.1, 20.0, False),
    (0.0, 0.4, 60.0, False),
  ],
)
def test_rewards_that_rise_while_completions_shrink(
  accuracy, reward, length, warned, capsys
):
  baseline = {"accuracy": 0.0, "held_out_reward": 0.2, "held_out_length": 100.0}
  row = {"held_out_reward": reward, "held_out_length": length}
  reporting.warn_of_shortcut(baseline, row | {"accuracy": accuracy})
  assert ("warning" in capsys.readouterr().out) == warned
  reporting.warn_of_shortcut({"accuracy": 0.0}, row | {"accuracy": 0.0})
  assert not capsys.readouterr().out  # a baseline of before this was measured
