"""Progress of a run: notes, printed lines, warnings and stop conditions."""

import dataclasses
import json
import math

import pytest

from grpojax.training.config import default_config
from grpojax.training.report import progress as lib
from grpojax.training.report import reporting
from grpojax.training.report.progress import Progress
from grpojax.training.report.reporting import Eta
from grpojax.training.run import start

GOOD = {
  "skipped_updates": 0,
  "rewards_missing": 0.0,
  "zero_variance_groups": 0.9,
  "truncated": 0.5,
  "rollout_effective_samples": 0.4,
  "train_seconds": 1.5,
}
# A value that counts, a smaller value that is only printed, and the text.
BAD = {
  "skipped_updates": (1, None, "1 updates skipped"),
  "rewards_missing": (1.0, 0.25, "25% without reward"),
  "zero_variance_groups": (1.0, None, "no group's rewards differ"),
  "truncated": (0.75, None, "75% cut off at sampling.max_new_tokens"),
  "few_effective_samples": (
    0.95,
    None,
    "95% of the samples ineffective (importance weights)",
  ),
  "engine_mismatch": (0.03, None, "the engine differs by 0.03 nats per token"),
}


def test_every_stop_condition_has_a_limit():
  names = set(default_config().stop) - {"no_improvement"}  # of evaluations
  assert names == set(lib.STOP_CONDITIONS) == set(BAD)


@pytest.mark.parametrize("name", BAD)
def test_a_stop_condition_ends_a_run_after_steps_in_a_row(name):
  whole, less, words = BAD[name]
  limits = dict.fromkeys(BAD, 0) | {name: 3}
  bad = GOOD | {name: whole}
  now = Progress()
  if name == "few_effective_samples":
    bad = GOOD | {"rollout_effective_samples": 1 - whole}
  if name == "engine_mismatch":
    bad = GOOD | {"rollout_mismatch_mean": whole, "seconds_sync": 1.0}
  bad["reward_failures"] = 3
  shown = bad if less is None else GOOD | {name: less}
  for row in [bad, bad, GOOD if less is None else shown, bad, bad]:
    now = lib.after(now, row)
    assert lib.stop_reason(now, limits) is None
  # A resumed run continues to count, and ignores unknown notes.
  notes = json.loads(json.dumps(dataclasses.asdict(now) | {"other": 1}))
  now = lib.after(lib.from_notes(notes), bad)
  why = lib.stop_reason(now, limits)
  assert "in 3 steps in a row" in why and f"--config.stop.{name}=0" in why
  assert lib.stop_reason(now, dict.fromkeys(BAD, 0)) is None
  assert now.failed_rewards == 5 * 3 and now.train_seconds == 1.5
  assert now.steps_with.pop(name) == 5 + (less is not None)
  assert not any(now.steps_with.values())
  assert lib.troubles(shown) == [words]
  assert lib.troubles(GOOD) == []


ROW = {
  "step": 3,
  "reward_mean": 0.5,
  "completion_length_mean": 37.94,
  "truncated": 0.25,
  "zero_variance_groups": 0.125,
  "entropy": 0.0559,
  "grad_norm": 0.121,
  "tokens_per_second": 366.2,
  "seconds_compile": 0.4,
  "skipped_updates": 0,
  "rewards_missing": 0.0,
  "loss": 1.0,
}


@pytest.fixture
def line_of(settings_with):
  """Returns the progress line of `ROW` with changes."""

  def line_of(eta=None, steps=40, **changes):
    settings = settings_with(steps=steps)
    row = ROW | changes
    return reporting.step_line(settings, row, eta or Eta())

  return line_of


def test_a_line_has_metrics_rewards_time_and_warnings(line_of):
  # 37 more steps of 2 s, with half a second after each.
  assert line_of(Eta(2, 4.0, 2, 1.0)) == (
    "step  3/40  reward_mean 0.5  completion_length_mean 37.9  truncated 0.25"
    "  zero_variance_groups 0.125  entropy 0.0559  grad_norm 0.121"
    "  tokens_per_second 366  2.00 s/step  1m32s left"
  )
  # Means of several rewards, and the KL without rounding errors.
  rewards = {"rewards/g/mean": 0.75, "rewards/f/mean": 0.25}
  rewards |= {"rewards/f/std": 0.1, "a/reward_mean": 1}
  line = line_of(kl=3e-9, **rewards)
  assert "reward_mean 0.5  rewards/g/mean 0.75  rewards/f/mean 0.25" in line
  assert "rewards/f/std" not in line and "kl 0  grad_norm 0.121" in line
  assert "  kl 0.0123  " in line_of(kl=0.0123)
  line = line_of(skipped_updates=2)
  assert line.endswith("  ! 2 updates skipped") and "left" not in line
  assert line_of(seconds_compile=83.2).endswith("  compiled 83 s")


def test_the_group_size_is_pooled_over_diagnoses(line_of):
  progress = Progress()
  words = []
  diagnoses = [
    (0.5, 8.0, 1.0, math.inf),
    (1.5, 10.0, 2.0, 5.0),
    (math.nan, math.nan, math.nan, math.nan),
    (1.0, 9.0, 1.0, math.inf),
  ]
  names = "c1", "c3", "optimal_group_size_low", "optimal_group_size_high"
  for values in diagnoses:
    row = ROW | {"train_seconds": 1.0, "optimal_group_size": 7.0}
    row |= dict(zip(names, values, strict=True))
    notes = json.loads(json.dumps(dataclasses.asdict(progress)))  # a resume
    progress = lib.after(lib.from_notes(notes), row)
    row = lib.with_pooled_group_size(progress, row)
    line = line_of(**row)
    words.append(line.partition("best_group_size ")[2].partition("  ")[0])
    assert row["c1"] is values[0]
  # By hand: G* = 1 + sqrt(9 / 1), t = 4.303. The means of c1 and c3 have
  # variances .25 / 3 and 1 / 3 and correlation 1, so rho = c1 / c3 has bounds
  # (1 -+ 4.303 .2887) / (9 -+ 4.303 .5774); the lower bound is negative.
  assert words == ["", "", "", "4 [3, inf]"]
  progress = lib.after(Progress(), row | {"c1": 1.5, "c3": 10.0})
  row |= {"optimal_group_size_low": 2.0, "optimal_group_size_high": 5.0}
  row = lib.with_pooled_group_size(progress, row)
  assert "best_group_size 4 [2, 5]" in line_of(**row)


def test_the_time_left_ignores_the_first_step_and_includes_evaluations(line_of):
  eta = Eta().after_step(60.0)  # it compiles
  assert "left" not in line_of(eta)
  for seconds in (2.0, 4.0, 3.0, 3.0):
    eta = eta.after_pause(0.0).after_step(seconds)
  eta = eta.after_pause(5.0)  # one evaluation in five steps
  # Five more steps of (2 + 4 + 3 + 3) / 4 seconds, and one more evaluation.
  assert line_of(eta, steps=8).endswith("  3.00 s/step  20s left")


@pytest.mark.parametrize(
  "parameters, warned, rate, rank",
  [
    (135_000_000, "150 times the usual 1e-06", 1.5e-4, 0),
    (900_000, None, 1.5e-4, 0),  # a bundled model
    (135_000_000, None, 1e-5, 0),
    (135_000_000, None, 1.5e-4, 8),
    (135_000_000, "adapters", 1e-3, 8),
    (135_000_000, "1/10 of the usual 1e-05 for adapters", 1e-6, 8),
  ],
)
def test_unusual_learning_rates_warn(
  parameters, warned, rate, rank, settings_with, capsys
):
  settings = settings_with(optim__learning_rate=rate, lora__rank=rank)
  start._warn_of_learning_rate(settings, parameters)
  output = capsys.readouterr().out
  assert warned in output if warned else not output


def test_a_warmup_longer_than_the_run_warns(settings_with, capsys):
  rates = {"optim__learning_rate": 1e-3, "optim__minibatches": 2}
  for warmup in (15, 16):
    settings = settings_with(steps=8, optim__warmup_steps=warmup, **rates)
    start._warn_of_warmup(settings)
    warning = "16 updates: the learning rate stays below 0.001"
    assert (warning in capsys.readouterr().out) == (warmup == 16)


def test_higher_rewards_of_short_wrong_completions_warn(capsys):
  names = "accuracy", "held_out_reward", "held_out_length"
  baseline = dict(zip(names, (0.0, 0.2, 100.0), strict=True))
  shortcut = (0.0, 0.4, 20.0)
  for values in (shortcut, (0.1, 0.4, 20), (0.0, 0.1, 20), (0.0, 0.4, 60)):
    row = dict(zip(names, values, strict=True))
    reporting.warn_of_shortcut(baseline, row)
    assert ("warning" in capsys.readouterr().out) == (values == shortcut)
    reporting.warn_of_shortcut({"accuracy": 0.0}, row)  # of an older run
    assert not capsys.readouterr().out
